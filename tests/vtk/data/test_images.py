import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from vtk.data.decoding.images import load_image
from vtk.errors import DataError

RNG = np.random.default_rng(0)
RGBA = RNG.integers(0, 256, (5, 7, 4), dtype=np.uint8)


def loaded(image: Image.Image, path: Path, **options: object) -> np.ndarray:
    image.save(path, **options)
    result = load_image(path)
    assert result.mode == "RGB"
    return np.asarray(result).astype(int)


def on_white(rgba: np.ndarray) -> np.ndarray:
    alpha = rgba[..., 3:] / 255
    return rgba[..., :3] * alpha + 255 * (1 - alpha)


def test_rgb_and_grey_are_unchanged(tmp_path: Path) -> None:
    rgb = RGBA[..., :3]
    assert np.array_equal(loaded(Image.fromarray(rgb), tmp_path / "a.png"), rgb)
    assert np.array_equal(loaded(Image.fromarray(rgb[..., 0]), tmp_path / "b.png"), np.stack([rgb[..., 0]] * 3, -1))


def test_bilevel_becomes_black_and_white(tmp_path: Path) -> None:
    bits = RGBA[..., 0] > 127
    assert np.array_equal(loaded(Image.fromarray(bits), tmp_path / "a.png")[..., 1], 255 * bits)


def test_transparency_is_composited_on_white(tmp_path: Path) -> None:
    np.testing.assert_allclose(loaded(Image.fromarray(RGBA, "RGBA"), tmp_path / "a.png"), on_white(RGBA), atol=1)
    la = RGBA[..., [0, 3]]
    expected = on_white(np.stack([la[..., 0]] * 3 + [la[..., 1]], -1))
    np.testing.assert_allclose(loaded(Image.fromarray(la, "LA"), tmp_path / "b.png"), expected, atol=1)


def test_a_transparent_palette_entry_becomes_white(tmp_path: Path) -> None:
    indices = np.arange(12, dtype=np.uint8).reshape(3, 4) % 3
    image = Image.fromarray(indices, "P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    plain = np.array([[10, 20, 30], [40, 50, 60], [70, 80, 90]])[indices]
    assert np.array_equal(loaded(image, tmp_path / "plain.png"), plain)
    see_through = np.where((indices == 1)[..., None], 255, plain)
    assert np.array_equal(loaded(image, tmp_path / "a.png", transparency=1), see_through)
    assert np.array_equal(loaded(image, tmp_path / "a.gif", transparency=1), see_through)
    half = np.where((indices == 1)[..., None], plain * (100 / 255) + 255 * (155 / 255), plain)
    np.testing.assert_allclose(loaded(image, tmp_path / "b.png", transparency=bytes([255, 100, 255])), half, atol=1)


def test_a_transparent_colour_key_becomes_white(tmp_path: Path) -> None:
    pixels = np.full((2, 2, 3), 50, np.uint8)
    pixels[0, 0] = (1, 2, 3)
    result = loaded(Image.fromarray(pixels), tmp_path / "a.png", transparency=(1, 2, 3))
    assert result[0, 0].tolist() == [255] * 3 and result[1, 1].tolist() == [50] * 3


def test_cmyk_jpeg_looks_like_the_rgb_it_came_from(tmp_path: Path) -> None:
    rgb = np.asarray(Image.fromarray(RGBA[..., :3]).resize((64, 64), Image.Resampling.BICUBIC))
    smooth = Image.fromarray(rgb)
    result = loaded(smooth.convert("CMYK"), tmp_path / "a.jpg", quality=100)
    assert np.abs(result - rgb.astype(int)).mean() < 3


def test_ycck_jpeg_looks_like_the_rgb_it_came_from(tmp_path: Path) -> None:
    smooth = Image.fromarray(RGBA[..., :3]).resize((64, 64), Image.Resampling.BICUBIC)
    cyan, magenta, yellow, black = smooth.convert("CMYK").split()
    planes = Image.merge("RGB", (cyan, magenta, yellow)).convert("YCbCr").split()
    inverted = [plane.point(lambda value: 255 - value) for plane in planes]  # Pillow inverts what it writes as CMYK
    path = tmp_path / "a.jpg"
    Image.merge("CMYK", (*inverted, black)).save(path, quality=100, subsampling=0)
    data = bytearray(path.read_bytes())
    at = data.index(b"Adobe") + 11
    assert data[at] == 0  # of Adobe's marker: these are CMYK …
    data[at] = 2  # … YCCK
    path.write_bytes(data)
    result = np.asarray(load_image(path)).astype(int)
    assert np.abs(result - np.asarray(smooth).astype(int)).mean() < 3


def test_lab_tiff_gives_the_colours_of_srgb(tmp_path: Path) -> None:
    lab = np.zeros((1, 3, 3), np.uint8)
    lab[0] = [(0, 0, 0), (255, 0, 0), (136, 80, 67)]  # L 53.3 a 80 b 67 is sRGB red; Pillow stores a and b signed
    result = loaded(Image.frombytes("LAB", (3, 1), lab.tobytes()), tmp_path / "a.tif")
    np.testing.assert_allclose(result[0], [(0, 0, 0), (255, 255, 255), (255, 0, 0)], atol=12)


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path, suffix: str) -> None:
    values = np.array([[0, 257, 1000], [30000, 40000, 65535]], np.uint16)
    result = loaded(Image.fromarray(values), tmp_path / f"a.{suffix}")
    np.testing.assert_allclose(result[..., 0], values / 257, atol=0.5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 100, 255]], np.int32), [0, 100, 255]),
        (np.array([[0, 25700, 65535]], np.int32), [0, 100, 255]),
        (np.array([[-1000, 0, 1000]], np.int32), [0, 128, 255]),
        (np.array([[0, 0.2, 1]], np.float32), [0, 51, 255]),
        (np.array([[0, 51, 200]], np.float32), [0, 51, 200]),
        (np.array([[-2, 0, np.nan, 2]], np.float32), [0, 128, 128, 255]),
        (np.array([[7e5, 7e5]], np.float32), [0, 0]),
    ],
)
def test_32_bits_take_the_smallest_usual_range(tmp_path: Path, values: np.ndarray, expected: list[int]) -> None:
    assert loaded(Image.fromarray(values), tmp_path / "a.tif")[0, :, 0].tolist() == expected


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_exif_orientation_is_applied_once(tmp_path: Path, orientation: int, suffix: str) -> None:
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8, :8], upright[:8, 16:], upright[8:, :8] = (250, 0, 0), (0, 250, 0), (0, 0, 250)
    # what a camera stores: the inverse of what the tag asks viewers to do
    inverse = {6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    same = {2: 0, 3: 3, 4: 1, 5: 5, 7: 6}
    stored = Image.fromarray(upright)
    if orientation != 1:
        stored = stored.transpose(inverse.get(orientation, Image.Transpose(same.get(orientation, 0))))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100} if suffix in ("jpg", "webp") else {}
    result = loaded(stored, tmp_path / f"a.{suffix}", exif=exif, **options)
    assert result.shape == upright.shape
    assert np.abs(result - upright.astype(int)).mean() < 12
    again = ImageOps.exif_transpose(load_image(tmp_path / f"a.{suffix}"))
    assert again.size == (24, 16)


@pytest.mark.parametrize("orientation", [3, 5, 6, 7, 8])
@pytest.mark.parametrize("mode", ["L", "I;16", "F", "CMYK"])
def test_plain_tiff_files_on_their_side_keep_their_rows(tmp_path: Path, mode: str, orientation: int) -> None:
    stored = np.asarray(RGBA[..., 0])  # 5×7, not compressed
    image = {"I;16": Image.fromarray(stored.astype(np.uint16) * 257), "F": Image.fromarray(stored / np.float32(255))}
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = {
        3: stored[::-1, ::-1],
        5: stored.T,
        6: np.rot90(stored, -1),
        7: np.rot90(stored, 2).T,
        8: np.rot90(stored),
    }
    result = loaded(image.get(mode, Image.fromarray(stored)).convert(mode), tmp_path / "a.tif", exif=exif)
    np.testing.assert_allclose(result[..., 0], turned[orientation], atol=1)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_is_ignored(tmp_path: Path) -> None:
    Image.fromarray(RGBA[..., :3]).save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff\x12\x01garbage")
    assert load_image(tmp_path / "a.jpg").size == (7, 5)


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def jpeg_bytes() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jpg", b"", "the file is empty"),
        ("a.jpg", b"<html>not found</html>", "not an image"),
        ("a.jpg", jpeg_bytes()[:900], "truncated"),
        ("a.heic", b"\0\0\0\x18ftypheic" + b"\0" * 40, "HEIC is not supported; convert it"),
        ("a.png", png_claiming(60000, 60000), "million pixels"),
        ("a.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    ],
)
def test_unreadable_files_say_why(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as error:
        load_image(tmp_path / name)
    assert str(tmp_path / name) in str(error.value) and "\n" not in str(error.value)


def test_an_absent_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        load_image(tmp_path / "none.png")
