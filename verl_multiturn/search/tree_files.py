"""The folder of a collection: search trees as they are finished, one a line, and nothing twice.

config.yaml      the configuration; `search`: what the trees were grown with
trees.jsonl      {"hash": ..., then the tree}, see `read_trees` and `verl_multiturn.journal`
failures.jsonl   one failed tree a line
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from omegaconf import OmegaConf

from verl_multiturn.journal import Journal, read_journal, write_all
from verl_multiturn.run_files import Record, json_line, write_atomically

TREES, FAILURES, CONFIG = "trees.jsonl", "failures.jsonl", "config.yaml"


class TreeFolder:
    """Writes a collection; the same folder again goes on with it.

    Args:
        folder: made if need be.
        config: of the run, plain.
        about: what the trees depend on; must be the same when a folder is taken up again.

    Raises:
        ValueError: another collection's folder, a folder with something else in it, one that another
            process writes to, or a damaged file.
    """

    def __init__(self, folder: Path, config: dict[str, Any], about: dict[str, Any]) -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is no folder: choose another --out")
        if folder.exists() and any(folder.iterdir()) and not (folder / CONFIG).exists():
            raise ValueError(f"{folder} holds something else than trees: choose another --out")
        folder.mkdir(parents=True, exist_ok=True)
        self._file = Journal(folder / TREES)
        try:
            self._take_up(config, about)
        except BaseException:
            self._file.close()
            raise

    def _take_up(self, config: dict[str, Any], about: dict[str, Any]) -> None:
        if (self.folder / CONFIG).exists():
            before = about_of(self.folder)
            for key, now in about.items():
                if before.get(key) != now:
                    raise ValueError(
                        f"{self.folder} holds trees of another search: {key} was {before.get(key)!r:.200}, "
                        f"is {now!r:.200}; choose another --out"
                    )
        else:
            text = OmegaConf.to_yaml(OmegaConf.create(config | {"search": about}))
            write_atomically(self.folder / CONFIG, [text.encode()])
        self._file.mend()
        self.done = {str(tree["task"]) for tree in read_trees(self.folder, empty=True)}

    def append(self, tree: Record) -> None:
        """Add a finished tree: on disk when this returns."""
        self._file.append(tree)
        self.done.add(str(tree["task"]))

    def fail(self, failure: Record) -> None:
        """Note a tree that could not be finished; it is tried again when the folder is taken up."""
        with (self.folder / FAILURES).open("ab") as file:
            write_all(file.fileno(), json_line(failure))

    def close(self) -> None:
        """Let the folder go."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_trees(folder: str | Path, empty: bool = False) -> Iterator[Record]:
    """The trees of a folder, in the order in which they were finished.

    A tree is one JSON object:

        task, content, task_type     id in the panel, its content hash, its type
        env, panel, model, seed      what was searched, by what
        stopped, iterations, success, rollout_successes     as in `tree.Tree`
        proposals, prompt_tokens, tokens, env_steps, seconds     what it cost; its nodes hold the same
        root      nested nodes {action, N, W, reward, terminal, children, text, messages, ...} of `tree.Node`;
                  what a prompt is built from: instruction (the root's), observation, admissible

    Raises:
        ValueError: no trees, or a line that is not what was written; its number is named.
    """
    path = Path(folder) / TREES
    if not path.exists():
        raise ValueError(f"{folder} holds no trees: {path} does not exist")
    trees = 0
    for tree in read_journal(path, "the same search again"):
        trees += 1
        yield tree
    if not trees and not empty:
        raise ValueError(f"{path} is empty: no tree was finished")


def about_of(folder: str | Path) -> dict[str, Any]:
    """What the trees of a folder were grown with.

    Raises:
        ValueError: no such folder.
    """
    config = config_of(folder)
    return dict(config.get("search") or {})


def config_of(folder: str | Path) -> dict[str, Any]:
    """The configuration of a collection, plain.

    Raises:
        ValueError: no such folder.
    """
    path = Path(folder) / CONFIG
    if not path.exists():
        raise ValueError(f"{folder} is no folder of trees: it has no {CONFIG}; make one with search --out")
    return OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[return-value]
