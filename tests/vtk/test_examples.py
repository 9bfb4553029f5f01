"""The worked examples of the documents do what the documents say, on what `vtk demo` leaves."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from vtk.__main__ import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
MARK = re.compile(r"^<!-- worked example: (.+?) -->\n\n?```sh\n(.*?)^```", re.M | re.S)


def examples() -> dict[str, str]:
    """Return the marked blocks by the commands they show."""
    found: dict[str, str] = {}
    for page in sorted(DOCS.rglob("*.md")):
        for names, block in MARK.findall(page.read_text("utf-8")):
            assert names not in found, f"{names} has two worked examples"
            found[names] = block
    return found


def subcommands() -> set[str]:
    """Return what the page of all commands lists: those with parts of their own by part."""
    source = (DOCS / "_generate" / "commands.py").read_text("utf-8")
    (table,) = re.findall(r"^COMMANDS = (\(.*?^\))", source, re.M | re.S)
    return {name for name in ast.literal_eval(table) if name}


def lines(block: str) -> list[list[str]]:
    """Return the command lines of a block, split as a shell does."""
    texts = (re.sub(r"\s+#.*$", "", line) for line in block.replace("\\\n", " ").splitlines())
    return [shlex.split(text) for text in texts if text.strip()]


def test_every_command_has_a_worked_example() -> None:
    # `finetune --sam` shows a flag, in addition
    commands = {names: block for names, block in examples().items() if "--" not in names}
    shown = [name for names in commands for name in names.split(", ")]
    assert len(shown) == len(set(shown))
    # the demo is what all others start from; the hub cannot be reached from a test
    assert set(shown) == subcommands() - {"demo", "tasks push", "tasks pull"}
    assert all(line[0] == "vtk" for block in examples().values() for line in lines(block))
    for names, block in commands.items():
        starts = {" ".join(line[1 : 2 + name.count(" ")]) for line in lines(block) for name in names.split(", ")}
        assert starts >= set(names.split(", ")), names


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which `vtk demo` ran; what it says of itself is checked."""
    root = tmp_path_factory.mktemp("examples")
    run = subprocess.run([sys.executable, "-m", "vtk", "demo", "--json"], capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["shared_ffn_tensors"] == result["ffn_tensors"] == 24
    assert result["saved_per_task_bytes"] > 0.5 * result["full_bytes"]
    for name in ("digits/task/task.json", "parity/task/task.json", "onnx/model.onnx", "profile/report.html"):
        assert (root / "demo-out" / name).is_file()
    return root


@pytest.mark.slow
@pytest.mark.parametrize("names", examples())
def test_the_worked_example_runs(
    names: str, demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(demo)
    for line in lines(examples()[names]):
        code = main(line[1:])
        assert code == 0, f"{shlex.join(line)}: exit code {code}\n{capsys.readouterr().err}"
