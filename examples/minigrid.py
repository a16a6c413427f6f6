r"""MiniGrid in words, for the environment `gymnasium`: a render function is all it takes.

    verl-multiturn play gymnasium id=minigrid:MiniGrid-DoorKey-5x5-v0 render=examples/minigrid.py:render
    verl-multiturn check-env gymnasium id=minigrid:MiniGrid-Empty-5x5-v0 render=examples/minigrid.py:render
    bash recipes/gigpo_frozenlake.sh hardware=cpu multiturn.env=gymnasium multiturn.run=runs/minigrid \
        "multiturn.env_kwargs={id: 'minigrid:MiniGrid-Empty-Random-5x5-v0', max_turns: 15, \
        render: 'examples/minigrid.py:render'}" "multiturn.val={first_seed: 0, size: 8}" multiturn.test=null

Needs `pip install "verl-multiturn[gym]"`.
"""

from typing import Any


def render(env: Any, observation: dict[str, Any]) -> str:
    """Say what lies in the agent's view, and where: only what it sees, as MiniGrid means it.

    Args:
        env: the unwrapped MiniGrid environment.
        observation: its dictionary with "image" (columns, rows, (object, colour, state)) and "mission".
    """
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    states = {number: name for name, number in STATE_TO_IDX.items()}
    image = observation["image"]
    columns, rows, _ = image.shape
    lines = [f"Mission: {observation['mission']}."]
    for row in reversed(range(rows)):
        for column in range(columns):
            kind, colour, state = (int(number) for number in image[column, row])
            name, ahead, aside = IDX_TO_OBJECT[kind], rows - 1 - row, column - columns // 2
            here = ahead == 0 and aside == 0
            next_to_it = ahead + abs(aside) == 1
            if name in ("unseen", "empty", "floor") or (name == "wall" and not next_to_it):
                continue
            words = [states[state]] if name == "door" else []
            words += [] if name == "wall" else [IDX_TO_COLOR[colour]]
            where = "in your hands" if here else _where(ahead, aside)
            lines.append(f"{' '.join([*words, name])}: {where}.")
    return "\n".join(lines)


def _where(ahead: int, aside: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    parts += [f"{abs(aside)} to the {'left' if aside < 0 else 'right'}"] if aside else []
    return ", ".join(parts)
