"""What an utterance says: the thought and the actions, or that it has no valid form. Pure text."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ActionFormat:
    """The form an utterance must have (`multiturn.action`)."""

    tag: str | None = "action"  # actions stand inside <tag>…</tag>; None: the whole text is one
    think: bool = True  # a closed <think>…</think> must stand before them
    separator: str = "||"  # between several actions of one turn
    max_actions: int = 1  # actions a turn may hold; later ones are dropped

    def __post_init__(self) -> None:
        if self.max_actions < 1:
            raise ValueError(f"multiturn.action.max_actions is {self.max_actions}, must be >= 1")
        if self.max_actions > 1 and not self.separator:
            raise ValueError("multiturn.action.separator is empty, several actions need one")


@dataclass(frozen=True)
class Parsed:
    """An utterance taken apart. `actions` is empty exactly where `valid` is false.

    `thinks`: a thought stands in it, opened and closed; None where the form asks for none.
    """

    actions: tuple[str, ...]
    valid: bool
    thought: str = ""
    thinks: bool | None = None


INVALID = Parsed((), False)


def parse(text: str, form: ActionFormat) -> Parsed:
    """Take the actions out of an utterance; anything out of form has none and is not valid, never an error.

    The first complete tag pair counts, as in the authors' projections (GiGPO, RAGEN); a thought
    must be closed before it.
    """
    thought = ""
    if form.think:
        found = _between(text, "think")
        if found is None:
            return replace(INVALID, thinks=False)
        thought, text = found[0].strip(), found[1]
    lacking = replace(INVALID, thinks=True) if form.think else INVALID
    if form.tag is not None:
        found = _between(text, form.tag)
        if found is None:
            return lacking
        text = found[0]
    parts = text.split(form.separator) if form.max_actions > 1 else [text]
    actions = tuple(part.strip() for part in parts if part.strip())[: form.max_actions]
    return Parsed(actions, True, thought, lacking.thinks) if actions else lacking


def _between(text: str, tag: str) -> tuple[str, str] | None:
    """What stands inside the first complete pair of tags, and behind it; None: there is none."""
    # Not a regular expression: on a text of many open tags that takes the square of its length.
    start = text.find(f"<{tag}>")
    if start < 0:
        return None
    start += len(tag) + 2
    stop = text.find(f"</{tag}>", start)
    return None if stop < 0 else (text[start:stop], text[stop + len(tag) + 3 :])
