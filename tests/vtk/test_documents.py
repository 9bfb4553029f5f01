"""Every command line in the documents parses."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from vtk.__main__ import main
from vtk.commands import _cli

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
