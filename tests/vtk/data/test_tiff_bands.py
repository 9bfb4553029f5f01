"""Every band of a TIFF reaches the model with the values that another program wrote, or the file is refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import REPO
from tests.vtk.data._images import tiff
from vtk.data.decoding.decode import read_image
from vtk.data.decoding.memory_images import take_image
from vtk.data.decoding.rules import SRGB, V0_1, Decoding
from vtk.data.decoding.tiff import pages
from vtk.data.decoding.tiff_samples import read_samples
from vtk.data.probing.probe import probe
from vtk.errors import DataError, UsageError

RNG = np.random.default_rng(0)
STORED = REPO / "tests" / "fixtures" / "tiff"
TWO = Decoding("srgb", ((200.0, 2600.0),), "uint16")


def eight(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def bands(path: Path, in_chans: int, decoding: Decoding = SRGB) -> np.ndarray:
    return np.stack([np.asarray(band) for band in read_image(path, in_chans, decoding=decoding)], -1)


def formula(count: int) -> np.ndarray:
    y, x = np.mgrid[:18, :21]
    return np.stack([200 + (7 * x + 13 * y + 37 * c) % 2401 for c in range(count)])


@pytest.mark.parametrize("name", ["bands13-lzw-tiles.tif", "bands13-planes-deflate.tif", "float3-predictor.tif"])
def test_samples_are_those_that_tifffile_wrote(name: str) -> None:
    data = (STORED / name).read_bytes()
    (page,) = pages(io.BytesIO(data))
    found = read_samples(data, page)
    want = formula(13).astype(np.uint16) if "13" in name else (formula(3) / 2401 - 0.5).astype(np.float32)
    assert found.dtype == want.dtype and np.array_equal(found, want)


@pytest.mark.parametrize("kind", ["u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8"])
@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("planes", [False, True])
def test_samples_of_every_type_and_order(tmp_path: Path, kind: str, order: str, planes: bool) -> None:
    values = np.frombuffer(RNG.bytes(7 * 5 * 3 * 8), kind)[: 7 * 5 * 3].reshape(7, 5, 3)
    data = tiff(tmp_path / "a.tif", values, order=order, planes=planes).read_bytes()
    (page,) = pages(io.BytesIO(data))
    assert read_samples(data, page).tobytes() == np.ascontiguousarray(values.transpose(2, 0, 1)).tobytes()


def test_a_fourth_band_of_no_stated_meaning_is_a_channel(tmp_path: Path) -> None:
    values = eight(6, 9, 4)
    path = tiff(tmp_path / "nir.tif", values, photometric=2, extra=(0,))
    assert np.array_equal(bands(path, 4), values)
    assert bands(path, 4, V0_1)[..., 3].min() == 255  # Pillow leaves it out, and a card of 0.1 still says so
    with pytest.raises(
        DataError, match=r"it has 4 channels \(RGB and 1 more\), --in-chans is 3; give --in-chans 4, or"
    ):
        read_image(path, 3, decoding=SRGB)
    assert "4 channels" in probe(str(path)).bad and not probe(str(path), 4).bad
    assert not probe(str(path), 3, rules="v0.1").bad
    five = eight(6, 9, 5)
    assert np.array_equal(bands(tiff(tmp_path / "five.tif", five, photometric=2, extra=(0, 0)), 5), five)
    assert np.array_equal(bands(tiff(tmp_path / "grey.tif", five[..., :2], extra=(0,)), 2), five[..., :2])
    inks = bands(tiff(tmp_path / "inks.tif", five, photometric=5, extra=(0,)), 5)
    assert np.array_equal(inks, five)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("planes", [False, True])
def test_thirteen_samples_of_sixteen_bits(tmp_path: Path, order: str, planes: bool) -> None:
    values = RNG.integers(200, 2601, (6, 9, 13)).astype(np.uint16)
    path = tiff(tmp_path / "a.tif", values, order=order, planes=planes)
    want = np.rint((values - 200.0) * (255 / 2400)).astype(np.uint8)
    assert np.array_equal(bands(path, 13, TWO), want)
    ranges = tuple((float(100 * c), 3000.0 + c) for c in range(13))
    low, high = (np.array([pair[i] for pair in ranges]) for i in (0, 1))
    want = np.clip(np.rint((values - low) * (255 / (high - low))), 0, 255).astype(np.uint8)
    assert np.array_equal(bands(path, 13, Decoding("srgb", ranges, "uint16")), want)


def test_opacity_is_none_of_the_bands_of_colour(tmp_path: Path) -> None:
    values = eight(6, 9, 4)
    values[..., 3] |= 128
    path = tiff(tmp_path / "a.tif", values, photometric=2, extra=(2,))
    assert np.array_equal(bands(path, 4), values)
    alpha = values[..., 3:] / 255
    np.testing.assert_allclose(bands_rgb(path), values[..., :3] * alpha + 255 * (1 - alpha), atol=1)
    wide = values.astype(np.uint16) * 257
    deep = tiff(tmp_path / "b.tif", wide, photometric=2, extra=(2,))
    full = Decoding("srgb", ((0.0, 65535.0),), "uint16")
    assert np.array_equal(bands(deep, 4, full), values)
    multiplied = wide.copy()
    multiplied[..., :3] = np.rint(wide[..., :3] * alpha)
    straight = bands(tiff(tmp_path / "c.tif", multiplied, photometric=2, extra=(1,)), 4, full)
    np.testing.assert_allclose(straight, values, atol=1)


def bands_rgb(path: Path, decoding: Decoding = SRGB) -> np.ndarray:
    image = read_image(path, 3, decoding=decoding)
    assert isinstance(image, Image.Image) and image.mode == "RGB"
    return np.asarray(image)


def test_pages_are_bands_of_any_types_but_not_thumbnails(tmp_path: Path) -> None:
    grey, deep = eight(6, 9), RNG.integers(200, 2601, (6, 9)).astype(np.uint16)
    path = tiff(tmp_path / "a.tif", grey, deep)
    found = bands(path, 2, TWO)
    assert np.array_equal(found[..., 0], grey)
    assert np.array_equal(found[..., 1], np.rint((deep - 200.0) * (255 / 2400)).astype(np.uint8))
    three = [eight(6, 9) for _ in range(3)]
    assert np.array_equal(bands_rgb(tiff(tmp_path / "b.tif", *three)), np.stack(three, -1))
    colours, small = eight(6, 9, 3), eight(3, 4, 3)
    assert np.array_equal(bands_rgb(tiff(tmp_path / "c.tif", colours, small, photometric=2, subfile=(0, 1))), colours)
    assert np.array_equal(bands_rgb(tiff(tmp_path / "d.tif", small, colours, photometric=2, subfile=(1, 0))), colours)
    with pytest.raises(DataError, match=r"it has 6 channels \(on 2 pages\), --in-chans is 3; give --in-chans 6"):
        read_image(tiff(tmp_path / "e.tif", colours, colours, photometric=2), 3, decoding=SRGB)
    with pytest.raises(DataError, match="pages differ in size"):
        read_image(tiff(tmp_path / "f.tif", grey, grey[:3]), 2, decoding=SRGB)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"more": {258: (8, 8, 16)}}, "its 3 samples are 16-bit unsigned and 8-bit unsigned; save all as one type of"),
        ({"more": {259: (7,)}}, r"compressed as pixels \(TIFF compression 7\); save them with LZW, deflate or none"),
        ({"photometric": 8}, r"an unsupported colour space \(TIFF photometric 8\); save it as grey or RGB"),
        ({"more": {277: (60000,)}}, "it declares 60000 samples per pixel"),
        ({"more": {317: (9,), 259: (8,)}}, "."),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, made: dict[str, Any], says: str) -> None:
    path = tiff(tmp_path / "a.tif", np.zeros((4, 5, 3), np.uint16), **made)
    with pytest.raises(DataError, match=says) as error:
        read_image(path, 3, decoding=SRGB)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_bands_stand_upright(tmp_path: Path, orientation: int) -> None:
    values = RNG.integers(200, 2601, (6, 9, 5)).astype(np.uint16)
    path = tiff(tmp_path / "a.tif", values, more={274: (orientation,)})
    turned = {
        1: values, 2: values[:, ::-1], 3: values[::-1, ::-1], 4: values[::-1], 5: values.transpose(1, 0, 2),
        6: np.rot90(values, -1), 7: np.rot90(values, 2).transpose(1, 0, 2), 8: np.rot90(values),
    }[orientation]  # fmt: skip
    assert np.array_equal(bands(path, 5, TWO), np.rint((turned - 200.0) * (255 / 2400)).astype(np.uint8))
    found = probe(str(path), 5)
    assert (found.height, found.width) == turned.shape[:2] and found.orientation == orientation


def test_an_open_image_is_read_whole_or_refused(tmp_path: Path) -> None:
    values = eight(6, 9, 4)
    path = tiff(tmp_path / "nir.tif", values, photometric=2, extra=(0,))
    with Image.open(path) as image:
        found = take_image(image, 4, SRGB)
    assert np.array_equal(np.stack([np.asarray(band) for band in found], -1), values)
    with Image.open(path) as image:
        image.load()
        image.fp = None  # as Pillow leaves it when nothing else holds the file
        with pytest.raises(UsageError, match="dropped bands or bits; give the path of the file"):
            take_image(image, 3, SRGB)
    plain = tiff(tmp_path / "rgb.tif", values[..., :3], photometric=2)
    with Image.open(plain) as image:
        image.load()
        assert np.array_equal(np.asarray(take_image(image, 3, SRGB)), values[..., :3])


@pytest.mark.filterwarnings("ignore")  # of doubtful metadata
def test_damaged_files_are_bad_files_and_nothing_else(tmp_path: Path) -> None:
    whole = tiff(tmp_path / "a.tif", RNG.integers(0, 4096, (6, 9, 5)).astype(np.uint16)).read_bytes()
    path, seen = tmp_path / "b.tif", set()
    for i in range(150):
        data = bytearray(whole)
        for _ in range(int(RNG.integers(1, 6))):
            data[int(RNG.integers(len(data)))] = int(RNG.integers(256))
        path.write_bytes(data[: int(RNG.integers(len(data)))] if i % 5 == 0 else data)
        found = probe(str(path), 5, 1_000_000)
        seen.add(bool(found.bad))
        assert found.bad.count("\n") == 0
    assert seen == {True, False}


def test_a_wide_type_is_no_decompression_bomb(tmp_path: Path, monkeypatch: Any) -> None:
    values = RNG.integers(0, 65536, (12, 14), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a.tif", compression="tiff_lzw")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 150)  # Pillow refuses more than 300; its 168 pixels are 336 bytes
    found = np.asarray(read_image(tmp_path / "a.tif", decoding=Decoding("srgb", ((0.0, 65535.0),), "uint16")))
    assert np.array_equal(found[..., 0], np.rint(values / 257).astype(np.uint8))


def test_what_a_file_becomes_is_limited_before_it_is_decoded(tmp_path: Path, monkeypatch: Any) -> None:
    page = Image.fromarray(eight(10, 10))
    page.save(tmp_path / "pages.tif", save_all=True, append_images=[page] * 39)
    tiff(tmp_path / "bands.tif", eight(10, 10, 6), photometric=1, extra=(0,) * 5)
    assert bands(tmp_path / "bands.tif", 6).shape == (10, 10, 6)
    monkeypatch.setattr("vtk.data.decoding.read_pixels._page", lambda *a: pytest.fail("a page was decoded"))
    with pytest.raises(DataError, match=r"pages\.tif: it has 40 pages of a channel or more, --in-chans is 3"):
        read_image(tmp_path / "pages.tif", 3, decoding=SRGB)
    assert "40 pages" in probe(str(tmp_path / "pages.tif")).bad
    with pytest.raises(
        DataError, match=r"bands\.tif: its 1 page has 600 values in all, more than 4 × --max-pixels 100"
    ):
        read_image(tmp_path / "bands.tif", 6, 100, SRGB)
