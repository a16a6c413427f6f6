"""Products and goals as the shop uses them, and a file of them that is read record by record."""

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import orjson

from verl_multiturn.errors import intact

NO_LIMIT = 1_000_000.0  # dollars: the original's price limit of a goal that names none


@dataclass(frozen=True)
class Product:
    """One product.

    Attributes:
        asin: its id.
        title, description, features: its texts.
        category: one of the shop's few departments.
        query: the search phrase that it was collected with, lower case.
        path: its place in the shop, joined by "›".
        price: in dollars, what buying it costs.
        price_tag: what its page shows.
        options: name -> values, lower case.
        attributes: what it is known to be.
    """

    asin: str
    title: str
    description: str
    features: Sequence[str]
    category: str
    query: str
    path: str
    price: float
    price_tag: str
    options: dict[str, list[str]]
    attributes: Sequence[str]


@dataclass(frozen=True)
class Goal:
    """One task: a product to buy.

    Attributes:
        product: number of a product that fits.
        text: the instruction, price limit included.
        attributes, options: what is asked for.
        price_limit: in dollars.
    """

    product: int
    text: str
    attributes: Sequence[str]
    options: Sequence[str]
    price_limit: float


Record = TypeVar("Record", Product, Goal)


def write_records(path: Path, records: Iterable[Product] | Iterable[Goal]) -> int:
    """Write JSON lines and, beside them, where each starts; return how many."""
    starts = [0]
    with open(path, "wb") as out:
        for record in records:
            starts.append(starts[-1] + out.write(orjson.dumps(asdict(record)) + b"\n"))
    np.save(path.with_suffix(".npy"), np.array(starts, np.int64))
    return len(starts) - 1


class Records(Generic[Record]):
    """What `write_records` wrote, memory-mapped: records are decoded when asked for.

    So a process holds a few of a million products, and all processes share the pages.
    """

    def __init__(self, path: Path, kind: type[Record], kept: int = 2048) -> None:
        self.path = path
        self.starts = np.load(path.with_suffix(".npy"), mmap_mode="r")
        self.kind: Callable[..., Record] = kind
        with open(path, "rb") as file:
            empty = not len(self)
            self.bytes = b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.get: Callable[[int], Record] = lru_cache(maxsize=kept)(self._get)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __iter__(self) -> Iterator[Record]:
        return map(self._get, range(len(self)))

    def _get(self, number: int) -> Record:
        """Record `number`, from 0."""
        if not 0 <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        line = self.bytes[self.starts[number] : self.starts[number + 1]]
        with intact(self.path, "delete its folder, it is built again"):
            return self.kind(**orjson.loads(line))
