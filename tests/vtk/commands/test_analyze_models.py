"""Which images ``vtk analyze`` takes for which model, and what they look like where they are augmented."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.analysis.config import AnalyzeCommand
from vtk.analysis.diagnostics.map_figures import chosen_images
from vtk.analysis.images import Images, Selection, choose_images, trained_cards
from vtk.analysis.sources import make_context, open_models
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UsageError
from vtk.runtime.source import Source
from vtk.training.engine.processes import Ranks

CLASSES = ("blue", "green", "red")
RANKS = Ranks(torch.device("cpu"))


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each class with ten images of 20 px, without a split."""
    root, rng = tmp_path_factory.mktemp("flat"), np.random.default_rng(0)
    for name in CLASSES:
        (root / name).mkdir()
        for i in range(10):
            Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    return root


def config(flat: Path, **changes: object) -> AnalyzeCommand:
    values = {"model": "test_vit", "data": flat, "pretrained": False, "img_size": 32, "num_classes": 3, "workers": 0}
    return AnalyzeCommand(**{**values, **changes})


def timm_source(options: AnalyzeCommand) -> Source:
    return open_models(["test_vit"], options.opening())[0]


def images_of(source: Source, options: AnalyzeCommand, name: str = "entropy") -> Images:
    return Selection(source, options).of(name)


def trained(**data: object) -> Source:
    """A pack's source as far as its images go."""
    card = Card(ModelSpec("test_vit"), InputSpec(32, 32), CLASSES, data={"layout": "flat", **data})
    return Source("checkpoint", "m", None, card)


def test_the_seed_draws_so_many_images_and_no_image_twice(flat: Path) -> None:
    def drawn(**changes: object) -> list[Path]:
        options = config(flat, split="all", **changes)
        return [path for path, _ in images_of(timm_source(options), options).samples]

    seven = drawn(max_images=7)
    assert len(seven) == len(set(seven)) == 7 and seven == drawn(max_images=7)
    assert drawn(max_images=7, seed=1) != seven and drawn(max_images=512)[:7] == seven
    assert len({path.parent.name for path in seven}) > 1  # not in the order of the classes


def test_compared_models_share_the_held_out_images_of_the_first(flat: Path, capsys) -> None:
    first, other = trained(val_split=0.2, seed=3), trained(val_split=0.5, seed=4)
    division = trained_cards([first, other])
    assert division == (first.card, other.card) and "different held-out images" in capsys.readouterr().err
    options = config(flat)
    names = [{path for path, _ in choose_images(one, options, division).samples} for one in (first, other)]
    assert names[0] == names[1] and len(names[0]) == 6
    assert {path for path, _ in choose_images(other, options).samples} != names[0]
    untrained = timm_source(options)
    assert {path for path, _ in choose_images(untrained, options, trained_cards([untrained, first])).samples} == (
        names[0]
    )


def test_labels_are_those_of_the_models_classes_or_none(flat: Path, capsys) -> None:
    options = config(flat)
    assert choose_images(timm_source(options), options).classes == CLASSES
    assert "random classifier" in capsys.readouterr().err
    more = config(flat, num_classes=5)
    assert choose_images(timm_source(more), more).classes is None
    assert "5 outputs without class names, the folder has 3 classes" in capsys.readouterr().err


def test_augmented_images_are_mixed_and_the_same_each_time(flat: Path) -> None:
    options = config(flat, split="all", max_images=9, loss_images="augmented")
    source = timm_source(options)
    context = make_context(source, images_of(source, options), options, RANKS)
    before = np.random.get_state()[1].copy()
    first, second = (list(context.loss_batches(4)) for _ in range(2))
    assert (np.random.get_state()[1] == before).all()
    assert [len(images) for images, _ in first] == [4, 4]  # pairs are mixed, so the ninth image is left out
    for (images, labels), (again, same) in zip(first, second, strict=True):
        assert torch.equal(images, again) and torch.equal(labels, same)
        assert labels.shape == (4, 3) and torch.allclose(labels.sum(dim=1), torch.ones(4))
        assert labels.min() >= 0.1 / 3 - 1e-6 and labels.max() <= 0.9 + 0.1 / 3 + 1e-6  # smoothing 0.1 of three classes
    assert any(((labels > 0.04).sum(dim=1) == 2).any() for _, labels in first)  # an image of two classes
    plain = list(context.loader(4))
    assert not torch.equal(plain[0][0], first[0][0]) and plain[0][1].ndim == 1
    other = config(flat, split="all", max_images=9, seed=1)
    changed = make_context(source, images_of(source, options), other, RANKS)
    assert not torch.equal(next(iter(changed.augmented(4)))[0], first[0][0])


def test_pairs_are_needed_for_mixed_images(flat: Path) -> None:
    options = config(flat, split="all", max_images=9, loss_images="augmented")
    source = timm_source(options)
    images = images_of(source, options)
    with pytest.raises(UsageError, match=r"mixes images in pairs, and a batch has 1 \(`--hessian-batch`"):
        make_context(source, images, options, RANKS).augmented(1)
    with pytest.raises(UsageError, match="mixes images in pairs, and there is 1 image"):
        make_context(source, images.first(1), options, RANKS).augmented(4)


def test_images_of_several_labels_are_not_mixed(flat: Path) -> None:
    options = config(flat, num_classes=5)
    source = timm_source(options)
    context = make_context(source, images_of(source, options), options, RANKS)
    with pytest.raises(UsageError, match="`--loss-images augmented` needs images with one label each; use plain"):
        context.augmented(4)


def test_the_report_shows_no_images_from_outside_of_a_tables_folder(flat: Path, tmp_path: Path) -> None:
    """They are measured with, since a table of one's own may name any file."""
    files = sorted(flat.rglob("*.png"))
    table = tmp_path / "tables" / "t.csv"
    table.parent.mkdir()
    inside = table.parent / "0.png"
    inside.write_bytes(files[0].read_bytes())
    lines = [f"{path},{path.parent.name}\n" for path in files[1:]]
    for own, count in (([f"0.png,{files[0].parent.name}\n"], 1), ([], 0)):
        table.write_text("".join([*own, *lines]))
        options = config(table, split="all", max_images=len(files))
        source = timm_source(options)
        context = make_context(source, images_of(source, options), options, RANKS)
        assert sum(len(labels) for _, labels in context.loader(4)) == len(own) + len(lines)
        assert context.shown is not None
        if count:
            ((images, _),) = chosen_images(context)
            assert len(images) == count
        else:
            with pytest.raises(UsageError, match="outside the folder of the table"):
                chosen_images(context)
