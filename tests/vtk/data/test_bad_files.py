"""Files that cannot be read: named, counted, never replaced by another image."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.card import InputSpec
from vtk.data import eval_transform, load_image, make_loader, scan
from vtk.data.decoding.images import TooLargeError, open_image
from vtk.errors import DataError

Tree = Callable[..., Path]


def jpeg(seed: int = 0, side: int = 64) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


BAD = {
    "truncated.jpg": jpeg()[:900],
    "header only.jpg": jpeg()[:20],
    "empty.jpg": b"",
    "text.jpg": b"this is no image\n" * 20,
    "page.png": b"<!doctype html><title>404</title>",
    "zeros.png": bytes(500),
    "pickle.webp": b"\x80\x04\x95",
}


@pytest.fixture
def root(tree: Tree) -> Path:
    root = tree({"train/a": 3, "train/b": 3, "val/a": 1, "val/b": 1})
    for i, (name, content) in enumerate(BAD.items()):
        (root / "train" / "ab"[i % 2] / name).write_bytes(content)
    return root


def test_skip_names_and_counts_them_and_takes_no_other_image(root: Path) -> None:
    audit = scan(root, show_progress=False, workers=0)
    assert {bad.path.name for bad in audit.bad} == BAD.keys() and all(bad.reason for bad in audit.bad)
    assert audit.counts("train") == [3, 3]
    loader = make_loader(audit.train, eval_transform(InputSpec(8, 8)), batch_size=4, shuffle=True, seed=0, workers=0)
    seen = torch.cat([images for images, _ in loader])
    assert len(seen) == 6 and len(seen.flatten(1).unique(dim=0)) == 6


def test_fail_stops_before_anything_is_used(root: Path) -> None:
    with pytest.raises(DataError, match=r"7 of 15 image files cannot be read, and --on-bad-image is fail; for example"):
        scan(root, show_progress=False, workers=0, on_bad_image="fail")


def test_fail_is_content_with_good_files(tree: Tree) -> None:
    assert not scan(tree({"a": 2, "b": 2}), show_progress=False, on_bad_image="fail").bad


def test_a_file_that_went_bad_after_the_scan_is_an_error_not_another_image(root: Path) -> None:
    audit = scan(root, show_progress=False, workers=0)
    audit.train[2].path.write_bytes(b"")
    loader = make_loader(audit.train, eval_transform(InputSpec(8, 8)), batch_size=6, shuffle=False, seed=0, workers=0)
    with pytest.raises(DataError, match="the file is empty"):
        list(loader)


def test_larger_images_than_allowed_are_bad_by_their_header(tmp_path: Path, picture: Callable[..., Path]) -> None:
    path = picture(tmp_path / "a.png", (30, 40))
    assert load_image(path, max_pixels=1200).size == (40, 30)
    with pytest.raises(DataError, match=r"40×30 are 1,200 pixels, more than --max-pixels 1,199; make it smaller"):
        load_image(path, max_pixels=1199)
    path.write_bytes(path.read_bytes()[:60])  # only the header is left, and is enough to refuse it
    with pytest.raises(TooLargeError):
        open_image(path, 1199)


def test_the_scan_obeys_the_limit_also_from_its_memory(tree: Tree, picture: Callable[..., Path]) -> None:
    root = tree({"a": 2, "b": 2})
    picture(root / "a" / "large.png", (30, 40))
    for limit, large in ((2000, 0), (1000, 1), (2000, 0), (1000, 1)):
        audit = scan(root, show_progress=False, workers=0, max_pixels=limit)
        assert len(audit.bad) == large and len(audit.samples) == 5 - large


def test_a_limit_above_pillows_own_is_a_limit(
    tmp_path: Path, picture: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = picture(tmp_path / "a.png", (30, 40))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # the process's own guard: 200 is an error
    with pytest.raises(DataError, match=r"decompression bomb.*--max-pixels"):
        load_image(path, max_pixels=150)
    assert load_image(path, max_pixels=1200).size == (40, 30)


def test_workers_get_the_limit(tree: Tree) -> None:
    root = tree({"a": 40, "b": 40})
    with pytest.raises(DataError, match="none of its 80 image files can be read"):
        scan(root, show_progress=False, workers=2, max_pixels=10, keep_empty_classes=True)


def damaged(data: bytes, block: bytes, seed: int) -> bytes:
    """Overwrite some bytes of a metadata block inside of a file."""
    rng = np.random.default_rng(seed)
    start = data.index(block)
    changed = bytearray(data)
    for at in rng.integers(start + 6, start + len(block), 4):
        changed[at] = rng.integers(0, 256)
    return bytes(changed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", ["jpg", "webp"])
def test_damaged_exif_never_costs_an_image(tmp_path: Path, suffix: str) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x8769] = 6, "maker", {0x9003: "2024:01:01 00:00:00", 0x829A: 0.01}
    exif[0x8825] = {1: "N", 2: (1.0, 2.0, 3.0)}
    block = exif.tobytes()
    path = tmp_path / f"a.{suffix}"
    image = Image.open(io.BytesIO(jpeg(side=16)))
    image.save(path, exif=exif)
    data = path.read_bytes()
    block = block if block in data else block.removeprefix(b"Exif\0\0")
    for seed in range(60):
        path.write_bytes(damaged(data, block, seed))
        assert load_image(path).size == (16, 16)


def test_a_damaged_stream_of_a_png_is_bad_already_in_the_scan(tree: Callable[..., Path]) -> None:
    """Pillow decodes a PNG to look for EXIF in it: the failure must not be taken for damaged metadata."""
    root = tree({"a": 2, "b": 2})
    path = root / "a" / "0.png"
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"IDAT") + 4] ^= 0xFF  # the first byte of the compressed stream
    path.write_bytes(raw)
    for in_chans in (3, 1):
        audit = scan(root, show_progress=False, workers=0, in_chans=in_chans)
        assert [bad.path for bad in audit.bad] == [path]
    with pytest.raises(DataError, match="broken data stream"):
        load_image(path)
