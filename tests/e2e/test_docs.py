"""The docs site: built as strictly as mkdocs can, and every link inside it leads somewhere."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = pytest.mark.e2e
pytest.importorskip("material", reason="extra docs is not installed")
pytest.importorskip("mkdocstrings_handlers", reason="extra docs is not installed")
REPOSITORY = Path(__file__).parents[2]


class Page(HTMLParser):
    """Links and ids of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.ids, self.path = [], set(), path
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {value for name, value in attributes if name in ("id", "name") and value}
        if tag in ("a", "link", "script", "img") and (link := found.get("href") or found.get("src")):
            self.links.append(link)


def build(folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)


def test_the_site(tmp_path):
    done = build(tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    pages = {path: Page(path) for path in (tmp_path / "site").rglob("*.html")}
    named = {path.relative_to(tmp_path / "site").parts[0] for path in pages}
    assert {"algorithms", "api", "faults", "migration", "index.html"} <= named
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are those of the server's root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                broken.append((str(path), link))
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                broken.append((str(path), link))
    assert not broken, broken[:10]
    text = (tmp_path / "site" / "metrics" / "index.html").read_text(encoding="utf-8")
    assert "zero_variance" in text and "readme:" not in text
    gigpo = (tmp_path / "site" / "algorithms" / "gigpo" / "index.html").read_text(encoding="utf-8")
    assert "step_weight" in gigpo and "Eq. 8" in gigpo
