"""README and the worked examples of the documents do what the documents say; the examples on what `vtk demo` leaves."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vtk._readme import REPO, RUNNERS, Newcomer, blocks, fill_hub_cache, lines, make_folder
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


def test_every_command_has_a_worked_example() -> None:
    # `finetune --sam` shows a flag, in addition
    commands = {names: block for names, block in examples().items() if "--" not in names}
    shown = [name for names in commands for name in names.split(", ")]
    assert len(shown) == len(set(shown))
    # the demo is what all others start from; the hub and a server cannot be reached from here (tests/server has one)
    assert set(shown) == subcommands() - {"demo", "tasks push", "tasks pull", "profile --server"}
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
    (root / "printed.txt").write_text(run.stderr, encoding="utf-8")
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


README = blocks((REPO / "README.md").read_text("utf-8"))


def test_every_block_of_readme_is_one_that_a_test_runs() -> None:
    fences = re.findall(r"^ *(?:```|~~~)", (REPO / "README.md").read_text("utf-8"), re.M)
    assert len(fences) == 2 * len(README) > 12
    for language, text in README:
        assert language in ("sh", "python", "text"), f"```{language} is run by no test: {text}"
        if language == "sh":
            unknown = {line[0] for line in lines(text)} - RUNNERS.keys()
            assert not unknown, f"{unknown} is run by no test: {text}"


def test_blocks_are_found_however_they_are_fenced() -> None:
    text = "a\n```sh\nb\n```\n~~~python\nc\n~~~\n- d\n  ```\n  e\n  ```\n```console title=x\n$ f\n```\n"
    assert [language for language, _ in blocks(text)] == ["sh", "python", "", "console title=x"]


def test_readme_is_as_long_as_agreed_and_names_targets_that_exist() -> None:
    text = (REPO / "README.md").read_text("utf-8")
    assert len(text.split()) <= 1100  # as `wc -w` counts: code, tables and links included
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text("utf-8"), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


@pytest.fixture(scope="module")
def newcomer(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    """Somebody who has run the demo and has two folders of photographs; the hub's weights are in the client's cache."""
    root = tmp_path_factory.mktemp("readme")
    make_folder(root)
    fill_hub_cache(root / "hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root / "hub"))
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setenv("VTK_HOME", str(root / "home"))
        before = os.getcwd()
        os.chdir(root)
        yield Newcomer(root, (demo / "printed.txt").read_text("utf-8"))
        os.chdir(before)


@pytest.mark.slow
@pytest.mark.parametrize(("language", "text"), README, ids=lambda text: text.strip().splitlines()[0][:40])
def test_readme_runs_from_the_first_block_to_the_last(language: str, text: str, newcomer: Newcomer) -> None:
    newcomer.run(language, text)
