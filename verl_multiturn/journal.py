"""Records as they are finished, one a line, in a file that survives a kill: `{"hash": ..., then the record}`.

A line begins with the hash of the rest of it. A killed process leaves at most one line without its end,
which the next one removes.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import orjson

from verl_multiturn.run_files import Record, json_line

HEAD, SIZE = b'{"hash":"', 32


class Journal:
    """Appends to a file that one process at a time may write.

    Args:
        path: made if need be; its folder must exist.

    Raises:
        ValueError: another process is writing to it.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another process is writing to {path.parent}") from None

    def mend(self) -> None:
        """Cut off what stands behind the end of the last whole line."""
        self._file.truncate(Path(self._file.name).read_bytes().rfind(b"\n") + 1)

    def append(self, record: Record) -> None:
        """Add a record: on disk when this returns; where that fails, nothing of it is left."""
        body, file = json_line(record)[1:], self._file.fileno()
        whole = os.fstat(file).st_size
        try:
            write_all(file, HEAD + _digest(body) + b'",' + body)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, whole)  # the next record would be joined to a half
            raise

    def close(self) -> None:
        """Let the file go."""
        self._file.close()


def read_journal(path: Path, again: str) -> Iterator[Record]:
    """The records of a file, in their order.

    Args:
        path: the file.
        again: the command that goes on with it, in words, for what is said of damage.

    Raises:
        ValueError: a line that is not what was written; its number is named.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                raise ValueError(
                    f"{path}, line {number} is cut off: the process that wrote it was stopped; run {again}, "
                    "it goes on from there"
                )
            body = line[len(HEAD) + SIZE + 2 :]
            if not line.startswith(HEAD) or line[len(HEAD) :][:SIZE] != _digest(body):
                raise ValueError(
                    f"{path}, line {number} is damaged: its content does not match its hash; delete the "
                    f"line and run {again}"
                )
            yield orjson.loads(b"{" + body)


def write_all(file: int, data: bytes) -> None:
    """Write to a file descriptor, in as many calls as it takes: a full disk or a signal may cut one."""
    while data:
        data = data[os.write(file, data) :]


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=SIZE // 2).hexdigest().encode()
