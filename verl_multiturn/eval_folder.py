"""The folder of an evaluation: new, unfinished (a kill, an error) and taken up again, or done.

    episodes.jsonl   as long as the evaluation is unfinished: first its settings, then its episodes, each as
                     it ended (see `verl_multiturn.journal`)

All else is a recorded run's. Episodes that failed are played again when a folder is taken up.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import orjson
from omegaconf import OmegaConf

from verl_multiturn.errors import intact
from verl_multiturn.eval_records import SPLIT
from verl_multiturn.journal import Journal, read_journal
from verl_multiturn.run_files import Record, json_line, trajectory_files, without_secrets

EPISODES = "episodes.jsonl"
AGAIN = "the same evaluation again"
# What an episode depends on, beside the model, the tasks and the way answers are chosen, which are in `eval`.
PARTS = (
    *(f"multiturn.{key}" for key in ("env", "env_kwargs", "row", "anchor", "action", "prompt", "seed")),
    *(f"multiturn.max_{what}" for what in ("action_tokens", "turns", "actions")),
    *(f"multiturn.{what}_timeout" for what in ("step", "generate", "episode")),
    *("data.max_prompt_length", "data.max_response_length", "data.apply_chat_template_kwargs"),
    *("actor_rollout_ref.model.custom_chat_template", "eval"),
)


def state_of(folder: Path) -> Literal["new", "unfinished", "done", "other"]:
    """What a folder holds of an evaluation; other: something else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return "new"
    if (folder / EPISODES).is_file():
        return "unfinished"
    return "done" if trajectory_files(folder, SPLIT) else "other"


def check_folder(folder: Path, done: bool = False) -> None:
    """Refuse a folder that an evaluation cannot record to.

    Args:
        folder: may hold an unfinished evaluation.
        done: may hold a finished one as well, which is then read.

    Raises:
        ValueError: it holds something else.
    """
    if state_of(folder) not in ("new", "unfinished", *(("done",) if done else ())):
        raise ValueError(f"{folder} exists: nothing is overwritten, choose another --out")


def check_same(folder: Path, config: Mapping[str, Any], then: Mapping[str, Any] | None = None) -> None:
    """Refuse the evaluation in a folder if it has other settings.

    Args:
        folder: of the evaluation.
        config: of this evaluation, as it is recorded.
        then: of that one; None: as it is recorded there.

    Raises:
        ValueError: a part differs; it is named.
    """
    if then is None:
        path = folder / "config.yaml"
        with intact(path, "choose another --out"):
            then = settings_of(OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
    was, now = dict(_flat(then)), dict(_flat(settings_of(config)))
    for key in sorted({*was, *now}):
        if was.get(key) != now.get(key):
            raise ValueError(
                f"{folder} exists: nothing is overwritten, choose another --out; it is of an evaluation with "
                f"{key}={was.get(key)!r:.100}, this one has {now.get(key)!r:.100}"
            )


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a recorded configuration that an evaluation depends on, as JSON has them."""
    whole = OmegaConf.create(without_secrets(dict(config)))
    found = {key: OmegaConf.select(whole, key) for key in PARTS}
    plain = OmegaConf.to_container(OmegaConf.create(found), resolve=True)
    return dict(orjson.loads(json_line(plain)))  # type: ignore[arg-type]


class Episodes:
    """The episodes of an evaluation that is under way.

    Args:
        folder: made if need be.
        config: of the evaluation, as it is recorded.

    Raises:
        ValueError: an evaluation of other settings, one that another process plays, or a damaged file.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / EPISODES
        self._file = Journal(self.path)
        try:
            self._file.mend()
            lines = list(read_journal(self.path, AGAIN))
            if lines:
                check_same(folder, config, lines[0]["settings"])
            else:
                self._file.append({"settings": settings_of(config)})
        except BaseException:
            self._file.close()
            raise
        self.before = {(line["task"], line["sample"]): line["record"] for line in lines[1:]}

    def append(self, task: int, sample: int, record: Record) -> None:
        """Add an episode: the place of its task in the panel, which sample of it, its record."""
        self._file.append({"task": task, "sample": sample, "record": record})

    def finish(self) -> None:
        """What was played is recorded elsewhere."""
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _flat(group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
