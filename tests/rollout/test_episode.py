"""The agent loop against a scripted server: which tokens are trained, how an episode ends, what fails."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_multiturn.env import make
from verl_multiturn.panel import content_hash
from verl_multiturn.rollout.episode import anchor_of
from verl_multiturn.rollout.parsing import ActionFormat
from verl_multiturn.rollout.pool import EnvironmentFailure, EnvPool, Observed
from verl_multiturn.rollout.prompts import PromptTooLong, Templates

ODD = Path(__file__).with_name("odd_environments.py")
STEADY = f"{ODD}:Steady"
ROWS = ("turn", "trajectory")
both = pytest.mark.parametrize("row", ROWS)


def said(*actions):
    return [f"<answer>{action}</answer>" for action in actions]


def sampled(output):
    """Ids and log-probabilities under mask 1."""
    marked = [i for i, one in enumerate(output.response_mask) if one]
    return [output.response_ids[i] for i in marked], [output.response_logprobs[i] for i in marked]


def flat(lists):
    return [one for part in lists for one in part]


def check_rows(played, row):
    """The rows hold what was sampled and nothing else under the mask; `played` is from `play`."""
    outputs, server, turns = played.outputs, played.server, played.trajectory.turns
    assert len(outputs) == (len(turns) if row == "turn" else 1)
    ids, log_probs = map(flat, zip(*map(sampled, outputs), strict=True))
    assert ids == flat(server.said) and log_probs == flat(server.log_probs)
    for output in outputs:
        zipped = zip(output.response_mask, output.response_logprobs, strict=True)
        assert len(output.response_ids) == len(output.response_mask) > 0
        assert all(value == 0.0 for one, value in zipped if not one)
        assert output.reward_score == played.trajectory.episode_return
        for record in output.extra_fields["turns"]:
            start, stop = record["span"]
            assert output.response_ids[start:stop] == server.said[record["index"]]
    # What the server read is what the row holds before the utterance.
    for t, (_, prompt_ids, _) in enumerate(server.calls):
        output = outputs[t if row == "turn" else 0]
        record = output.extra_fields["turns"][0 if row == "turn" else t]
        assert output.prompt_ids + output.response_ids[: record["span"][0]] == prompt_ids


@both
def test_the_mask_marks_what_was_sampled(play, row):
    played = play(said("1", "2", "nonsense", "win"), row, STEADY)
    check_rows(played, row)
    trajectory = played.trajectory
    assert trajectory.terminated and trajectory.success and not trajectory.truncated
    assert trajectory.info["truncation"] is None
    assert [turn.reward for turn in trajectory.turns] == [1, 2, 0, 1]
    assert [turn.valid for turn in trajectory.turns] == [True] * 4
    assert played.outputs[-1].num_turns == 4 and played.outputs[-1].reward_score == 4
    assert played.outputs[0].extra_fields["reward_extra_info"] == {
        "success": 1, "return": 4, "turns": 4, "valid": 1, "truncated": 0,
        "missing_action": 0, "unknown_action": 0,
    }  # fmt: skip


@both
def test_weight_versions_of_every_row(play, row):
    for output in play(said("1", "2", "win"), row, STEADY).outputs:
        assert output.extra_fields["min_global_steps"] == 1
        assert output.extra_fields["max_global_steps"] == 3


def template(played, tokens):
    """The chat of a trajectory row as its template renders it, tokenized at once."""
    messages = []
    for turn in played.outputs[0].extra_fields["turns"]:
        messages += [{"role": "user", "content": turn["prompt"]}]
        messages += [{"role": "assistant", "content": turn["text"]}]
    return tokens.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_a_trajectory_row_is_the_chat_template(play, tokens):
    played = play(said("1", "left is 東 ☃", "win"), "trajectory", STEADY)
    stream = played.outputs[0].prompt_ids + played.outputs[0].response_ids
    # The newline behind the last stop token is never sampled and never needed.
    assert [*stream, *tokens.encode("\n", add_special_tokens=False)] == template(played, tokens)


def test_a_cut_utterance_is_closed_as_the_template_closes_it(play, tokens):
    """One that hit its token limit has no stop token; the next message must still follow one."""
    cut = tokens.encode("<answer>no end in sight", add_special_tokens=False)
    played = play([cut, *said("win")], "trajectory", STEADY)
    output = played.outputs[0]
    stream = output.prompt_ids + output.response_ids
    # The newline behind the last stop token is never sampled and never needed.
    assert [*stream, *tokens.encode("\n", add_special_tokens=False)] == template(played, tokens)
    end = len(cut)  # the stop token was not sampled, so it is not trained
    assert output.response_ids[:end] == cut and output.response_ids[end] == tokens.eos_token_id
    assert output.response_mask[: end + 1] == [1] * end + [0]
    check_rows(played, "trajectory")


@both
def test_ends_by_turns(play, row):
    played = play(said("1"), row, STEADY, max_turns=3)
    assert len(played.trajectory.turns) == 3 and played.trajectory.truncated
    assert not played.trajectory.terminated and played.trajectory.info["truncation"] == "turns"


@both
def test_ends_by_the_environment(play, row):
    """Its own limit, six turns, and a truncation of its own."""
    played = play(said("1"), row, STEADY)
    assert len(played.trajectory.turns) == 6 and played.trajectory.info["truncation"] == "environment"
    played = play(said("1", "stop", "1"), row, STEADY)
    assert len(played.trajectory.turns) == 2 and played.trajectory.info["truncation"] == "environment"
    assert played.trajectory.truncated and not played.trajectory.terminated


def test_ends_by_tokens(play):
    """A running chat ends while there still is room for a whole utterance, never in the middle of one."""
    played = play(said("1"), "trajectory", STEADY, max_response_tokens=150, max_action_tokens=40)
    assert 1 < len(played.trajectory.turns) < 6
    assert played.trajectory.truncated and played.trajectory.info["truncation"] == "tokens"
    length = len(played.outputs[0].response_ids)
    assert length <= 150 and length + 40 + len(played.trajectory.turns[-1].prompt_ids) > 150
    check_rows(played, "trajectory")


@both
def test_ends_by_actions(play, row):
    """Five steps in all, two a turn: the last turn may take one only."""
    form = ActionFormat("answer", False, max_actions=2)
    played = play(said("1||2"), row, STEADY, form=form, max_actions=5, max_turns=9)
    turns = played.trajectory.turns
    assert [turn.reward for turn in turns] == [3, 3, 1]
    assert played.trajectory.info["truncation"] == "turns" and played.trajectory.truncated
    assert [d["actions"] for d in played.trajectory.info["details"]] == [["1", "2"], ["1", "2"], ["1"]]


@both
def test_several_actions_a_turn_stop_where_the_episode_ends(play, row):
    form = ActionFormat("answer", False, max_actions=3)
    played = play(said("4 || 5", "1||win||7"), row, STEADY, form=form)
    assert [turn.reward for turn in played.trajectory.turns] == [9, 2] and played.trajectory.terminated
    assert played.episode.acted == 4
    check_rows(played, row)


@both
def test_an_invalid_utterance_is_a_turn_without_an_action(play, row):
    """The environment is told "": it decides what an idle turn costs."""
    played = play(["what now?", *said("win")], row, STEADY)
    first, second = played.trajectory.turns
    assert (first.valid, second.valid) == (False, True) and first.action_text == "what now?"
    assert played.trajectory.info["details"][0]["actions"] == []
    assert played.trajectory.info["details"][1]["observation"] == "told ['']"
    check_rows(played, row)


@both
def test_an_action_that_the_environment_does_not_know_is_invalid(play, row):
    played = play(said("fly", "up"), row, "frozen_lake", max_turns=2)
    assert [turn.valid for turn in played.trajectory.turns] == [False, True]


@both
@pytest.mark.parametrize("script", [[[], "<answer>win</answer>"], ["<answer>1</answer>", []], [[]]])
def test_empty_completions(play, row, script, tokens):
    played = play(script, row, STEADY, max_turns=2)
    empty = [not turn.action_ids for turn in played.trajectory.turns]
    assert any(empty)
    assert [turn.valid for turn in played.trajectory.turns] == [not one for one in empty]
    check_rows(played, row)
    if row == "turn":  # verl needs one token a row; this one is not trained
        alone = played.outputs[empty.index(True)]
        assert (alone.response_ids, alone.response_mask) == ([tokens.eos_token_id], [0])
        assert alone.extra_fields["turns"][0]["span"] == [0, 0]


@both
def test_observations_count_against_their_budget(play, row):
    with pytest.raises(PromptTooLong, match=r"data\.max_prompt_length is 10"):
        play(said("1"), row, STEADY, max_prompt_tokens=10)


def test_history_in_turn_rows(play):
    templates = Templates(turn="{history}#{observation}", first="{observation}", history=1)
    prompts = [turn["prompt"] for turn in play(said("1", "2", "win"), "turn", STEADY, templates=templates)
               .trajectory.info["details"]]  # fmt: skip
    assert prompts[0].startswith("task 3 in")
    assert prompts[2] == "[turn 1] told ['1']\n[action] 2#told ['1', '2']"


# ------------------------------------------------------------------ what goes wrong


@both
def test_a_task_that_is_not_the_panels(play, row):
    env = make("frozen_lake")
    right = content_hash(env, env.reset(3)[0])
    assert play(said("up"), row, id=3, content=right).trajectory.turns
    with pytest.raises(EnvironmentFailure, match=f"its content hash is {right}, the panel says {'0' * 32}"):
        play(said("up"), row, id=3, content="0" * 32)


@both
def test_a_failing_environment_names_task_turn_and_action(play, row):
    with pytest.raises(EnvironmentFailure) as caught:
        play(said("1", "raise"), row, f"{ODD}:Odd")
    assert str(caught.value) == (
        f"{ODD}:Odd, task 3: step('raise') at turn 1 raised KeyError: 'no such door'"
    )


LATE = r"Odd, task 3: the episode took longer than 0\.2 s, 1 turns done, in step\('hang'\)$"


def test_an_episode_that_takes_too_long(play):
    with pytest.raises(EnvironmentFailure, match=LATE):
        play(said("1", "hang"), "turn", f"{ODD}:Odd", episode_timeout=0.2, pool=EnvPool(1, 60.0))


def test_one_that_cannot_be_made_names_the_task_too(play):
    with pytest.raises(EnvironmentFailure) as caught:
        play(said("1"), "turn", f"{ODD}:BadStart")
    name = f"{ODD}:BadStart"
    assert str(caught.value) == f"{name}, task 3: make('{name}') raised RuntimeError: no licence"


def test_a_failed_environment_is_not_used_again(play):
    pool = EnvPool(1, 5.0)
    played = play(said("win"), "turn", f"{ODD}:BadClose", pool=pool)
    assert sum(map(len, pool._idle.values())) == 1 and played.trajectory.success
    with pytest.raises(EnvironmentFailure, match="KeyError"):
        play(said("raise"), "turn", f"{ODD}:BadClose", pool=pool)
    assert sum(map(len, pool._idle.values())) == 0


def test_anchors():
    def seen(**change):
        return Observed(**({"observation": "o", "key": (1, "k"), "admissible": ["l"]} | change))

    for rule, differs, same in (
        ("state", {"key": (2, "k")}, {"observation": "p", "admissible": None}),
        ("observation", {"observation": "p"}, {"key": 3, "admissible": None}),
        ("observation+actions", {"admissible": ["l", "r"]}, {"key": 3}),
        ("builtins:repr", {"key": 2}, {}),  # a function of one's own
    ):
        assert anchor_of(rule, seen()) == anchor_of(rule, seen(**same)) != anchor_of(rule, seen(**differs))
        assert len(anchor_of(rule, seen())) == 32


@both
def test_equal_states_have_equal_anchors(play, row):
    """A step against the wall leads nowhere, so the next turn starts from the same state."""
    env = make("frozen_lake")
    env.reset(3)
    wall = next(a for a in env.admissible() if env._move(env.position, a) == env.position)
    played = play(said(wall, wall), row, "frozen_lake", max_turns=3)
    anchors = [turn.anchor for turn in played.trajectory.turns]
    assert anchors[0] == anchors[1] == anchors[2]


# ------------------------------------------------------------------ any script, both layouts

words = st.sampled_from(["<answer>", "</answer>", "1", "win", " ", "\n", "☃", "up||", "<|im_start|>user"])
utterances = st.one_of(st.lists(words, max_size=6).map("".join), st.lists(st.integers(0, 299), max_size=50))


@settings(max_examples=40, deadline=None)
@given(st.lists(utterances, min_size=1, max_size=6), st.sampled_from(ROWS), st.integers(60, 400))
def test_whatever_is_sampled_is_trained(play, script, row, room):
    played = play(script, row, STEADY, max_response_tokens=room, max_action_tokens=40)
    check_rows(played, row)
    longest = room if row == "trajectory" else 40
    assert all(len(output.response_ids) <= longest for output in played.outputs)


# ------------------------------------------------------------------ as verl calls it


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    from verl_multiturn.compose import compose
    from verl_multiturn.configure import prepare

    run = tmp_path_factory.mktemp("run")
    return prepare(
        compose("grpo_frozenlake", ["hardware=cpu", f"multiturn.run={run}", f"multiturn.env={STEADY}"])
    )


@pytest.fixture
def loop(config, tokens, server):
    """`loop(script, **columns)` runs the loop as a worker of verl's does; (outputs, server)."""
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from verl_multiturn.dataset import EnvDataset
    from verl_multiturn.rollout import loop as module

    def run(script, change=None, **columns):
        changed = config.copy()
        changed.merge_with(change or {})
        module._rollouts.clear()
        fake = server(script)

        async def go():
            made = module.MultiTurnLoop(
                trainer_config=DictConfigWrap(changed), server_manager=fake,
                tokenizer=tokens, processor=None, hf_model_type="qwen2", dataset_cls=EnvDataset,
                data_config=DictConfigWrap(changed.data),
            )  # fmt: skip
            row = {
                "raw_prompt": [], "index": 0, "data_source": "steady", "split": "train", "task": 3,
                "task_hash": None, "task_type": "default", "uid": "u", "session_id": 0, "global_steps": 1,
            }  # fmt: skip
            return await made.run({"temperature": 0.7, "logprobs": True}, **(row | columns))

        return SimpleNamespace(outputs=asyncio.run(go()), calls=fake.calls, server=fake)

    return run


def seeds(played):
    return [params.get("seed") for _, _, params in played.calls]


def test_one_server_for_all_turns_and_verls_sampling_parameters(loop):
    played = loop(said("1", "2", "win"))
    assert len({request for request, _, _ in played.calls}) == 1
    again = loop(said("win"))
    assert again.calls[0][0] != played.calls[0][0]  # another trajectory, another place
    assert played.calls[0][2] == {"temperature": 0.7, "logprobs": True, "max_tokens": 12}
    assert len(played.outputs) == 1 and played.outputs[0].reward_score == 4


def test_sampling_seeds(loop):
    """Seeded: one a turn, again the same, and others for the next sample and the next step."""
    script, seeded = said("1", "2", "win"), {"multiturn": {"seeded": True}}
    first = seeds(loop(script, seeded))
    assert len(set(first)) == 3 and all(isinstance(seed, int) for seed in first)
    assert seeds(loop(script, seeded)) == first
    assert not set(first) & set(seeds(loop(script, seeded, session_id=1)))
    assert not set(first) & set(seeds(loop(script, seeded, global_steps=2)))
    assert not set(first) & set(seeds(loop(script, {"multiturn": {"seeded": True, "seed": 2}})))


def test_validation_is_always_seeded_and_the_same_at_every_step(loop):
    script = said("1", "win")
    first = loop(script, split="val")
    later = loop(script, split="val", global_steps=9)
    assert None not in seeds(first) and seeds(first) == seeds(later)
    dynamics = [p.outputs[0].extra_fields["trajectory"]["dynamics_seed"] for p in (first, later)]
    assert dynamics[0] == dynamics[1]
    train = [loop(script, global_steps=n).outputs[0].extra_fields["trajectory"] for n in (1, 9)]
    assert train[0]["dynamics_seed"] != train[1]["dynamics_seed"]


def test_a_failure_is_one_line_and_is_raised(loop, config):
    file = Path(config.multiturn.run) / "failures.jsonl"
    for n in (1, 2):
        with pytest.raises(EnvironmentFailure, match="step\\('raise'\\) at turn 1 raised KeyError"):
            loop(said("1", "raise"), {"multiturn": {"env": f"{ODD}:Odd"}}, uid="a_b", session_id=5)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(lines) == n
    line = lines[0]
    expected = {"split": "train", "task": 3, "uid": "a_b", "step": 1, "trajectory": 5, "turn": 1}
    expected |= {"env": f"{ODD}:Odd", "action": "raise"}
    assert expected.items() <= line.items()
    assert line["error"].endswith("KeyError: 'no such door'") and "no such door" in line["traceback"]


def test_the_record_says_whether_the_environment_was_at_work(loop, config):
    """In a reset, and before the first prompt, there is no action; then the one it was taking."""
    file, change = Path(config.multiturn.run) / "failures.jsonl", {"multiturn": {"env": f"{ODD}:Odd"}}
    for script, more, columns, turn, action, error in (
        (said("1"), {}, {"task": "raise"}, 0, None, "Odd, task raise: reset raised KeyError"),
        (said("1"), {"data": {"max_prompt_length": 5}}, {}, 0, None, "data.max_prompt_length is 5"),
        (said("2", "1", "nan"), {}, {}, 2, "nan", "Odd, task 3: step('nan') at turn 2 raised TypeError"),
    ):
        with pytest.raises((EnvironmentFailure, PromptTooLong)):
            loop(script, change | more, **columns)
        line = json.loads(file.read_text().splitlines()[-1])
        assert (line["env"], line["turn"], line["action"]) == (f"{ODD}:Odd", turn, action)
        assert line["task"] == columns.get("task", 3) and error in line["error"]


def test_a_process_that_is_killed_costs_one_trajectory(loop, config):
    """It is named with the action that killed it; the next episode has another process."""
    change = {"multiturn": {"env": f"{ODD}:Apart"}}
    with pytest.raises(EnvironmentFailure) as caught:
        loop(said("1", "kill"), change)
    said_of_it = f"{ODD}:Apart, task 3: step('kill') at turn 1: its process was ended by signal 9 (SIGKILL)"
    assert str(caught.value) == said_of_it
    line = json.loads((Path(config.multiturn.run) / "failures.jsonl").read_text().splitlines()[-1])
    assert (line["error"], line["action"], line["turn"]) == (said_of_it, "kill", 1)
    assert loop(said("win"), change).outputs[0].reward_score == 1


def test_what_the_workers_share_is_built_once(config, tokens, server):
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    from verl_multiturn.dataset import EnvDataset
    from verl_multiturn.rollout.loop import MultiTurnLoop

    async def two():
        return [
            MultiTurnLoop(
                trainer_config=DictConfigWrap(config), server_manager=server(["x"]), tokenizer=tokens,
                processor=None, dataset_cls=EnvDataset, data_config=DictConfigWrap(config.data),
                hf_model_type="qwen2",
            )
            for _ in range(2)
        ]  # fmt: skip

    first, second = asyncio.run(two())
    assert first.rollout is second.rollout


def test_a_server_that_never_answers_costs_one_trajectory(loop, config, monkeypatch):
    """The utterance has a time-out; the record says what was asked, and how long it was waited for."""

    async def never(self, **_):
        await asyncio.sleep(600)

    server_class = type(loop(said("win")).server)
    monkeypatch.setattr(server_class, "generate", never)
    change = {"multiturn": {"generate_timeout": 0.2}}
    with pytest.raises(
        EnvironmentFailure, match=r"LLM server took longer than 0\.2 s for turn 0 \(multiturn"
    ):
        loop(said("win"), change)
    line = json.loads((Path(config.multiturn.run) / "failures.jsonl").read_text().splitlines()[-1])
    assert (line["task"], line["turn"], line["waiting"]) == (3, 0, "LLM server")
    assert 0.15 < line["waiting_seconds"] <= line["seconds"] < 100 and line["prompt"].startswith("task 3")
    with pytest.raises(EnvironmentFailure, match=r"longer than 0\.3 s, 0 turns done, waiting for the LLM"):
        loop(said("win"), {"multiturn": {"episode_timeout": 0.3}})


@pytest.mark.parametrize("token", [-1, -(2**40), 10**6, 2**63, "tokens"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_token_that_does_not_exist_costs_one_trajectory(loop, config, tokens, token, place):
    """Beyond the vocabulary or negative, in the first utterance or a later one: one sentence, one record."""
    token = len(tokens) if token == "tokens" else token  # the first that is too large
    good = tokens.encode("<answer>1</answer>", add_special_tokens=False)
    last = loop([[*good, len(tokens) - 1], *said("win")])
    assert last.outputs[0].reward_score >= 1  # the last that exists
    file = Path(config.multiturn.run) / "failures.jsonl"
    before = len(file.read_text().splitlines()) if file.exists() else 0
    with pytest.raises(EnvironmentFailure, match=f"sampled token {token}, the tokenizer has those from 0 to"):
        loop([*[good] * place, [*good, token], *said("win")])
    lines = [json.loads(line) for line in file.read_text().splitlines()[before:]]
    assert [line["turn"] for line in lines] == [place]
    assert lines[0]["error"].startswith("the LLM server sampled token") and lines[0]["task"] == 3


@pytest.mark.parametrize("wrong", [[], [0.0], [float("nan")] * 40])
def test_log_probabilities_that_do_not_fit_cost_one_trajectory(loop, monkeypatch, wrong):
    server_class = type(loop(said("win")).server)
    real = server_class.generate

    async def generate(self, **given):
        out = await real(self, **given)
        out.log_probs = wrong[: len(out.token_ids)]
        return out

    monkeypatch.setattr(server_class, "generate", generate)
    with pytest.raises(EnvironmentFailure, match=r"the LLM server gave \d+ log-probabilities for \d+ tokens"):
        loop(said("win"))


@both
def test_an_empty_utterance_is_an_invalid_turn(loop, row):
    """The server stopped at once: a turn without tokens, and the episode goes on."""
    played = loop([[], *said("win")], {"multiturn": {"row": row}})
    turns = [turn for output in played.outputs for turn in output.extra_fields["turns"]]
    assert [turn["valid"] for turn in turns] == [False, True] and turns[0]["span"][0] == turns[0]["span"][1]


def test_an_environment_that_blocks_is_recorded_with_its_seconds(loop, config):
    change = {"multiturn": {"env": f"{ODD}:Odd", "step_timeout": 0.2}}
    with pytest.raises(EnvironmentFailure, match=r"took longer than 0\.2 s"):
        loop(said("1", "hang"), change)
    line = json.loads((Path(config.multiturn.run) / "failures.jsonl").read_text().splitlines()[-1])
    assert (line["turn"], line["action"], line["waiting"]) == (1, "hang", "environment")
    assert 0.15 < line["waiting_seconds"] <= line["seconds"] and "told ['1']" in line["prompt"]
