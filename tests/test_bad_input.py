"""What is read from a model, a user or a disk: garbage is refused in one sentence, never a traceback."""

import importlib.util
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import zstandard
from omegaconf import OmegaConf

import verl_multiturn as vm
from verl_multiturn import configure
from verl_multiturn.compose import compose
from verl_multiturn.limits import BLOCKS, TEMPLATES, VALUES, check_values
from verl_multiturn.panel import Panel
from verl_multiturn.runs import Run, RunWriter

BENCH = Path(__file__).parent / "bench"


def bench(name):
    """A module of tests/bench, which is no package."""
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz = bench("fuzz")

# ------------------------------------------------------------------------------- what a model writes


def test_no_output_of_a_model_raises():
    """Five hundred here, 100,000 in tests/bench/reliability.py."""
    found, raised = fuzz.run(500)
    assert raised == []
    assert all(bad == 0 for _, bad in found.values()) and len(found) == 33


@pytest.mark.parametrize("name", fuzz.parsers())
def test_time_is_linear_in_the_length_of_an_output(name):
    """Four times the length may take four times as long: 16 would be quadratic."""
    read = fuzz.parsers()[name]
    for piece in fuzz.HOSTILE:
        times, _ = fuzz.growth(read, piece, 4_000)
        assert times < 9 or fuzz.growth(read, piece, 16_000)[0] < 9, piece


def test_tags_are_found_as_the_pattern_says():
    """The same as the regular expressions that took the square of the length."""
    import re

    def slowly(text, form):
        if form.think:
            match = re.search(r"<think>(.*?)</think>", text, re.DOTALL)
            if match is None:
                return None
            text = text[match.end() :]
        if form.tag is not None:
            tag = re.escape(form.tag)
            match = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
            if match is None:
                return None
            text = match.group(1)
        parts = text.split(form.separator) if form.max_actions > 1 else [text]
        return tuple(part.strip() for part in parts if part.strip())[: form.max_actions] or None

    for text in fuzz.outputs(2000, seed=1):
        for form in fuzz.FORMS:
            assert (fuzz.parse(text, form).actions or None) == slowly(text, form), text


# ------------------------------------------------------------------------------- configuration

WRONG = {str: 7, bool: "maybe", int: "many", float: "much"}


def refuse(overrides, *words):
    with pytest.raises(ValueError) as caught:
        configure.prepare(compose("gigpo_frozenlake", ["hardware=cpu", *overrides]))
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert "\n" not in said.strip()


@pytest.fixture(scope="module")
def composed():
    return compose("gigpo_frozenlake", ["hardware=cpu"])


OURS = sorted(name for name in VALUES if name.startswith("multiturn."))


def refused(config, key, value):
    """What is said of a value; the configuration is as before afterwards."""
    before = OmegaConf.to_container(OmegaConf.create({"value": OmegaConf.select(config, key)}))["value"]
    OmegaConf.update(config, key, value, merge=False, force_add=True)
    try:
        with pytest.raises(ValueError) as caught:
            check_values(config)
    finally:
        OmegaConf.update(config, key, before, merge=False, force_add=True)
    assert "\n" not in str(caught.value).strip()
    return str(caught.value)


@pytest.mark.parametrize("name", OURS)
def test_a_value_of_the_wrong_type_or_size_names_its_key(composed, name):
    kind, least = VALUES[name]
    key = name.removesuffix("?")
    wrong = [WRONG[kind], [1], {"a": 1}] + ([] if name.endswith("?") else [None])
    wrong += [least - 1, math.nan] if kind is float else [least - 1, 1.5] if kind is int else []
    for value in wrong:
        assert key in refused(composed, key, value), value


@pytest.mark.parametrize("block", BLOCKS)
def test_a_group_that_is_no_group_names_its_key(composed, block):
    for value in (None, 3, "x", [1]):
        assert f"multiturn.{block}" in refused(composed, f"multiturn.{block}", value), value


def test_every_key_of_ours_is_checked_or_free(composed):
    """A key without a check would be found out in the middle of a run."""
    named = {name.removesuffix("?") for name in VALUES}
    free = ("env_kwargs", "train", "val", "test", "also", "keywords", "rloo")
    # Their own dataclasses check them, for the algorithm or rule that is used.
    blocks = ("gigpo", "turn_gae", "bilevel_gae", "vineppo", "reinforce", "collapse")
    blocks += ("archer", "critic", "search", "pairs", "fit", "qvalue")
    elsewhere = tuple(f"multiturn.{name}" for name in (*free, *(f"{name}." for name in blocks)))
    named |= {f"multiturn.prompt.{name}" for name in TEMPLATES}
    unnamed = [
        key
        for key in leaves(OmegaConf.to_container(composed.multiturn), "multiturn.")
        if key not in named and not key.startswith(elsewhere)
    ]
    assert unnamed == []


def leaves(node, prefix):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("key", ["multiturn.step_timout", "multiturn.gigpo.gama"])
def test_a_misspelt_key_is_refused_with_the_nearest(key):
    refuse([f"{key}=1"], key.rpartition(".")[2].partition(".")[0][:4])


# ------------------------------------------------------------------------------- files


def test_a_damaged_panel_is_one_sentence(tmp_path):
    panel = Panel.build("frozen_lake", {"size": 4}, range(5), "test")
    path = tmp_path / "panel.json"
    panel.save(path)
    for data in fuzz.damaged(path.read_bytes(), random.Random(1)):
        path.write_bytes(data)
        try:
            assert Panel.load(path) == panel  # a flip may leave the meaning as it was: "\t" for " "
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)


def test_a_damaged_run_is_one_sentence(tmp_path):
    with RunWriter(tmp_path, {"a": 1}) as writer:
        writer.metrics(1, {"loss": 1.0})
        writer.trajectories("train", 1, [{"turns": [{"reward": 1.0}], "n": n} for n in range(20)])
    path = tmp_path / "trajectories/train/1.jsonl.zst"
    whole = Run(tmp_path).trajectories("train", 1)
    other = zstandard.compress(b"no json\n")
    for data in [*fuzz.damaged(path.read_bytes(), random.Random(2)), other, zstandard.compress(b"[1, 2\n")]:
        path.write_bytes(data)
        try:
            assert Run(tmp_path).trajectories("train", 1) == whole
        except ValueError as error:
            assert "1.jsonl.zst" in str(error) and "\n" not in str(error)


# ------------------------------------------------------------------------------- numbers


def test_rewards_that_are_no_numbers_are_refused():
    for bad in (math.nan, math.inf, -math.inf):
        for name in ("grpo", "rloo", "reinforce", "gigpo"):
            with pytest.raises(ValueError, match="reward"):
                batch = vm.TurnBatch.from_lists(["g", "g"], [0, 1], [0, 0], [1.0, bad], anchor=["s", "s"])
                vm.advantages(name, batch)


def test_empty_responses_have_no_weight_and_no_error():
    batch = vm.TurnBatch.from_lists(["g", "g"], [0, 1], [0, 0], [1.0, 0.0], anchor=["s", "s"], tokens=[0, 0])
    assert np.isfinite(vm.advantages("gigpo", batch)).all()
    assert vm.split_steps("") == [0]


def test_the_reports_of_a_fuzz_are_plain():
    assert json.dumps(fuzz.jsonable({"a": (1, 0)}))
