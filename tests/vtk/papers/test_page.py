"""The example of docs/guides/alternet.md does what the page says, on a few digits."""

import json
import re
import shlex
from pathlib import Path

import pytest

from vtk.__main__ import main
from vtk.data import write_digits

PAGE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "alternet.md"


@pytest.mark.slow
def test_the_commands_of_the_page_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8").partition("## AlterNet")[0], re.M | re.S)
    lines = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    monkeypatch.chdir(tmp_path)
    write_digits(Path("demo-out/data/digits"), limit=5)
    for program, *arguments in lines:
        assert program == "vtk"
        assert main([*arguments, "--json"]) == 0, arguments
    printed = capsys.readouterr()
    assert "is an alternet_18_cifar for 32×32 px" in " ".join(printed.err.split())
    seen = [json.loads(line) for line in printed.out.splitlines()]
    assert len(seen) == len(lines) == 6
    trained = json.loads(Path("runs/attention/census.json").read_text())["groups"]
    assert trained["attention"]["frozen"] == 0 and trained["other"]["trained"] == 0
    assert Path("exports/alternet/model.onnx").is_file()
