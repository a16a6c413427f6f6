"""A catalogue with its goals and its search index: built once into the cache, shared by all processes."""

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

import numpy as np

from environments.webshop_parts import generate, goals, records, search, upstream, words
from environments.webshop_parts.goals import SPLITS, Kind
from environments.webshop_parts.records import Goal, Product, Records, write_records
from verl_multiturn.cache import built, cache_folder
from verl_multiturn.errors import intact

WHOLE = 64 << 20  # bytes up to which a file is hashed whole; of a larger one size, time and both ends
BUILDERS = (generate, goals, records, search, upstream, words)


@dataclass(frozen=True)
class Source:
    """Where a catalogue comes from.

    Attributes:
        data: folder or products' file of the original's format; None: generated.
        products: how many of them; None: all.
        seed: of a generated one.
    """

    data: str | None
    products: int | None
    seed: int

    def key(self) -> str:
        """Of everything that the built catalogue depends on: inputs, code, bm25s."""
        digest = hashlib.blake2b(digest_size=12)
        digest.update(f"{self.products} {self.seed if self.data is None else ''} {version('bm25s')}".encode())
        for module in BUILDERS:
            digest.update(Path(str(module.__file__)).read_bytes())
        for path in () if self.data is None else upstream.find_files(self.data, self.products):
            digest.update(_fingerprint(path))
        return digest.hexdigest()

    def read(self) -> tuple[Iterator[dict[str, Any]], dict[str, Any], dict[str, Any], str]:
        """Raw products, what was made of them, what people wrote, and where they come from."""
        if self.data is None:
            items, made, human = generate.generate(self.products or 0, self.seed)
            return iter(items), made, human, "the generated catalogue"
        files = upstream.find_files(self.data, self.products)
        raw = upstream.read_products(files[0], self.products)
        return raw, upstream.read_object(files[1]), upstream.read_object(files[2], list), str(files[0])


def _fingerprint(path: Path) -> bytes:
    size, digest = path.stat().st_size, hashlib.blake2b(path.name.encode(), digest_size=16)
    with open(path, "rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
        else:
            digest.update(f"{size} {path.stat().st_mtime_ns}".encode() + file.read(1 << 20))
            file.seek(-(1 << 20), os.SEEK_END)
            digest.update(file.read())
    return digest.digest()


class Shop:
    """An opened catalogue; read-only. Its pickle is where it comes from, so it never travels.

    Attributes:
        source, kind: what was opened.
        products, goals: of the catalogue; goals in their shuffled order.
        search: its index.
        marks: per goal, the number of its split in SPLITS; -1: none.
        train: positions of the training goals.
        digest: of the products.
    """

    def __init__(self, source: Source, kind: Kind, folder: Path) -> None:
        self.source, self.kind = source, kind
        with intact(folder, "delete it, it is built again"):
            self.products: Records[Product] = Records(folder / "products.jsonl", Product)
            self.goals: Records[Goal] = Records(folder / f"{kind}.jsonl", Goal)
            self.search = search.Search(folder / "index", len(self.products))
            self.marks = np.load(folder / f"{kind}-splits.npy", mmap_mode="r")
            self.digest = str(json.loads((folder / "meta.json").read_text())["digest"])
            if len(self.marks) != len(self.goals):
                raise ValueError(f"{len(self.marks)} goals are split, there are {len(self.goals)}")
        self.train = np.flatnonzero(self.marks == SPLITS.index("train"))
        if not len(self.train):
            raise ValueError(f"no {kind} goals for the {len(self.products)} products of {source}.")

    def split(self, name: str) -> list[int]:
        """Positions of a split's goals, ascending."""
        return [int(position) for position in np.flatnonzero(self.marks == SPLITS.index(name))]

    def __reduce__(self) -> tuple[Any, ...]:
        return open_shop, (self.source, self.kind)


_opening = threading.Lock()


def open_shop(source: Source, kind: Kind) -> Shop:
    """The catalogue, built if the cache has not got it; one per process, however many ask.

    Raises:
        ValueError: files missing or malformed, or an index of other products.
    """
    with _opening:
        return _open(source, kind)


@lru_cache(maxsize=8)
def _open(source: Source, kind: Kind) -> Shop:
    folder = built(cache_folder("webshop") / source.key(), partial(_build, source))
    return Shop(source, kind, folder)


def _build(source: Source, folder: Path) -> None:
    folder.mkdir()
    raw, made, human, where = source.read()
    write_records(folder / "products.jsonl", upstream.clean(raw, made, where))
    products: Records[Product] = Records(folder / "products.jsonl", Product, kept=1)
    for kind in get_args(Kind):
        arranged, marks = goals.arrange(goals.make_goals(products, kind, made, human))
        write_records(folder / f"{kind}.jsonl", arranged)
        np.save(folder / f"{kind}-splits.npy", marks)
    with intact(where, upstream.AGAIN):
        search.build(map(search.document, products), folder / "index")
    digest = hashlib.blake2b(products.bytes, digest_size=12).hexdigest()
    (folder / "meta.json").write_text(json.dumps({"products": len(products), "digest": digest}))
