"""Shared by the tests of Q models: a chat model that is small enough to be fitted in seconds."""

import pytest

WORDS = "left right up down start goal hole ice user assistant system".split()
# No space behind "assistant": prompt and answer as one text would be other tokens.
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}assistant"


@pytest.fixture(scope="session")
def save_chat_model():
    """`save(folder, template)`: some thousand parameters with a word for each token, never trained."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")

    def save(folder, template=TEMPLATE):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

        vocabulary = {word: n for n, word in enumerate(["<pad>", "<end>", "?", *WORDS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokens = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=template
        )
        torch.manual_seed(1)
        model = PhiForCausalLM(  # the paper's family
            PhiConfig(
                vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=64, initializer_range=0.3,
                eos_token_id=1, pad_token_id=0, bos_token_id=None,
            )
        )  # fmt: skip
        model.save_pretrained(folder)
        tokens.save_pretrained(folder)

    return save
