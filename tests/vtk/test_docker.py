"""The Dockerfiles, which nothing here can build: what they name exists, and they copy all that the package needs."""

import fnmatch
import itertools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from setuptools import find_namespace_packages

REPO = Path(__file__).resolve().parents[2]
FILES = sorted((REPO / "docker").glob("*.Dockerfile"))
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))
each = pytest.mark.parametrize("file", FILES, ids=lambda p: p.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, in order."""
    text = re.sub(r"^#.*\n", "", file.read_text("utf-8"), flags=re.M).replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip()]
    return [(name, rest) for name, rest in lines]


def copied(file: Path, folder: Path) -> None:
    """Do what the file's COPY instructions do from a context without what .dockerignore leaves out."""
    for name, rest in instructions(file):
        if name == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                assert in_context(source), f".dockerignore leaves out {source}"
                to = folder / target / source if target.endswith("/") else folder / target
                to.parent.mkdir(parents=True, exist_ok=True)
                to.symlink_to(REPO / source)


def in_context(source: str) -> bool:
    """Whether .dockerignore lets a path through: the last pattern that matches it or a folder of it counts."""
    kept = True
    for line in (REPO / ".dockerignore").read_text("utf-8").splitlines():
        pattern = line.strip().removeprefix("!")
        if line.strip() and not line.startswith("#"):
            parts = [str(part) for part in (Path(source), *Path(source).parents) if str(part) != "."]
            if any(fnmatch.fnmatch(part, pattern) for part in parts):
                kept = line.startswith("!")
    return kept


def packages(folder: Path) -> set[str]:
    """The packages that setuptools would install from a folder."""
    how = PROJECT["tool"]["setuptools"]["packages"]["find"]
    return {name for where in how["where"] for name in find_namespace_packages(folder / where, include=how["include"])}


def installs(file: Path) -> list[list[str]]:
    """The arguments of each `pip install`."""
    runs = [rest for name, rest in instructions(file) if name == "RUN" and rest.startswith("pip install")]
    return [shlex.split(re.sub(r"\$\{.*?\}", "", rest))[2:] for rest in runs]


def test_there_is_one_for_cpus_and_one_for_cuda() -> None:
    assert [file.name for file in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile"]


@each
def test_what_is_copied_is_what_the_package_is_made_of(file: Path, tmp_path: Path) -> None:
    copied(file, tmp_path)
    found = {name for name in packages(tmp_path) if "__pycache__" not in name}
    assert found == {name for name in packages(REPO) if "__pycache__" not in name}
    project = PROJECT["project"]
    for name in (project["readme"], *project["license-files"], "pyproject.toml"):
        assert (tmp_path / name).is_file(), name
    for arguments in installs(file):
        for option, value in itertools.pairwise(arguments):
            assert option != "-r" or (tmp_path / value).is_file(), value


@each
def test_the_package_gets_its_requirements_and_known_extras(file: Path) -> None:
    (own,) = [arguments for arguments in installs(file) if arguments[-1].startswith(".")]
    if "--no-deps" in own:
        assert any("-r" in arguments for arguments in installs(file))
    extras = Requirement(f"x{own[-1][1:]}").extras
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


@each
def test_its_python_is_supported_and_its_command_exists(file: Path) -> None:
    found = dict(instructions(file))
    version = re.fullmatch(r"python:([\d.]+)-slim", found["FROM"])
    assert version is not None and SpecifierSet(PROJECT["project"]["requires-python"]).contains(version[1])
    assert found["ENTRYPOINT"] == '["vtk"]' and "vtk" in PROJECT["project"]["scripts"]


def test_the_page_says_that_they_are_not_built_and_names_both() -> None:
    text = (REPO / "docs" / "guides" / "docker.md").read_text("utf-8")
    assert "**State: not built.**" in text and all(f"docker/{file.name}" in text for file in FILES)
    assert all("Not built or run by this project" in file.read_text("utf-8") for file in FILES)
    for name in re.findall(r"docker build -f (\S+)", text):
        assert (REPO / name).is_file(), name
