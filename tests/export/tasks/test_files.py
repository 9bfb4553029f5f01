"""The form ``files``: one .onnx per task, one file of shared weights."""

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file

import vtk_export.graph.convert
from vtk.__main__ import main
from vtk.errors import DataError
from vtk.formats import read_json
from vtk.packs.load import load_task
from vtk.runtime import load_backend, open_source

FC = ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight")


def _logits(path: Path, images: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(["logits"], {"pixel_values": images.numpy()})[0]


def test_every_tasks_ffn_is_the_same_bytes_of_one_file(files: Any, lab: Any) -> None:
    base = load_file(lab.base())
    shared = (files.out / files.index["shared"]["file"]).read_bytes()
    places: dict[str, set[tuple[str, int, int]]] = {}
    for name, task in files.index["tasks"].items():
        external = files.external(task["file"])
        assert {location for location, _, _ in external.values()} == {files.index["shared"]["file"]}
        dims = {
            t.name: list(t.dims)
            for t in onnx.load(files.out / task["file"], load_external_data=False).graph.initializer
        }
        places[name] = {external[key] for key in external if dims[key] in ([32, 128], [128, 32])}
        assert all(offset % 4096 == 0 for _, offset, _ in external.values())
    assert places["pets"] == places["cb"] == places["wide"]
    held = {shared[offset : offset + length] for _, offset, length in places["pets"]}
    # torch's exporter stores the matrices of a product as (in, out)
    assert held == {base[key].t().contiguous().numpy().tobytes() for key in FC}


def test_each_distinct_tensor_is_stored_once_and_nothing_of_a_task_is_shared(files: Any, lab: Any) -> None:
    shared = (files.out / files.index["shared"]["file"]).read_bytes()
    ranges = sorted(
        {(o, n) for task in files.index["tasks"].values() for _, o, n in files.external(task["file"]).values()}
    )
    assert len({shared[o : o + n] for o, n in ranges}) == len(ranges)
    assert all(o + n <= following for (o, n), (following, _) in itertools.pairwise(ranges))
    assert ranges[-1][0] + ranges[-1][1] == len(shared) == files.index["shared"]["bytes"]
    own = load_file(lab.root / "pets" / "task" / "task.safetensors")
    for key in ("blocks.0.attn.qkv.weight", "pos_embed", "head.weight"):
        assert own[key].numpy().tobytes() not in shared
        assert own[key].t().contiguous().numpy().tobytes() not in shared if own[key].ndim == 2 else True


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_files_give_their_tasks_logits(files: Any, lab: Any, tools: Any, batch: int) -> None:
    for name, classes, size in (("pets", 3, (32, 32)), ("wide", 2, (32, 48))):
        images = tools.images(batch, size)
        with torch.no_grad():
            expected = lab.timm(name, classes, size)(images)
        np.testing.assert_allclose(
            _logits(files.out / f"{name}.onnx", images), expected, atol=1e-4 * expected.abs().max()
        )


def test_context_broadcasting_is_in_the_file_of_the_task_that_has_it(
    files: Any, packs: Any, lab: Any, tools: Any
) -> None:
    images = tools.images(3)
    with torch.no_grad():
        expected = load_task(packs["cb"] / "task").model(images)
        without = lab.timm("cb", 4)(images)
    assert (expected - without).abs().max() > 0.05 * expected.abs().max()
    np.testing.assert_allclose(_logits(files.out / "cb.onnx", images), expected, atol=1e-4 * expected.abs().max())


def test_index_cards_and_gate(files: Any) -> None:
    index = files.index
    assert list(index["tasks"]) == files.result["tasks"] == ["pets", "cb", "wide"]
    assert index["format"] == 1
    assert index["gathered"] is None
    assert index["files"] == sorted(p.name for p in files.out.iterdir() if p.name != "tasks.json")
    for name, task in index["tasks"].items():
        card = read_json(files.out / task["card"])
        assert task["classes"] == card["classes"] == [f"{name}{i}" for i in range(len(card["classes"]))]
        assert (task["height"], task["width"]) == (card["input"]["height"], card["input"]["width"])
        assert card["base"] is None
    assert index["tasks"]["wide"]["width"] == 48
    rows = files.result["verified"]
    assert {(r["task"], r["against"], r["batch"]) for r in rows} == {
        (name, against, batch) for name in index["tasks"] for against in ("torch", "bank") for batch in (1, 2, 3)
    }
    assert all(r["passed"] and r["images"] == r["batch"] for r in rows)
    total = sum(p.stat().st_size for p in files.out.iterdir())
    assert files.result["size_bytes"] == total
    assert "Warning" not in files.stderr


def test_a_moved_folder_still_works(files: Any, lab: Any, tools: Any, tmp_path: Path) -> None:
    moved = tmp_path / "else where"
    shutil.copytree(files.out, moved)
    images = tools.images(2)
    np.testing.assert_array_equal(_logits(moved / "pets.onnx", images), _logits(files.out / "pets.onnx", images))
    (moved / files.index["shared"]["file"]).unlink()
    with pytest.raises(Exception, match="shared-"):
        _logits(moved / "pets.onnx", images)


def test_weights_that_are_not_whole_are_noticed(files: Any, tmp_path: Path) -> None:
    moved = tmp_path / "out"
    shutil.copytree(files.out, moved)
    shared = moved / files.index["shared"]["file"]
    whole = bytearray(shared.read_bytes())
    assert open_source(moved / "pets.onnx").kind == "onnx"
    whole[len(whole) // 2] ^= 1
    for data, told in ((bytes(whole), "is damaged"), (bytes(whole[:-1]), f"has {len(whole) - 1} bytes")):
        shared.write_bytes(data)
        with pytest.raises(DataError, match=told):
            open_source(moved / "pets.onnx")
    shared.unlink()
    with pytest.raises(DataError, match="which is not beside it; keep the files of an export together"):
        open_source(moved / "pets.onnx")


def test_predict_takes_a_tasks_file(
    files: Any, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(files.out / "pets.onnx"), str(photos), "--out", str(tmp_path / "p.csv"), "--json"]
    assert main(["predict", *argv]) == 0
    assert '"pets2"' in capsys.readouterr().out


@pytest.mark.slow
def test_eval_and_profile_take_a_tasks_file(
    files: Any, packs: dict[str, Path], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(files.out / "pets.onnx")
    argv = [file, str(photos), "--reference", str(packs["pets"]), "--out", str(tmp_path / "eval"), "--json"]
    assert main(["eval", *argv]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["count"] == 6
    assert main(["profile", file, "--batch-sizes", "1,2", "--duration", "0.1", "--json"]) == 0
    assert "ort-cpu" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_without_prepacking_sessions_map_the_shared_file_and_compute_the_same(files: Any, tools: Any) -> None:
    images = tools.images(2)
    mapped = [load_backend("ort-cpu", open_source(files.out / f"{n}.onnx"), prepack=False) for n in ("pets", "cb")]
    results = [backend.run({"pixel_values": images})["logits"] for backend in mapped]
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "shared-" in line]
    bounds = [line.split()[0].split("-") for line in lines]
    ffn_bytes = 2 * 32 * 128 * 4
    assert sum(int(end, 16) - int(start, 16) for start, end in bounds) >= 2 * ffn_bytes
    assert len({line.split()[4] for line in lines}) == 1  # one inode: the pages are in memory once
    for name, result in zip(("pets", "cb"), results, strict=True):
        np.testing.assert_allclose(result, _logits(files.out / f"{name}.onnx", images), atol=1e-3)


def test_parallel_branches_are_merged_and_their_ffns_still_shared(lab: Any, tools: Any, tmp_path: Path) -> None:
    base, how = lab.base("base2", depth=2), {"transforms": (tools.transforms["parallel"],), "depth": 2}
    named = [f"{name}={lab.pack(f'par-{name}', n, base=base, **how)}" for name, n in (("a", 2), ("b", 3))]
    done = tools.run_export(*named, "--out", tmp_path / "out")
    a, b = done.external("a.onnx"), done.external("b.onnx")
    merged = {place for place in a.values() if place[2] == 2 * 32 * 128 * 4}
    assert len(merged) == 2
    assert merged <= set(b.values())
    images = tools.images(3)
    with torch.no_grad():
        expected = load_task(lab.root / "par-b" / "task").model(images)
    np.testing.assert_allclose(_logits(done.out / "b.onnx", images), expected, atol=1e-4 * expected.abs().max())


def test_own_weights_above_protobufs_limit_go_beside(
    lab: Any, packs: dict[str, Path], tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vtk_export.tasks.build.INLINE_LIMIT", 1000)
    done = tools.run_export(packs["pets"], packs["cars"], "--form", "both", "--out", tmp_path / "out")
    stems = {name.rpartition("-")[0] for name in done.index["files"] if name.endswith(".data")}
    assert stems == {"shared", "pets", "cars", "gathered"}
    for stem in ("pets", "gathered"):
        assert {place[0].rpartition("-")[0] for place in done.external(f"{stem}.onnx").values()} == {"shared", stem}
    images = tools.images(2)
    with torch.no_grad():
        expected = lab.timm("pets", 3)(images)
    np.testing.assert_allclose(_logits(done.out / "pets.onnx", images), expected, atol=1e-4 * expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, True], ids=["as-it-is", "fused"])
def test_torchs_exporter_writes_equal_weights_as_equal_bytes(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: Any, fuse: bool
) -> None:
    """Every graph of parallel and of deep models is converted by itself here; elsewhere weights are put in."""
    monkeypatch.setattr("vtk_export.tasks.build.convert", vtk_export.graph.convert.convert)
    base, how = lab.base("base2", depth=2), {"transforms": (tools.transforms["parallel"],), "depth": 2}
    for kind, options in (("parallel", how), ("deep", {"depth": 2})):
        named = [f"{n}={lab.pack(f'{kind}-{n}', k, base=base, **options)}" for n, k in (("a", 2), ("b", 3))]
        done = tools.run_export(*named, "--out", tmp_path / kind, "--fuse" if fuse else "--no-fuse")
        assert all(file["shared_bytes"] >= 4 * 32 * 128 * 4 for file in done.result["files"])
