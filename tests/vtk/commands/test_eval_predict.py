"""``vtk eval`` and ``vtk predict`` from the command line, against a plain loop over timm, PIL and NumPy."""

import csv
import dataclasses
import json
import math
import shutil
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

from vtk.__main__ import main
from vtk.card import Card, Regime
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.formats import write_json
from vtk.models.create import Created, build_model
from vtk.packs.cards import read_card
from vtk.packs.pack import save_task

CLASSES = ("red", "green", "blue", "grey")  # on purpose not in alphabetical order
COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200), "grey": (120, 120, 120)}
TIMM = {"depth": 2, "embed_dim": 64, "num_heads": 2}


@dataclass
class Shop:
    """A trained pack with a base file, and photographs."""

    created: Created
    card: Card
    pack: Path
    photos: Path

    def logits(self, paths: list[Path], dtype: torch.dtype = torch.float32, batch: int = 4) -> np.ndarray:
        """Logits of a timm model that was built from the pack's and the base's files alone."""
        model = timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32, **TIMM)
        state = load_file(self.pack.parent / "base.safetensors") | load_file(self.pack / "task.safetensors")
        model.load_state_dict(state, strict=True)
        model.to(dtype).eval()
        transform = eval_transform(self.card.input)
        images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths]).to(dtype)
        with torch.no_grad():
            return torch.cat([model(part).float() for part in images.split(batch)]).numpy()

    def files(self, part: str) -> list[tuple[Path, int]]:
        return [(p, CLASSES.index(p.parent.name)) for p in sorted((self.photos / part).glob("*/*.png"))]


def _photos(folder: Path, per_class: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = np.clip(np.array(colour) * rng.uniform(0.4, 1.2) + rng.normal(0, 60, (36, 44, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    root = tmp_path_factory.mktemp("shop")
    _photos(root / "photos" / "train", 3, seed=0)
    _photos(root / "photos" / "val", 5, seed=1)
    torch.manual_seed(5)
    plain = timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32, **TIMM)
    save_file(plain.state_dict(), root / "base.safetensors")
    created = build_model(
        "vit_tiny_patch16_224", num_classes=4, img_size=32, weights=root / "base.safetensors", kwargs=TIMM
    )
    state = {k: v.clone() for k, v in created.model.state_dict().items()}
    trained = [k for k in state if ".attn." in k or k.startswith("head.")]
    for name in trained:
        state[name] += torch.randn_like(state[name]) * (0.2 if "attn" in name else 2.0)
    data = {"layout": "split", "val_split": 0.2, "seed": 0, "root": "photos"}
    card = Card(created.spec, created.input, CLASSES, data=data, regime=Regime("fp32", 4, "cpu"))
    save_task(root / "task", state=state, created=created, card=card, trained=trained)
    result = Shop(created, read_card(root / "task"), root / "task", root / "photos")
    files = result.files("val")
    top1 = float(np.mean(result.logits([p for p, _ in files]).argmax(1) == [label for _, label in files]))
    assert 0.1 < top1 < 0.9, "the figure must be able to be wrong"
    result.card = dataclasses.replace(result.card, metrics={"top1": top1})
    write_json(root / "task" / "task.json", result.card.to_dict())
    return result


@pytest.fixture
def bf16_pack(shop: Shop, tmp_path: Path) -> Path:
    """The same pack, whose card says that it was evaluated in bf16."""
    folder = tmp_path / "bf16" / "task"
    folder.mkdir(parents=True)
    for file in shop.pack.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    files = shop.files("val")
    logits = shop.logits([p for p, _ in files], torch.bfloat16)
    top1 = float(np.mean(logits.argmax(1) == [label for _, label in files]))
    card = dataclasses.replace(shop.card, regime=Regime("bf16", 4, "cpu"), metrics={"top1": top1})
    write_json(folder / "task.json", card.to_dict())
    return folder


def _onnx(path: Path, card: Card | None) -> np.ndarray:
    """Write logits = mean colour × weight; returns the weight (3, 4)."""
    weight = np.random.default_rng(3).normal(size=(3, 4)).astype(np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["pixel_values"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "by-hand",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    if card is not None:
        helper.set_model_props(model, {"vtk": card.to_json()})
    onnx.save(model, path)
    return weight


def _json(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def test_eval_of_a_pack_is_the_training_metric(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    files = shop.files("val")
    logits = shop.logits([p for p, _ in files])
    truth = np.array([label for _, label in files])
    confusion = np.zeros((4, 4), int)
    np.add.at(confusion, (truth, logits.argmax(1)), 1)
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    loss = np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(truth)), truth])
    result = _json(capsys, "eval", shop.pack, shop.photos)
    assert result["top1"] == result["training_top1"] == shop.card.metrics["top1"]
    assert result["confusion"] == confusion.tolist()
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    assert [row["name"] for row in result["per_class"]] == list(CLASSES)
    assert (result["count"], result["split"], result["backend"], result["precision"]) == (20, "val", "eager", "fp32")
    assert result["agreement"] is None
    assert result["same_conditions"]


def test_eval_in_the_bf16_regime_needs_no_flags(
    shop: Shop, bf16_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = shop.files("val")
    logits = torch.from_numpy(shop.logits([p for p, _ in files], torch.bfloat16))
    loss = torch.nn.functional.cross_entropy(logits.double(), torch.tensor([label for _, label in files]))
    result = _json(capsys, "eval", bf16_pack, shop.photos)
    assert result["precision"] == "bf16"
    assert result["top1"] == result["training_top1"]
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-12)


def test_eval_in_another_precision_reports_agreement(
    shop: Shop, bf16_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [p for p, _ in shop.files("val")]
    agree = np.mean(shop.logits(paths).argmax(1) == shop.logits(paths, torch.bfloat16).argmax(1))
    result = _json(capsys, "eval", bf16_pack, shop.photos, "--precision", "fp32")
    assert result["precision"] == "fp32"
    assert not result["same_conditions"]
    assert result["training_top1"] == read_card(bf16_pack).metrics["top1"]
    assert result["agreement"] == agree
    assert result["reference"] == "bf16 (eager, bf16, cpu)"


def test_eval_says_when_the_metric_is_not_the_training_runs(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(shop.pack), str(shop.photos)]) == 0
    assert "top-1 is exactly the training run's" in capsys.readouterr().out
    worse = dataclasses.replace(shop.card, metrics={"top1": 0.99})
    write_json(shop.pack / "task.json", worse.to_dict())
    try:
        assert main(["eval", str(shop.pack), str(shop.photos)]) == 0
        assert "the training run's top-1 was 99.00 %" in capsys.readouterr().err
        rounded = dataclasses.replace(worse, pack={**worse.pack, "converted_from": "bf16"})
        write_json(shop.pack / "task.json", rounded.to_dict())
        assert main(["eval", str(shop.pack), str(shop.photos)]) == 0
        said = capsys.readouterr()
        assert "the training run's top-1 was 99.00 %, in bf16; this pack is rounded to fp32" in said.out
        assert "another torch" not in said.err
        compressed = dataclasses.replace(shop.card, pack={**shop.card.pack, "compression": {"rank": 4}})
        write_json(shop.pack / "task.json", compressed.to_dict())
        assert main(["eval", str(shop.pack), str(shop.photos)]) == 0
        assert "top-1 is exactly the compressed pack's when it was compressed" in capsys.readouterr().out
    finally:
        write_json(shop.pack / "task.json", shop.card.to_dict())


def test_eval_splits(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    counts = {}
    for split in ("val", "train", "all"):
        counts[split] = _json(capsys, "eval", shop.pack, shop.photos, "--split", split)["count"]
    assert counts == {"val": 20, "train": 12, "all": 32}


def test_eval_of_a_flat_folder_repeats_the_training_runs_split(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vtk.data.audit.folder_scan import scan

    data = {"layout": "flat", "val_split": 0.4, "seed": 7, "root": "val"}
    flat = shop.photos / "val"
    pack = tmp_path / "task"
    pack.mkdir()
    for file in shop.pack.iterdir():
        (pack / file.name).write_bytes(file.read_bytes())
    held_out = scan(flat, val_split=0.4, seed=7).val  # as a training run divides it, in its own order of classes
    logits = shop.logits([s.path for s in held_out])
    top1 = float(np.mean(logits.argmax(1) == [CLASSES.index(s.path.parent.name) for s in held_out]))
    write_json(pack / "task.json", dataclasses.replace(shop.card, data=data, metrics={"top1": top1}).to_dict())
    assert main(["eval", str(pack), str(flat)]) == 0
    out = capsys.readouterr().out
    assert "divided as in the training run (val_split 0.4, seed 7)" in out
    result = _json(capsys, "eval", pack, flat)
    assert (result["count"], result["top1"], result["training_top1"]) == (8, top1, top1)
    assert _json(capsys, "eval", pack, flat, "--split", "all")["count"] == 20
    # a pack whose training folder had its own val/ knows no division: every image counts
    assert _json(capsys, "eval", shop.pack, flat)["count"] == 20


def test_eval_writes_its_files_and_refuses_a_folder_in_use(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eval"
    result = _json(capsys, "eval", shop.pack, shop.photos, "--out", out)
    assert json.loads((out / "metrics.json").read_text()) == result
    with (out / "per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == list(CLASSES)
    assert [int(row["count"]) for row in rows] == [5, 5, 5, 5]
    assert Image.open(out / "confusion.png").size[0] > 100
    assert main(["eval", str(shop.pack), str(shop.photos), "--out", str(out)]) == 3
    assert "not empty" in capsys.readouterr().err
    assert main(["eval", str(shop.pack), str(shop.photos), "--out", str(out), "--overwrite"]) == 0


def test_eval_of_an_onnx_with_a_reference(
    shop: Shop, bf16_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = _onnx(tmp_path / "m.onnx", dataclasses.replace(shop.card, base=None))
    files = shop.files("val")
    transform = eval_transform(shop.card.input)
    images = np.stack([transform(Image.open(p).convert("RGB")).numpy() for p, _ in files])
    best = (images.mean((2, 3)) @ weight).argmax(1)
    agree = np.mean(best == shop.logits([p for p, _ in files]).argmax(1))
    # the reference is run in the file's fp32, also where it was trained in bf16
    result = _json(capsys, "eval", tmp_path / "m.onnx", shop.photos, "--reference", bf16_pack)
    assert result["reference"] == "bf16 (eager, fp32, cpu)"
    assert (result["backend"], result["provider"]) == ("ort-cpu", "CPUExecutionProvider")
    assert result["top1"] == np.mean(best == [label for _, label in files])
    assert result["agreement"] == agree
    assert _json(capsys, "eval", tmp_path / "m.onnx", shop.photos)["agreement"] is None


@pytest.mark.parametrize(("fraction", "warned"), [(0.9985, True), (0.9995, False)])
def test_a_plain_onnx_that_disagrees_with_its_reference_is_warned_of(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    fraction: float, warned: bool,
) -> None:  # fmt: skip
    from vtk.runtime.agreement import Agreement

    _onnx(tmp_path / "m.onnx", dataclasses.replace(shop.card, base=None))
    monkeypatch.setattr(Agreement, "fraction", fraction)
    assert main(["eval", str(tmp_path / "m.onnx"), str(shop.photos), "--reference", str(shop.pack)]) == 0
    out, err = capsys.readouterr()
    line = f"(eager, fp32, cpu): {100 * fraction:.2f} % of the images"
    assert (line in err, line in out) == (warned, not warned)
    assert ("an fp32 file should reach 99.9 %" in err) == warned


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--backend", "ort-cuda"], 5, "CUDA"),
        (["--backend", "server"], 5, "not in this version"),
        (["--device", "cuda"], 5, "CUDA"),
        (["--batch-size", "0"], 2, "`--batch-size` is 0"),
        (["--reference", "no/such"], 3, "does not exist"),
    ],
)
def test_eval_refusals(
    shop: Shop, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, message: str
) -> None:
    if torch.cuda.is_available() and "cuda" in " ".join(flags):
        pytest.skip("there is CUDA here")
    assert main(["eval", str(shop.pack), str(shop.photos), *flags]) == code
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_bare_onnx_has_no_classes_to_map(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _onnx(tmp_path / "bare.onnx", None)
    for command in ("eval", "predict"):
        assert main([command, str(tmp_path / "bare.onnx"), str(shop.photos)]) == 2
        assert f"`vtk {command}`: bare.onnx carries no vtk card" in capsys.readouterr().err


def test_class_folders_are_matched_by_name(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("blue", "red"):
        (tmp_path / "two" / name).mkdir(parents=True)
        for file in (shop.photos / "val" / name).iterdir():
            (tmp_path / "two" / name / file.name).write_bytes(file.read_bytes())
    result = _json(capsys, "eval", shop.pack, tmp_path / "two")
    logits = shop.logits(sorted((tmp_path / "two").glob("*/*.png")))
    assert result["top1"] == np.mean(logits.argmax(1) == [2] * 5 + [0] * 5)
    (tmp_path / "two" / "blue").rename(tmp_path / "two" / "purple")
    assert main(["eval", str(shop.pack), str(tmp_path / "two")]) == 3
    assert "purple" in capsys.readouterr().err


def test_predict_writes_the_most_likely_labels(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [p for p, _ in shop.files("val")]
    logits = shop.logits(paths).astype(np.float64)
    scores = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    out = tmp_path / "p.csv"
    result = _json(capsys, "predict", shop.pack, shop.photos / "val", "--top-k", 2, "--out", out)
    with out.open() as file:
        rows = {Path(row["path"]): row for row in csv.DictReader(file)}
    assert list(rows[paths[0]]) == ["path", "label1", "score1", "label2", "score2"]
    for path, score in zip(paths, scores, strict=True):
        first, second = np.argsort(-score)[:2]
        assert (rows[path]["label1"], rows[path]["label2"]) == (CLASSES[first], CLASSES[second])
        assert float(rows[path]["score1"]) == pytest.approx(score[first], abs=1e-5)
    assert len(rows) == result["count"] == 20
    assert {Path(p["path"]): p["labels"][0] for p in result["predictions"]} == {
        path: row["label1"] for path, row in rows.items()
    }


def test_predict_of_one_image_and_more_labels_than_classes(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = shop.photos / "val" / "red" / "0.png"
    assert main(["predict", str(shop.pack), str(image)]) == 0
    assert "\n1 image on " in capsys.readouterr().out
    result = _json(capsys, "predict", shop.pack, image, "--top-k", 9, "--out", tmp_path / "one.csv")
    assert len(result["predictions"]) == 1
    assert sorted(result["predictions"][0]["labels"]) == sorted(CLASSES)
    assert sum(result["predictions"][0]["scores"]) == pytest.approx(1)


def test_predict_skips_what_it_cannot_read(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "a.png").write_bytes((shop.photos / "val" / "red" / "0.png").read_bytes())
    (mixed / "bad.jpg").write_bytes(b"not an image")
    out = tmp_path / "p.csv"
    assert main(["predict", str(shop.pack), str(mixed), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert f"skipped {mixed / 'bad.jpg'}" in printed.err
    assert "1 skipped" in printed.out
    assert len(out.read_text().splitlines()) == 2
    (mixed / "a.png").unlink()
    out.unlink()
    assert main(["predict", str(shop.pack), str(mixed), "--out", str(out)]) == 3
    assert "none of the 1 images" in capsys.readouterr().err
    assert list(tmp_path.glob("*.csv*")) == []


def test_predict_replaces_only_its_own_tables(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = shop.photos / "val" / "red" / "0.png"
    out = tmp_path / "p.csv"
    for _ in range(2):
        assert main(["predict", str(shop.pack), str(image), "--out", str(out)]) == 0
    out.write_text("name,price\n")
    assert main(["predict", str(shop.pack), str(image), "--out", str(out)]) == 3
    assert "not a table of predictions" in capsys.readouterr().err
    assert out.read_text() == "name,price\n"
    assert main(["predict", str(shop.pack), str(image), "--out", str(out), "--overwrite"]) == 0
    assert out.read_text().startswith("path,label1,score1")


def test_a_reference_must_be_the_same_task(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = dataclasses.replace(shop.card, base=None, classes=tuple(sorted(CLASSES)))
    _onnx(tmp_path / "other.onnx", card)
    assert main(["eval", str(tmp_path / "other.onnx"), str(shop.photos), "--reference", str(shop.pack)]) == 2
    assert "has other classes" in capsys.readouterr().err
    assert main(["eval", str(shop.pack), str(shop.photos), "--reference", str(tmp_path / "other.onnx")]) == 2
    assert "is an ONNX file; give a pack" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_a_model_whose_numbers_are_not_finite_gives_no_labels(
    shop: Shop, tmp_path: Path, command: str, capsys: pytest.CaptureFixture
) -> None:
    pack = tmp_path / "task"
    shutil.copytree(shop.pack, pack)
    state = load_file(pack / "task.safetensors")
    state["head.weight"][0] = 3e38  # finite, its logits are not
    save_file(state, pack / "task.safetensors", metadata={"format": "pt"})
    argv = [command, str(pack), str(shop.photos), "--base", str(shop.pack.parent / "base.safetensors")]
    out = tmp_path / "p.csv"
    assert main([*argv, "--out", str(out)] if command == "predict" else argv) == 4
    assert "infinite or NaN" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("backend", ["eager", "bank", "fused"])
def test_an_image_that_gives_no_numbers_is_named_and_changes_no_other_label(
    shop: Shop, backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vtk.runtime import prediction

    load, argv = prediction._load, ("predict", shop.pack, shop.photos, "--batch-size", 4, "--backend", backend)
    before = _json(capsys, *argv)["predictions"]
    assert len(before) > 5
    spoilt = before[2]["path"]

    def spoil(path: Path, **options: Any) -> tuple[Path, Any]:
        path, image = load(path, **options)
        return path, image * math.nan if str(path) == spoilt else image

    monkeypatch.setattr(prediction, "_load", spoil)
    found = _json(capsys, *argv)
    assert [entry["path"] for entry in found["skipped"]] == [spoilt]
    assert "NaN" in found["skipped"][0]["reason"]
    others = [entry for entry in before if entry["path"] != spoilt]
    assert [(e["path"], e["labels"]) for e in found["predictions"]] == [(e["path"], e["labels"]) for e in others]
    np.testing.assert_allclose(
        [e["scores"] for e in found["predictions"]], [e["scores"] for e in others], rtol=0, atol=1e-6
    )
    assert main(["predict", str(shop.pack), spoilt, "--backend", backend]) == 4
    assert "infinite or NaN" in capsys.readouterr().err
