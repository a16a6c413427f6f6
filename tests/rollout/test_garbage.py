"""How Python collects garbage while many episodes are played: seldom, and as before afterwards."""

import asyncio
import gc

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


def test_what_was_collected_is_returned():
    """Cycles go, and the pages of freed blocks: those above 40 MB fall below 20 MB."""

    def rss():
        return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

    class Node:
        pass

    base, nodes = rss(), []
    for _ in range(20_000):
        node = Node()
        node.me, node.tokens = node, [1] * 400
        nodes.append(node)
    keep = nodes[::2000]
    grown = rss() - base
    assert grown > 40
    gc.disable()  # nothing but `give_back` is to collect them
    try:
        del nodes, node
        garbage.give_back()
    finally:
        gc.enable()
    assert rss() - base < 20 and len(keep) == 10


def test_collections_do_not_grow_with_the_square():
    """Full collections of 8,000 living turns: none under our thresholds, several under Python's own."""

    def full(thresholds):
        before = gc.get_threshold()
        gc.collect()
        gc.set_threshold(*thresholds)
        start = gc.get_stats()[2]["collections"]
        kept = [[[n], {"turn": [n]}, [n]] for n in range(40_000)]
        try:
            return gc.get_stats()[2]["collections"] - start, len(kept)
        finally:
            gc.set_threshold(*before)

    assert full((700, 10, 10))[0] > full(garbage.THRESHOLDS)[0] == 0
