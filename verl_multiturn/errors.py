"""One way to say that a name is wrong: what was given, what is valid, and the nearest match."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def unknown(kind: str, given: object, valid: Iterable[object], hint: str = "") -> ValueError:
    """Build (not raise) the error for a name that is not among the valid ones.

    Args:
        kind: what the name stands for, e.g. "algorithm".
        given: the wrong name.
        valid: every valid name, listed in the message.
        hint: one more sentence, e.g. how to add such a thing.
    """
    names = [str(name) for name in valid]
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    more = f" {hint}" if hint else ""
    return ValueError(f"unknown {kind} {str(given)!r}; valid: {', '.join(names) or 'none'}.{guess}{more}")


class RunStopped(RuntimeError):
    """A run stops for a reason that its message tells whole; what was recorded is kept.

    Attributes:
        said: whether standard error has the message already.
    """

    said = False


def cause_of(error: BaseException) -> BaseException:
    """What was raised, also in another process: there Ray's own error stands around it, a whole traceback."""
    while isinstance(inner := getattr(error, "cause", None), BaseException):
        error = inner
    return error


@contextmanager
def intact(path: str | Path, cure: str) -> Iterator[None]:
    """Says whatever reading a damaged file raises as one ValueError, which names the file and what to do.

    Args:
        path: the file, or the folder of files, that is read inside.
        cure: what to do, e.g. "delete it, it is built again".

    Raises:
        ValueError: something was raised inside; a ValueError that names the path already stays as it is.
    """
    try:
        yield
    except (ImportError, RunStopped):
        raise  # a missing package, or a sentence of its own
    # Parsers of broken files raise whatever their parts raise; translators leave with SystemExit.
    except (Exception, SystemExit) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} cannot be used ({type(error).__name__}: {why}): {cure}") from error
