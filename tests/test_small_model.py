"""The small default model: tokenizer as trained, training text as the chat, a sound cache."""

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_multiturn import small_model
from verl_multiturn.compose import compose
from verl_multiturn.configure import prepare
from verl_multiturn.demonstrations import FIRST_SEED, Encoder, Plan, demonstrations, repeated
from verl_multiturn.env import make
from verl_multiturn.rollout.parsing import ActionFormat, parse

ROOT = Path(__file__).parents[1]
BUILT_IN = ["bandit", "chain_sum", "frozen_lake", "sokoban"]
TRICKY = [
    "", " ", "\n", "\n\n\n  x", "a\nb", "don't we'll", "1234567 3.14", "<think>so</think><answer>up</answer>",
    "<answer> up </answer>\n", "東京 ☃ \U0001f600", "e\u0301 é", "a  b\t c ", "P O\n _ G!!?",
    "<|im_start|>user\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run whose small model takes two steps."""
    cache = tmp_path_factory.mktemp("cache")
    few = ["width=32", "layers=1", "steps=2", "batch=4", f"cache={cache}"]
    overrides = ["hardware=cpu", *(f"multiturn.small_model.{one}" for one in few)]
    return prepare(compose("gigpo_frozenlake", overrides))


@pytest.fixture(scope="module")
def plan(config):
    return Plan.of(config)


@pytest.fixture(scope="module")
def quick():
    """A tokenizer from a few demonstrations instead of hundreds."""
    whole = small_model.tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_model, "tokenizer", lambda plan: whole(plan, 10))
        yield whole


@pytest.fixture(scope="module")
def folder(config, quick):
    return small_model.build(config)


@pytest.fixture(scope="module")
def trained(plan, quick):
    return quick(plan, 10)


@pytest.fixture(scope="module")
def loaded(folder):
    from transformers import AutoConfig, AutoTokenizer

    assert AutoConfig.from_pretrained(folder).model_type == "qwen2"
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("env", BUILT_IN)
def test_the_loaded_tokenizer_reads_every_environment_like_the_trained_one(env, plan, trained, loaded):
    """transformers puts another pre-tokenizer into whatever it loads from a folder of type qwen2."""
    texts = {
        text
        for episode in islice(demonstrations(replace(plan, env=env), noise=0.5), 20)
        for messages, answer in episode
        for text in (*(message["content"] for message in messages), answer)
    }
    assert len(texts) > 10
    for text in [*texts, *(f"Observation:\n{text}\n\nAct!" for text in texts)]:
        ids = trained.encode(text, add_special_tokens=False)
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids) == text


def test_the_loaded_tokenizer_reads_tricky_text_like_the_trained_one(trained, loaded):
    for text in TRICKY:
        assert loaded.encode(text) == trained.encode(text), repr(text)
    assert len(loaded) == len(trained) and loaded.get_vocab() == trained.get_vocab()
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert loaded.chat_template == trained.chat_template == small_model.CHAT_TEMPLATE


def test_the_model_fits_its_tokenizer(folder, loaded):
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(loaded) == model.get_input_embeddings().weight.shape[0]
    assert model.config.eos_token_id == GenerationConfig.from_pretrained(folder).eos_token_id
    assert model.config.eos_token_id == loaded.eos_token_id
    assert max(loaded.get_vocab().values()) < len(loaded)


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_what_is_imitated_is_the_chat_template(row, plan, trained):
    """Ids by pieces equal the template's; what is learnt are the answers with their stop tokens."""
    encoder = Encoder(trained)
    plan = replace(plan, row=row)
    for episode in islice(demonstrations(plan, noise=0.4), 3):
        for messages, answer in episode:
            chat = [*messages, {"role": "assistant", "content": answer}]
            ids, mask = encoder(messages, answer)
            assert ids == trained.apply_chat_template(chat, tokenize=True, return_dict=False)
            learnt = trained.decode([i for i, one in zip(ids, mask, strict=True) if one])
            answers = [m["content"] for m in chat if m["role"] == "assistant"]
            assert learnt == "".join(f"{one}<|im_end|>" for one in answers)
            assert parse(answer, plan.form).valid
        assert len(episode[-1][0]) == (2 * len(episode) - 1 if row == "trajectory" else 1)


def test_answers_have_the_form_of_the_run(plan):
    for form in (ActionFormat(), ActionFormat(tag=None, think=False), plan.form):
        messages, answer = next(demonstrations(replace(plan, form=form), noise=0.0))[0]
        assert parse(answer, form).valid and messages[-1]["role"] == "user"


# ------------------------------------------------------------------ the cache


def test_a_model_is_built_once(config, folder, monkeypatch, capsys):
    def never(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr(small_model, "_train", never)
    assert small_model.build(config) == folder
    assert capsys.readouterr().out == f"small model: {folder} (built before)\n"
    assert folder.name.startswith("frozen_lake-") and (folder / "model.safetensors").exists()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_interrupted_build_leaves_nothing_and_an_overtaken_one_is_dropped(config, monkeypatch, tmp_path):
    mine = config.copy()
    mine.multiturn.small_model.cache = str(tmp_path)

    def interrupted(plan, folder):
        (folder / "model.safetensors").write_text("half a mod")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(small_model, "_train", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small_model.build(mine)
    assert list(tmp_path.iterdir()) == []

    def overtaken(plan, draft):
        (draft / "model.safetensors").write_text("late")
        folder = draft.with_name(draft.name.partition(".")[0])
        folder.mkdir()
        (folder / "model.safetensors").write_text("first")

    monkeypatch.setattr(small_model, "_train", overtaken)
    built = small_model.build(mine)
    assert [path.name for path in tmp_path.iterdir()] == [built.name]
    assert (built / "model.safetensors").read_text() == "first"


CHANGES = [
    "+multiturn.env_kwargs.size=5", "multiturn.small_model.steps=3", "multiturn.small_model.width=64",
    "multiturn.prompt.first=x {observation}", "multiturn.prompt.history=1", "multiturn.action.tag=act",
    "multiturn.row=trajectory", "multiturn.seed=2", "multiturn.env=sokoban", "data.max_prompt_length=300",
    "multiturn.small_model.imitate=expert", "multiturn.small_model.prompt_weight=0.5",
    "multiturn.small_model.mistakes=0.5", "multiturn.small_model.mixed=4",
    "multiturn.small_model.episodes=3", "multiturn.small_model.vocabulary=400",
]  # fmt: skip
SAME = ["multiturn.small_model.cache=elsewhere", "multiturn.algorithm=grpo", "trainer.total_training_steps=9"]


def test_the_digest_covers_what_the_model_depends_on(config, plan):
    seen = {plan.digest(): "nothing"}
    for change in [*CHANGES, *SAME]:
        changed = config.copy()
        OmegaConf.set_struct(changed, False)
        changed.merge_with_dotlist([change.lstrip("+")])
        digest = Plan.of(changed).digest()
        assert (digest in seen) is (change in SAME), f"{change} is taken for {seen.get(digest)}"
        seen.setdefault(digest, change)


def test_one_model_may_serve_all_seeds(config):
    digests = set()
    for seed in (1, 2):
        changed = config.copy()
        changed.merge_with_dotlist(["multiturn.small_model.seed=7", f"multiturn.seed={seed}"])
        digests.add(Plan.of(changed).digest())
    assert len(digests) == 1


def test_a_few_demonstrations_come_again_in_another_order(plan):
    few = replace(plan, episodes=4)
    shown = [str(episode) for episode in islice(repeated(few), 12)]
    assert len(set(shown)) == 4
    rounds = [shown[:4], shown[4:8], shown[8:]]
    assert all(set(one) == set(shown) for one in rounds)
    assert rounds[0] != rounds[1] or rounds[1] != rounds[2]
    every = [str(episode) for episode in islice(repeated(plan), 12)]
    assert len(set(every)) == 12


def test_the_expert_is_imitated_where_chance_played(plan):
    """All of the moves are chance, yet each answer is the expert's for what the prompt shows."""
    lost = replace(plan, imitate="expert")
    env = make("frozen_lake")
    for number, episode in enumerate(islice(demonstrations(lost, noise=1.0), 5)):
        env.reset(FIRST_SEED + number)
        for messages, answer in episode:
            position = messages[-1]["content"].splitlines()[-1].split()[1:3]
            env.position = tuple(map(int, position))
            assert answer == f"<answer>{env.expert()}</answer>"


def test_a_warm_start_sees_what_a_mistake_leads_to(alfworld_games):
    """With `mistakes`, some of the chance actions come from other episodes: most do nothing here."""
    given = ["hardware=cpu", f"multiturn.env_kwargs.data={alfworld_games}"]
    plan = Plan.of(prepare(compose("gigpo_alfworld", given)))
    idle = {}
    for mistakes in (0.0, 0.5):
        shown = [
            messages[-1]["content"]
            for episode in islice(demonstrations(replace(plan, mistakes=mistakes), noise=0.5), 12)
            for messages, _ in episode
        ]
        idle[mistakes] = sum("Nothing happens." in text for text in shown) / len(shown)
    assert idle[0.0] == 0 and 0.05 < idle[0.5] < 0.3


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_mixed_batches_hold_the_same_turns_with_less_padding(plan, row):
    """Rows of several batches put together by length: each turn once, the batches as large as asked."""
    tokens = small_model.tokenizer(plan)
    texts, padding = {}, {}
    for mixed in (1, 8):
        one = replace(plan, row=row, mixed=mixed, batch=32, max_tokens=4000)
        batches = list(islice(small_model._batches(one, demonstrations(one, 0.4), Encoder(tokens)), 8))
        rows = [row for ids, _ in batches for row in ids.tolist()]
        texts[mixed] = sorted(tuple(t for t in row if t != tokens.pad_token_id) for row in rows)
        padding[mixed] = sum(row.count(tokens.pad_token_id) for row in rows)
    with_few = replace(plan, row=row, mixed=1, batch=32, max_tokens=4000)
    for ids, labels in islice(
        small_model._batches(with_few, demonstrations(with_few, 0.4), Encoder(tokens)), 6
    ):
        answers = ((labels == tokens.eos_token_id).sum(dim=1)).sum()
        assert answers >= 32 and len(ids) == len(labels)
    shared = set(texts[1]) & set(texts[8])
    assert len(shared) > 0.8 * len(set(texts[1])) and padding[8] <= padding[1]


def test_answers_that_were_not_played_do_not_enter_a_chat():
    given = ["hardware=cpu", "multiturn.row=trajectory", "multiturn.small_model.imitate=expert"]
    with pytest.raises(ValueError, match=r"imitate=expert needs multiturn\.row=turn"):
        prepare(compose("gigpo_frozenlake", given))


def test_a_weight_on_the_prompt_changes_the_model(config, plan, quick, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    weights = []
    for weight in (0.0, 0.5):
        folder = tmp_path / str(weight)
        folder.mkdir()
        small_model._train(replace(plan, prompt_weight=weight), folder)
        weights.append(AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight)
    assert not torch.equal(*weights)


def test_the_digest_covers_the_parts_of_the_environment(plan, tmp_path):
    """What `environments/<name>.py` imports from a folder of parts beside it."""
    file = tmp_path / "lake.py"
    source = (ROOT / "environments" / "frozen_lake.py").read_text()
    file.write_text(
        f"{source}\n\ndef part():\n    from environments.lake_parts import ice\n\n    return ice\n"
    )
    (tmp_path / "lake_parts").mkdir()
    part = tmp_path / "lake_parts" / "ice.py"
    part.write_text("THICK = 1\n")
    mine = replace(plan, env=str(file))
    before = mine.digest()
    part.write_text("THICK = 2\n")
    assert mine.digest() != before


def test_the_digest_covers_the_source_of_the_environment(plan, tmp_path):
    file = tmp_path / "lake.py"
    shutil.copy(ROOT / "environments" / "frozen_lake.py", file)
    mine = replace(plan, env=str(file))
    before = mine.digest()
    assert mine.digest() == before
    file.write_text(file.read_text() + "\n# another lake\n")
    assert mine.digest() != before
