"""Every command line in the documents parses."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from vtk.__main__ import main
from vtk.commands import _cli, doctor
from vtk.commands.doctor import Check

REPO = Path(__file__).resolve().parents[2]
PAGES = sorted([REPO / "README.md", *(REPO / "docs").rglob("*.md")])


def command_lines() -> list[tuple[str, str]]:
    lines = []
    for page in PAGES:
        for block in re.findall(r"^```(?:sh|bash|console)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))
                # the command is the entry point of our containers
                line = re.sub(r"^docker run (?!.*--entrypoint).* vtk-(?:cpu|cuda) ", "vtk ", line)
                if line.startswith("vtk "):
                    lines.append((page.name, line))
    return lines


class Parsed(BaseException):
    """Raised in place of running the command."""


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_documented_command_lines_parse(page: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = _cli.parse

    def parse(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise Parsed

    monkeypatch.setattr(_cli, "parse", parse)
    monkeypatch.chdir(tmp_path)
    argv = shlex.split(line)[1:]
    if "--config" in argv:  # what an earlier command of the page wrote
        config = Path(argv[argv.index("--config") + 1])
        config.parent.mkdir(parents=True)
        config.write_text("epochs: 3\n")
    if argv == ["--help"]:
        assert main(argv) == 0
        return
    with pytest.raises(Parsed):
        main(argv)


def test_there_are_command_lines_to_check() -> None:
    assert len(command_lines()) >= 10


def test_the_page_of_files_names_what_commands_write() -> None:
    from vtk.profiling import report as profile_report
    from vtk.profiling.search import report as search_report
    from vtk.profiling.server import report as server_report
    from vtk.training.runs import outputs

    page = (REPO / "docs" / "reference" / "files.md").read_text("utf-8")
    known = {*outputs.ALL_FILES, *profile_report.MARKS, *server_report.MARKS, *search_report.MARKS,
             outputs.STATE_INFO}  # fmt: skip
    of_0_1 = REPO / "tests" / "fixtures" / "v0_1"
    for folder in ("runs", "exports", "repositories", "digits-peft", "digits.vtkbundle", "profile"):
        known |= {path.name for path in (of_0_1 / folder).rglob("*.*") if path.is_file()}
    own = ("digits.", "parity.", "shared-")  # named after a task, or by a digest
    missing = {name for name in known if f"{name}`" not in page and not name.startswith(own)}
    assert len(known) > 30 and not missing, missing


def test_the_page_on_doctor_has_its_statuses_and_groups() -> None:
    page = (REPO / "docs" / "guides" / "doctor.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \|.*\|$", page, re.M)
    sources = "".join(path.read_text("utf-8") for path in sorted((REPO / "vtk" / "commands").glob("_*.py")))
    (statuses,) = re.findall(r"^Status = Literal\[(.*)\]$", sources, re.M)
    groups = set(re.findall(r'\bCheck\(\s*"(\w+)"', sources))
    assert rows[:4] == re.findall(r"\w+", statuses) and set(rows[4:]) == groups and len(groups) == 6
    ends = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d) \|$", page, re.M))
    assert ends == {name: str(int(doctor.exit_code((Check("devices", "x", name, ""),)))) for name in rows[:4]}


def test_papers_are_named_by_author_and_year() -> None:
    key = REPO / "docs" / "concepts" / "papers-key.md"
    names = [f"{name}" for name in re.findall(r"^## (.+ \d{4})$", key.read_text("utf-8"), re.M)]
    assert len(names) == 5
    letter = re.compile(r"\bpapers?['’]?s? [A-E]\b(?! to\b)", re.I)
    found = []
    for folder in ("docs", "vtk", "export", "kernels", "examples", "benchmarks", "tests"):
        for path in sorted((REPO / folder).rglob("*")):
            if path.suffix in {".md", ".py", ".yaml", ".txt", ".sh"} and path not in (key, Path(__file__)):
                found += [f"{path.relative_to(REPO)}: {hit}" for hit in letter.findall(path.read_text("utf-8"))]
    assert not found, f"see {key.relative_to(REPO)}: {found}"
