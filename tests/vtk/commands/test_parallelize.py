"""``vtk parallelize`` as a person meets it: its files, its numbers, and that every other command takes the result."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests._plots import not_drawn
from vtk.__main__ import main
from vtk.branches import tune
from vtk.card import Card
from vtk.data.audit.folder_scan import scan
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.mirroring import Mirroring
from vtk.models.create import build_model
from vtk.packs import load_checkpoint, load_task
from vtk.packs.load import card_metadata

KWARGS: dict[str, Any] = {"depth": 4, "embed_dim": 32, "num_heads": 2}
CLASSES = ("blue", "green", "red")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 4)):
        for label, name in enumerate(CLASSES):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 150, (20, 20, 3))
                pixels[..., 2 - label] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(root / part / name / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A merged checkpoint of four sequential blocks."""
    torch.manual_seed(0)
    created = build_model("vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False, kwargs=KWARGS)
    state = {k: v + 0.1 * torch.randn_like(v) for k, v in created.model.state_dict().items()}
    path = tmp_path_factory.mktemp("merged") / "colours.safetensors"
    card = Card(created.spec, created.input, CLASSES, metrics={"top1": 0.5})
    save_file(state, path, metadata=card_metadata(card))
    return path


@pytest.fixture(autouse=True)
def _cheap_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("confusion_png", "curves_png"):
        monkeypatch.setattr(f"vtk.evaluation.result_files.{name}", lambda data, path: path.write_bytes(not_drawn()))


def vtk(capsys: pytest.CaptureFixture, *argv: object, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*map(str, argv), "--json"]) == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def by_hand(file: Path, branches: int, images: Tensor, **kwargs: Any) -> Tensor:
    """The paper's equation 2 over timm's sequential blocks."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, **KWARGS, **kwargs).eval()
    model.load_state_dict(load_file(file))
    with torch.no_grad():
        x = model._pos_embed(model.patch_embed(images))
        for start in range(0, len(model.blocks), branches):
            group = model.blocks[start : start + branches]
            x = x + sum(b.attn(b.norm1(x)) for b in group)
            x = x + sum(b.mlp(b.norm2(x)) for b in group)
        logits: Tensor = model.forward_head(model.norm(x))
    return logits


def run_load_py(folder: Path, images: Tensor, tmp_path: Path) -> Tensor:
    """Run load.py in a Python that has this toolkit nowhere on its path, and its model on the images."""
    save_file({"x": images}, tmp_path / "x.safetensors")
    code = (
        "import runpy, sys, torch; from safetensors.torch import load_file, save_file\n"
        f"model = runpy.run_path({str(folder / 'load.py')!r})['model']\n"
        "assert 'vtk' not in sys.modules and not model.training\n"
        "with torch.no_grad(): y = model(load_file('x.safetensors')['x'])\n"
        "save_file({'y': y}, 'y.safetensors')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return load_file(tmp_path / "y.safetensors")["y"]


def top1(model: nn.Module, card: Card, root: Path) -> float:
    audit = scan(root, classes=card.classes, show_progress=False)
    loader = make_loader(audit.val, eval_transform(card.input), batch_size=64, shuffle=False, seed=0, workers=0)
    with torch.no_grad():
        return float(torch.cat([(model(x).argmax(1) == y).double() for x, y in loader]).mean())


def test_a_checkpoint_becomes_parallel_and_is_used_like_any_other(
    merged: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "parallel"
    told = vtk(capsys, "parallelize", merged, "--branches", 2, "--data", photos, "--images", 10, "--out", out)
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "load.py", "drift.json"}
    images = torch.randn(3, 3, 32, 32)
    expected = by_hand(merged, 2, images)
    torch.testing.assert_close(run_load_py(out, images, tmp_path), expected, rtol=1e-4, atol=1e-5)
    task = load_checkpoint(out / "model.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(task.model(images), expected, rtol=1e-4, atol=1e-5)
    assert (task.card.model.name, task.card.transforms) == ("vit_tiny_patch16_2x2_224", ())
    assert task.card.metrics == {} and task.card.classes == CLASSES  # the sequential model's metric is not this one's
    assert task.card.command.startswith("vtk parallelize ")

    assert (told["branches"], told["depth"], told["count"], told["images"]) == (
        2,
        2,
        10,
        f"10 held-out images of {photos}",
    )
    assert [(b["first"], b["last"]) for b in told["blocks"]] == [(0, 1), (2, 3)]
    assert told["top1_sequential"] == top1(load_checkpoint(merged).model, task.card, photos)
    assert told["top1_parallel"] == top1(task.model, task.card, photos)
    assert json.loads((out / "drift.json").read_text()) == told

    assert vtk(capsys, "eval", out, photos)["top1"] == told["top1_parallel"]
    assert vtk(capsys, "predict", out, photos / "val" / "red", "--out", tmp_path / "p.csv")


def test_other_images_of_some_classes_judge_whole(
    merged: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    fresh = tmp_path / "fresh"  # without parts, and images that the run has not seen
    for path in (photos / "val" / CLASSES[1]).iterdir():
        target = fresh / CLASSES[1] / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.open(path).rotate(90).save(target)
    told = vtk(capsys, "parallelize", merged, "--data", fresh, "--images", 2, "--out", tmp_path / "parallel")
    images = len(list(fresh.rglob("*.png")))
    assert told["before"]["count"] == images
    assert vtk(capsys, "eval", merged, fresh)["top1"] == told["top1_sequential"]


@pytest.mark.slow
def test_the_result_is_exported_and_profiled(merged: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "parallel"
    vtk(capsys, "parallelize", merged, "--images", 1, "--out", out)
    for flag in ("--no-fuse", "--fuse"):
        exported = vtk(capsys, "export", "onnx", out, flag, "--out", tmp_path / f"onnx{flag}")
        assert all(row["passed"] for row in exported["verified"])
    flags = ("--backends", "eager", "--batch-sizes", "1", "--duration", "0.05")
    assert vtk(capsys, "profile", out / "model.safetensors", *flags)["backends"]


def test_a_model_without_a_parallel_name_keeps_its_own_and_a_transform(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "parallel"
    flags = ("--no-pretrained", "--num-classes", 3, "--img-size", 32, "--branches", 3, "--images", 5, "--seed", 4)
    told = vtk(capsys, "parallelize", "test_vit", *flags, "--out", out)
    assert told["images"] == "5 smoothed random images (seed 4)"
    assert told["model"] == {"name": "test_vit", "kwargs": {}}
    assert told["transforms"] == [{"op": "parallelize", "args": {"branches": 3}}]
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        logits = load_checkpoint(out / "model.safetensors").model(images)
    with torch.no_grad():
        plain = runpy.run_path(str(out / "load.py"))["model"](images)
    torch.testing.assert_close(plain, logits, rtol=1e-4, atol=1e-6)
    run = ("finetune", photos, "--model", "test_vit", "--weights", out / "model.safetensors", "--img-size", 32)
    assert (
        "was made with `parallelize`" in vtk(capsys, *run, "--branches", 2, "--out", tmp_path / "no", code=3)["error"]
    )
    more = ("--epochs", 1, "--workers", 0, "--device", "cpu", "--out", tmp_path / "run")
    vtk(capsys, *run, *more)
    assert len(load_task(tmp_path / "run" / "task").model.blocks) == 2


def test_fine_tuning_afterwards_reports_before_and_after(
    merged: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "parallel"
    told = vtk(
        capsys, "parallelize", merged, "--branches", 4, "--data", photos, "--finetune", 3, "--train", "full", "--lr",
        "2e-3", "--batch-size", 6, "--out", out, "--device", "cpu",
    )  # fmt: skip
    task = load_task(out / "finetune" / "task")
    assert told["top1_finetuned"] == top1(task.model, task.card, photos) == told["finetune"]["top1"]
    assert told["top1_finetuned"] > told["top1_parallel"]
    assert task.card.model.name == "vit_tiny_patch16_1x4_224" and task.card.transforms == ()
    start = load_file(out / "model.safetensors")
    head = task.model.state_dict()["head.weight"]  # the checkpoint's head goes on, of the same classes
    assert float(nn.functional.cosine_similarity(head.flatten(), start["head.weight"].flatten(), dim=0)) > 0.7


def test_the_original_teaches_the_parallel_model(
    merged: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """More alike afterwards than before, and than after as many steps of plain fine-tuning."""
    flags = ("--branches", 2, "--data", photos, "--finetune", 3, "--lr", "2e-3", "--batch-size", 6, "--device", "cpu")
    plain = vtk(capsys, "parallelize", merged, *flags, "--out", tmp_path / "plain")
    taught = vtk(
        capsys, "parallelize", merged, *flags, "--distill", "--distill-alpha", "1", "--out", tmp_path / "taught"
    )
    before, after = taught["before"], taught["after"]
    assert plain["before"] == before and before["count"] == 12 and "after" in plain
    assert after["cosine"] > max(before["cosine"], plain["after"]["cosine"])
    models = [load_checkpoint(merged).model, load_task(tmp_path / "taught" / "finetune" / "task").model]
    audit = scan(photos, show_progress=False)
    spec = load_checkpoint(merged).card.input
    loader = make_loader(audit.val, eval_transform(spec), batch_size=64, shuffle=False, seed=0, workers=0)
    images = next(iter(loader))[0]
    with torch.no_grad():
        one, two = (model(images).double() for model in models)
    assert after["cosine"] == pytest.approx(float(nn.functional.cosine_similarity(one, two).mean()), abs=1e-5)
    assert after["agreement"] == float((one.argmax(1) == two.argmax(1)).double().mean())
    assert json.loads((tmp_path / "taught" / "drift.json").read_text())["after"] == after
    assert f"distill_from: {merged}" in (tmp_path / "taught" / "finetune" / "config.yaml").read_text()


@pytest.mark.parametrize("kind", ["soft", "tokens"])
def test_images_without_classes_are_enough(
    kind: str, merged: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: Any
) -> None:
    loose, out = tmp_path / "loose", tmp_path / "out"
    loose.mkdir()
    views: list[Any] = []  # mirrored or not by the teacher's classes, since the images have none
    own = tune.train_transform
    monkeypatch.setattr(tune, "choose_mirroring", lambda audit, channels: Mirroring(0.0, " ".join(audit.classes)))
    monkeypatch.setattr(tune, "train_transform", lambda spec, **given: views.append(given) or own(spec, **given))
    monkeypatch.setattr(tune, "describe_views", lambda run, mirroring, **_: views.append(mirroring.why) or "told")
    for i, path in enumerate(sorted(photos.rglob("*.png"))):
        (loose / f"{i}.png").write_bytes(path.read_bytes())
    told = vtk(
        capsys, "parallelize", merged, "--data", loose, "--finetune", 4, "--distill", "--no-labels", "--distill-kind",
        kind, "--train", "full", "--lr", "2e-3", "--batch-size", 6, "--device", "cpu", "--out", out,
    )  # fmt: skip
    assert told["after"]["cosine"] > told["before"]["cosine"] and told["before"]["count"] == 3
    assert told["rows"][-1]["loss"] < told["rows"][0]["loss"]
    assert views == [" ".join(CLASSES), {"hflip": 0.0}]
    task = load_checkpoint(out / "distilled" / "model.safetensors")
    start = load_checkpoint(out / "model.safetensors")
    assert task.card == start.card and len(task.model.blocks) == 2
    assert not torch.equal(
        task.model.blocks[0].attns[0].attn.qkv.weight, start.model.blocks[0].attns[0].attn.qkv.weight
    )
    assert vtk(capsys, "eval", out / "distilled", photos)["count"] == 12


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["test_vit", "--branches", "4"], 2, "`branches` is 4; a depth of 6 can be divided by 2, 3, 6"),
        (["test_vit", "--branches", "1"], 2, "`--branches` is 1; allowed is at least 2"),
        (["vit_tiny_patch16_1x2_224"], 2, "is already parallel"),
        (["resnet18"], 2, "ResNet cannot be parallelized"),
        (["test_vit", "--finetune", "2"], 2, "`--finetune` needs --data"),
        (["test_vit", "--images", "0"], 2, "`--images` is 0"),
        (["test_vit", "--distill"], 2, "`--distill` needs --finetune"),
        (["test_vit", "--data", ".", "--finetune", "1", "--no-labels"], 2, "add --distill"),
        (["test_vit", "--distill-kind", "hard"], 2, "`--distill-kind` needs --distill"),
        (
            ["test_vit", "--data", ".", "--finetune", "1", "--distill", "--distill-alpha", "2"],
            2,
            "allowed is above 0, at most 1",
        ),
        (["nowhere.safetensors"], 3, "does not exist"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    argv: list[str], code: int, message: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert main(["parallelize", *argv, "--no-pretrained", "--out", str(tmp_path / "out")]) == code
    err = capsys.readouterr().err
    assert message in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_too_few_loose_images_are_refused_before_anything_is_written(merged: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "none").mkdir()
    words = ["--data", str(tmp_path / "none"), "--images", "2", "--finetune", "1", "--distill", "--no-labels"]
    for i in range(3):
        Image.fromarray(np.full((20, 20, 3), 40 * i, np.uint8)).save(tmp_path / "none" / f"{i}.png")
    assert main(["parallelize", str(merged), *words, "--out", str(tmp_path / "out")]) == 3
    assert "2 readable training images and 1 held out; give at least 4" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_not_written_to(merged: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "other").write_text("x")
    assert main(["parallelize", str(merged), "--out", str(tmp_path)]) == 3
    assert "is not empty" in capsys.readouterr().err


def test_the_table_fits_a_terminal(merged: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["parallelize", str(merged), "--images", "2", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith(("blocks", "0–1", "2–3"))]
    assert len(rows) == 3 and max(map(len, rows)) <= 80
    assert any("measured on random images" in line for line in lines)


def test_the_card_travels_in_the_file(merged: Path, tmp_path: Path, capsys) -> None:
    vtk(capsys, "parallelize", merged, "--images", 1, "--out", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        card = Card.from_json(file.metadata()["vtk"], "file")
    assert card.base is None and card.model.kwargs == {"init_values": 0.0, "embed_dim": 32, "num_heads": 2}
