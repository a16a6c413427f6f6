import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verl_multiturn.cli import app
from verl_multiturn.env import make
from verl_multiturn.model_policy import Chat, ModelPlayer, Sampler
from verl_multiturn.play import Screen, play_tasks, tasks
from verl_multiturn.play_settings import model_folder, settings
from verl_multiturn.rollout.episode import Sample


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["play", *map(str, arguments)])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def screen(turns=True):
    return Screen(Console(file=io.StringIO(), width=200), turns)


def shown(one):
    return one.console.file.getvalue()


def test_a_checkpoint_of_verl_is_named(tmp_path):
    (tmp_path / "actor" / "huggingface").mkdir(parents=True)
    (tmp_path / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"")
    for place in (tmp_path, tmp_path / "actor", tmp_path / "actor" / "huggingface"):
        with pytest.raises(ValueError, match="convert it: python -m verl") as error:
            model_folder(settings("frozen_lake"), str(place))
        assert f"{tmp_path / 'actor'} holds" in str(error.value)
    with pytest.raises(ValueError, match="has no weights"):
        model_folder(settings("frozen_lake"), str(tmp_path.parent))


class Letters:
    """A tokenizer of single characters with Qwen's chat form; "$" ends an utterance."""

    eos_token, eos_token_id, chat_template = "$", ord("$"), "yes"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        text = "".join(f"@{m['role'][0]}:{m['content']}$\n" for m in messages)
        return text + "@a:" * add_generation_prompt

    def encode(self, text, add_special_tokens):
        return list(map(ord, text))


class Scripted:
    """A model that was told what to say."""

    def __init__(self, *texts):
        self.texts, self.tokenizer, self.read, self.seeds = iter(texts), Letters(), [], []

    async def __call__(self, prompt_ids, max_tokens, seed):
        self.read.append("".join(map(chr, prompt_ids)))
        self.seeds.append(seed)
        return Sample([ord(letter) for letter in next(self.texts) + "$"])

    def decode(self, ids):
        return "".join(map(chr, ids)).rstrip("$")


def model_plays(row, *texts, overrides=()):
    plain = ["multiturn.prompt.first='{observation}'", "multiturn.prompt.next='{observation}'"]
    form = ["multiturn.action.tag=a", "multiturn.action.think=false", f"multiturn.row={row}"]
    config = settings(
        "frozen_lake", {"size": 3}, overrides=[*plain, *form, "multiturn.prompt.history=0", *overrides]
    )
    one, model = screen(), Scripted(*texts)
    play = ModelPlayer(config, model, one)
    (episode,) = play_tasks(play, tasks(4), one)
    play.close()
    return episode, model, shown(one)


def test_a_model_plays_as_in_a_run():
    env = make("frozen_lake", size=3)
    first, _ = env.reset(4)
    way, over = [], False
    while not over:
        way.append(env.expert())
        over = env.step(way[-1])[2]
    texts = ["well", *(f"<a>{action}</a>" for action in way)]
    episode, model, text = model_plays("turn", *texts)
    assert episode.success and episode.turns == len(texts) and episode.invalid == 1
    assert episode.task_type in ("near", "middle", "far")
    assert model.read[0] == model.read[1] == f"@u:{first}$\n@a:"
    assert len(set(model.seeds)) == len(texts)  # another one each turn, the same ones each time
    assert model_plays("turn", *texts)[1].seeds == model.seeds
    assert "model: well" in text and "step 1: (nothing) (not an action here)" in text and "solved" in text

    episode, model, _ = model_plays("trajectory", *texts)
    assert episode.success and model.read[1] == f"@u:{first}$\n@a:well$\n@u:{first}$\n@a:"


def test_several_actions_and_limits_of_the_run():
    several = ["multiturn.action.max_actions=3", "multiturn.max_actions=4"]
    episode, _, text = model_plays("turn", *["<a>up||fly||up</a>"] * 2, overrides=several)
    assert (episode.turns, episode.truncated, episode.invalid) == (
        2,
        True,
        1,
    )  # the last turn had one action left
    assert "step 4: up" in text and "step 5" not in text


def test_a_template_that_rewrites_the_past_is_rendered_whole():
    class Forgetful(Letters):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            return super().apply_chat_template(messages[-1:], tokenize, add_generation_prompt)

    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    merged = Chat(Forgetful()).merge_context_tokens(said, [*said, {"role": "user", "content": "z"}], [1, 2])
    assert "".join(map(chr, merged.token_ids)) == "@u:z$\n@a:"


def test_a_real_model_of_transformers(tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<|im_end|>": 0, **{chr(n): n for n in range(1, 128)}}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="\x01"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokens.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no chat template"):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 128}
        config = transformers.LlamaConfig(**sizes, **heads, eos_token_id=0)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
        Sampler(str(tmp_path), {})
    tokens.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    tokens.save_pretrained(tmp_path)
    override = ["--set", "multiturn.max_action_tokens=5"]
    said = call("bandit", "--model", tmp_path, *override)
    assert f"model {tmp_path}" in said and "step 1: (nothing)" in said
    assert said == call("bandit", "--model", tmp_path, *override)  # seeded
    state = torch.random.get_rng_state()
    assert call("bandit", "--model", tmp_path, *override, "--seed", 1) != said
    assert torch.equal(state, torch.random.get_rng_state())
