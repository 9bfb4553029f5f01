"""Thin images: refused, by name, before memory is taken for what the crop would make of them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.card import InputSpec
from vtk.data.audit.folder_scan import scan
from vtk.data.audit.result import Sample
from vtk.data.decoding.thin_images import resized
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import ImageDataset, ImageReadError
from vtk.errors import DataError


def save(path: Path, height: int, width: int, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (9, 99, 200)).save(path, **options)
    return path


@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("spec", [(224, 224), (32, 48), (56, 32)], ids=str)
def test_the_size_after_resizing_is_what_timms_steps_make(mode: str, spec: tuple[int, int]) -> None:
    made = InputSpec(*spec, resize_mode=mode, crop_pct=0.9)  # type: ignore[arg-type]
    first = eval_transform(made).geometry[0]
    for height, width in ((20, 20), (33, 47), (300, 20), (7, 500), (501, 333)):
        image = first(Image.new("RGB", (width, height)))
        assert resized(made, height, width) == (image.height, image.width), (height, width)


@pytest.mark.parametrize("suffix", ["png", "tif", "bmp"])
@pytest.mark.parametrize("sides", [(1, 60000), (60000, 1), (3, 9000)], ids=str)
def test_a_thin_image_is_named_by_the_audit_and_by_the_loader(
    sides: tuple[int, int], suffix: str, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        for i in range(3):
            save(tmp_path / "set" / name / f"{i}.png", 20, 30 + i)
    thin = save(tmp_path / "set/a" / f"thin.{suffix}", *sides)
    audit = scan(tmp_path / "set")
    assert [bad.path for bad in audit.bad] == [thin] and "would be enlarged to" in audit.bad[0].reason
    assert [bad.path for bad in scan(tmp_path / "set").bad] == [thin]  # also where the scan is remembered
    # what is not enlarged is used
    assert not scan(tmp_path / "set", spec=InputSpec(224, 224, resize_mode="pad")).bad
    spec = InputSpec(32, 32)
    loaded = ImageDataset([Sample(thin, 0)], eval_transform(InputSpec(518, 518)))
    with pytest.raises(ImageReadError, match=f"thin.{suffix}.*would be enlarged"):
        loaded[0]
    if min(sides) == 3:  # small enough for a small input
        assert not scan(tmp_path / "set", spec=spec).bad and ImageDataset([Sample(thin, 0)], eval_transform(spec))[0]


def test_several_channels_are_refused_alike() -> None:
    spec = InputSpec(224, 224, in_chans=2, mean=(0.5,) * 2, std=(0.5,) * 2)
    band = Image.fromarray(np.zeros((1, 60000), np.uint8))
    with pytest.raises(DataError, match="would be enlarged"):
        eval_transform(spec)((band, band))
