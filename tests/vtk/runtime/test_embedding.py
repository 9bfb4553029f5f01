"""``vtk embed``, against timm's own pooled features of images that PIL read."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from safetensors.torch import load_file, save_file

import vtk
from vtk.__main__ import main
from vtk.card import Card, Regime
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model
from vtk.models.pooled_features import without_classifier
from vtk.packs.load import card_metadata
from vtk.packs.pack import save_task
from vtk.runtime.embedding import tables
from vtk.runtime.embedding.config import EmbedConfig
from vtk.runtime.export_facts import Facts

TIMM = {"depth": 2, "embed_dim": 64, "num_heads": 2}
NAME = "vit_tiny_patch16_224"


@dataclass
class Shop:
    """A pack with its base, a checkpoint of the base without classifier, and photographs in class folders."""

    pack: Path
    base: Path
    backbone: Path
    photos: Path
    card: Card

    def features(self, paths: list[Path], weights: str = "pack") -> np.ndarray:
        """Features of a timm model that was built from the files alone."""
        model = timm.create_model(NAME, num_classes=2, img_size=32, **TIMM)
        state = load_file(self.base) | (load_file(self.pack / "task.safetensors") if weights == "pack" else {})
        model.load_state_dict(state)
        transform = eval_transform(self.card.input)
        images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
        with torch.no_grad():
            return model.eval().forward_head(model.forward_features(images), pre_logits=True).numpy()


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    root, rng = tmp_path_factory.mktemp("shop"), np.random.default_rng(0)
    for name in ("a/1", "a/2", "a/10", "b/deep/1", "b/2"):
        (path := root / "photos" / f"{name}.png").parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (36, 44, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(5)
    plain = timm.create_model(NAME, num_classes=2, img_size=32, **TIMM)
    save_file(plain.state_dict(), root / "base.safetensors")
    created = build_model(NAME, num_classes=2, img_size=32, weights=root / "base.safetensors", kwargs=TIMM)
    state = {k: v.clone() for k, v in created.model.state_dict().items()}
    trained = [k for k in state if ".attn." in k or k.startswith("head.")]
    for name in trained:
        state[name] += 0.3 * torch.randn_like(state[name])
    card = Card(created.spec, created.input, ("a", "b"), regime=Regime("fp32", 2, "cpu"))
    save_task(root / "task", state=state, created=created, card=card, trained=trained)
    headless = Card(created.spec, created.input, ())
    without = {k: v for k, v in plain.state_dict().items() if not k.startswith("head.")}
    save_file(without, root / "backbone.safetensors", metadata=card_metadata(headless))
    return Shop(root / "task", root / "base.safetensors", root / "backbone.safetensors", root / "photos", card)


PATHS = ["a/1.png", "a/2.png", "a/10.png", "b/2.png", "b/deep/1.png"]


def read(path: Path) -> tuple[list[str], list[str] | None, np.ndarray]:
    """Paths, labels and rows of a table, by its format's own reader."""
    if path.suffix == ".npz":
        found = np.load(path)
        return found["path"].tolist(), found["label"].tolist() if "label" in found else None, found["embedding"]
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
        columns = [name for name in lines[0] if name not in ("path", "label")]
        rows = np.array([[line[name] for name in columns] for line in lines], np.float32)
        return [x["path"] for x in lines], [x["label"] for x in lines] if "label" in lines[0] else None, rows
    from pyarrow import parquet

    found = parquet.read_table(path)
    labels = found["label"].to_pylist() if "label" in found.column_names else None
    return found["path"].to_pylist(), labels, np.array(found["embedding"].to_pylist(), np.float32)


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code = main(["embed", *map(str, argv), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("suffix", [".parquet", ".npz", ".csv"])
def test_rows_are_timms_features_in_every_format(shop, tmp_path, capsys, suffix):
    out = tmp_path / f"e{suffix}"
    result = run(capsys, shop.pack, shop.photos, "--out", out)
    paths, labels, rows = read(out)
    assert paths == [str(shop.photos / name) for name in PATHS] and labels == list("aaabb")
    np.testing.assert_allclose(rows, shop.features(list(map(Path, paths))), rtol=0, atol=2e-6)
    assert rows.dtype == np.float32
    assert (result["count"], result["width"], result["labelled"], result["skipped"]) == (5, 64, True, [])
    assert list(tmp_path.iterdir()) == [out]


def test_formats_hold_the_same_numbers_and_others_of_a_lower_precision(shop, tmp_path, capsys):
    for name in ("x.parquet", "x.npz", "x.csv"):
        run(capsys, shop.pack, shop.photos, "--out", tmp_path / name, "--normalize")
    one, *others = (read(tmp_path / name)[2] for name in ("x.parquet", "x.npz", "x.csv"))
    assert all(np.array_equal(one, other) for other in others)
    wanted = shop.features([shop.photos / name for name in PATHS])
    np.testing.assert_allclose(one, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-6)
    run(capsys, shop.pack, shop.photos, "--out", tmp_path / "half.npz", "--precision", "bf16", "--normalize")
    half = read(tmp_path / "half.npz")[2]
    assert 1e-4 < np.abs(half - one).max() < 3e-2


def test_files_that_cannot_be_read_are_skipped_counted_and_named(shop, tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    for i, name in enumerate(PATHS):
        (photos / f"{i}.png").write_bytes((shop.photos / name).read_bytes())
    (photos / "1.png").write_bytes(b"no image")
    for workers in (0, 1):  # batches of two: one of them has a row less
        result = run(capsys, shop.pack, photos, "--out", tmp_path / "e.npz", "--workers", workers, "--overwrite")
        paths, labels, rows = read(tmp_path / "e.npz")
        assert [Path(path).name for path in paths] == ["0.png", "2.png", "3.png", "4.png"] and labels is None
        np.testing.assert_allclose(rows, shop.features(list(map(Path, paths))), atol=2e-6)
        assert [Path(bad["path"]).name for bad in result["skipped"]] == ["1.png"]
    with pytest.raises(DataError, match="none of the 1 images"):
        vtk.embed(shop.pack, EmbedConfig(images=photos / "1.png", out=tmp_path / "none.csv"))
    assert not (tmp_path / "none.csv").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_skipped_files_are_those_of_predict(shop, tmp_path, capsys, workers):
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "good.png").write_bytes((shop.photos / PATHS[0]).read_bytes())
    (photos / "cut.png").write_bytes((shop.photos / PATHS[0]).read_bytes()[:400])
    (photos / "empty.jpg").write_bytes(b"")
    mine = run(capsys, shop.pack, photos, "--out", tmp_path / "e.npz", "--workers", workers)["skipped"]
    assert main(["predict", str(shop.pack), str(photos), "--json"]) == 0
    assert mine == json.loads(capsys.readouterr().out)["skipped"] and len(mine) == 2


def test_a_table_and_the_parts_of_a_split_give_their_labels(shop, tmp_path, capsys):
    (table := shop.photos / "labels.csv").write_text("path,labels\na/1.png,x;y\nb/2.png,z\n")
    run(capsys, shop.pack, table, "--out", tmp_path / "e.csv")
    table.unlink()
    assert read(tmp_path / "e.csv")[:2] == ([str(shop.photos / "a/1.png"), str(shop.photos / "b/2.png")], ["x;y", "z"])
    for part, name in (("train", "a"), ("val", "a"), ("train", "b"), ("val", "b")):
        (path := tmp_path / "set" / part / name / f"{part}-{name}.png").parent.mkdir(parents=True)
        path.write_bytes((shop.photos / "a/1.png").read_bytes() + part.encode() + name.encode())
    run(capsys, shop.pack, tmp_path / "set", "--out", tmp_path / "e.csv")
    assert read(tmp_path / "e.csv")[1] == ["a", "b", "a", "b"]
    run(capsys, shop.pack, tmp_path / "set", "--out", tmp_path / "e.csv", "--split", "val", "--no-labels")
    paths, labels, _ = read(tmp_path / "e.csv")
    assert [Path(path).name for path in paths] == ["val-a.png", "val-b.png"] and labels is None


def test_a_backbone_and_a_timm_name_with_weights_need_no_classifier(shop, tmp_path, capsys):
    wanted = shop.features([shop.photos / name for name in PATHS], weights="base")
    run(capsys, shop.backbone, shop.photos, "--out", tmp_path / "e.npz")
    np.testing.assert_allclose(read(tmp_path / "e.npz")[2], wanted, atol=2e-6)
    with pytest.raises(DataError, match=r"backbone without a classifier.*vtk embed"):
        vtk.open_source(shop.backbone)
    torch.manual_seed(0)
    model = timm.create_model("test_vit", pretrained=False).eval()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    run(capsys, "test_vit", shop.photos, "--weights", tmp_path / "w.safetensors", "--out", tmp_path / "t.npz")
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    images = torch.stack([transform(Image.open(shop.photos / name).convert("RGB")) for name in PATHS])
    with torch.no_grad():
        wanted = model.forward_head(model.forward_features(images), pre_logits=True).numpy()
    np.testing.assert_allclose(read(tmp_path / "t.npz")[2], wanted, rtol=1e-5, atol=1e-5)
    vtk.embed(model, EmbedConfig(images=shop.photos, out=tmp_path / "m.npz"))  # of which a copy loses its classifier
    np.testing.assert_allclose(read(tmp_path / "m.npz")[2], wanted, rtol=1e-5, atol=1e-5)
    assert isinstance(model.head, torch.nn.Linear)


@pytest.mark.parametrize(
    "name",
    ["deit_tiny_distilled_patch16_224", "test_convnext", "test_efficientnet",
     *(pytest.param(name, marks=pytest.mark.slow) for name in ("test_vit", "test_resnet", "levit_128s", "eva"))],
)  # fmt: skip
def test_features_are_those_that_the_classifier_reads(name):
    size = {"img_size": 32, "depth": 1} if name.startswith("deit") else {}
    if name == "eva":
        name, size = "eva02_tiny_patch14_224", {"img_size": 28, "depth": 1}
    model = timm.create_model(name, pretrained=False, **size).eval()
    images = torch.randn(2, 3, *([size["img_size"]] * 2 if size else model.default_cfg["input_size"][1:]))
    with torch.no_grad():
        wanted = model.forward_head(model.forward_features(images), pre_logits=True)
        assert torch.equal(without_classifier(model)(images), wanted)


@pytest.mark.parametrize("backend", ["fused", pytest.param("ort-cpu", marks=pytest.mark.slow)])
def test_back_ends_agree(shop, tmp_path, capsys, backend):
    run(capsys, shop.pack, shop.photos, "--out", tmp_path / "e.npz", "--backend", backend)
    wanted = shop.features([shop.photos / name for name in PATHS])
    np.testing.assert_allclose(read(tmp_path / "e.npz")[2], wanted, atol=1e-4)  # ONNX Runtime's own erf


@pytest.fixture
def write_file(shop, tmp_path):
    """Write an ONNX file of our card by hand: the features are the image's mean colour."""

    def write(*outputs: str, batch: str | int = "batch", name: str = "features") -> Path:
        nodes = [
            helper.make_node("GlobalAveragePool", ["pixel_values"], ["mean"]),
            helper.make_node("Flatten", ["mean"], [name]),
            helper.make_node("Slice", [name, "zero", "two", "one"], ["logits"]),
        ]
        numbers = [numpy_helper.from_array(np.array([i]), name) for i, name in enumerate(("zero", "one", "two"))]
        image = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, [batch, 3, 32, 32])
        widths, given = {"features": 3, "logits": 2}, {"features": name, "logits": "logits"}
        results = [helper.make_tensor_value_info(given[output], TensorProto.FLOAT, [batch, widths[output]])
                   for output in outputs]  # fmt: skip
        graph = helper.make_graph(nodes, "by-hand", [image], results, numbers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        facts = Facts(names={"features": name} if name != "features" else {})
        helper.set_model_props(model, {"vtk": shop.card.to_json(), **facts.props()})
        path = tmp_path / f"{'-'.join(outputs)}.onnx"
        onnx.save(model, path)
        return path

    return write


@pytest.mark.parametrize(
    ("outputs", "batch", "backend"),
    [(("features",), 2, "ort-cpu"), (("logits", "features"), "batch", "ort-cpu"), (("features",), "batch", "openvino")],
)
def test_an_exported_file_gives_its_features(shop, tmp_path, capsys, write_file, outputs, batch, backend):
    name = "embedding" if batch == 2 else "features"  # of `--output-name`
    own = ("--backend", backend, "--precision", "fp32") if backend == "openvino" else ()
    result = run(capsys, write_file(*outputs, batch=batch, name=name), shop.photos, "--out", tmp_path / "e.npz", *own)
    transform = eval_transform(shop.card.input)
    images = [transform(Image.open(shop.photos / name).convert("RGB")) for name in PATHS]
    wanted = torch.stack([image.mean((1, 2)) for image in images])
    np.testing.assert_allclose(read(tmp_path / "e.npz")[2], wanted.numpy(), atol=1e-6)
    assert (result["backend"], result["width"]) == (backend, 3)


def test_what_gives_no_features_is_refused(shop, tmp_path, write_file):
    out = tmp_path / "e.npz"
    with pytest.raises(UsageError, match="outputs logits, and no `features`; give the pack"):
        vtk.embed(write_file("logits"), EmbedConfig(images=shop.photos, out=out))
    with pytest.raises(UsageError, match="`bank` gives logits only"):
        vtk.embed(shop.pack, EmbedConfig(images=shop.photos, out=out, backend="bank"))
    with pytest.raises(UsageError, match="Sequential does not say which part is its classifier"):
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        vtk.embed(model, EmbedConfig(images=shop.photos, out=out), img_size=4)
    assert not out.exists()


def test_only_a_table_of_embeddings_is_replaced_and_only_by_a_whole_one(shop, tmp_path, monkeypatch):
    for suffix in (".parquet", ".npz", ".csv"):
        out = tmp_path / f"e{suffix}"
        out.write_text("mine\n")
        config = EmbedConfig(images=shop.photos, out=out)
        with pytest.raises(DataError, match="is not a table of embeddings"):
            vtk.embed(shop.pack, config)
        assert out.read_text() == "mine\n"
        vtk.embed(shop.pack, EmbedConfig(images=shop.photos, out=out, overwrite=True))
        before = out.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(tables, "_GROUP", 64 * 2)  # a row group is on the disk by then
            patch.setattr("vtk.runtime.embedding.embed.labels_of", lambda images: _fails_at("b"))
            with pytest.raises(RuntimeError, match="stop"):  # not the file: one of ours needs no flag
                vtk.embed(shop.pack, config)
        assert out.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def _fails_at(name):
    seen = []

    def label(path):
        seen.append(path)
        if len(seen) > 4 and path.parent.name == name:
            raise RuntimeError("stop")
        return path.parent.name

    return label


def test_row_groups_bound_what_is_in_memory(tmp_path, monkeypatch):
    from pyarrow import parquet

    monkeypatch.setattr(tables, "_GROUP", 40)
    rows = np.arange(90, dtype=np.float32).reshape(9, 10)
    with tables.open_table(tmp_path / "e.parquet", 10, labelled=False, about={"model": "m"}) as table:
        for i in range(9):
            table.add([f"caf\udce9{i}"], [], rows[i : i + 1])
    file = parquet.ParquetFile(tmp_path / "e.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [4, 4, 1]
    assert json.loads(file.schema_arrow.metadata[b"vtk"])["model"] == "m"
    assert file.read()["path"][0].as_py() == "caf\\xe90"
    assert np.array_equal(np.array(file.read()["embedding"].to_pylist()), rows)


def test_it_stays_on_the_cores_it_is_given(shop, tmp_path, monkeypatch):
    core, seen = max(before := os.sched_getaffinity(0)), []
    monkeypatch.setattr("vtk.runtime.embedding.embed.check_out", lambda *a, **k: seen.append(os.sched_getaffinity(0)))
    vtk.embed(shop.pack, EmbedConfig(images=shop.photos / PATHS[0], out=tmp_path / "e.csv", cpus=str(core)))
    assert seen == [{core}] and os.sched_getaffinity(0) == before


def test_names_of_tables_are_checked(shop, tmp_path):
    with pytest.raises(UsageError, match=r"`--out` is \S+e.txt; allowed is a name that ends in .parquet, .npz, .csv"):
        EmbedConfig(images=shop.photos, out=tmp_path / "e.txt")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    """600 rows of 1 MiB in a process that may hold 256 MiB more than it began with."""
    code = """
import resource, sys, numpy as np
from pathlib import Path
from vtk.runtime.embedding.tables import open_table
row = np.ones((1, 1 << 18), np.float32)
with open_table(Path(sys.argv[1]), row.shape[1], labelled=True, about={}) as table:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(600):
        table.add([str(i)], ["x"], row)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    for suffix in (".parquet", ".npz"):
        out = tmp_path / f"e{suffix}"
        run = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True, check=True,
                             env={**os.environ})  # fmt: skip
        assert out.stat().st_size > 500 << 20 or suffix == ".parquet"
        assert int(run.stdout) < 256 << 10, suffix  # KiB
        out.unlink()
