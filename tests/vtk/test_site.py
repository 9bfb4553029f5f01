"""The documents as a site: links and anchors, every page in its contents, every public name on a reference page.

Building it is `make site`; here the sources are checked, by other means than the generator's.
"""

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import vtk
from vtk import errors

REPO = Path(__file__).resolve().parents[2]
DOCS = REPO / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READ_IN_PLACE = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PACKAGES = ("vtk.packs", "vtk.bank", "vtk.training", "vtk.runtime", "vtk.fused", "vtk_export", "vtk_kernels")


def without_code(path: Path) -> str:
    return re.sub(r"^(```.*?^```|~~~.*?^~~~)", "", path.read_text("utf-8"), flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as both GitHub and Python-Markdown make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_code(path), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        text = text.encode("ascii", "ignore").decode()
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
        found.add(slug if slug not in found else f"{slug}_1")
    return found | set(re.findall(r'id="([^"]+)"', path.read_text("utf-8")))


def links(path: Path) -> Iterator[tuple[Path, str]]:
    """Each relative link of a page: the file it names, and its anchor."""
    text = re.sub(r"`[^`\n]*`", "", without_code(path))
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:href|src|srcset)="([^"]+)"', text):
        if not re.match(r"[a-z]+:", target):
            name, _, anchor = target.partition("#")
            yield ((path.parent / name).resolve() if name else path), anchor


@pytest.mark.parametrize("page", [*READ_IN_PLACE, *PAGES], ids=lambda p: str(p.relative_to(REPO)))
def test_relative_links_and_their_anchors_exist(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{target.relative_to(REPO)} is not there"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{target.relative_to(REPO)} has no #{anchor}: {sorted(anchors(target))}"


def test_pages_of_the_site_link_only_to_what_the_site_has() -> None:
    for page in PAGES:
        outside = [str(target) for target, _ in links(page) if DOCS not in target.parents]
        assert not outside, f"{page.relative_to(REPO)} links to {outside}: name the path in backticks instead"


def contents(part: object) -> Iterator[str]:
    """Yield the pages of a part of the contents."""
    if isinstance(part, str):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from contents(inner)


def test_every_page_is_in_the_contents_once() -> None:
    listed = list(contents(yaml.safe_load((REPO / "mkdocs.yml").read_text("utf-8"))["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def shown() -> list[str]:
    """The names that the reference pages show."""
    pages = (DOCS / "reference" / "python").glob("*.md")
    return [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text("utf-8"), re.M)]


def lazy_names(package: str) -> dict[str, str]:
    """The public names of a package, each with the module that it comes from, as its source says."""
    folders = {"vtk_export": "export/vtk_export", "vtk_kernels": "kernels/vtk_kernels"}
    path = REPO / folders.get(package, package.replace(".", "/")) / "__init__.py"
    tables = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Dict)]
    names: dict[str, str] = ast.literal_eval(tables[0])
    return names


def test_every_public_name_is_on_one_reference_page() -> None:
    names = shown()
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]
    of_vtk = lazy_names("vtk")
    assert sorted(of_vtk) == vtk.__all__ and {f"vtk.{name}" for name in of_vtk} <= set(names)
    for package in PACKAGES:
        found = lazy_names(package)
        assert len(found) >= 5
        for name, module in found.items():
            if f"{package}.{name}" not in names:  # then it is one of those of `vtk`
                assert of_vtk.get(name) == module, f"{package}.{name}"


@pytest.mark.slow  # imports all of the toolkit
def test_every_name_of_a_reference_page_exists_and_is_described() -> None:
    for name in shown():
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        assert value.__doc__, name


def test_every_kernel_and_every_error_is_on_a_reference_page() -> None:
    names = set(shown())
    launches = (REPO / "kernels" / "vtk_kernels" / "launches.py").read_text("utf-8")
    (table,) = re.findall(r"^OPERATIONS = (\(.*?^\))", launches, re.M | re.S)
    operations = ast.literal_eval(table)
    assert len(operations) > 10 and {f"vtk_kernels.{name}.{name}" for name in operations} <= names
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {f"vtk.errors.{name}" for name in classes} <= names


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    """docs/_generate/site.py, which is a script; `site` is also a module of Python."""
    spec = importlib.util.spec_from_file_location("vtk_site", DOCS / "_generate" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


WHOLE = '<h1 id="a">A</h1><a href="b.html#b">b</a><img src="x.png"><a href="https://example.org">elsewhere</a>'


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (WHOLE, None),
        (WHOLE + '<link rel="canonical" href="https://example.org/a">', None),
        (WHOLE.replace("b.html", "c.html"), "c.html#b leads nowhere"),
        (WHOLE.replace("#b", "#c"), "b.html#c has no such anchor"),
        (WHOLE + '<a href="#z">z</a>', "#z has no such anchor"),
        (WHOLE.replace("x.png", "y.png"), "y.png leads nowhere"),
        (WHOLE + '<script src="https://example.org/x.js"></script>', "loads https://example.org/x.js"),
        (WHOLE + '<link rel="stylesheet" href="//example.org/x.css">', "loads //example.org/x.css"),
        (WHOLE + '<img src="http://example.org/x.png">', "loads http://example.org/x.png"),
    ],
)
def test_the_built_pages_are_checked(page: str, problem: str | None, site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(page)
    (tmp_path / "b.html").write_text('<h2 id="b">B</h2>')
    (tmp_path / "x.png").write_bytes(b"")
    found = list(site.problems(tmp_path))
    assert not found if problem is None else len(found) == 1 and problem in found[0], found


def test_style_sheets_that_fetch_and_empty_sites_are_problems(site: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<p>a")
    (tmp_path / "x.css").write_text('@import "https://example.org/font.css";')
    assert [line.partition(": ")[2] for line in site.problems(tmp_path)][1:] == [
        "loads https://example.org/font.css from elsewhere"
    ]
    assert "has 1 pages" in next(site.problems(tmp_path))
