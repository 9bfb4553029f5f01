"""Identity by content and by name: images that were replaced, classifiers of other classes, mirrored digits."""

import csv
import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from vtk.card import InputSpec
from vtk.data.digits import write_digits
from vtk.data.loading.train_pipeline import train_transform
from vtk.data.mirroring import Mirroring
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model
from vtk.models.weights.class_names import describe_rows, match_rows, read_names
from vtk.packs.load import load_task
from vtk.training.finetune import finetune, finetune_tasks
from vtk.training.runs.views import describe_views


def replace_all(folder: Path, *, part: str = "train") -> None:
    """Replace every image by another of the same name, size and times, as far as a program can set them."""
    for path in sorted((folder / part).rglob("*.png")):
        before = path.stat()
        pixels = np.asarray(Image.open(path))
        Image.fromarray(255 - pixels).save(path, compress_level=0)
        raw = path.read_bytes()
        path.write_bytes(raw + b"\0" * max(before.st_size - len(raw), 0))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture
def own(photos: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(photos, tmp_path / "own"))


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_run_does_not_go_on_with_images_replaced_under_their_names(config: Any, own: Path, part: str) -> None:
    finetune(config(data=own, epochs=2, stop_after=1))
    replace_all(own, part=part)
    count = len(list((own / part).rglob("*.png")))
    with pytest.raises(DataError, match=rf"{count} images are not as when .* with 51; for example {part}/"):
        finetune(config(data=own, epochs=2, resume=True))


@pytest.mark.parametrize("multi", [False, True])
def test_a_run_does_not_go_on_with_other_labels_of_held_out_images(
    config: Any, photos: Path, tmp_path: Path, multi: bool
) -> None:
    table = tmp_path / "photos.csv"
    rows = [(str(path), path.parent.name, path.parent.parent.name) for path in sorted(photos.rglob("*.png"))]
    text = "path,label,split\n" + "\n".join(map(",".join, rows))
    table.write_text(text)
    options: dict[str, Any] = {"data": table, "epochs": 2, "multi_label": multi}
    finetune(config(**options, stop_after=1))
    name = str(photos / "val/red/0.png")
    table.write_text(text.replace(f"{name},red", f"{name},blue"))
    with pytest.raises(DataError, match=r"the images or their labels are not those the run started with"):
        finetune(config(**options, resume=True))
    table.write_text(text)
    assert len(finetune(config(**options, resume=True)).rows) == 2


def test_one_task_of_several_with_other_images_is_named(config: Any, own: Path, photos: Path) -> None:
    options: dict[str, Any] = {"data": None, "tasks": (f"a={photos}", f"b={own}"), "epochs": 2}
    finetune_tasks(config(**options, stop_after=1))
    next((own / "train/red").glob("0.png")).unlink()
    with pytest.raises(DataError, match=r"task `b`: 1 image is not as .*train/red/0.png is gone"):
        finetune_tasks(config(**options, resume=True))


def test_a_run_lists_its_images_with_their_contents(config: Any, own: Path) -> None:
    result = finetune(config(data=own, epochs=1))
    rows = list(csv.DictReader((result.out / "images.csv").open()))
    assert len(rows) == 51 and [row["part"] for row in rows].count("val") == 15
    for row in rows:
        assert hashlib.sha256((own / row["path"]).read_bytes()).hexdigest().startswith(row["content"])
        assert row["path"].startswith(row["part"]) and len(row["content"]) == 32


def test_a_run_whose_state_knows_no_contents_goes_on(config: Any, own: Path, capsys: Any) -> None:
    finetune(config(data=own, epochs=2, stop_after=1))
    state = Path(config().out) / "last/state.json"
    info = json.loads(state.read_text())
    del info["images"]  # as version 0.1 wrote it
    state.write_text(json.dumps(info))
    assert len(finetune(config(data=own, epochs=2, resume=True)).rows) == 2
    assert "was saved by version 0.1" in capsys.readouterr().out


# ---- classifiers


def start(config: Any, tmp_path: Path, names: tuple[str, ...]) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a checkpoint of these classes, and return its head as it is."""
    base = config()
    created = build_model(
        base.model, num_classes=len(names), img_size=32, pretrained=False, seed=7, kwargs={"depth": 2, "embed_dim": 32,
                                                                                     "num_heads": 2},
    )  # fmt: skip
    state = created.model.state_dict()
    save_file(state, tmp_path / "start.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"label_names": list(names)}))
    return tmp_path / "start.safetensors", {key: state[key] for key in ("head.weight", "head.bias") if key in state}


@pytest.mark.parametrize(
    ("names", "rows", "said"),
    [
        (("blue", "green", "red"), (0, 1, 2), ""),
        (("red", "blue", "green"), (1, 2, 0), "in another order: rows are matched by name"),
        (("x", "red", "green", "blue", "y"), (3, 2, 1), "among 5: rows are matched by name"),
        (("cat", "dog", "bird"), None, "other classes (3, without blue, green, red): a new one is initialised"),
        (("red", "green", "cyan"), None, "other classes (3, without blue): a new one is initialised"),
        (("LABEL_0", "LABEL_1", "LABEL_2"), (0, 1, 2), ""),  # placeholders are no names
    ],
    ids=lambda value: "".join(map(str, value))[:12] if isinstance(value, tuple) else "",
)
def test_rows_of_a_classifier_are_taken_by_the_names_of_their_classes(
    config: Any, tmp_path: Path, capsys: Any, names: tuple[str, ...], rows: Any, said: str
) -> None:
    weights, head = start(config, tmp_path, names)
    run = config(weights=weights, pretrained=True, epochs=1, train="full", lr=1e-12, head_lr_mult=1.0)
    found = load_file(finetune(run).task / "task.safetensors")
    text = " ".join(capsys.readouterr().out.split())
    assert (said in text) if said else ("its classifier" not in text and "new classifier" not in text)
    for key, value in head.items():
        if rows is None:
            assert not torch.allclose(found[key], value[: len(found[key])], atol=1e-6) or not value.any()
        else:
            assert torch.allclose(found[key], value[list(rows)], atol=1e-6)


def test_a_classifier_of_a_model_that_timm_builds_without_one_is_taken_by_name(tmp_path: Path) -> None:
    name, kwargs = "vit_small_patch14_dinov2", {"depth": 1, "embed_dim": 32, "num_heads": 2}
    first = build_model(name, num_classes=3, img_size=28, pretrained=False, kwargs=kwargs).model.state_dict()
    first["head.weight"] = torch.randn(3, 32)
    save_file(first, tmp_path / "own.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"label_names": ["a", "b", "c"]}))
    made = build_model(
        name, num_classes=2, img_size=28, weights=tmp_path / "own.safetensors", kwargs=kwargs, classes=("c", "a")
    )
    assert torch.equal(made.model.state_dict()["head.weight"], first["head.weight"][[2, 0]])
    assert any("rows are matched by name" in note for note in made.notes)


def test_a_pack_to_start_from_gives_its_rows_by_name(config: Any, photos: Path, tmp_path: Path, capsys: Any) -> None:
    weights, _ = start(config, tmp_path, ())
    base = {"weights": weights, "pretrained": True, "epochs": 1}
    first = finetune(config(out=tmp_path / "first", **base))
    other = tmp_path / "photos"
    for part in ("train", "val"):
        for old, new in (("blue", "red"), ("green", "green")):  # what was blue is called red
            shutil.copytree(photos / part / old, other / part / new)
    run = config(data=other, init_from=(str(first.task),), **base | {"lr": 1e-12})
    found = load_task(finetune(run).task).model.state_dict()["head.weight"]
    known = load_task(first.task).model.state_dict()["head.weight"]
    assert torch.allclose(found, known[[1, 2]], atol=1e-6)  # green, red
    assert "among 3: rows are matched by name" in " ".join(capsys.readouterr().out.split())


def test_names_beside_weights_are_those_of_timm_and_transformers(tmp_path: Path) -> None:
    path, told = tmp_path / "model.safetensors", tmp_path / "config.json"
    assert read_names(path, None) == ()
    for value, wanted in (
        ({"label_names": ["a", "b"]}, ("a", "b")), ({"id2label": {"0": "cat", "1": "dog"}}, ("cat", "dog")),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, ()), ({"label_names": ["a", "a"]}, ()), ([], ()), (3, ()),
        ({"label_names": [1, 2]}, ()), ({"id2label": {"1": "dog"}}, ()),
    ):  # fmt: skip
        told.write_text(json.dumps(value))
        assert read_names(path, None) == wanted, value
    told.write_text("no json")
    assert read_names(path, None) == ()
    assert match_rows("abc", "cb") == [2, 1] and match_rows("abc", "cx") is None and not describe_rows("ab", "ab")


def test_a_start_that_knows_the_held_out_images_is_said(config: Any, photos: Path, tmp_path: Path, capsys: Any) -> None:
    weights, _ = start(config, tmp_path, ())
    base: dict[str, Any] = {"weights": weights, "pretrained": True, "epochs": 1}
    first = finetune(config(out=tmp_path / "first", **base))
    flat = tmp_path / "flat"
    for part in ("train", "val"):
        for path in (photos / part).rglob("*.png"):
            target = flat / path.parent.name / f"{part}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    capsys.readouterr()
    finetune(config(out=tmp_path / "same", data=photos, init_from=(str(first.task),), **base))
    assert "was trained on" not in capsys.readouterr().out
    finetune(config(out=tmp_path / "other", data=flat, init_from=(str(first.task),), **base))
    held = json.loads((tmp_path / "other/audit.json").read_text())["val"]["count"]
    seen = [row["path"] for row in csv.DictReader((tmp_path / "other/images.csv").open()) if row["part"] == "val"]
    count = sum(Path(path).name.startswith("train-") for path in seen)
    assert f"was trained on {count} of the {held} held-out images" in " ".join(capsys.readouterr().out.split())


# ---- mirroring


def test_digits_are_not_mirrored_and_every_run_says_what_it_does(
    config: Any, photos: Path, tmp_path: Path, capsys: Any
) -> None:
    digits = write_digits(tmp_path / "digits", limit=6)
    options: dict[str, Any] = {"data": digits, "epochs": 1}
    plain = finetune(config(out=tmp_path / "auto", **options))
    said = " ".join(capsys.readouterr().out.split())
    assert "not mirrored, since the classes are digits or letters and the images grey (--hflip 0.5 mirrors)" in said
    never = finetune(config(out=tmp_path / "never", hflip=0.0, **options))
    half = finetune(config(out=tmp_path / "half", hflip=0.5, **options))
    said = " ".join(capsys.readouterr().out.split())
    assert "mirrored with probability 0.5" in said and "training images are cropped at random to 60–100 %" in said
    files = [(run.task / "task.safetensors").read_bytes() for run in (plain, never, half)]
    assert files[0] == files[1] != files[2]
    finetune(config(out=tmp_path / "photos", data=photos, epochs=1))
    assert "mirrored with probability 0.5" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("policy", "said"), [(None, True), ("3a", True), ("rand-m9-mstd0.5-inc1", False)])
def test_colours_that_a_policy_leaves_alone_are_not_said_to_change(config: Any, policy: Any, said: bool) -> None:
    run = config(auto_augment=policy, color_jitter=0.3)
    text = describe_views(run, Mirroring(0.0, "a class is called left"), hint=False)
    assert ("colours changed by up to 30 %" in text) == said
    steps = repr(vars(train_transform(InputSpec(32, 32), auto_augment=policy, color_jitter=0.3))["steps"])
    assert ("ColorJitter" in steps) == said
    assert "not mirrored, since a class is called left," in text or text.endswith("labels smoothed by 0.1")


def test_a_run_that_was_mirrored_goes_on_so(config: Any, tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits", limit=6)
    options: dict[str, Any] = {"data": digits, "epochs": 2}
    whole = finetune(config(out=tmp_path / "whole", hflip=0.5, **options))
    finetune(config(out=tmp_path / "run", hflip=0.5, stop_after=1, **options))
    parts = finetune(config(out=tmp_path / "run", resume=True, **options))  # as of 0.1, where it was the default
    assert (whole.task_last / "task.safetensors").read_bytes() == (parts.task_last / "task.safetensors").read_bytes()
    finetune(config(out=tmp_path / "off", stop_after=1, **options))
    with pytest.raises(UsageError, match=r"--hflip 0.5 \(was 0.0\)"):
        finetune(config(out=tmp_path / "off", resume=True, **options, hflip=0.5))


def test_small_images_blown_up_are_said_before_they_cost_memory(
    config: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    digits = write_digits(tmp_path / "digits", limit=3)
    stop = RuntimeError("the memory is chosen")
    monkeypatch.setattr("vtk.training.runs.prepare.choose_memory", lambda *a, **k: (_ for _ in ()).throw(stop))
    for size, factor in ((64, "8 times a side to 64×64 px, 16 patches an image"), (128, "16 times a side")):
        with pytest.raises(RuntimeError, match="memory is chosen"):
            finetune(config(data=digits, img_size=size))
        said = " ".join(capsys.readouterr().err.split())
        assert f"images of 8×8 px (median) are enlarged {factor}" in said
        assert ("--img-size 32 takes 1/" in said) == (size > 32)
    with pytest.raises(RuntimeError, match="memory is chosen"):
        finetune(dataclasses.replace(config(data=digits), img_size=16))
    assert "enlarged" not in capsys.readouterr().err
