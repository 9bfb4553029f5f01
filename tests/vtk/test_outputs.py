"""Every command that writes: nothing is written over a device, a pipe or a link to nothing, beside another writer, or
over somebody else's file; and without ``--out`` nothing is written into the current folder.
"""

import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vtk._faults import files_below, tree
from vtk.__main__ import main
from vtk.locks import hold_folder, hold_name

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes and sockets among its files")

MADE = Path(__file__).resolve().parents[1] / "fixtures" / "v0_1"
PACK, DATA, BASE = str(MADE / "runs" / "digits" / "task"), str(MADE / "data" / "digits"), str(MADE / "base.safetensors")
_BASE = ("--base", BASE)
_SMALL = ("--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=2", "embed_dim=16", "num_heads=2", "patch_size=8",
          "mlp_ratio=2", "--img-size", "32", "--epochs", "1", "--workers", "0")  # fmt: skip
_QUICK = ("--backends", "eager", "--duration", "0.1", "--batch-sizes", "1")
FOLDERS: dict[str, tuple[str, ...]] = {
    "finetune": ("finetune", DATA, *_SMALL, "--no-pretrained"),
    "finetune tasks": ("finetune", "--task", f"a={DATA}", "--task", f"b={DATA}", *_SMALL, "--no-pretrained"),
    "train": ("train", DATA, *_SMALL, "--no-pretrained"),
    "pretrain": ("pretrain", DATA, *_SMALL, "--method", "mae"),
    "parallelize": ("parallelize", PACK, "--branches", "2", "--data", DATA, *_BASE),
    "export onnx": ("export", "onnx", PACK, *_BASE),
    "export tensorrt": ("export", "tensorrt", PACK, *_BASE),
    "export triton": ("export", "triton", PACK, "--name", "a", *_BASE),
    "export tasks": ("export", "tasks", PACK, f"x={PACK}", *_BASE),
    "profile": ("profile", PACK, *_BASE, *_QUICK),
    "profile sizes": ("profile", "test_vit", "--no-pretrained", "--img-sizes", "32,64", *_QUICK),
    "analyze": ("analyze", PACK, "--data", DATA, "--what", "entropy", *_BASE),
    "eval": ("eval", PACK, DATA, *_BASE),
    "demo": ("demo",),
}
REPLACED: dict[str, tuple[str, ...]] = {
    "tasks convert": ("tasks", "convert", PACK, "--pack-dtype", "bf16", *_BASE),
    "tasks bundle": ("tasks", "bundle", PACK, *_BASE),
    "tasks to-peft": ("tasks", "to-peft", PACK, *_BASE),
    "tasks from-peft": ("tasks", "from-peft", str(MADE / "digits-peft")),
    "tasks pull": ("tasks", "pull", "me/it"),
}
FILES: dict[str, tuple[str, ...]] = {
    "predict": ("predict", PACK, f"{DATA}/val", *_BASE),
    "data audit": ("data", "audit", DATA),
    "tasks merge": ("tasks", "merge", PACK, *_BASE),
}
COMMANDS = {**FOLDERS, **REPLACED, **FILES}
OVERWRITE = {name: () if name == "export triton" else ("--overwrite",) for name in COMMANDS}
OWN = {  # a name that the command writes
    "finetune": "metrics.csv", "finetune tasks": "config.yaml", "train": "model.safetensors", "pretrain": "audit.json",
    "parallelize": "drift.json", "export onnx": "model.json", "export tensorrt": "profile.json",
    "export tasks": "tasks.json", "profile": "latency.png", "profile sizes": "img-64/report.html",
    "analyze": "figures/entropy.png", "eval": "metrics.json", "demo": "demo.json", "tasks convert": "task.json",
    "tasks bundle": "base.safetensors", "tasks to-peft": "README.md", "tasks from-peft": "task.safetensors",
    "tasks pull": "base_tensors.json",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """Run a command that must be refused, and return its one line."""
    assert main([str(word) for word in argv]) == 3, argv
    (line,) = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
    return line


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """What no output may replace, by what is said of it."""
    found = {kind: tmp_path / f"{kind.replace(' ', '-')}.safetensors" for kind in
             ("a named pipe", "a socket", "a link to", "a named pipe behind a link")}  # fmt: skip
    os.mkfifo(found["a named pipe"])
    found["a link to"].symlink_to(tmp_path / "nowhere")
    found["a named pipe behind a link"].symlink_to(found["a named pipe"])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(found["a socket"]))  # an absolute path may be too long for one
        yield found


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_pipe_a_socket_and_a_link_to_nothing_stay_what_they_are(
    name: str, nodes: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there = {p: os.lstat(p) for p in tmp_path.iterdir()}
    for kind, node in nodes.items():
        line = refused(capsys, *COMMANDS[name], "--out", node, *OVERWRITE[name])
        assert f"`--out` {node} is {kind.removesuffix(' behind a link')}" in line
    assert {p: (os.lstat(p).st_ino, os.lstat(p).st_mode) for p in tmp_path.iterdir()} == {
        p: (found.st_ino, found.st_mode) for p, found in there.items()
    }


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "tasks merge"])
def test_a_stream_of_the_shell_is_no_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a stream of a running program" in refused(capsys, *COMMANDS[name], "--out", "/dev/stdout")


@pytest.mark.parametrize("name", list(FOLDERS) + list(FILES))
def test_a_file_is_no_folder_and_a_folder_no_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    if name in FILES:
        out.mkdir()
        assert "is a folder; give a file" in refused(capsys, *COMMANDS[name], "--out", out, *OVERWRITE[name])
        assert "is a file, not a folder" in refused(capsys, *COMMANDS[name], "--out", f"{PACK}/task.json/x.safetensors")
    else:
        out.write_text("mine")
        assert "is a file; give" in refused(capsys, *COMMANDS[name], "--out", out, *OVERWRITE[name])
        assert out.read_text() == "mine"


@pytest.mark.parametrize("name", [*FOLDERS, *REPLACED])
def test_a_folder_that_is_being_written_is_refused_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    held = out.with_name("out.a") if name == "export triton" else out  # of a repository, one model is held
    hold = hold_name if name in REPLACED or name == "export triton" else hold_folder
    with hold(held, "vtk trial"):
        before = sorted(tmp_path.rglob("*"))
        line = refused(capsys, *COMMANDS[name], "--out", out, *OVERWRITE[name])
        assert f"is being written by `vtk trial`, process {os.getpid()} (this process) on " in line
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", list(OWN))
def test_somebody_elses_file_under_a_name_of_ours_stays(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "out" / OWN[name]).parent.mkdir(parents=True)
    file.write_text('{"mine": 1}')
    (tmp_path / "out" / "notes.txt").write_text("mine") if name not in REPLACED else None
    before = tree(tmp_path)
    line = refused(capsys, *COMMANDS[name], "--out", tmp_path / "out", *OVERWRITE[name])
    assert OWN[name] in line and "did not write; move it away, or give another folder" in line
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["predict", "data audit"])
def test_without_out_nothing_is_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("predictions.csv", "audit.html"):
        (tmp_path / "here" / file).write_text("path,label1,score1\n")
    before = tree(tmp_path)
    assert main(list(COMMANDS[name])) == 0
    assert tree(tmp_path) == before


def test_predict_prints_every_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = sorted((MADE / "data").rglob("*.png"))
    assert len(images) > 20
    assert main(["predict", PACK, str(MADE / "data"), *_BASE]) == 0
    text = "".join(capsys.readouterr().out.split())
    assert all("".join(str(image).split())[-12:] in text for image in images) and "more" not in text


def test_a_table_of_labels_is_no_table_of_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "labels.csv"
    for text in ("path,labels,split\na.png,x;y,train\n", "path,label1,weight\n", "", "path,labels,scores"):
        out.write_text(text)
        assert "is not a table of predictions" in refused(capsys, *COMMANDS["predict"], "--out", out)
        assert out.read_text() == text
    out.write_text("path,label1,score1\nold.png,a,1\n")  # of an earlier prediction
    assert main([*COMMANDS["predict"], "--out", str(out)]) == 0
    assert "old.png" not in out.read_text()


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link = tmp_path / "predictions.csv"
    (tmp_path / "disk" / "real.csv").write_text("path,label1,score1\n")
    link.symlink_to(tmp_path / "disk" / "real.csv")
    assert main([*COMMANDS["predict"], "--out", str(link)]) == 0
    assert link.is_symlink() and (tmp_path / "disk" / "real.csv").read_text().startswith("path,label1,score1,label2")


def test_a_copy_that_somebody_keeps_beside_a_pack_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vtk.files.exchange", lambda a, b: False)  # a system where the old folder is moved aside first
    (copy := tmp_path / "pack.old").mkdir()
    (copy / "task.json").write_text("mine")
    for more in ((), ("--overwrite",)):
        assert main([*COMMANDS["tasks convert"], "--out", str(tmp_path / "pack"), *more]) == 0
    assert (copy / "task.json").read_text() == "mine" and sorted(os.listdir(tmp_path)) == ["here", "pack", "pack.old"]


@pytest.mark.parametrize("name", [
    "eval", *(pytest.param(name, marks=pytest.mark.slow) for name in
                         ("profile", "profile sizes", "analyze", "parallelize", "export onnx"))
])  # fmt: skip
def test_a_disk_that_fills_leaves_the_earlier_set(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever file is the first that no longer fits: small ones are written, larger ones are not."""
    out = tmp_path / "out"
    assert main([*COMMANDS[name], "--out", str(out)]) == 0
    before = tree(out)
    sizes = sorted({len(data) for data in before.values()})
    for size in {10, sizes[len(sizes) // 2] // 2, sizes[-1] // 2}:  # another run's are about as large
        with files_below(size):
            assert main([*COMMANDS[name], "--out", str(out), "--overwrite"]) == 3, size
        (line,) = [line for line in capsys.readouterr().err.splitlines() if ": error: " in line]
        assert "cannot write" in line and os.strerror(errno.EFBIG) in line
        assert {n: data for n, data in tree(out).items() if not n.startswith(".vtk-waiting")} == before
    assert main([*COMMANDS[name], "--out", str(out), "--overwrite"]) == 0
    assert set(tree(out)) == set(before)
