"""Search trees as one static HTML page: every node with its visits N and mean return Q.

Read from a file of JSON lines, or a folder with `trees.jsonl`: a tree a line, nested nodes as
`search.tree.Tree.to_dict` gives them, or an object that holds such a node as `root` beside what was searched.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from verl_multiturn import run_files
from verl_multiturn.run_files import Record
from verl_multiturn.view_data import embeddable
from verl_multiturn.view_page import page, refuse_foreign

FILE = "trees.jsonl"
SCRIPTS = ("dom.js", "trees.js")
MAX_BYTES = 300_000_000  # more than a browser opens with ease
ABOUT = (
    "task",
    "task_type",
    "env",
    "model",
    "seed",
    "stopped",
    "success",
    "proposals",
    "env_steps",
    "tokens",
)
# Of a node, after the number of its parent; texts are numbers of strings.
NODE = (
    *("action", "N", "Q", "deviation", "reward", "terminal", "truncated", "valid", "success", "executed"),
    *("closed", "votes", "prior", "observation", "text"),
)
TEXTS = ("action", "observation", "text")


class Trees(NamedTuple):
    """A page that was written."""

    path: Path
    size: int  # bytes
    trees: int
    nodes: int


def holds_trees(path: Path) -> bool:
    """Whether `path` is a file of trees or a folder with one, and no recorded run."""
    if path.is_file():
        return path.suffix == ".jsonl"
    return (path / FILE).exists() and bool(run_files.missing_parts(path))


def build_trees(source: str | Path, out: str | Path | None = None) -> Trees:
    """Write the page.

    Args:
        source: the file, or a folder with `trees.jsonl`.
        out: the page; default: view.html beside the file. An earlier page of ours is replaced.

    Raises:
        ValueError: a line that is no tree, no line at all, a page above 300 MB, or a file at `out`
            that is not ours. Nothing is written then.
    """
    file = Path(source) / FILE if Path(source).is_dir() else Path(source)
    path = file.with_name("view.html") if out is None else Path(out)
    refuse_foreign(path)
    about: list[Record] = []
    packed: list[bytes] = []
    size = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            record, nodes, data = _pack(f"{file}, line {number}", line)
            about.append(record | {"nodes": nodes})
            packed.append(data)
            size += len(data)
            if size > MAX_BYTES:
                raise ValueError(f"the page would be larger than {MAX_BYTES // 10**6} MB: split {file}")
    if not packed:
        raise ValueError(f"{file} holds no trees")
    title = file.absolute().parent.name
    meta = embeddable({"name": title, "trees": about, "node": NODE})
    elements = [("meta", meta), *((f"tree-{n}", data) for n, data in enumerate(packed))]
    run_files.write_atomically(path, page(title, "trees.html", SCRIPTS, elements))
    return Trees(path, path.stat().st_size, len(packed), sum(one["nodes"] for one in about))


def _pack(where: str, line: bytes) -> tuple[Record, int, bytes]:
    """What is said of a tree, its number of nodes, and the tree: strings, and nodes with their parents."""
    try:
        record = orjson.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    root = record.get("root", record) if isinstance(record, dict) else None
    if not isinstance(root, dict) or "children" not in root:
        raise ValueError(f"{where} is no search tree: it has no root with children")
    strings: dict[str, int] = {}
    nodes = []
    for parent, node in _walk(where, root):
        row = [_field(node, name) for name in NODE]
        for k, name in enumerate(NODE):
            if name in TEXTS and row[k] is not None:
                row[k] = strings.setdefault(str(row[k]), len(strings))
        nodes.append([parent, *row])
    said = {name: record[name] for name in ABOUT if record.get(name) is not None}
    return said | {"N": root.get("N", 0)}, len(nodes), embeddable({"strings": list(strings), "nodes": nodes})


def _walk(where: str, root: Record) -> Iterator[tuple[int, Record]]:
    """(number of the parent, node), every parent before its children; the root's parent is -1."""
    stack, count = [(-1, root)], 0
    while stack:
        parent, node = stack.pop()
        children = node.get("children") if isinstance(node, dict) else None
        if not isinstance(children, list) or any(
            not isinstance(node.get(key), int | float) for key in ("N", "W")
        ):
            raise ValueError(f"{where} is no search tree: a node lacks N, W or children")
        yield parent, node
        stack.extend((count, child) for child in reversed(children))
        count += 1


def _field(node: Record, name: str) -> Any:
    """A field of a node, short; None where it is not known."""
    N, W = node["N"], node["W"]
    if name == "Q":
        return _short(W / N) if N else None
    if name == "deviation":  # of the returns from this action on
        W2 = node.get("W2")
        return _short(max(0.0, W2 / N - (W / N) ** 2) ** 0.5) if N and W2 is not None else None
    value = node.get(name)
    return _short(value) if isinstance(value, float) else value


def _short(value: float) -> float:
    return float(f"{value:.6g}")
