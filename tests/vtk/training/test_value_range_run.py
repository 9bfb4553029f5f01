"""A run's value range and colour handling go with its card: evaluation, prediction, resume, and runs of 0.1."""

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image, ImageCms

from tests.conftest import REPO
from tests.vtk.data._images import ADOBE_RGB, matrix_profile, tiff
from vtk.__main__ import main
from vtk.card import Card
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.errors import DataError, UsageError
from vtk.packs.cards import read_card
from vtk.packs.load import load_task
from vtk.training.finetune import finetune
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.run import pretrain

TIMM = {"patch_size": 8, "depth": 1, "embed_dim": 32, "num_heads": 2}
RNG = np.random.default_rng(0)
V0_1 = REPO / "tests" / "fixtures" / "v0_1"


def config(data: Path, out: Path, **changes: Any) -> FinetuneConfig:
    values: dict[str, Any] = {
        "data": data, "out": out, "model": "vit_tiny_patch16_224", "pretrained": False, "img_size": 16, "epochs": 1,
        "model_kwargs": tuple(f"{key}={value}" for key, value in TIMM.items()), "batch_size": 8, "lr": 2e-3,
        "head_lr_mult": 1.0, "workers": 0, "device": "cpu", "memory": "plain",
    }  # fmt: skip
    return FinetuneConfig(**{**values, **changes})


def shots(root: Path, low: int, high: int, channels: int = 1, count: int = 6) -> dict[Path, np.ndarray]:
    """Write images of two brightnesses, grey PNG or TIFF of several bands, in train/ and val/."""
    found = {}
    for part in ("train", "val"):
        for label, name in enumerate(("dim", "light")):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                shape = (20, 23) if channels == 1 else (20, 23, channels)
                share = RNG.random(shape) * 0.5 + 0.5 * label
                share.reshape(-1)[0] = label
                values = (low + share * (high - low)).astype(np.uint16)
                path = root / part / name / f"{i}.{'png' if channels == 1 else 'tif'}"
                Image.fromarray(values).save(path) if channels == 1 else tiff(path, values)
                found[path] = values
    return found


def judged(pack: Path, images: list[Any]) -> np.ndarray:
    """Logits of a model that timm built, of 8-bit images that were made by hand."""
    card, state = read_card(pack), load_task(pack).model.state_dict()
    model = timm.create_model(card.model.name, num_classes=len(card.classes), img_size=16, in_chans=card.input.in_chans,
                              **TIMM)  # fmt: skip
    model.load_state_dict(state)
    transform = eval_transform(dataclasses.replace(card.input, value_range=(), value_type="", decoding="v0.1"))
    with torch.no_grad():
        return model.eval()(torch.stack([transform(image) for image in images])).numpy()


def levels(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.clip(np.rint((values - float(low)) * (255 / (high - low))), 0, 255).astype(np.uint8)


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert main([*argv, "--json"]) == 0
    found = capsys.readouterr()
    return json.loads(found.out), " ".join(found.err.split())


@pytest.mark.parametrize("channels", [1, 13])
def test_everything_that_reads_images_uses_the_runs_range(
    tmp_path: Path, channels: int, capsys: pytest.CaptureFixture[str]
) -> None:
    low, high = (0, 4095) if channels == 1 else (200, 2600)
    files = shots(tmp_path / "data", low, high, channels)
    chans = 3 if channels == 1 else 13
    result = finetune(config(tmp_path / "data", tmp_path / "run", in_chans=chans))
    card = read_card(result.task)
    want = (float(low), float(high))
    assert card.input.value_type == "uint16" and card.input.decoding == "srgb"
    assert np.abs(np.array(card.input.value_range) - want).max() <= 0.05 * (high - low)
    if channels == 1:
        assert card.input.value_range == (want,)
    ranges = card.input.value_range
    held = [path for path in files if "val" in path.parts]

    def shown(values: np.ndarray) -> Any:
        if channels == 1:
            return Image.fromarray(levels(values, *want)).convert("RGB")
        return tuple(Image.fromarray(levels(values[..., c], *ranges[c])) for c in range(13))

    logits = judged(result.task, [shown(files[path]) for path in held])
    right = np.mean(logits.argmax(1) == ["light" in path.parts for path in held])
    assert result.metrics.top1 == right

    told, _ = run(["eval", str(result.task), str(tmp_path / "data"), "--workers", "0"], capsys)
    assert told["top1"] == right and told["loss"] == result.metrics.loss and "outside_value_range" not in told
    task = load_task(result.task)
    for path, row in zip(held, logits, strict=True):
        for given in (path, files[path], files[path].astype(np.float32)):
            with torch.no_grad():
                found = task.model.eval()(task.transform(given)[None])[0].numpy()
            np.testing.assert_allclose(found, row, atol=1e-5)

    beyond = tmp_path / "data" / "val" / "dim" / f"beyond.{held[0].suffix[1:]}"
    values = files[held[0]].copy()
    values[0, 0] = 60000
    Image.fromarray(values).save(beyond) if channels == 1 else tiff(beyond, values)
    told, said = run(["eval", str(result.task), str(tmp_path / "data"), "--split", "all", "--workers", "0"], capsys)
    assert told["outside_value_range"] == [f"val/dim/{beyond.name}"] and f"val/dim/{beyond.name}" in said
    told, said = run(["predict", str(result.task), str(tmp_path / "data" / "val"), "--out", str(tmp_path / "p.csv")],
                     capsys)  # fmt: skip
    assert (
        told["outside_value_range"] == [str(beyond)] and "1 image has values outside of the model's value range" in said
    )
    assert told["count"] == len(held) + 1


def test_a_range_that_is_given_counts_for_the_run(tmp_path: Path) -> None:
    files = shots(tmp_path / "data", 0, 4095)
    argv = ["finetune", str(tmp_path / "data"), "--out", str(tmp_path / "run"), "--model", "vit_tiny_patch16_224"]
    argv += ["--no-pretrained", "--img-size", "16", "--epochs", "1", "--batch-size", "8", "--workers", "0"]
    argv += ["--model-kwargs", *(f"{key}={value}" for key, value in TIMM.items()), "--value-range", "-100", "5000"]
    assert main(argv) == 0
    card = read_card(tmp_path / "run" / "task")
    assert card.input.value_range == ((-100.0, 5000.0),)
    task = load_task(tmp_path / "run" / "task")
    path, values = next(iter(files.items()))
    want = eval_transform(card.input)(Image.fromarray(levels(values, -100, 5000)).convert("RGB"))
    assert torch.equal(task.transform(path), want)
    assert FinetuneConfig(value_range=(0, 2.5)).value_range == ("0", "2.5")
    with pytest.raises(UsageError, match="LOW must be below HIGH"):
        finetune(config(tmp_path / "data", tmp_path / "other", value_range=("7", "3")))


def test_pretraining_settles_and_keeps_the_range(tmp_path: Path) -> None:
    shots(tmp_path / "data", 0, 4095)
    kwargs = tuple(f"{key}={value}" for key, value in TIMM.items())
    result = pretrain(
        PretrainConfig(
            data=tmp_path / "data", out=tmp_path / "pre", method="simmim", model="vit_tiny_patch16_224",
            model_kwargs=kwargs, pretrained=False, img_size=32, epochs=1, batch_size=8, workers=0, device="cpu",
        )
    )  # fmt: skip
    assert read_card(result.backbone).input.value_range == ((0.0, 4095.0),)


def test_profiles_are_converted_in_training_and_after(tmp_path: Path) -> None:
    profile = matrix_profile("Adobe RGB (1998)", ADOBE_RGB, 563 / 256)
    for part in ("train", "val"):
        for label, name in enumerate(("dim", "light")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(3):
                pixels = RNG.integers(0, 128, (20, 23, 3), dtype=np.uint8) + np.uint8(100 * label)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{i}.png", icc_profile=profile)
    result = finetune(config(tmp_path, tmp_path / "run"))
    card = read_card(result.task)
    assert card.input.decoding == "srgb" and card.input.value_range == ()
    task, path = load_task(result.task), tmp_path / "val" / "dim" / "0.png"
    with Image.open(path) as image:
        converted = ImageCms.profileToProfile(
            image, ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC, flags=0x2000,
        )  # fmt: skip
        assert converted is not None
        assert torch.equal(task.transform(path), eval_transform(card.input)(converted))
        old = load_task(_as_of_0_1(result.task, tmp_path / "old"))
        assert torch.equal(old.transform(path), eval_transform(card.input)(image.convert("RGB")))
    assert not torch.equal(old.transform(path), task.transform(path))


def _as_of_0_1(pack: Path, to: Path) -> Path:
    """Copy a pack with a card that says nothing about decoding."""
    shutil.copytree(pack, to)
    card = json.loads((to / "task.json").read_text())
    for name in ("decoding", "value_range", "value_type"):
        card["input"].pop(name, None)
    (to / "task.json").write_text(json.dumps(card))
    return to


def test_a_card_of_0_1_reads_as_0_1(tmp_path: Path) -> None:
    """Sixteen bits divided by 257, and Pillow's own choice of bands."""
    task = load_task(V0_1 / "digits-bf16", base=V0_1 / "base.safetensors")
    assert task.card.input.decoding == "v0.1" and "decoding" not in json.dumps(task.card.to_dict())
    values = RNG.integers(0, 4096, (20, 23)).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "a.png")
    want = eval_transform(task.card.input)(Image.fromarray(np.rint(values / 257).astype(np.uint8)).convert("RGB"))
    assert torch.equal(task.transform(tmp_path / "a.png"), want)
    colours = RNG.integers(0, 256, (20, 23, 4), dtype=np.uint8)
    path = tiff(tmp_path / "b.tif", colours, photometric=2, extra=(0,))
    assert torch.equal(task.transform(path), eval_transform(task.card.input)(Image.fromarray(colours[..., :3])))


@pytest.mark.parametrize("newer", [False, True])
def test_a_resumed_run_decodes_as_it_began(tmp_path: Path, newer: bool) -> None:
    """A run whose state says nothing about it is one of 0.1."""
    shots(tmp_path / "data", 0, 4095)
    out = tmp_path / "run"
    finetune(config(tmp_path / "data", out, epochs=2, stop_after=1))
    state = out / "last" / "state.json"
    told = json.loads(state.read_text())
    assert told["flags"]["decoding"] == "srgb"
    if not newer:
        del told["flags"]["decoding"], told["flags"]["value_range"]
        state.write_text(json.dumps(told))
    finetune(config(tmp_path / "data", out, epochs=2, resume=True))
    card = read_card(out / "task-last")
    assert (card.input.decoding, card.input.value_range) == (("srgb", ((0.0, 4095.0),)) if newer else ("v0.1", ()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value_range": [[1, 0]], "value_type": "uint16"}, "no LOW below a HIGH"),
        ({"value_range": [[0, 1], [0, 1]], "value_type": "uint16"}, "2 pairs for 3 channels"),
        ({"value_range": [[0, 1]], "value_type": "uint99"}, "value_type"),
        ({"value_range": [[0, 1]]}, "value_type"),
        ({"decoding": "later"}, "decoding"),
    ],
)
def test_damaged_cards_are_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    card = read_card(V0_1 / "digits-bf16").to_dict()
    with pytest.raises(DataError, match=says):
        Card.from_dict({**card, "input": {**card["input"], **changes}}, "a card")
