"""What a run is refused for, each in one sentence, and that every recipe composes and is complete."""

import copy
import json
import os
import shlex
import subprocess
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from verl_multiturn import compose, configure, main
from verl_multiturn.panel import Panel
from verl_multiturn.recipes_index import list_recipes

pytestmark = pytest.mark.usefixtures("parsed_once")
ROOT = Path(__file__).parents[1]
RECIPES = sorted(list_recipes())
LAKE, CPU = "gigpo_frozenlake", "hardware=cpu"
ARCHER = ["multiturn.algorithm=archer"]
FEW = [
    "multiturn.val={first_seed: 1, size: 4}",
    "multiturn.test=null",
    "multiturn.train={first_seed: 9, size: 8}",
]


@pytest.fixture(scope="module")
def composed(parsed_once):
    """`composed(*overrides)`: the FrozenLake recipe, composed once per preset; values are set by dotlist."""
    memo = {}

    def run(*overrides):
        preset = [CPU] if CPU in overrides else []
        if not memo.get(str(preset)):
            memo[str(preset)] = compose.compose(LAKE, preset)
        config = copy.deepcopy(memo[str(preset)])
        with open_dict(config):
            config.merge_with_dotlist([one.lstrip("+") for one in overrides if one != CPU])
        return config

    return run


@pytest.fixture
def refusal(capsys, monkeypatch, tmp_path):
    """`refusal(recipe, *overrides)`: the sentence with which a run is refused."""
    monkeypatch.chdir(tmp_path)

    def run(recipe, *arguments):
        code = main.main(["--config-name", recipe, *arguments])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1
        assert list(tmp_path.glob("runs/*")) == []  # nothing was begun
        return err.removeprefix("error: ").rstrip("\n")

    return run


def mini(n):
    return f"actor_rollout_ref.actor.ppo_mini_batch_size={n}"


MISSPELT = {
    "our key": (["multiturn.histroy=2"], "unknown config key in multiturn: 'histroy'", "valid: "),
    "nested key": (["multiturn.gigpo.gama=1"], "in multiturn.gigpo: 'gama'", "Did you mean 'gamma'?"),
    "verl's key": (["trainer.tes_freq=1"], "in trainer: 'tes_freq'", "Did you mean 'test_freq'?"),
    "added key": (["+algorithm.gama=0.9"], "in algorithm: 'gama'", "Did you mean 'gamma'?"),
    "added group": (["+multitrun.row=turn"], "in the top level: 'multitrun'", "Did you mean 'multiturn'?"),
    "no value": (["multiturn.row"], "multiturn.row"),
    "preset": (["hardware=cpuu"], "unknown hardware preset 'cpuu'", "one_gpu", "Did you mean 'cpu'?"),
}
REFUSED = {
    "algorithm": (["multiturn.algorithm=gigp"], "unknown value of multiturn.algorithm 'gigp'", "'gigpo'?"),
    "own algorithm": (["multiturn.algorithm=no_such_module:mine"], "no_such_module:mine", "package.module"),
    "environment": (["multiturn.env=frozen_lak", *FEW], "unknown environment", "Did you mean 'frozen_lake'?"),
    "environment file": (["multiturn.env=gone.py:Mine", *FEW], "gone.py"),
    "row": (["multiturn.row=turns"], "unknown value of multiturn.row 'turns'", "Did you mean 'turn'?"),
    "mode": (["trainer.v1.trainer_mode=snyc"], "trainer.v1.trainer_mode 'snyc'", "Did you mean 'sync'?"),
    "separate on a CPU": ([CPU, "trainer.v1.trainer_mode=separate_async"], "a CPU has neither: use sync"),
    "separate": (["trainer.v1.trainer_mode=separate_async"], "not supported yet: use sync"),
    "KL in reward": (["algorithm.use_kl_in_reward=true"], "gigpo does not read", "use_kl_loss=true instead"),
    "estimator": (["algorithm.adv_estimator=gae"], "contradicts multiturn.algorithm=gigpo: set the latter"),
    "no estimator": (["multiturn.algorithm=verl"], "needs algorithm.adv_estimator"),
    "needless critic": (["critic.enable=true"], "contradicts multiturn.algorithm=gigpo, which has none"),
    "missing critic": (
        ["multiturn.algorithm=ppo", "multiturn.row=trajectory", "critic.enable=false"],
        "critic.enable=False contradicts multiturn.algorithm=ppo, which needs a critic: leave it out",
    ),
    "ppo over turns": (["multiturn.algorithm=ppo"], "score every turn as an episode of its own", "turn_gae"),
    "large mini-batch": (
        ["multiturn.row=trajectory", mini(64)], "is 512 rows, a step has 256", "use at most 32"
    ),
    "odd mini-batch": (["multiturn.row=trajectory", mini(5)], "has 256 rows, not a multiple of", "40 rows"),
    "mini-batch of turns": (["multiturn.max_turns=2", mini(65)], "of 520 rows", "exceeds the 512 rows"),
    "long utterances": (["multiturn.max_action_tokens=513"], "=513 exceeds data.max_response_length=512"),
    "keyword": (["multiturn.gigpo.gamma=2"], "GiGPOConfig.gamma must be in [0", "not 2"),
    "placeholder": (['multiturn.prompt.first="{observatoin}"'], "'observatoin'", "mean 'observation'?"),
    "history": (["multiturn.prompt.history=-1"], "history=-1 must be a whole number of at least 0"),
    "actions": (["multiturn.action.max_actions=0"], "max_actions=0 must be a whole number of at least 1"),
    "no number": (["data.train_batch_size=abc"], "data.train_batch_size='abc' must be a whole number"),
    "a group of one": (["actor_rollout_ref.rollout.n=1"], "gigpo compares the members of a group"),
    "row filter": (["+algorithm.filter_groups.enable=true"], "multiturn.filter.place=refill instead"),
    "tasks": (["multiturn.val={first_seed: 0}"], "multiturn.val=", "must be the name or file of a panel"),
    "share": (["multiturn.failures.min_share=0"], "must be in (0, 1]"),
    "other panel": (["multiturn.val=sokoban-val"], "panel sokoban-val is for sokoban", "the run plays f"),
    "other size": (["+multiturn.env_kwargs.size=5"], "panel frozen_lake-val is for frozen_lake with {}"),
    "no panel": (["multiturn.val=frozen_lake-vall"], "unknown panel", "Did you mean 'frozen_lake-val'?"),
    "trained on the test": (["multiturn.train=frozen_lake-test"], "frozen_lake-train share 512 tasks"),
    "validated on the test": (
        ["multiturn.val={first_seed: 0, size: 4}"], "frozen_lake-val and frozen_lake-test share 4 tasks"
    ),
    "keyword of the environment": (
        ["+multiturn.env_kwargs.sise=4", *FEW], "unknown keyword of frozen_lake 'sise'", "mean 'size'?"
    ),
    "value of the environment": (["+multiturn.env_kwargs.size=1", *FEW], "needs size >= 2"),
    "ArCHer's mode": ([*ARCHER, "multiturn.archer.mode=insilico"], "ArcherConfig.mode 'insilico'"),
    "ArCHer's preset": ([*ARCHER, "multiturn.critic.preset=papr"], "unknown critic preset", "mean 'paper'?"),
    "ArCHer's encoder": ([*ARCHER, "multiturn.critic.encoder=ngram"], "unknown encoder", "mean 'ngrams'?"),
    "ArCHer's replay": ([*ARCHER, "multiturn.critic.capacity=100"], "must be at least batch=256"),
    "ArCHer's discount": ([*ARCHER, "multiturn.critic.gamma=2"], "gamma must be in [0, 1], not 2"),
    "ArCHer's updates": ([*ARCHER, "multiturn.archer.updates=0"], "updates=0 must be a whole number"),
    "ArCHer's baseline": ([*ARCHER, "multiturn.archer.token_baseline=1"], "must be true or false"),
    "ArCHer and verl's critic": ([*ARCHER, "critic.enable=true"], "contradicts multiturn.algorithm=archer"),
    "ArCHer's GPU": ([*ARCHER, "multiturn.critic.gpus=0.7"], "gpus=0.7 exceeds 0.6"),
    "ArCHer's GPU on a CPU": ([CPU, *ARCHER, "multiturn.critic.gpus=0.2"], "on trainer.device=cpu: use 0"),
    "ArCHer under other weights": (
        [*ARCHER, "trainer.v1.trainer_mode=colocate_async"], "asks the policy that it trains: use sync"
    ),
    "ArCHer in silico with groups": (
        [*ARCHER, "multiturn.archer.mode=in_silico", "multiturn.filter.strategy=top_p"], "use on_policy"
    ),
    "ArCHer in silico, few states": (
        [*ARCHER, "multiturn.archer.mode=in_silico", "multiturn.archer.states=8"], "archer.states=8: lower"
    ),
    "ArCHer's uncovered states": ([*ARCHER, "multiturn.critic.uncovered=skip"], "has no effect in a run"),
    "ArCHer's state after the end": (
        [*ARCHER, "multiturn.archer.state=prompt", "multiturn.critic.bootstrap_on_truncation=true"],
        "which has no prompt",
    ),
    "too few tasks": (
        ["multiturn.env=bandit", "multiturn.val=bandit-val", "multiturn.test=bandit-test"],
        "bandit has 24 training tasks", "data.train_batch_size=32: lower it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSPELT)
def test_a_name_that_hydra_does_not_know(refusal, case):
    overrides, *said = MISSPELT[case]
    sentence = refusal(LAKE, *overrides, "--dry-run")
    assert all(words in sentence for words in said), sentence


def test_an_unknown_recipe(refusal):
    said = refusal("gigpo_frozenlak", "--dry-run")
    assert said.startswith("unknown recipe 'gigpo_frozenlak'") and "Did you mean 'gigpo_frozenlake'?" in said


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(refusal, composed, monkeypatch, case):
    overrides, *said = REFUSED[case]
    monkeypatch.setattr(main, "compose", lambda _, given: composed(*given))  # hydra takes its time
    sentence = refusal(LAKE, *overrides, "--dry-run")
    assert all(words in sentence for words in said), sentence


def test_a_run_on_gpus_where_there_is_none(refusal, composed, monkeypatch):
    monkeypatch.setattr(main, "compose", lambda _, given: composed(*given))
    monkeypatch.setattr(main, "has_cuda", lambda: False)
    assert "none was found: add hardware=cpu for a real run on this machine" in refusal(LAKE, *FEW)


def test_a_panel_that_is_not_what_the_environment_makes(refusal, composed, monkeypatch, tmp_path):
    monkeypatch.setattr(main, "compose", lambda _, given: composed(*given))
    panel = Panel.build("frozen_lake", {}, count(500_000), "val", n=4)
    wrong = replace(panel, tasks=(replace(panel.tasks[0], hash="0" * 32), *panel.tasks[1:]))
    wrong.save(tmp_path / "wrong.json")
    said = refusal(LAKE, "multiturn.val=wrong.json", "multiturn.test=null", "--dry-run")
    assert said.startswith("1 of 4 tasks of panel frozen_lake-val are no longer what environment frozen_lake")
    assert said.endswith("first: 500000.")


MINE = """
recipe: {algorithm: gigpo, environment: frozen_lake, paper: none, table: none, needs: a GPU, cpu: true}
defaults: [multiturn, _self_, hardware: one_gpu]
"""
GOOD = """
multiturn: {env: frozen_lake, env_kwargs: {size: 4}}
actor_rollout_ref: {model: {path: somewhere}}
data: {train_batch_size: 8, max_prompt_length: 1024, max_response_length: 512}
trainer: {experiment_name: mine, total_training_steps: 3}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """`mine(yaml)` writes a recipe of one's own, "mine", into a folder of its own."""

    def write(text):
        folder = tmp_path / "my_recipes"
        folder.mkdir(exist_ok=True)
        (folder / "mine.yaml").write_text(MINE + text)
        monkeypatch.setenv("VERL_MULTITURN_RECIPES", str(folder))
        return "mine"

    return write


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("env:", "environment:"), ["multiturn.env must be set, e.g. multiturn.env=..."]),
        (GOOD.replace("path: somewhere", ""), ["actor_rollout_ref.model.path must be set"]),
        (GOOD + "algorithm: {gama: 0.9}", ["config key in algorithm: 'gama'", "Did you mean 'gamma'?"]),
        (GOOD + "multitrun: {}", ["in the top level: 'multitrun'"]),
        (GOOD + "critic: {modl: {path: x}}", ["in critic: 'modl'", "Did you mean 'model'?"]),
        (GOOD + "data: {}", ["mine.yaml is not YAML", "found duplicate key data"]),
    ],
    ids=["no environment", "no model", "unknown key", "unknown group", "unknown group inside", "twice"],
)
def test_a_recipe_of_ones_own_is_checked(refusal, mine, text, said):
    sentence = refusal(mine(text), "--dry-run")
    assert all(words in sentence for words in said), sentence


def test_a_recipe_of_ones_own_runs(mine, capsys):
    free = "\nactor_rollout_ref: {model: {path: x}, rollout: {n: 2, engine_kwargs: {vllm: {anything: 1}}}}"
    text = GOOD.replace("\nactor_rollout_ref: {model: {path: somewhere}}", free)
    assert main.main(["--config-name", mine(text), "--dry-run"]) == 0
    assert "ok: grpo on frozen_lake (64 val, 2000 train tasks), turn rows" in capsys.readouterr().out


# ------------------------------------------------------------------ what is accepted


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """A file with problems that GSM8K's rule and MATH's can both grade."""
    path = tmp_path_factory.mktemp("problems") / "problems.jsonl"
    lines = [{"question": f"{n}?", "answer": rf"$\boxed{{{n}}}$\n#### {n}"} for n in range(400)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A folder with the name of a game that does not ship; a dry run does not play it."""
    folder = tmp_path_factory.mktemp("roms")
    (folder / "detective.z5").write_bytes(b"no game")
    return folder


@pytest.mark.parametrize("hardware", [[], [CPU]], ids=["gpu", "cpu"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_complete(
    recipe, hardware, capsys, monkeypatch, tmp_path, alfworld_games, problems, story
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ALFWORLD_DATA", str(alfworld_games))
    monkeypatch.setenv("JERICHO_ROMS", str(story))
    many = recipe.endswith(("_search", "_gsm8k", "_math")) or recipe.startswith("archer_")
    small = [f"multiturn.train.size={256 if many else 32}"]
    if recipe.endswith("_alfworld"):
        # on the CPU too: thousands of games take a minute; six of the few have one of its two types
        small += ["multiturn.env_kwargs.data=benchmark", "data.train_batch_size=4"]
    if recipe.endswith(("_gsm8k", "_math")) and not hardware:
        small += [f"multiturn.env_kwargs.file={problems}"]
    assert main.main(["--config-name", recipe, *hardware, *small, "--dry-run"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    row = list_recipes()[recipe]
    assert out.startswith(f"ok: {row['algorithm']} on {row['environment']} (")
    assert ("cpu, model small" in out) is bool(hardware)
    assert (ROOT / "recipes" / f"{recipe}.sh").read_text().count(recipe) == 2
    assert list(tmp_path.iterdir()) == []  # a dry run leaves nothing behind


def test_an_environment_from_a_file(capsys, monkeypatch):
    """The command in the example's own docstring."""
    example = "examples/new_environment.py"
    lines = (ROOT / example).read_text().replace("\\\n", " ").splitlines()
    command = next(line for line in lines if "multiturn.env=" in line)
    monkeypatch.chdir(ROOT)
    _, script, *overrides = shlex.split(command)
    assert script == f"recipes/{LAKE}.sh"
    assert main.main(["--config-name", LAKE, *overrides, "--dry-run"]) == 0
    assert f"ok: gigpo on {ROOT / example}:GuessNumber (4 val, 12 train tasks)" in capsys.readouterr().out


@pytest.fixture
def prepared(composed):
    """`prepared(*overrides)` composes and prepares the FrozenLake recipe."""
    return lambda *overrides: configure.prepare(composed(*overrides))


@pytest.mark.parametrize(
    ("algorithm", "estimator", "critic"),
    [
        ("gigpo", "gigpo", False),
        ("turn_gae", "turn_gae", True),
        ("rloo", "rloo", False),
        ("archer", "archer", False),  # its critic is not verl's
    ],
)
def test_what_follows_from_the_algorithm(prepared, algorithm, estimator, critic):
    config = prepared(CPU, f"multiturn.algorithm={algorithm}")
    assert (config.algorithm.adv_estimator, config.critic.enable) == (estimator, critic)


def test_the_baseline_of_archer_is_verls_critic(prepared):
    baseline = (CPU, *ARCHER, "multiturn.archer.token_baseline=true")
    config = prepared(*baseline)
    assert config.critic.enable is True
    assert config.critic.model.path == config.actor_rollout_ref.model.path
    assert prepared(*baseline, "critic.enable=true").critic.enable is True
    with pytest.raises(ValueError, match=r"contradicts multiturn\.algorithm=archer, which needs a"):
        prepared(*baseline, "critic.enable=false")


def test_what_follows_from_verls_algorithms(prepared):
    row = "multiturn.row=trajectory"
    ppo = prepared(row, "multiturn.algorithm=ppo")
    assert (ppo.algorithm.adv_estimator, ppo.critic.enable) == ("gae", True)
    assert ppo.critic.model.path == ppo.actor_rollout_ref.model.path
    other = prepared(row, "multiturn.algorithm=verl", "algorithm.adv_estimator=reinforce_plus_plus")
    assert (other.algorithm.adv_estimator, other.critic.enable) == ("reinforce_plus_plus", False)


def test_users_values_survive():
    given = [
        "multiturn.row=trajectory", "multiturn.algorithm=ppo", "critic.model.path=my/critic",
        "multiturn.run=here", CPU, "actor_rollout_ref.rollout.n=4", "trainer.total_training_steps=7",
    ]  # fmt: skip
    config = configure.prepare(compose.compose(LAKE, given))
    assert config.critic.model.path == "my/critic" and config.trainer.total_training_steps == 7
    assert config.actor_rollout_ref.rollout.n == 4  # over the preset's 8
    assert config.multiturn.run == str(Path("here").resolve())
    assert config.data.train_files == f"{config.multiturn.run}/panels/train.json"


def test_without_flash_attention(prepared):
    """PyTorch's attention, unless the user chose one; with flash-attn nothing changes."""
    config = prepared()
    before = copy.deepcopy(config)
    configure.without_flash_attention(config, installed=True)
    assert config == before
    configure.without_flash_attention(config, installed=False)
    for part in (config.actor_rollout_ref.model, config.critic.model):
        assert part.override_config.attn_implementation == "sdpa" and part.use_remove_padding is False


def test_a_chosen_attention_is_kept(prepared):
    actor = "actor_rollout_ref.model.override_config.attn_implementation"
    config = prepared(f"+{actor}=eager")
    configure.without_flash_attention(config, installed=False)
    assert OmegaConf.select(config, actor) == "eager"
    critic = prepared("+critic.model.override_config.attn_implementation=eager")
    configure.without_flash_attention(critic, installed=False)
    assert critic.critic.model.override_config.attn_implementation == "eager"
    assert OmegaConf.select(critic, actor) == "sdpa"


def test_a_critic_on_a_gpu_needs_flash_attention(prepared):
    with pytest.raises(ValueError, match="verl's critic needs flash-attn on a GPU"):
        configure.without_flash_attention(prepared("multiturn.algorithm=turn_gae"), installed=False)
    configure.without_flash_attention(prepared(CPU, "multiturn.algorithm=turn_gae"), installed=False)


def test_the_resolved_configuration_is_printed(capsys):
    assert main.main(["--config-name", LAKE, CPU, "--cfg", "multiturn.gigpo.gamma=0.5"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown.multiturn.gigpo.gamma == 0.5 and shown.algorithm.adv_estimator == "gigpo"


@pytest.mark.parametrize("script", ["run.sh", "gigpo_frozenlake.sh"])
def test_a_script_without_a_gpu_names_the_switch(script, tmp_path):
    """Before it sets anything up: a Python without verl, no device, no hardware=cpu."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("a GPU is present")
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    arguments = ["gigpo_frozenlake"] if script == "run.sh" else []
    run = subprocess.run(
        ["bash", str(ROOT / "recipes" / script), *arguments],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert "none was found: add hardware=cpu" in run.stderr
