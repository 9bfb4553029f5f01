"""Models that take other than grey or colour: channels of files, statistics, crops, and the pack's memory of them."""

import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.card import InputSpec
from vtk.data import Sample, eval_transform, make_loader, scan, train_transform
from vtk.data.decoding.decode import read_image
from vtk.data.decoding.rules import V0_1
from vtk.errors import DataError, UsageError
from vtk.models.inputs import input_spec

RNG = np.random.default_rng(0)
SIX = RNG.integers(0, 256, (6, 9, 12), dtype=np.uint8)  # (channels, height, width)


def spec(in_chans: int, size: tuple[int, int] = (8, 8), **options: object) -> InputSpec:
    mean = tuple(0.1 * (c + 1) for c in range(in_chans))
    return InputSpec(*size, in_chans=in_chans, mean=mean, std=(0.5,) * in_chans, **options)


def pages(path: Path, planes: np.ndarray, **options: object) -> Path:
    images = [Image.fromarray(plane) for plane in planes]
    images[0].save(path, save_all=True, append_images=images[1:], **options)
    return path


def planes(path: Path, in_chans: int) -> np.ndarray:
    return np.stack([np.asarray(band) for band in read_image(path, in_chans)])


def test_pages_of_a_tiff_are_its_channels(tmp_path: Path) -> None:
    path = pages(tmp_path / "a.tif", SIX)
    assert np.array_equal(planes(path, 6), SIX)
    assert np.array_equal(planes(pages(tmp_path / "b.tif", SIX[:2]), 2), SIX[:2])
    colours = pages(tmp_path / "c.tif", np.stack([SIX[:3], SIX[3:]]).transpose(0, 2, 3, 1))
    assert np.array_equal(planes(colours, 6), SIX)
    wide = pages(tmp_path / "d.tif", SIX.astype(np.uint16) * 257)
    assert np.array_equal(planes(wide, 6), SIX)
    assert read_image(path).mode == "RGB"  # for three channels the first page, as before


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_pages_stand_upright(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    first = pages(tmp_path / "a.tif", SIX, exif=exif)
    turned = np.rot90(SIX, {1: 0, 3: 2, 6: -1}[orientation], axes=(1, 2))
    assert np.array_equal(planes(first, 6), turned)


def test_opacity_is_a_channel_and_hidden_colours_stay(tmp_path: Path) -> None:
    rgba = RNG.integers(0, 256, (5, 7, 4), dtype=np.uint8)
    rgba[0, :, 3] = 0
    Image.fromarray(rgba, "RGBA").save(tmp_path / "a.png")
    assert np.array_equal(planes(tmp_path / "a.png", 4), rgba.transpose(2, 0, 1))
    grey, alpha = planes(tmp_path / "a.png", 2)
    luminance = rgba[..., :3] @ (0.299, 0.587, 0.114)
    np.testing.assert_allclose(grey, luminance, atol=1)
    assert np.array_equal(alpha, rgba[..., 3])
    la = rgba[..., [0, 3]]
    Image.fromarray(la, "LA").save(tmp_path / "b.png")
    assert np.array_equal(planes(tmp_path / "b.png", 2), la.transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "I;16"])
def test_without_opacity_it_is_full(tmp_path: Path, mode: str) -> None:
    base = Image.fromarray(SIX[:3].transpose(1, 2, 0))
    image = Image.fromarray(SIX[0].astype(np.uint16) * 257) if mode == "I;16" else base.convert(mode)
    image.save(tmp_path / "a.tif")
    assert np.all(planes(tmp_path / "a.tif", 4)[3] == 255) and np.all(planes(tmp_path / "a.tif", 2)[1] == 255)
    if mode == "I;16":
        assert np.array_equal(planes(tmp_path / "a.tif", 2)[0], SIX[0])
    elif mode != "CMYK":
        assert np.array_equal(planes(tmp_path / "a.tif", 4)[:3], np.asarray(image.convert("RGB")).transpose(2, 0, 1))


def test_files_without_the_channels_say_what_they_have(tmp_path: Path, picture: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"it has 3 channels; --in-chans 6 needs a TIFF file whose pages have 6"):
        read_image(picture(tmp_path / "a.png"), 6)
    with pytest.raises(DataError, match=r"its 6 pages have more than 5 channels; --in-chans is 5"):
        read_image(pages(tmp_path / "b.tif", SIX), 5)
    with pytest.raises(DataError, match=r"its 2 pages have 2 channels; --in-chans is 6"):
        read_image(pages(tmp_path / "c.tif", SIX[:2]), 6)
    images = [Image.fromarray(SIX[0]), Image.fromarray(SIX[1, :4])]
    images[0].save(tmp_path / "d.tif", save_all=True, append_images=images[1:])
    with pytest.raises(DataError, match="pages differ in size"):
        read_image(tmp_path / "d.tif", 2)


def test_the_scan_asks_for_the_channels(tmp_path: Path, picture: Callable[..., Path], vtk_home: Path) -> None:
    for name in ("a", "b"):
        for i in range(3):
            (tmp_path / name).mkdir(exist_ok=True)
            pages(tmp_path / name / f"{i}.tif", SIX)
        picture(tmp_path / name / "colour.png")
    colours, six = ["colour.png"] * 2, ["0.tif", "1.tif", "2.tif"] * 2
    for in_chans, bad in ((3, six), (6, colours), (3, six), (4, six), (6, colours)):  # one is not known of another
        audit = scan(tmp_path, in_chans=in_chans, workers=0, show_progress=False)
        assert [path.name for path, _ in audit.bad] == bad
    audit = scan(tmp_path, decoding=V0_1, workers=0, show_progress=False)  # took the first page
    assert not audit.bad


@pytest.mark.parametrize("resize_mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("in_chans", [2, 4, 6])
def test_evaluation_treats_each_channel_as_a_grey_image(in_chans: int, resize_mode: str) -> None:
    bands = tuple(Image.fromarray(SIX[c]) for c in range(in_chans))
    whole = spec(in_chans, (8, 12), resize_mode=resize_mode, crop_pct=0.9)
    result = eval_transform(whole)(bands)
    for c, band in enumerate(bands):
        alone = InputSpec(
            8, 12, in_chans=1, mean=whole.mean[c : c + 1], std=(0.5,), resize_mode=resize_mode, crop_pct=0.9
        )
        assert torch.equal(result[c], eval_transform(alone)(band.convert("RGB"))[0])


def test_training_cuts_and_mirrors_all_channels_alike() -> None:
    ramp = np.linspace(0, 255, 64, dtype=np.uint8)[None].repeat(48, 0)
    same = tuple(Image.fromarray(ramp) for _ in range(5))
    flat = InputSpec(16, 16, in_chans=5, mean=(0.5,) * 5, std=(0.5,) * 5)
    transform = pickle.loads(pickle.dumps(train_transform(flat, crop_scale=(0.1, 0.9))))
    results = [transform(same) for _ in range(10)]
    assert all(torch.equal(result[0], band) for result in results for band in result)
    assert len({float(result[0, 0, 0]) for result in results}) > 5 and not torch.equal(results[0], results[1])


def test_changes_of_colour_need_colours() -> None:
    for options, flag in (({"auto_augment": "rand-m9"}, "--auto-augment"), ({"color_jitter": 0.2}, "--color-jitter")):
        with pytest.raises(UsageError, match=f"{flag}.*changes colours, which --in-chans 6"):
            train_transform(spec(6), **options)


def test_statistics_follow_the_weights() -> None:
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    colours = input_spec("resnet18.a1_in1k")  # timm: three different values
    mean = colours.mean
    assert len(set(mean)) == 3
    assert input_spec("resnet18.a1_in1k", in_chans=4).mean == (*mean, mean[0])
    assert input_spec("resnet18.a1_in1k", in_chans=6).mean == mean * 2
    for in_chans in (1, 2):
        assert input_spec("resnet18.a1_in1k", in_chans=in_chans).mean == (pytest.approx(sum(mean) / 3),) * in_chans
    given = input_spec(name, in_chans=4, mean=(0.1, 0.2, 0.3, 0.4), std=(0.2,))
    assert given.mean == (0.1, 0.2, 0.3, 0.4) and given.std == (0.2,) * 4
    with pytest.raises(
        UsageError, match=r"`--mean` has 3 values; the input has 4 channels; give one value, or one per"
    ):
        input_spec(name, in_chans=4, mean=(0.1, 0.2, 0.3))


@pytest.mark.slow  # a new Python imports torch
def test_workers_that_are_started_anew_give_the_same_batches(tmp_path: Path) -> None:
    """What Windows and macOS do: the data set and its transform go through pickle to a Python that imports them."""
    samples = [Sample(pages(tmp_path / f"{i}.tif", np.roll(SIX, i, axis=0)), i % 2) for i in range(6)]
    here, there = (
        make_loader(samples, train_transform(spec(6), reprob=0.5), batch_size=2, shuffle=True, seed=3, workers=workers)
        for workers in (0, 1)
    )
    there.multiprocessing_context = multiprocessing.get_context("spawn")
    for (images, labels), (other, their_labels) in zip(here, there, strict=True):
        assert torch.equal(images, other) and torch.equal(labels, their_labels)
