"""`vtk tasks list` reads cards and nothing else: no torch, no weights, whatever lies in the folders."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vtk.__main__ import main
from vtk.errors import DataError
from vtk.packs.cards import CARD, find_packs, read_card

MADE = Path(__file__).resolve().parents[2] / "fixtures" / "v0_1"
PACK, MERGED = MADE / "runs" / "digits" / "task", MADE / "digits.safetensors"


def packs(root: Path, count: int) -> Path:
    """Make run folders with a pack in each."""
    for i in range(count):
        shutil.copytree(PACK, root / f"run{i:04d}" / "task", copy_function=os.link)
    return root


def command(*words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, "-m", "vtk", *words], capture_output=True, text=True, check=True, env=env)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from vtk.__main__ import main; from vtk.packs import read_card\n"
        "main(['tasks', 'list', sys.argv[1]]); read_card(Path(sys.argv[2]))\n"
        "print(sorted({'torch', 'numpy', 'timm'} & sys.modules.keys()))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", code, str(packs(tmp_path, 1)), str(MERGED)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.splitlines()[-1] == "[]" and "1 packs" in done.stdout


def test_damaged_packs_are_named_and_the_others_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = packs(tmp_path, 3)
    broken = {
        "no-json": "{", "a-list": "[]", "deep": "[" * 5000, "newer": '{"schema": 99}', "empty": "",
        "other": json.dumps({"schema": 1, "model": {"name": "\x1b[2J"}}),
    }  # fmt: skip
    for name, text in broken.items():
        (root / name).mkdir()
        (root / name / CARD).write_text(text)
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / CARD)
    (root / "folder" / CARD).mkdir(parents=True)
    (root / "circle").symlink_to(root)
    assert main(["tasks", "list", str(root), "--json"]) == 0
    out, err = capsys.readouterr()
    assert [Path(pack["path"]).parent.name for pack in json.loads(out)["packs"]] == ["run0000", "run0001", "run0002"]
    for name in (*broken, "pipe"):
        assert "warning: skipped: " in err and str(root / name) in err
    assert "\x1b" not in err


def test_a_listing_is_sorted(tmp_path: Path) -> None:
    for i in range(100):
        (tmp_path / f"{99 - i:03d}" / "task").mkdir(parents=True)
        os.link(PACK / CARD, tmp_path / f"{99 - i:03d}" / "task" / CARD)
    (tmp_path / "x.tmp-1" / "task").mkdir(parents=True)
    (tmp_path / "x.tmp-1" / "task" / CARD).touch()
    found = list(find_packs(tmp_path))
    assert [path.parent.name for path in found] == [f"{i:03d}" for i in range(100)]


@pytest.mark.parametrize("header", ['{"__metadata__": []}', '{"__metadata__": {"vtk": 3}}', "[]", '{"a": {}}'])
def test_a_header_of_another_kind_has_no_card(tmp_path: Path, header: str) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(DataError):
        read_card(file)


@pytest.mark.slow
@pytest.mark.timing
def test_a_hundred_packs_take_at_most_three_times_the_help(tmp_path: Path) -> None:
    """Interleaved, the median of seven."""
    root, ratios = packs(tmp_path, 100), []
    for _ in range(7):
        times = []
        for words in (("tasks", "list", str(root)), ("tasks", "--help")):
            start = time.perf_counter()
            command(*words)
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    assert statistics.median(ratios) <= 3, ratios
