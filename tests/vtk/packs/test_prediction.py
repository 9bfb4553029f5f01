"""``Task.predict`` against ``vtk predict``, and against timm, PIL and torch's own formulas."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

import vtk
from vtk.__main__ import main
from vtk.card import Card, Regime
from vtk.errors import DataError, UnavailableError, UsageError, VerificationError
from vtk.formats import write_json
from vtk.models.create import build_model
from vtk.models.inputs import input_spec
from vtk.packs.cards import read_card
from vtk.packs.load import Task, load_task
from vtk.packs.pack import save_task
from vtk.packs.prediction import ImageTransform


@pytest.fixture(scope="module")
def task(shared_pack: Path, shared_base: Path) -> Task:
    return vtk.load_task(shared_pack, base=shared_base)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    rng, folder = np.random.default_rng(7), tmp_path_factory.mktemp("photos")
    paths = [folder / f"{i}.png" for i in range(7)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (40, 56, 3), dtype=np.uint8)).save(path)
    return paths


def by_hand(task: Task, path: Path) -> Tensor:
    """(C, H, W) by torchvision alone."""
    spec = task.card.input
    side = int(spec.height / spec.crop_pct)
    steps = [transforms.Resize(side, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(spec.size),
             transforms.ToTensor(), transforms.Normalize(spec.mean, spec.std)]  # fmt: skip
    return transforms.Compose(steps)(Image.open(path).convert("RGB"))


def plain(prediction: Any) -> tuple[tuple[str, ...], tuple[float, ...]]:
    return prediction.labels, prediction.scores


def command(pack: Path, base: Path, photos: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    argv = ["predict", str(pack), str(photos), "--base", str(base), "--out", str(out), "--json", *more]
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out)["predictions"]


def with_card(pack: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(pack, folder)
    write_json(folder / "task.json", dataclasses.replace(read_card(pack), **changes).to_dict())
    return folder


@pytest.mark.parametrize("regime", [Regime("fp32", 3), Regime("bf16", 4)], ids=["fp32", "bf16"])
def test_the_same_as_the_command_to_the_last_digit(
    shared_pack: Path, shared_base: Path, photos: list[Path], tmp_path: Path, regime: Regime,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pack = with_card(shared_pack, tmp_path / "pack", regime=regime)
    wanted = command(pack, shared_base, photos[0].parent, tmp_path / "p.csv", capsys)
    found = load_task(pack, base=shared_base).predict(photos)
    assert [(str(p.path), list(p.labels), list(p.scores)) for p in found] == [
        (p["path"], p["labels"], p["scores"]) for p in wanted
    ]


def test_scores_are_the_softmax_of_timms_logits(task: Task, photos: list[Path], small: Any) -> None:
    name, kwargs = small
    model = timm.create_model(name, num_classes=3, img_size=32, **kwargs).eval()
    model.load_state_dict(task.model.state_dict(), strict=True)
    with torch.no_grad():
        scores = model.double()(torch.stack([by_hand(task, path) for path in photos]).double()).softmax(1)
    for prediction, row in zip(task.predict(photos, top_k=2), scores, strict=True):
        order = row.argsort(descending=True)[:2]
        assert prediction.labels == tuple(f"c{i}" for i in order)
        assert prediction.scores == pytest.approx(row[order].tolist(), abs=1e-5)


def test_the_transform_is_torchvisions(task: Task, photos: list[Path]) -> None:
    for path in photos:
        wanted = by_hand(task, path)
        for image in (path, str(path), Image.open(path), np.asarray(Image.open(path))):
            assert torch.equal(task.transform(image), wanted)
    assert task.classes == ("c0", "c1", "c2")


def test_every_form_of_an_image_gives_the_same(task: Task, photos: list[Path]) -> None:
    wanted = [plain(p) for p in task.predict(photos)]
    forms = [str(photos[0]), photos[1], Image.open(photos[2]), np.asarray(Image.open(photos[3])), *photos[4:]]
    found = task.predict(forms)
    assert [plain(p) for p in found] == wanted
    assert [p.path for p in found] == [photos[0], photos[1], None, None, *photos[4:]]
    tensor = torch.stack([by_hand(task, path) for path in photos])
    assert [plain(p) for p in task.predict(tensor)] == wanted
    assert [plain(p) for p in task.predict(photos[0].parent)] == wanted
    (alone,) = task.predict(Image.open(photos[0]))
    assert alone.labels == wanted[0][0]


def test_batches_keep_the_order(task: Task, photos: list[Path]) -> None:
    one, all_ = task.predict(photos, batch_size=2), task.predict(photos, batch_size=64)
    assert [p.path for p in one] == [p.path for p in all_] == photos
    for a, b in zip(one, all_, strict=True):
        assert a.labels == b.labels and a.scores == pytest.approx(b.scores, abs=1e-6)
    assert task.predict([]) == []


def test_a_photograph_on_its_side_is_turned(task: Task, photos: list[Path], tmp_path: Path) -> None:
    image = Image.open(photos[0])
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "side.png", exif=exif)
    for form in (tmp_path / "side.png", Image.open(tmp_path / "side.png")):
        assert torch.equal(task.transform(form), by_hand(task, photos[0]))


def test_the_model_stays_as_it_is(task: Task, photos: list[Path]) -> None:
    task.model.train()
    task.model.norm.eval()
    before = {k: v.clone() for k, v in task.model.state_dict().items()}
    modes = [m.training for m in task.model.modules()]
    try:
        task.predict(photos[:2], precision="bf16")
        task.predict(photos[:2])
        assert [m.training for m in task.model.modules()] == modes
        assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in task.model.state_dict().items())
    finally:
        task.model.eval()


def test_several_labels_are_those_above_the_threshold(
    shared_pack: Path, shared_base: Path, photos: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = with_card(shared_pack, tmp_path / "pack", multi_label=True)
    task = load_task(pack, base=shared_base)
    with torch.no_grad():
        scores = task.model(torch.stack([by_hand(task, path) for path in photos])).sigmoid()
    least = float(scores.median())
    found = task.predict(photos, threshold=least)
    assert [set(p.labels) for p in found] == [{f"c{i}" for i in range(3) if row[i] >= least} for row in scores]
    assert any(len(p.labels) < 3 for p in found) and any(p.labels for p in found)
    wanted = command(pack, shared_base, photos[0].parent, tmp_path / "p.csv", capsys, "--threshold", str(least))
    assert [(list(p.labels), list(p.scores)) for p in found] == [(p["labels"], p["scores"]) for p in wanted]


@pytest.mark.parametrize("channels", [1, 2, 4, 5])
def test_arrays_of_other_channels(shared_base: Path, small: Any, channels: int, tmp_path: Path) -> None:
    name, kwargs = small
    spec = input_spec(name, kwargs, 32, channels, crop_pct=1.0)  # nothing is resized
    created = build_model(
        name, num_classes=3, img_size=32, weights=shared_base, kwargs=kwargs, in_chans=channels, input=spec
    )
    card = Card(created.spec, spec, ("a", "b", "c"), transforms=created.transforms)
    save_task(tmp_path / "t", state=created.model.state_dict(), created=created, card=card, trained=["head.bias"])
    task = load_task(tmp_path / "t", base=shared_base)
    array = np.random.default_rng(0).integers(0, 256, (32, 32, channels), dtype=np.uint8)
    wanted = (array.astype(np.float64) / 255 - card.input.mean) / card.input.std
    np.testing.assert_allclose(task.transform(array), wanted.transpose(2, 0, 1), atol=1e-6)
    assert task.predict(array)[0].labels[0] in card.classes


@pytest.mark.parametrize(
    ("images", "options", "error", "says"),
    [
        (7, {}, UsageError, "allowed is a path"),
        ([None], {}, UsageError, "allowed is a path"),
        (np.zeros((4, 4, 3), np.float32), {}, UsageError, "uint8"),
        (np.zeros((4, 4, 7), np.uint8), {}, UsageError, "7 channels"),
        (torch.zeros(3, 32, 32), {}, UsageError, "normalised images"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), {}, UsageError, "floating"),
        ("absent.png", {}, DataError, "absent.png"),
        ([], {"top_k": 0}, UsageError, "`top_k`"),
        ([], {"top_k": "2"}, UsageError, "`top_k` is '2'; give a whole number"),
        ([], {"top_k": 1.5}, UsageError, "`top_k` is 1.5"),
        ([], {"batch_size": True}, UsageError, "`batch_size` is True"),
        ([], {"batch_size": 0}, UsageError, "`batch_size`"),
        ([], {"threshold": 0.5}, UsageError, "--threshold"),
        ([], {"precision": "int4"}, UsageError, "unknown precision"),
        ([], {"device": "cuda:99"}, UnavailableError, "cuda:99"),
    ],
)
def test_what_is_wrong_is_one_line(task: Task, images: Any, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        task.predict(images, **options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_no_label_of_numbers_that_are_none(shared_pack: Path, shared_base: Path, photos: list[Path]) -> None:
    task = load_task(shared_pack, base=shared_base)
    with torch.no_grad():
        task.model.head.bias.fill_(float("nan"))
    with pytest.raises(VerificationError, match="infinite or NaN"):
        task.predict(photos[0])


def test_an_image_of_nan_in_a_tensor_is_named_before_anything_runs(task: Task) -> None:
    images = torch.zeros(5, 3, *task.card.input.size)
    images[3, 1, 2, 2] = torch.inf
    with pytest.raises(UsageError, match=r"^image 3 of the tensor's 5 holds NaN or infinite values; leave it out$"):
        task.predict(images)
    images[1] = torch.nan
    with pytest.raises(UsageError, match="image 1 of the tensor's 5 and 1 more"):
        task.predict(images)


def test_the_transform_can_be_given_to_a_loader(task: Task, photos: list[Path]) -> None:
    import pickle

    copied = pickle.loads(pickle.dumps(task.transform))
    assert isinstance(copied, ImageTransform) and torch.equal(copied(photos[0]), task.transform(photos[0]))
