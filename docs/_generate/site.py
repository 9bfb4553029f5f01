"""Builds the site into site/ and checks it: no warning, no link that leads nowhere, nothing fetched from elsewhere.

Usage: python docs/_generate/site.py [--check-only]

It needs docs/requirements.txt and no network. The built pages are checked apart from the generator, since it looks
neither at images nor at what mkdocstrings makes of docstrings.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

REPO = Path(__file__).resolve().parents[2]
SITE = REPO / "site"
LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "object": "data",
}
"""Elements that a browser loads by itself, each with the attribute that names what; of `link` see `Page`."""
NOT_LOADED = {"canonical", "next", "prev", "alternate", "author", "license"}
"""Kinds of `link` that only point."""


class Page(HTMLParser):
    """The anchors, links and loaded resources of a built page."""

    def __init__(self, path: Path) -> None:
        """Read a page."""
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort an element's addresses."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(value for name, value in given.items() if name == "id" or (tag == "a" and name == "name"))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and not set(given.get("rel", "").split()) & NOT_LOADED:
            self.loaded.append(given.get("href", ""))
        elif address := given.get(LOADED.get(tag, "")):
            self.loaded.append(address)


def problems(site: Path) -> Iterator[str]:
    """Yield what is wrong with the built pages, a line each."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    if len(pages) < 2:
        yield f"{site} has {len(pages)} pages"
    for path, page in pages.items():
        here = path.relative_to(site)
        yield from (f"{here}: loads {a} from elsewhere" for a in page.loaded if urlsplit(a).netloc)
        for address in (*page.links, *page.loaded):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if path.name == "404.html" and parts.path.startswith("/"):
                target = site / unquote(parts.path).lstrip("/")
            if not target.is_file():
                yield f"{here}: {address} leads nowhere"
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors | {"__comments"}
            ):
                yield f"{here}: {address} has no such anchor"
    for sheet in sorted(site.rglob("*.css")):
        if found := re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", sheet.read_text("utf-8")):
            yield f"{sheet.relative_to(site)}: loads {found[0]} from elsewhere"


def main() -> int:
    """Build and check; return an exit code."""
    if "--check-only" not in sys.argv[1:]:
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        run = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
        said = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout + run.stderr)
        found = [
            line for line in said.splitlines() if re.match(r"(griffe|mkdocstrings|autorefs|warning)\b", line, re.I)
        ]
        if run.returncode or found:
            print(said, file=sys.stderr)
            return 1
    found = list(problems(SITE))
    print(*found[:50], sep="\n", file=sys.stderr, end="\n" if found else "")
    print(f"{len(list(SITE.rglob('*.html')))} pages in {SITE.relative_to(REPO)}/, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
