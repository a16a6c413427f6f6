"""Which rows a step keeps where trajectories were lost, and the keys that say so."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_multiturn.survivors import Survivors


@dataclass
class Batch:
    """As much of a KVBatchMeta as is used."""

    keys: list
    tags: list
    partition_id: str = "train"

    def select_keys(self, keys):
        return Batch(keys, [tag for key, tag in zip(self.keys, self.tags, strict=True) if key in keys])


def batch(*sessions):
    """Two rows for each (uid, session)."""
    keys = [f"{uid}_{session}_{row}" for uid, session in sessions for row in range(2)]
    return Batch(keys, [{"of": key} for key in keys])


def test_keep():
    kept, one = Survivors("keep", 2, 2), batch(("a", 0), ("b", 0), ("b", 1))
    assert kept.take(one) == []
    assert kept.batch is one and (kept.trajectories, kept.failed, kept.dropped) == (3, 1, 0)


def test_drop():
    kept = Survivors("drop", 3, 2)
    assert kept.take(batch(("a", 0), ("b", 0), ("b", 1))) == ["a_0_0", "a_0_1"]
    assert kept.batch.keys == ["b_0_0", "b_0_1", "b_1_0", "b_1_1"]
    assert (kept.trajectories, kept.failed, kept.dropped) == (2, 3, 2)  # c was lost whole


def test_refill_gathers():
    kept = Survivors("refill", 2, 2)
    kept.take(batch(("a", 0), ("b", 0), ("b", 1)))
    assert (kept.missing, kept.uids) == (1, {"b"})
    assert kept.take(batch(("a.1", 0), ("a.1", 1))) == []
    assert len(kept.batch.keys) == 8 and (kept.missing, kept.failed, kept.dropped) == (0, 1, 0)
    assert [tag["of"] for tag in kept.batch.tags] == kept.batch.keys


def test_nothing_at_all():
    kept = Survivors("refill", 2, 2)
    for _ in range(2):
        assert kept.take(batch()) == []
    assert kept.batch.keys == [] and (kept.trajectories, kept.failed, kept.dropped) == (0, 8, 2)


groups = st.lists(st.sets(st.integers(0, 3), max_size=4), min_size=1, max_size=6)


@given(groups, st.sampled_from(["keep", "drop", "refill"]))
def test_every_row_is_kept_or_given_back(lost, policy):
    """And dropping leaves complete groups only."""
    sessions = [(f"g{i}", s) for i, one in enumerate(lost) for s in range(4) if s not in one]
    rows, kept = batch(*sessions), Survivors(policy, len(lost), 4)
    others = kept.take(rows)
    assert sorted([*kept.batch.keys, *others]) == sorted(rows.keys)
    assert kept.failed == sum(map(len, lost))
    if policy == "keep":
        assert others == [] and kept.trajectories == len(sessions)
    else:
        assert kept.uids == {f"g{i}" for i, one in enumerate(lost) if not one}
        assert kept.trajectories == 4 * len(kept.uids) and kept.dropped == sum(map(bool, lost))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("multiturn.failures.group=drp", "'drp'; valid: keep, drop, refill. Did you mean 'drop'?"),
        ("multiturn.failures.group=null", "multiturn.failures.group=None must be text"),
        ("multiturn.env_max_memory_mb=0", "env_max_memory_mb=0 must be a number of at least 1 or null"),
        (
            "multiturn.env_max_episodes=1.5",
            "env_max_episodes=1.5 must be a whole number of at least 1 or null",
        ),
    ],
)
def test_wrong_values_are_refused(override, sentence):
    pytest.importorskip("verl", reason="verl is not installed")
    from verl_multiturn import configure
    from verl_multiturn.compose import compose

    with pytest.raises(ValueError) as caught:
        configure.prepare(compose("gigpo_frozenlake", ["hardware=cpu", override]))
    assert sentence in str(caught.value)
