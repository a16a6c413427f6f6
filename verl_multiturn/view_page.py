"""A page that holds everything it needs and may load nothing.

Its policy allows its own style and script by their hashes and no address at all. Data stands in elements
of their own, as JSON that `view_data.embeddable` made.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

MARK = b'<meta name="generator" content="verl_multiturn.view">'  # stands in every page of ours


def refuse_foreign(path: Path) -> None:
    """Refuse to write over what is not a page of ours.

    Raises:
        ValueError: a folder, or another file.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; --out names a file")
    if path.exists():
        with path.open("rb") as file:
            if MARK not in file.read(1000):
                raise ValueError(f"{path} is not a page of verl-multiturn view, so it is not replaced")


def page(
    title: str, template: str, scripts: Sequence[str], elements: Iterable[tuple[str, bytes]]
) -> Iterator[bytes]:
    """The page in pieces.

    Args:
        title: of the window.
        template: file of `viewer` with {{mark}}, {{policy}}, {{title}}, {{style}}, {{data}} and {{script}}.
        scripts: files of `viewer` that become one script, in this order.
        elements: (id, JSON) of the data.
    """
    viewer = files("verl_multiturn.viewer")
    style = viewer.joinpath("page.css").read_text(encoding="utf-8")
    script = "".join(viewer.joinpath(name).read_text(encoding="utf-8") for name in scripts)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}"
    filled = {"mark": MARK.decode(), "policy": policy, "title": escape(title),
              "style": style, "script": script}  # fmt: skip
    text = viewer.joinpath(template).read_text(encoding="utf-8")
    # in one pass: what is filled in may itself look like a placeholder
    head, tail = (re.sub(r"{{(\w+)}}", lambda m: filled[m[1]], part) for part in text.split("{{data}}"))
    yield head.encode()
    for name, data in elements:
        yield f'<script type="application/json" id="{name}">'.encode()
        yield data
        yield b"</script>\n"
    yield tail.encode()


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
