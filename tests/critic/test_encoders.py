"""Encoders: shapes, left truncation, independence of batch mates, and what is refused."""

import subprocess
import sys

import pytest
import torch

from verl_multiturn.critic.encoders import Bytes, NGrams, make_encoder

LONG = "the beginning of a dialogue " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A RoBERTa of a few thousand parameters with a tokenizer of words, saved without a pooler."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaModel

    words = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefghij"]
    tokens = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, "<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    named = {"cls_token": "<s>", "bos_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}
    path = tmp_path_factory.mktemp("roberta")
    PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", unk_token="<unk>", model_max_length=16, **named
    ).save_pretrained(path)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=len(words), hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=18, pad_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    RobertaModel(config, add_pooling_layer=False).save_pretrained(path)
    return str(path)


@pytest.fixture(params=["ngrams", "lines", "small", "folder"])
def encoder(request, folder):
    torch.manual_seed(0)
    return make_encoder(folder if request.param == "folder" else request.param, max_tokens=16)


def encoded(encoder, *texts):
    with torch.no_grad():
        return encoder.encode(texts)


def test_one_vector_a_text(encoder):
    h = encoded(encoder, "a b", "", "a b", "c d e")
    assert h.shape == (4, encoder.width) and h.dtype == torch.float32 and torch.isfinite(h).all()
    torch.testing.assert_close(h[0], h[2], rtol=0, atol=1e-6)
    assert (h[0] - h[3]).abs().max() > 0.01


def test_the_end_of_a_text_is_kept(encoder):
    end = " a b c d e f g h i j a b c d e f g h"
    other, same = "j i h g f" + end, "c c c c c" + end
    assert (encoded(encoder, other) == encoded(encoder, same)).all()
    changed = encoded(encoder, other[:-1] + "a")
    assert (changed - encoded(encoder, other)).abs().max() > 0.01


def test_batch_mates_and_padding_change_nothing(encoder):
    alone = encoded(encoder, "a b c")
    torch.testing.assert_close(encoded(encoder, LONG, "a b c", "d")[1:2], alone, rtol=0, atol=1e-5)


def test_no_dropout_and_gradients_where_there_are_parameters(encoder):
    assert (encoder.encode(["a b"]) == encoder.encode(["a b"])).all()
    parameters = list(encoder.parameters())
    if parameters:
        (encoder.encode(["a b", "c"]) * torch.arange(encoder.width)).sum().backward()
        assert sum(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in parameters) > 10


def test_the_cls_token_is_pooled_and_the_random_pooler_left_out(folder):
    from transformers import AutoModel, AutoTokenizer

    encoder = make_encoder(folder, max_tokens=16)
    tokens, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(**tokens(["c a b"], return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(encoded(encoder, "c a b"), hidden[:, 0], rtol=0, atol=1e-5)
    assert not [name for name, _ in encoder.named_parameters() if "pooler" in name]


def test_bytes_are_tokens():
    batch = Bytes(4)(["é", "abcdef", ""])
    assert batch["input_ids"].tolist() == [[1, 0xC3 + 2, 0xA9 + 2, 0], [1, 102, 103, 104], [1, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 4, 1]


def test_ngrams_are_the_same_in_every_process():
    code = (
        "from verl_multiturn.critic.encoders import NGrams;"
        "print(NGrams(8).encode(['open the door', 'x']).tolist())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    vectors = NGrams(8).encode(["open the door", "x"])
    assert other.stdout.strip() == str(vectors.tolist())
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))


def test_lines_are_a_set_of_lines_and_pairs():
    """Which answer stands behind which question counts; how often, and in what order, does not."""
    lines = make_encoder("lines", 200)
    first, same, other = encoded(
        lines, "a?\nYes.\nb?\nNo.", "a?\nYes.\nb?\nNo.\na?\nYes.", "a?\nNo.\nb?\nYes."
    )
    assert int(first.abs().sum()) == 4 + 3  # lines and pairs, none of which share a bucket
    apart = (same - first).nonzero()
    assert len(apart) == 1  # the pair "No.\na?"
    assert int((first - other).abs().sum()) == 6  # the same lines, other pairs
    assert torch.equal(encoded(lines, "x" * 300 + "\na?")[0], encoded(lines, "x" * 197 + "\na?")[0])


def test_ngrams_tell_short_texts_apart():
    texts = [f"{a}{b}" for a in "abcdefgh01234567" for b in "abcdefgh01234567"]
    assert len(NGrams(512).encode(texts).unique(dim=0)) == 256
    assert len(NGrams(64).encode(texts).unique(dim=0)) >= 250  # "ab" and "ba" differ in one gram only


def test_small_follows_the_seed():
    vectors = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        vectors.append(encoded(make_encoder("small"), "look"))
    assert (vectors[0] == vectors[1]).all() and (vectors[0] != vectors[2]).any()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "ngram",
            "unknown encoder 'ngram'; valid: ngrams, lines, small, roberta-base,.* Did you mean 'ngrams'",
        ),
        ("roberta-bse", "Did you mean 'roberta-base'"),
        ("", "unknown encoder ''.*Or a folder, or owner/name"),
    ],
)
def test_an_unknown_name_is_refused(name, words):
    with pytest.raises(ValueError, match=words):
        make_encoder(name)


def test_what_cannot_be_loaded_is_said_in_one_sentence(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in (str(empty), "nobody/nothing", "roberta-base"):
        with pytest.raises(ValueError, match=f"cannot load the encoder '{name}'") as caught:
            make_encoder(name)
        message = str(caught.value)
        assert message.endswith("which need no files.") and "\n" not in message


def test_more_tokens_than_the_model_takes(folder):
    with pytest.raises(ValueError, match=r"takes fewer than max_tokens=17 tokens"):
        make_encoder(folder, max_tokens=17)
    with pytest.raises(ValueError, match="max_tokens must be at least 2, not 1"):
        make_encoder("small", max_tokens=1)


def test_a_model_without_cls_token_is_no_encoder(folder, tmp_path):
    import json
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    path = bare / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cls_token": None}))
    with pytest.raises(ValueError, match="has no CLS token"):
        make_encoder(str(bare), max_tokens=8)
