"""The value range of images of more than 8 bits: settled once per data set, by all files, printed and obeyed."""

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.vtk.data._images import tiff
from vtk.data import scan
from vtk.data.audit.result import DataAudit
from vtk.data.decoding.decode import read_image
from vtk.data.decoding.memory_images import take_image
from vtk.data.decoding.rules import SRGB, Decoding
from vtk.data.probing.probe import probe
from vtk.data.value_range.choice import choose_range
from vtk.data.value_range.values import LEVELS, Values
from vtk.errors import DataError, UsageError

RNG = np.random.default_rng(0)


def folder(root: Path, images: Sequence[np.ndarray], suffix: str = "png") -> Path:
    """Write images in turn to two classes."""
    for i, values in enumerate(images):
        path = root / "ab"[i % 2] / f"{i:03d}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == "tif":
            tiff(path, values)
        else:
            Image.fromarray(values).save(path)
    return root


def audit(root: Path, *value_range: str, **options: object) -> DataAudit:
    return scan(root, value_range=value_range, workers=0, show_progress=False, **options)  # type: ignore[arg-type]


def grey(path: Path, decoding: Decoding, in_chans: int = 3) -> np.ndarray:
    image = read_image(path, in_chans, decoding=decoding)
    assert isinstance(image, Image.Image) and image.mode == "RGB"
    planes = np.asarray(image)
    assert np.array_equal(planes[..., 0], planes[..., 1]) and np.array_equal(planes[..., 0], planes[..., 2])
    return planes[..., 0].astype(int)


def mapped(values: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.clip(np.rint((values.astype(np.float64) - low) * (255 / (high - low))), 0, 255).astype(int)


def twelve(count: int = 12, top: int = 4095) -> list[np.ndarray]:
    found = [RNG.integers(0, top // 2 + top * i // (2 * count), (9, 11)).astype(np.uint16) for i in range(count)]
    found[-1][0, 0] = top
    return found


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_twelve_bits_in_sixteen_fill_all_levels(tmp_path: Path, suffix: str) -> None:
    images = twelve()
    found = audit(folder(tmp_path, images, suffix))
    assert found.decoding == Decoding("srgb", ((0.0, 4095.0),), "uint16")
    for i, values in enumerate(images):
        path = tmp_path / "ab"[i % 2] / f"{i:03d}.{suffix}"
        assert np.array_equal(grey(path, found.decoding), mapped(values, 0, 4095))
        assert np.array_equal(grey(path, found.decoding, 1), mapped(values, 0, 4095))
    text = " ".join(found.notes)
    least = min(int(values.min()) for values in images)
    assert f"more than 8 bits: 12 images of uint16, values from {least} to 4095; 0…4095 becomes 0…255" in text
    assert found.to_dict()["values"]["range"] == [[0.0, 4095.0]] and found.to_dict()["values"]["max"] == 4095
    assert audit(tmp_path).decoding == found.decoding and audit(tmp_path).cached == 12  # remembered with the scan


def test_a_dark_file_stays_dark_among_bright_ones(tmp_path: Path) -> None:
    dark = np.full((9, 11), 40, np.uint16)
    found = audit(folder(tmp_path, [dark, *twelve()]))
    assert set(np.unique(grey(tmp_path / "a" / "000.png", found.decoding))) == {round(40 * 255 / 4095)}
    assert not found.values["outside"]


def test_one_file_beyond_all_others_does_not_set_the_range(tmp_path: Path) -> None:
    images = [*twelve(20), np.full((9, 11), 65535, np.uint16)]
    found = audit(folder(tmp_path, images))
    assert found.decoding.ranges == ((0.0, 4095.0),) and found.values["outside"] == ["a/020.png"]
    (warning,) = [text for text in found.warnings if "outside the value range" in text]
    assert warning.startswith("1 image has") and "a/020.png (65535 to 65535)" in warning
    assert grey(tmp_path / "a" / "020.png", found.decoding).min() == 255
    some = audit(folder(tmp_path / "more", [*twelve(6), *twelve(6, 65535)]))  # half of them are no exception
    assert some.decoding.ranges == ((0.0, 65535.0),)


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("u2", 200, 2600, (200.0, 2600.0)),
        ("i2", -1024, 3071, (-1024.0, 3071.0)),
        ("i4", -70000, 900000, (-70000.0, 900000.0)),
        ("u4", 5, 4_294_967_000, (0.0, 4_294_967_295.0)),
        ("f4", -2.5, 7.25, (-2.5, 7.25)),
        ("f4", 0.001, 0.99, (0.0, 1.0)),
        ("f8", -1e300, 1e300, (-1e300, 1e300)),
        ("u2", 0, 65535, (0.0, 65535.0)),
        ("u2", 12, 1010, (0.0, 1023.0)),
    ],
)
def test_ranges_of_all_types(tmp_path: Path, kind: str, low: float, high: float, expected: tuple[float, float]) -> None:
    images = [(low + (high / 2 - low / 2) * 2 * RNG.random((9, 11))).astype(kind) for _ in range(6)]
    images[0][0, :2] = low, high
    found = audit(folder(tmp_path, images, "tif"))
    assert found.decoding == Decoding("srgb", (expected,), np.dtype(kind).name)
    values = grey(tmp_path / "a" / "000.tif", found.decoding)
    assert np.array_equal(values, mapped(images[0], *expected)) and values[0, :2].tolist() == (
        mapped(np.array([low, high], kind), *expected).tolist()
    )


def test_values_that_are_no_numbers_are_zero(tmp_path: Path) -> None:
    images = [RNG.uniform(-2, 4, (9, 11)).astype(np.float32) for _ in range(6)]
    images[0][0, :3] = np.nan, np.inf, -np.inf
    images[1][0, 0], images[1][0, 1] = 5, -3
    found = audit(folder(tmp_path, images, "tif"))
    assert found.decoding.ranges == ((-3.0, 5.0),)
    assert grey(tmp_path / "a" / "000.tif", found.decoding)[0, :3].tolist() == [0, 255, 0]
    assert any("1 images have NaN" in note for note in found.notes)
    filled = images[2].copy()
    filled[0, 0] = -9999
    tiff(tmp_path / "a" / "002.tif", filled, text={42113: "-9999"})  # GDAL's tag of what stands for no data
    found = audit(tmp_path)
    assert found.decoding.ranges == ((-3.0, 5.0),) and grey(tmp_path / "a" / "002.tif", found.decoding)[0, 0] == 0


def test_bands_have_ranges_of_their_own_and_colours_one(tmp_path: Path) -> None:
    lows, highs = np.array([200, 0, 5000, 10]), np.array([2600, 300, 9000, 60000])
    images = [(lows + RNG.random((9, 11, 4)) * (highs - lows)).astype(np.uint16) for _ in range(6)]
    images[0][0, 0], images[0][0, 1] = lows, highs
    found = audit(folder(tmp_path, images, "tif"), in_chans=4)
    assert found.decoding.ranges == ((200.0, 2600.0), (0.0, 300.0), (5000.0, 9000.0), (0.0, 60000.0))
    path = tmp_path / "a" / "000.tif"
    planes = [np.asarray(band) for band in read_image(path, 4, decoding=found.decoding)]
    for c, (low, high) in enumerate(found.decoding.ranges):
        assert np.array_equal(planes[c], mapped(images[0][..., c], low, high))
    assert any("1: 200…2600, 2: 0…300, 3: 5000…9000, 4: 0…60000" in note for note in found.notes)
    for values in images:
        values[..., 0] //= 4
    colours = folder(tmp_path / "rgb", [np.ascontiguousarray(values[..., :3]) for values in images], "tif")
    for path in colours.rglob("*.tif"):
        tiff(path, images[int(path.stem)][..., :3], photometric=2)
    found = audit(colours)
    assert found.decoding.ranges == ((0.0, 9000.0),)  # one, which keeps the balance
    shown = np.asarray(read_image(colours / "a" / "000.tif", 3, decoding=found.decoding))
    assert np.array_equal(shown, mapped(images[0][..., :3], 0, 9000))


def test_the_range_can_be_given(tmp_path: Path) -> None:
    images = twelve()
    root = folder(tmp_path, images)
    found = audit(root, "-100", "1000.5")
    assert found.decoding.ranges == ((-100.0, 1000.5),)
    assert np.array_equal(grey(tmp_path / "b" / "011.png", found.decoding), mapped(images[11], -100, 1000.5))
    assert len(found.values["outside"]) == sum(values.max() > 1000.5 for values in images)
    large = [np.random.default_rng(i).integers(0, 2000 + 170 * i, (60, 70)).astype(np.uint16) for i in range(12)]
    every = np.concatenate([values.ravel() for values in large])
    low, high = audit(folder(tmp_path.with_name("large"), large), "p5", "p95").decoding.ranges[0]
    assert abs(low - np.percentile(every, 5)) < 41 and abs(high - np.percentile(every, 95)) < 41  # 1 % of the range
    assert audit(root, "0", "p100").decoding.ranges == ((0.0, 4095.0),)
    for given, says in (
        (("5",), "give two ends LOW HIGH"), (("1", "x"), "a number or a percentile"), (("9", "3"), "LOW must be below"),
        (("p99", "p1"), "LOW must be below"), (("p1", "p101"), "a number or a percentile"), (("0", "nan"), "a number"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=says):
            audit(root, *given)
    with pytest.raises(DataError, match="`--value-range` 5000 p99 goes from 5000 to"):
        audit(root, "5000", "p99")


def test_eight_bits_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [RNG.integers(0, 256, (9, 11, 3), dtype=np.uint8) for _ in range(4)]
    found = audit(folder(tmp_path, images), "0", "100")
    assert found.decoding == SRGB and found.values == {}
    assert any("`--value-range` has no effect: no image has more than 8 bits" in text for text in found.warnings)
    assert np.array_equal(np.asarray(read_image(tmp_path / "a" / "000.png", 3, decoding=found.decoding)), images[0])
    mixed = folder(tmp_path / "mixed", [*twelve(6), *images])
    found = audit(mixed)
    assert found.decoding.ranges == ((0.0, 4095.0),)
    assert any("4 images have 8 bits and are used unchanged" in note for note in found.notes)
    assert np.array_equal(np.asarray(read_image(mixed / "a" / "006.png", 3, decoding=found.decoding)), images[0])


def test_constant_images_and_few_levels_are_said(tmp_path: Path) -> None:
    found = audit(folder(tmp_path / "flat", [np.full((9, 11), 700, np.uint16)] * 4))
    assert found.decoding.ranges == ((0.0, 1023.0),)
    assert any("all values of the 4 images of uint16 are 700" in text for text in found.warnings)
    assert set(np.unique(grey(tmp_path / "flat" / "a" / "000.png", found.decoding))) == {174}
    hot = [RNG.integers(0, 200, (40, 50)).astype(np.uint16) for _ in range(6)]
    for values in hot:
        values[0, 0] = 65535  # one defect pixel in each
    found = audit(folder(tmp_path / "hot", hot))
    assert any("--value-range p1 p99 would spread them" in text for text in found.warnings)
    floats = [values.astype(np.float32) / 4095 for values in twelve(4)]
    mixed = folder(folder(tmp_path / "two", twelve(4)), floats, "tif")
    assert any("float32 lie in" in text and "store all images as one type" in text for text in audit(mixed).warnings)


def test_images_without_a_single_number(tmp_path: Path) -> None:
    found = audit(folder(tmp_path, [np.full((9, 11), np.nan, np.float32)] * 4, "tif"))
    assert found.decoding.ranges == ((0.0, 1.0),)
    assert grey(tmp_path / "a" / "000.tif", found.decoding).max() == 0


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(path: Path, values: np.ndarray, colours: int, *more: bytes) -> Path:
    """Write a PNG of 16 bits by hand: ``colours`` 0 grey, 2 RGB, 4 grey and opacity, 6 RGB and opacity."""
    height, width = values.shape[:2]
    raw = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 16, colours, 0, 0, 0))
    parts = [b"\x89PNG\r\n\x1a\n", header, *more, chunk(b"IDAT", zlib.compress(raw)), chunk(b"IEND", b"")]
    path.write_bytes(b"".join(parts))
    return path


TWELVE = Decoding("srgb", ((0.0, 4095.0),), "uint16")


def test_png_files_of_sixteen_bits_a_colour_are_read_whole(tmp_path: Path) -> None:
    values = RNG.integers(0, 4096, (9, 11, 3)).astype(np.uint16)
    path = png(tmp_path / "rgb.png", values, 2, chunk(b"sBIT", bytes([12, 12, 12])))
    assert np.array_equal(np.asarray(read_image(path, 3, decoding=TWELVE)), mapped(values, 0, 4095))
    assert Values.parse(probe(str(path)).values).bands[0][::16] == (values[..., 0].min(), values[..., 0].max())
    opaque = np.concatenate([values, np.full((9, 11, 1), 65535, np.uint16)], -1)
    assert np.array_equal(np.asarray(read_image(png(tmp_path / "a.png", opaque, 6), 3, decoding=TWELVE)),
                          mapped(values, 0, 4095))  # fmt: skip
    half = np.stack([values[..., 0], np.full((9, 11), 65535 // 2, np.uint16)], -1)
    shown = np.asarray(read_image(png(tmp_path / "la.png", half, 4), 3, decoding=TWELVE))[..., 0]
    np.testing.assert_allclose(shown, mapped(values[..., 0], 0, 4095) / 2 + 127.5, atol=1.5)
    grey_ = png(tmp_path / "l.png", values[..., 0], 0, chunk(b"sBIT", bytes([12])))
    assert np.array_equal(grey(grey_, TWELVE), mapped(values[..., 0], 0, 4095))


def test_ppm_files_of_sixteen_bits_a_colour_too(tmp_path: Path) -> None:
    values = RNG.integers(0, 4096, (9, 11, 3)).astype(np.uint16)
    path = tmp_path / "a.ppm"
    path.write_bytes(b"P6\n11 9\n65535\n" + values.astype(">u2").tobytes())
    assert np.array_equal(np.asarray(read_image(path, 3, decoding=TWELVE)), mapped(values, 0, 4095))
    path.write_bytes(b"P6\n11 9\n4095\n" + values.astype(">u2").tobytes())  # the header says what is white
    full = Decoding("srgb", ((0.0, 65535.0),), "uint16")
    want = mapped(np.rint(values * (65535 / 4095)), 0, 65535)
    assert np.array_equal(np.asarray(read_image(path, 3, decoding=full)), want)


def test_arrays_and_open_images_are_mapped_alike(tmp_path: Path) -> None:
    values = twelve(1)[0]
    Image.fromarray(values).save(tmp_path / "a.png")
    want = mapped(values, 0, 4095)
    for given in (values, values[..., None], values.astype(">u2"), values.astype(np.float32), values.astype(np.int64)):
        assert np.array_equal(np.asarray(take_image(given, 3, TWELVE))[..., 1], want)
    with Image.open(tmp_path / "a.png") as image:
        assert np.array_equal(np.asarray(take_image(image, 3, TWELVE))[..., 0], want)
    colours = RNG.integers(0, 4096, (9, 11, 3)).astype(np.uint16)
    assert np.array_equal(np.asarray(take_image(colours, 3, TWELVE)), mapped(colours, 0, 4095))
    with Image.open(png(tmp_path / "b.png", colours, 2)) as image:
        assert np.array_equal(np.asarray(take_image(image, 3, TWELVE)), mapped(colours, 0, 4095))
    five = RNG.integers(0, 4096, (9, 11, 5)).astype(np.uint16)
    found = np.stack([np.asarray(band) for band in take_image(five, 5, TWELVE)], -1)
    assert np.array_equal(found, mapped(five, 0, 4095))
    bytes_ = RNG.integers(0, 256, (9, 11, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(take_image(bytes_, 3, TWELVE)), bytes_)
    with pytest.raises(UsageError, match="an array is uint16"):
        take_image(values, 3, SRGB)
    with pytest.raises(UsageError, match=r"values of the model's range 0…4095"):
        take_image(values.astype(str), 3, TWELVE)


def test_the_range_of_many_files_is_quick_and_right() -> None:
    """Pooled percentiles against NumPy's of all pixels together."""
    files, pixels = {}, []
    for i in range(400):
        values = RNG.gamma(2, 100 + i, 500)
        pixels.append(values)
        quantiles = tuple(float(v) for v in np.percentile(values, LEVELS))
        files[f"{i}.tif"] = (Values("float64", (quantiles,)).text(), values.size)
    low, high = choose_range(files, SRGB, ("p2", "p98"), 3, known=False).decoding.ranges[0]
    want = np.percentile(np.concatenate(pixels), (2, 98))
    assert abs(low - want[0]) < 0.02 * want[1] and abs(high - want[1]) < 0.02 * want[1]
