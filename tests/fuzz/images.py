"""Images of every format, by the rules of both versions and by a server's own code."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.fuzz.mutators import flip
from tests.fuzz.reader import JSON, V0_1, Reader, check_line, quietly


def _make_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((40, 30))
    wide = Image.fromarray(rng.integers(0, 65536, (30, 40), dtype=np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, image, options in (
        ("a.png", coarse, {}),
        ("b.png", wide, {}),
        ("c.png", coarse.convert("P"), {}),
        ("d.png", coarse.convert("RGBA"), {}),
        ("e.jpg", coarse, {"exif": exif.tobytes()}),
        ("f.jpg", coarse.convert("CMYK"), {}),
        ("g.gif", coarse, {}),
        ("h.bmp", coarse, {}),
        ("i.webp", coarse, {}),
        ("j.tif", coarse, {}),
        ("k.tif", wide, {"compression": "tiff_lzw"}),
        ("l.tif", coarse.convert("F"), {}),
        ("m.ppm", coarse, {}),
        ("n.jp2", coarse, {}),
        ("o.avif", coarse, {}),
        ("p.tif", coarse, {"compression": "jpeg"}),
        ("q.tif", coarse, {"save_all": True, "append_images": [coarse] * 3}),
    ):
        try:
            image.save(folder / name, **options)
        except (OSError, KeyError):  # a build of Pillow without this format
            continue
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    coarse.save(folder / "r.png", icc_profile=profile)
    coarse.save(folder / "s.jpg", icc_profile=profile)
    for tiff in (V0_1.parent / "tiff").glob("*.tif"):
        shutil.copyfile(tiff, folder / tiff.name)


def _read_image(folder: Path, file: Path) -> None:
    from vtk.card import InputSpec
    from vtk.data.decoding.decode import read_image, read_raw
    from vtk.data.decoding.images import load_image
    from vtk.data.decoding.rules import V0_1 as OLD
    from vtk.data.decoding.rules import Decoding
    from vtk.data.probing.probe import probe

    wide = Decoding("srgb", ((0.0, 65535.0),), "uint16")
    spec = InputSpec(32, 32, decoding="srgb")
    for read in (
        lambda: load_image(file, max_pixels=1 << 22),
        lambda: read_image(file, 3, 1 << 22, Decoding("srgb")),
        lambda: read_image(file, 1, 1 << 22, wide),
        lambda: read_image(file, 13, 1 << 22, OLD),
        lambda: read_raw(file, spec, 1 << 22),
    ):
        quietly(lambda read=read: _check_image(read()))
    assert isinstance(probe(str(file), 3, 1 << 22).bad, str)
    from vtk_export.triton.served import vtk_images

    try:
        plain = json.loads(json.dumps(spec.to_dict()))
        prepared = vtk_images.prepare(vtk_images.decode(file.read_bytes(), plain), plain)
        assert prepared.shape == (3, 32, 32) and np.isfinite(prepared).all()
    except vtk_images.Unreadable as error:
        check_line(error)


def _check_image(image: Any) -> None:
    for band in image if isinstance(image, tuple) else (image,):
        pixels = np.asarray(band)
        assert pixels.dtype == np.uint8 and 0 < pixels.size <= 1 << 24


def _make_arrays(folder: Path) -> None:
    rng = np.random.default_rng(0)
    np.save(folder / "fog.npy", rng.integers(0, 256, (10, 8, 8, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", rng.integers(0, 10, 10))
    scores = {"fog": {str(s): {"count": 2, "top1": 0.5, "loss": 1.0} for s in range(1, 6)}}
    (folder / "corruptions.json").write_text(json.dumps({"source": "m", "corruptions": scores}))


def _read_arrays(folder: Path, file: Path) -> None:
    from vtk.data.loading.array_images import open_images, read_labels
    from vtk.evaluation.corruption_error import read_baseline, summarize

    def images() -> None:
        found = open_images(file)
        assert found.dtype == np.uint8 and found.ndim == 4 and int(np.array(found[-1]).sum()) >= 0

    def labels() -> None:
        assert int(read_labels(file).min()) >= 0

    def baseline() -> None:
        found = summarize({"fog": dict.fromkeys("12345", 0.5)}, read_baseline(str(file)))
        assert all(np.isfinite(value) for value in found.relative.values())

    for read in (baseline,) if file.suffix == ".json" else (images, labels):
        quietly(read)


READERS = {
    "arrays": Reader(300, _make_arrays, _read_arrays, {".npy": (flip,), ".json": JSON}),
    "images": Reader(
        2000,
        _make_images,
        _read_image,
        dict.fromkeys((".png", ".jpg", ".gif", ".bmp", ".webp", ".tif", ".ppm", ".jp2", ".avif"), (flip,)),
    ),
}
