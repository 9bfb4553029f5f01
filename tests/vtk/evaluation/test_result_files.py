from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vtk.errors import UsageError
from vtk.evaluation import Metrics, confusion_png, curves_png


def metrics(n: int) -> Metrics:
    confusion = np.diag(np.arange(1, n + 1)).astype(np.int64)
    confusion[0, n - 1] = 3
    names = tuple(f"a class of ${i}$ with a long name" for i in range(n))
    return Metrics(int(confusion.sum()), 0.9, 1.0, 0.1, confusion, names)


@pytest.mark.parametrize("n", [2, 10, 45, 100])
def test_confusion_matrix(tmp_path: Path, n: int) -> None:
    confusion_png(metrics(n), tmp_path / "c.png")
    image = Image.open(tmp_path / "c.png").convert("RGB")
    assert 400 < image.width < 2100 and 400 < image.height < 2100
    colours = {colour for _, colour in image.getcolors(10**7)}
    assert (8, 48, 107) in colours  # the darkest of "Blues": a class of which all are right
    assert [file.name for file in tmp_path.iterdir()] == ["c.png"]


def drawn(path: Path, colour: tuple[int, int, int]) -> np.ndarray:
    """Columns and rows (from the top) where this colour is."""
    return np.argwhere((np.asarray(Image.open(path).convert("RGB")) == colour).all(-1))


def test_curves_go_where_the_numbers_go(tmp_path: Path) -> None:
    rows = [{"epoch": e, "train_loss": 4 / e, "val_top1": 1 - 1 / (e + 1), "lr": 1e-3, "note": "x"} for e in (1, 2, 5)]
    curves_png(rows, tmp_path / "a.png")
    curves_png(rows[:1], tmp_path / "one.png")
    blue = drawn(tmp_path / "a.png", (31, 95, 168))
    third = Image.open(tmp_path / "a.png").width // 3
    loss = blue[blue[:, 1] < third]
    left, right = loss[loss[:, 1] == loss[:, 1].min()], loss[loss[:, 1] == loss[:, 1].max()]
    assert left[:, 0].mean() < right[:, 0].mean()  # falls
    accuracy = blue[(blue[:, 1] > third) & (blue[:, 1] < 2 * third)]
    left, right = accuracy[accuracy[:, 1] == accuracy[:, 1].min()], accuracy[accuracy[:, 1] == accuracy[:, 1].max()]
    assert left[:, 0].mean() > right[:, 0].mean()  # rises


def test_gaps_and_nothing_to_draw(tmp_path: Path) -> None:
    curves_png([{"train_loss": 1.0, "val_loss": None}, {"train_loss": float("nan")}], tmp_path / "a.png")
    with pytest.raises(UsageError, match="no learning curves"):
        curves_png([{"epoch": 1}], tmp_path / "b.png")
