"""What the doctor says of recipes: every refusal, dead keys, arithmetic, and one sample with its mask."""

import copy

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_multiturn import compose, doctor_budget, doctor_dead, doctor_recipe, small_model
from verl_multiturn.cli import app
from verl_multiturn.doctor import examine

MISSING = object()
LAKE, CPU = "gigpo_frozenlake", "hardware=cpu"
ACTOR = "actor_rollout_ref.actor"
FEW = ["multiturn.train.size=32", "multiturn.test=null"]


@pytest.fixture(scope="module", autouse=True)
def cheaper():
    """hydra composes once per preset, values are set by dotlist; the tokenizer learns from fewer episodes."""
    hydra, train, memo = compose._hydra, small_model.tokenizer, {}

    def composed(recipe, overrides):
        preset = [CPU] if CPU in overrides else []
        if (recipe, *preset) not in memo:
            memo[recipe, *preset] = hydra(recipe, preset)
        config, values = memo[recipe, *preset], [one for one in overrides if one != CPU]
        keys = [one.partition("=")[0] for one in values]
        if any(OmegaConf.select(config, key, default=MISSING) is MISSING for key in keys):
            return hydra(recipe, overrides)
        config = copy.deepcopy(config)
        config.merge_with_dotlist(values)
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_hydra", composed)
        patch.setattr(small_model, "tokenizer", lambda plan, episodes=0: train(plan, 5))
        yield


def by_name(lines, name):
    return next(line for line in lines if line.name == name)


def failed(lines):
    return [line.text for line in lines if line.status == "FAIL"]


def composed(*overrides, recipe=LAKE):
    return doctor_recipe.composed(recipe, [*overrides])


CONTRADICTORY = {
    "multiturn.histroy=2": "Did you mean 'multiturn.prompt.history'?",
    "multiturn.gigpo.gama=1": "Did you mean 'gamma'?",
    "+algorithm.gama=1": "in algorithm: 'gama'",
    "multiturn.row=turns": "Did you mean 'turn'?",
    "trainer.v1.trainer_mode=snyc": "Did you mean 'sync'?",
    "critic.enable=true": "which has none: leave it out",
    "algorithm.adv_estimator=gae": "contradicts multiturn.algorithm=gigpo",
    "multiturn.max_action_tokens=99999": "exceeds data.max_response_length",
    "multiturn.failures.min_share=2": "must be in (0, 1]",
    "multiturn.gigpo.gamma=7": "gamma must be in [0, 1], not 7",
    "algorithm.use_kl_in_reward=true": "use_kl_loss=true instead",
    "multiturn.prompt.first='{obs}'": "unknown placeholder in multiturn.prompt.first 'obs'",
}


def test_every_refusal_is_found_not_only_the_first():
    found = composed(CPU, *CONTRADICTORY)
    said = failed(found.lines)
    assert not found.accepted and len(said) == len(CONTRADICTORY)
    for words in CONTRADICTORY.values():
        assert any(words in text for text in said), words


def test_a_refused_recipe_ends_with_code_1_and_an_unknown_one_with_2():
    run = CliRunner().invoke(app, ["doctor", LAKE, CPU, "multiturn.row=turns", "--no-imports"])
    assert run.exit_code == 1 and "Did you mean 'turn'?" in run.output
    unknown = CliRunner().invoke(app, ["doctor", "gigpo_frozenlak", "--no-imports"])
    assert unknown.exit_code == 2 and "Did you mean 'gigpo_frozenlake'?" in unknown.output


DEAD = {
    "multiturn.gigpo.gamma=0.9": "multiturn.algorithm is rloo",
    "critic.optim.lr=5e-3": "the run has no critic",
    "trainer.v1.colocate_async.num_warmup_batches=3": "trainer.v1.trainer_mode is sync",
    "algorithm.gamma=0.9": "rloo is ours",
    "actor_rollout_ref.rollout.multi_turn.max_user_turns=4": "tool_agent loop only",
    "data.prompt_key=question": "tasks come from panels",
    "multiturn.prompt.next='{observation}!'": "turn rows start a fresh chat",
    "multiturn.anchor=observation": "compares no states",
}


def test_keys_without_effect():
    found = composed(CPU, "multiturn.algorithm=rloo", *DEAD)
    assert found.accepted
    said = [line.text for line in doctor_dead.lines(found.config, doctor_recipe.base())]
    for override, why in DEAD.items():
        key = override.partition("=")[0]
        assert any(key in text.partition(": ")[0] and why in text for text in said), (key, said)


def test_presets_prepare_for_every_algorithm():
    """The critic's block of hardware=cpu is not the user's: only what he set is called dead."""
    for line in doctor_dead.lines(composed(CPU).config, doctor_recipe.base()):
        assert "critic" not in line.text


def budget(*overrides):
    lines = doctor_budget.lines(composed(CPU, *overrides).config)
    return {line.name: line for line in reversed(lines)}


def test_batch_arithmetic():
    rows = "multiturn.max_turns=5"
    turn = budget(rows, "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=3")
    assert turn["trajectories"].text.startswith("4 tasks x 8 = 32")
    assert turn["rows"].text.startswith("32 to 160 ")
    assert turn["mini-batch"].text.startswith("about 24 rows")
    assert turn["optimizer steps"].text.startswith("1 to 7 ")  # 32 and 160 rows, in mini-batches of about 24
    whole = budget(rows, "multiturn.row=trajectory")
    assert whole["rows"].text.startswith("128 a step") and whole["optimizer steps"].text.startswith("2 per")


@pytest.mark.parametrize(
    ("overrides", "name", "said"),
    [
        (["actor_rollout_ref.rollout.max_model_len=200"], "max_model_len", "raise it"),
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100"], "micro-batch", "raise it"),
        (
            [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=48"],
            "micro-batch",
            "does not divide the 64 rows",
        ),
    ],
)  # fmt: skip
def test_what_verl_would_only_say_after_the_first_rollout(overrides, name, said):
    line = budget(*overrides)[name]
    assert line.status == "FAIL" and said in line.text


def test_panels_that_main_would_refuse():
    report = examine(LAKE, [CPU, "multiturn.train.size=8", "multiturn.test=null"], imports=False)
    assert any("8 training tasks" in text for text in failed(report.lines))


def test_where_the_small_model_is_kept(monkeypatch, tmp_path):
    config = composed(CPU, f"multiturn.small_model.cache={tmp_path}").config
    assert "to be built" in doctor_recipe.model(config)[0].text
    monkeypatch.setattr(small_model, "_train", lambda plan, folder: (folder / "model.safetensors").touch())
    assert small_model.build(config) == doctor_recipe.small_folder(config)
    assert str(tmp_path) in doctor_recipe.model(config)[0].text


def test_a_check_that_breaks_is_a_finding(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("class Mine:\n    def reset(self): raise KeyError('lost')\n    def step(self, a): ...\n")
    few = "multiturn.val={first_seed: 1, size: 2}"
    report = examine(LAKE, [CPU, *FEW, few, f"multiturn.env={mine}:Mine"], imports=False)
    assert not report.ok and "panels" in [line.part for line in report.lines if line.status == "FAIL"]


@pytest.mark.parametrize("row", ["turn", "trajectory"])
def test_one_sample_with_its_mask(row, tmp_path):
    pytest.importorskip("verl")
    overrides = [CPU, *FEW, f"multiturn.row={row}", f"multiturn.small_model.cache={tmp_path}"]
    report = examine(LAKE, overrides, imports=False)
    assert report.ok, failed(report.lines)
    text = by_name(report.lines, "environment").text if row == "turn" else ""
    assert "success yes" in text or row != "turn"
    assert "exactly the sampled ones" in by_name(report.lines, "mask").text
    shown = report.as_dict()["sample"]
    turns = [turn for one in shown["rows"] for turn in one["turns"]]
    assert len(shown["rows"]) == (len(turns) if row == "turn" else 1) and len(turns) > 1
    assert all(turn["valid"] for turn in turns) and turns[-1]["reward"] == 1
    styles = [style for style, _ in report.sample.segments(report.sample.rows[0])]
    assert styles[:2] == ["dim", "bold green"] and ("yellow" in styles) is (row == "trajectory")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("multiturn.max_action_tokens=3", "max_action_tokens is 3: an action in the right form is cut"),
        ("data.max_prompt_length=20", "data.max_prompt_length is 20: raise it"),
    ],
)
def test_a_budget_that_is_too_small(override, said, tmp_path):
    pytest.importorskip("verl")
    overrides = [CPU, *FEW, f"multiturn.small_model.cache={tmp_path}", override]
    found = failed(examine(LAKE, overrides, imports=False).lines)
    assert any(said in text for text in found), found


def test_a_socket_path_that_is_too_long():
    found = composed(CPU, f"ray_kwargs.ray_init._temp_dir=/scratch/{'x' * 60}")
    assert any("a socket in /scratch" in text for text in failed(found.lines))


def test_best_is_of_the_steps_that_are_saved():
    """Said where some validations have no checkpoint, by the doctor and at the start."""
    for test, save, steps in ((5, 20, 20), (4, 6, 12), (10, 10, 0), (20, 5, 0), (5, -1, 0), (-1, 5, 0)):
        found = composed(f"trainer.test_freq={test}", f"trainer.save_freq={save}")
        said = [line.text for line in found.lines if line.name == "best"]
        assert len(said) == (1 if steps else 0)
        assert not steps or f"best of the validations at every {steps} steps and at the end" in said[0]
