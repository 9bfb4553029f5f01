"""Embedded colour profiles become sRGB, by formulas of the colour spaces; sRGB itself stays bit for bit."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.vtk.data._images import ADOBE_RGB, DISPLAY_P3, grey_profile, ink_profile, matrix_profile, tiff
from vtk.data import scan
from vtk.data.decoding.decode import read_image
from vtk.data.decoding.images import load_image
from vtk.data.decoding.memory_images import take_image
from vtk.data.decoding.rules import SRGB, Decoding
from vtk.data.probing.probe import probe

RNG = np.random.default_rng(0)
ADOBE = matrix_profile("Adobe RGB (1998)", ADOBE_RGB, 563 / 256)
P3 = matrix_profile("Wide screen", DISPLAY_P3, 2.2)
OWN = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
# of XYZ in D50, by Bradford's adaptation
TO_SRGB = np.array([[3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.0334540],
                    [0.0719453, -0.2289914, 1.4052427]])  # fmt: skip


def encoded(linear: np.ndarray) -> np.ndarray:
    linear = np.clip(linear, 0, 1)
    return 255 * np.where(linear > 0.0031308, 1.055 * linear ** (1 / 2.4) - 0.055, 12.92 * linear)


def by_formula(pixels: np.ndarray, colours: tuple[tuple[float, ...], ...], gamma: float) -> np.ndarray:
    return encoded((pixels / 255) ** gamma @ np.array(colours) @ TO_SRGB.T)


def colours(path: Path, decoding: Decoding = SRGB, in_chans: int = 3) -> np.ndarray:
    image = read_image(path, in_chans, decoding=decoding)
    assert isinstance(image, Image.Image) and image.mode == "RGB"
    return np.asarray(image).astype(int)


PIXELS = RNG.integers(40, 216, (9, 11, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("profile", "primaries", "gamma"), [(ADOBE, ADOBE_RGB, 563 / 256), (P3, DISPLAY_P3, 2.2)], ids=["adobe", "p3"]
)
@pytest.mark.parametrize("suffix", ["png", "tif", "webp", "jpg"])
def test_a_profile_is_converted(tmp_path: Path, profile: bytes, primaries: Any, gamma: float, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    options: dict[str, Any] = {"jpg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": True}}.get(suffix, {})
    Image.fromarray(PIXELS).save(path, icc_profile=profile, **options)
    stored = np.asarray(load_image(path))  # as version 0.1 reads it
    found, want = colours(path), by_formula(stored, primaries, gamma)
    assert np.abs(found - want).max() < 2.5 and np.abs(stored - want).max() > 8
    assert probe(str(path)).colors in ("Adobe RGB (1998)", "Wide screen")
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(take_image(image, 3, SRGB)), found)
    assert np.array_equal(colours(path, Decoding()), stored)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1"])
def test_srgb_and_no_profile_change_nothing(tmp_path: Path, mode: str) -> None:
    image = Image.fromarray(RNG.integers(0, 256, (9, 11, 4), dtype=np.uint8), "RGBA").convert(mode)
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "b.png", icc_profile=OWN)
    plain = np.asarray(load_image(tmp_path / "a.png")).astype(int)
    assert np.array_equal(colours(tmp_path / "a.png"), plain) and np.array_equal(colours(tmp_path / "b.png"), plain)
    assert (probe(str(tmp_path / "a.png")).colors, probe(str(tmp_path / "b.png")).colors) == ("", "sRGB")


def test_grey_opacity_palettes_and_sixteen_bits(tmp_path: Path) -> None:
    levels = np.arange(0, 250, 10, dtype=np.uint8)[None].repeat(2, 0)
    Image.fromarray(levels).save(tmp_path / "l.png", icc_profile=grey_profile("Dark grey", 1.5))
    want = encoded((levels / 255) ** 1.5)
    found = colours(tmp_path / "l.png")
    assert np.abs(found - want[..., None]).max() < 1.5 and np.ptp(found, axis=2).max() == 0
    assert np.array_equal(colours(tmp_path / "l.png", in_chans=1), found)
    Image.fromarray(levels).save(tmp_path / "rgb.png", icc_profile=ADOBE)  # of colours, in an image of grey
    grey = by_formula(np.stack([levels] * 3, -1), ADOBE_RGB, 563 / 256)
    assert np.abs(colours(tmp_path / "rgb.png") - grey).max() < 1.5
    rgba = np.concatenate([PIXELS, np.full((9, 11, 1), 128, np.uint8)], -1)
    Image.fromarray(rgba, "RGBA").save(tmp_path / "a.png", icc_profile=ADOBE)
    want = by_formula(PIXELS, ADOBE_RGB, 563 / 256)
    np.testing.assert_allclose(colours(tmp_path / "a.png"), want * (128 / 255) + 127, atol=2.5)
    four = read_image(tmp_path / "a.png", 4, decoding=SRGB)
    assert np.abs(np.stack([np.asarray(b) for b in four[:3]], -1) - want).max() < 2.5
    assert np.asarray(four[3]).min() == 128
    palette = Image.fromarray(PIXELS).quantize(8)
    palette.save(tmp_path / "p.png", icc_profile=ADOBE)
    shown = by_formula(np.asarray(palette.convert("RGB")), ADOBE_RGB, 563 / 256)
    assert np.abs(colours(tmp_path / "p.png") - shown).max() < 2.5
    deep = tiff(tmp_path / "d.tif", PIXELS.astype(np.uint16) * 257, photometric=2, profile=ADOBE)
    full = Decoding("srgb", ((0.0, 65535.0),), "uint16")
    assert np.abs(colours(deep, full) - want).max() < 2.5


@pytest.mark.parametrize("suffix", ["jpg", "tif"])
def test_inks_are_what_their_profile_says(tmp_path: Path, suffix: str) -> None:
    """Cyan that is printed as a dull green; without the profile it is #00ffff."""
    dull = (60.0, -30.0, 20.0)
    inks = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    inks.paste((0, 0, 0, 0), (0, 0, 8, 16))
    options: dict[str, Any] = {"quality": 100} if suffix == "jpg" else {}
    inks.save(
        tmp_path / f"a.{suffix}",
        icc_profile=ink_profile("Newspaper", dull),
        **options,
    )
    found = colours(tmp_path / f"a.{suffix}")
    lab = ImageCms.profileToProfile(
        Image.frombytes("LAB", (1, 1), bytes([round(dull[0] * 2.55), (round(dull[1]) + 256) % 256, round(dull[2])])),
        ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB",
    )  # fmt: skip
    assert lab is not None
    assert np.abs(found[0, 0] - 255).max() <= 2
    assert np.abs(found[0, 15] - np.array(lab.getpixel((0, 0)))).max() <= 12  # black point compensation darkens
    assert np.abs(np.asarray(load_image(tmp_path / f"a.{suffix}")).astype(int)[0, 15] - (0, 255, 255)).max() <= 3
    assert probe(str(tmp_path / f"a.{suffix}")).colors == "Newspaper"


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (b"no profile", "a damaged profile"), (ADOBE[:300], "unnamed RGB, which cannot be applied"),
        (grey_profile("Grey", 2.2), "Grey, of GRAY colours in an image of mode RGB"),
        (ink_profile("Ink", (60.0, 0.0, 0.0)), "Ink, of CMYK colours in an image of mode RGB"),
    ],
)  # fmt: skip
def test_profiles_that_are_none_are_ignored_and_said(tmp_path: Path, profile: bytes, says: str) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(PIXELS).save(tmp_path / name / "0.png", icc_profile=profile)
        Image.fromarray(PIXELS).save(tmp_path / name / "1.png", icc_profile=P3)
    assert np.array_equal(colours(tmp_path / "a" / "0.png"), PIXELS)
    found = scan(tmp_path, workers=0, show_progress=False)
    assert not found.bad and found.to_dict()["colors"] == {f"ignored: {says}": 2, "Wide screen": 2}
    assert any("colour profiles converted to sRGB: Wide screen in 2 images" in note for note in found.notes)
    assert any(f"colours ignored: {says} in 2 images" in text for text in found.warnings)


def test_a_pngs_gamma_is_ignored_and_said(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG")
    data = buffer.getvalue()

    def chunk(kind: bytes, value: bytes) -> bytes:
        return struct.pack(">I", len(value)) + kind + value + struct.pack(">I", zlib.crc32(kind + value))

    cases = {
        "linear": (chunk(b"gAMA", struct.pack(">I", 100000)), "ignored: a PNG's gamma without a profile"),
        "usual": (chunk(b"gAMA", struct.pack(">I", 45455)), ""),
        "told": (chunk(b"sRGB", b"\0") + chunk(b"gAMA", struct.pack(">I", 45455)), ""),
        "wide": (
            chunk(b"cHRM", struct.pack(">8I", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)),
            "ignored: a PNG's primaries without a profile",
        ),
    }
    for name, (more, says) in cases.items():
        path = tmp_path / f"{name}.png"
        path.write_bytes(data[:33] + more + data[33:])
        assert probe(str(path)).colors == says and np.array_equal(colours(path), PIXELS)
