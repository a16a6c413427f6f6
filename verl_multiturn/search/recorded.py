"""Recorded turns as steps that a `StepValue` judges, with the chats that the policy read.

A record holds the last message of each chat. What stands before it is the prompt policy's (turn rows), or
what was said before (trajectory rows), so the run's settings and the record give the whole chat again:
exactly, unless a prompt policy of one's own lists legal actions, which are not recorded, in an earlier
message.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from verl_multiturn.rollout.prompts import Messages, View, prompt_policy
from verl_multiturn.search.step_value import Step


def steps_of(records: Iterable[Mapping[str, Any]], settings: Mapping[str, Any] | None = None) -> list[Step]:
    """The turns of recorded trajectories, in the order of `runs.to_turns`.

    The group is the recorded one; a turn of several actions counts as one, joined by " || ".

    Args:
        records: with the schema of `verl_multiturn.runs`.
        settings: `multiturn` of their run; None: the steps have no prompts, which only a Q model needs.
    """
    steps = []
    for record in records:
        path: tuple[str, ...] = ()
        turns = record["turns"]
        read = [None] * len(turns) if settings is None else chats(record, settings)
        for turn, prompt in zip(turns, read, strict=True):
            action = " || ".join(turn["actions"])
            steps.append(
                Step(
                    index=turn["index"],
                    action=action,
                    path=path,
                    state=turn["observation"],
                    prompt=prompt,
                    text=turn["text"],
                    others=_others(turn),
                    group=record["group"],
                    trajectory=record["trajectory"],
                )
            )
            path = (*path, action)
    return steps


def chats(record: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Messages]:
    """What the policy read at each turn of a recorded trajectory.

    Args:
        record: with the schema of `verl_multiturn.runs`.
        settings: `multiturn` of its run: prompt, row, action.
    """
    policy, separator = prompt_policy(settings), f" {settings['action']['separator']} "
    view, found = View(record.get("instruction") or "", ""), list[Messages]()
    said: dict[str, str] = {}
    for turn in record["turns"]:
        view.observation, last = turn["observation"], {"content": turn["prompt"]}
        if settings["row"] == "trajectory" and found:
            found.append([*found[-1], said, policy.follow_up(view) | last])
        else:
            shown = min(policy.templates.history, len(view.past)) - turn.get("dropped_turns", 0)
            *before, message = policy.messages(view, shown, None)
            found.append([*before, message | last])
        said = {"role": "assistant", "content": turn["text"]}
        view.past.append((turn["observation"], separator.join(turn["actions"])))
    return found


def _others(turn: Mapping[str, Any]) -> tuple[str, ...]:
    """The answers beside a turn's own: of a choice among candidates, or that training asked for."""
    votes = Counter({one["text"]: one["votes"] for one in turn.get("candidates", ())})
    votes[turn["text"]] -= 1  # elements() leaves out what is not above 0
    return (*votes.elements(), *turn.get("others", ()))
