"""The gate's rules, on logits written by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.card import InputSpec
from vtk.data.sources.image_set import list_images
from vtk.errors import DataError, VerificationError
from vtk.runtime.images import ImageSelection
from vtk_export.gate.images import gate_images
from vtk_export.gate.verify import GateRow, _remarks, check_rows, compare

SPEC = InputSpec(32, 48, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


def test_rows_whose_order_may_be_rounding_are_excluded_and_counted() -> None:
    expected = torch.tensor([[5.0, 0.0, 0.0], [1.0, 1.00001, 0.0], [0.0, 9.0, 3.0]])
    result = expected.clone()
    result[1] = torch.tensor([1.00002, 1.0, 0.0])  # another winner, but by less than twice the error
    row = compare(expected, [result, expected])
    assert (row.batch, row.compared, row.excluded, row.agreed) == (3, 2, 1, 2)
    assert row.error == pytest.approx(2e-5, rel=0.05)
    assert row.error_plain == 0
    assert row.bound == pytest.approx(9e-4)
    assert row.passed
    assert _remarks(expected, [row]) == ["1 of 3 rows excluded: their two best classes are within twice the error"]


def test_an_error_above_the_bound_fails_in_either_session() -> None:
    expected = torch.tensor([[5.0, 0.0], [0.0, 4.0]])
    wrong = expected + torch.tensor([[0.0, 0.001], [0.0, 0.0]])
    for results in ([wrong, expected], [expected, wrong]):
        row = compare(expected, results)
        assert not row.passed
        with pytest.raises(VerificationError, match=r"batch 2: max error 1\.0e-03 is above the bound 5\.0e-04"):
            check_rows([row])


def test_nan_is_an_error_and_nothing_to_compare_too() -> None:
    expected = torch.tensor([[5.0, 0.0]])
    assert not compare(expected, [expected * torch.nan, expected]).passed
    for useless in (torch.zeros(1, 2), torch.full((1, 2), torch.nan)):
        with pytest.raises(VerificationError, match="nothing can be compared"):
            compare(useless, [useless, useless])
    with pytest.raises(VerificationError, match=r"gives \(2, 2\), torch \(1, 2\)"):
        compare(expected, [expected.repeat(2, 1), expected])


def test_disagreement_fails_even_within_the_bound() -> None:
    row = GateRow(batch=4, error=1e-6, error_plain=1e-6, bound=1e-3, agreed=3, compared=4, excluded=0)
    with pytest.raises(VerificationError, match="agrees with PyTorch in 3 of 4"):
        check_rows([row])


def test_one_class_has_no_margin() -> None:
    row = compare(torch.tensor([[2.0]]), [torch.tensor([[2.0]])] * 2)
    assert (row.compared, row.excluded, row.passed) == (1, 0, True)


def test_logits_that_do_not_depend_on_the_image_are_remarked() -> None:
    expected = torch.tensor([[5.0, 0.0]]).repeat(3, 1)
    (remark,) = _remarks(expected, [compare(expected, [expected, expected])])
    assert "rows that changed places could not be seen" in remark


def test_random_images_are_different_smooth_and_normalised() -> None:
    images, text = gate_images(SPEC, 5, chosen=None, seed=3)
    assert images.shape == (5, 3, 32, 48)
    assert text == "5 smoothed random images (seed 3)"
    assert torch.equal(images, gate_images(SPEC, 5, chosen=None, seed=3)[0])
    assert not torch.equal(images, gate_images(SPEC, 5, chosen=None, seed=4)[0])
    assert len({image.numpy().tobytes() for image in images}) == 5
    pixels = images * torch.tensor(SPEC.std).view(1, 3, 1, 1) + torch.tensor(SPEC.mean).view(1, 3, 1, 1)
    assert pixels.min() >= -1e-6
    assert pixels.max() <= 1 + 1e-6
    neighbours = (pixels[..., 1:] - pixels[..., :-1]).abs().mean()
    assert neighbours < 0.1 < pixels.std()


def chosen(folder: Path) -> ImageSelection:
    return ImageSelection(tuple(list_images(folder)), None, f"images of {folder}")


def test_given_images_are_spread_over_the_folder(tmp_path: Path) -> None:
    for i in range(10):
        Image.fromarray(np.full((32, 48, 3), 20 * i, np.uint8)).save(tmp_path / f"{i}.png")
    spec = dataclasses.replace(SPEC, mean=(0.0,) * 3, std=(1.0,) * 3)
    images, text = gate_images(spec, 5, chosen=chosen(tmp_path), seed=0)
    assert text == f"5 images of {tmp_path}"
    assert [round(float(image.mean()) * 255) for image in images] == [0, 40, 80, 120, 160]


def test_unreadable_images_are_skipped_and_filled_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"none of 1 images of .* could be read"):
        gate_images(SPEC, 3, chosen=chosen(tmp_path), seed=0)
    Image.new("RGB", (50, 50), (9, 9, 9)).save(tmp_path / "good.png")
    images, text = gate_images(SPEC, 3, chosen=chosen(tmp_path), seed=0)
    assert len(images) == 3
    assert text == f"1 images of {tmp_path} and 2 smoothed random images (seed 0)"
    assert "bad.png" in capsys.readouterr().err
