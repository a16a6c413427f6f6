"""How Python collects garbage while many episodes are played: seldom, and as before afterwards."""

import asyncio
import gc
import subprocess
import sys

import pytest

from verl_multiturn.rollout import garbage


@pytest.fixture
def given_back(monkeypatch):
    calls = []
    monkeypatch.setattr(garbage, "give_back", lambda: calls.append(garbage._playing))
    monkeypatch.setattr(garbage, "_played", 0)
    return calls


def test_thresholds_hold_while_an_episode_is_played(play, given_back):
    before, seen = gc.get_threshold(), []
    assert before != garbage.THRESHOLDS
    for _ in range(3):
        with garbage.playing():
            seen.append(gc.get_threshold())
            play(["<answer>right</answer>"], max_turns=2)  # an episode inside changes nothing
            seen.append(gc.get_threshold())
        assert gc.get_threshold() == before
    assert set(seen) == {garbage.THRESHOLDS} and given_back == []


def test_an_episode_that_fails_counts_as_ended(play):
    before = gc.get_threshold()
    with pytest.raises(Exception, match="nowhere"):
        play(["x"], env="nowhere")
    with pytest.raises(RuntimeError), garbage.playing():
        raise RuntimeError
    assert gc.get_threshold() == before and garbage._playing == 0


def test_memory_is_given_back_once_when_many_have_ended(given_back):
    async def one(n):
        with garbage.playing():
            await asyncio.sleep(1e-3 * (n % 3))

    async def wave(size):
        await asyncio.gather(*map(one, range(size)))

    asyncio.run(wave(garbage.MANY - 1))
    assert given_back == []
    asyncio.run(wave(2 * garbage.MANY))
    assert given_back == [0]
    asyncio.run(wave(garbage.MANY - 1))
    assert given_back == [0]


ALONE = """
import gc
from verl_multiturn.rollout import garbage

{body}
"""
RETURNED = """
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

class Node:
    pass

base, nodes = rss(), []
gc.disable()  # nothing but `give_back` is to collect them
for _ in range(20_000):
    node = Node()
    node.me, node.tokens = node, [1] * 400
    nodes.append(node)
keep, grown = nodes[::2000], rss() - base
del nodes, node
garbage.give_back()
assert len(keep) == 10
print(grown, rss() - base)
"""
COLLECTED = """
def full(thresholds):
    gc.collect()
    gc.set_threshold(*thresholds)
    start = gc.get_stats()[2]["collections"]
    kept = [[[n], {"turn": [n]}, [n]] for n in range(40_000)]
    return gc.get_stats()[2]["collections"] - start

print(full((700, 10, 10)), full(garbage.THRESHOLDS))
"""


def alone(body):
    """What a process of its own prints: another has objects and free pages of other tests."""
    command = [sys.executable, "-c", ALONE.format(body=body)]
    return map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def test_what_was_collected_is_returned():
    """Cycles go, and the pages of freed blocks: those above 40 MB fall below 20 MB."""
    grown, left = alone(RETURNED)
    assert grown > 40 and left < 20


def test_collections_do_not_grow_with_the_square():
    """Full collections of 40,000 living turns: none under our thresholds, several under Python's own."""
    often, seldom = alone(COLLECTED)
    assert often > seldom == 0
