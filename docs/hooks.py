"""Parts of README.md in the pages, so that nothing is said twice: `<!-- readme: Heading -->` on a line."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
PLACE = re.compile(r"^<!-- readme: (.+?) -->$", re.MULTILINE)


def sections() -> dict[str, str]:
    """Text below each second-level heading of README.md, heading left out; "intro": above the first."""
    parts = re.split(r"^## (.+)$", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    intro = parts[0].partition("\n")[2]
    return {"intro": intro, **dict(zip(parts[1::2], parts[2::2], strict=True))}


def on_page_markdown(markdown: str, **more: Any) -> str:
    """Put the named sections in.

    Raises:
        ValueError: README.md has no such heading; says which there are.
    """
    found = sections()

    def put(place: re.Match[str]) -> str:
        if place[1] not in found:
            raise ValueError(f"README.md has no section {place[1]!r}; it has: {', '.join(found)}")
        return found[place[1]].strip()

    return PLACE.sub(put, markdown)
