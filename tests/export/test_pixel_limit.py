"""Images that an export is checked or calibrated with are read with the ``--max-pixels`` of the pack's training run."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vtk.__main__ import main
from vtk.card import InputSpec
from vtk.data.decoding import decode as decoding
from vtk.data.decoding import images
from vtk.data.loading import eval_pipeline as transforms
from vtk.data.sources.image_set import list_images
from vtk.errors import DataError
from vtk.packs.cards import read_card
from vtk.packs.pack import update_card
from vtk.runtime.images import ImageSelection
from vtk.runtime.photographs import Photographs
from vtk_export.gate.images import gate_images

LIMIT = 2399  # the photographs have 2400 pixels, but one
SPEC = InputSpec(32, 48)


@pytest.fixture
def limited(calm: Any, tmp_path: Path) -> Path:
    """The pack of a run with ``--max-pixels 2399``, its base, and its photographs beside it."""
    shutil.copytree(calm.path.parent, tmp_path / "own")
    pack = tmp_path / "own/task"
    card = read_card(pack)
    update_card(pack, dataclasses.replace(card, data={**card.data, "max_pixels": LIMIT}))
    Image.new("RGB", (40, 50), (9, 200, 9)).save(tmp_path / "own/photos/a/small.png")
    return pack


def test_a_larger_image_is_skipped_and_named(limited: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos = limited.parent / "photos"
    many = len(list(photos.rglob("*.png")))
    chosen = ImageSelection(tuple(list_images(photos)), None, f"images of {photos}")
    found, text = gate_images(SPEC, many, chosen=chosen, seed=0, max_pixels=LIMIT)
    assert text.startswith("1 images of") and len(found) == many
    assert capsys.readouterr().err.count("more than --max-pixels 2,399") == many - 1
    assert gate_images(SPEC, many, chosen=chosen, seed=0, max_pixels=LIMIT + 1)[1] == f"{many} images of {photos}"
    read = Photographs(chosen, many, max_pixels=LIMIT).batches(SPEC, many)
    assert [len(batch) for batch, _ in read] == [1]
    (photos / "a/small.png").unlink()
    with pytest.raises(DataError, match="none of"):
        list(Photographs(chosen, many, max_pixels=LIMIT).batches(SPEC, many))


@pytest.mark.parametrize("flags", [(), ("--with-preproc",), ("--int8", "static")], ids=["plain", "preproc", "int8"])
def test_every_image_of_an_export_is_read_with_the_packs_limit(
    limited: Path, fake_calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    fake_calm()
    limits: list[int] = []

    def watch(module: Any, name: str) -> None:
        own = getattr(module, name)

        def read(*args: Any, **kwargs: Any) -> Any:
            limits.append(kwargs["max_pixels"] if "max_pixels" in kwargs else args[2] if len(args) > 2 else 0)
            return own(*args, **kwargs)

        monkeypatch.setattr(module, name, read)

    watch(transforms, "read_image")
    watch(images, "load_image")
    watch(decoding, "read_image")  # of raw images
    data = limited.parent / "photos"
    argv = ["export", "onnx", str(limited), "--out", str(tmp_path / "out"), "--data", str(data), *flags]
    main(argv)  # an int8 file may fall short with one image to calibrate on; what was read is what counts
    assert len(limits) > 2 and set(limits) == {LIMIT}
