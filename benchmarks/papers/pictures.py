"""The images of the runs: at most 1,000 for training, of a folder, or made here from scikit-learn's digits.

Digits as they are can be told apart by anything. These are turned, shifted and scaled on 32×32 px, in colours,
with pieces of other digits behind them; those held out are of other originals.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, VAL = 1000, 600
"""Images for training and held out, at most."""
SIDE = 32


def prepare(folder: Path, source: Path | None, train: int = TRAIN, val: int = VAL) -> Path:
    """Write ``folder/all``, and ``folder/first`` and ``folder/second`` with half of the classes each; return it.

    Every class gets the same number of images. The choice does not depend on the run's seed: all runs see the same.

    Args:
        folder: for the images.
        source: image folder as `vtk train` takes it; None for digits.
        train: images of ``all/train``.
        val: images of ``all/val``.
    """
    mark = folder / "images.json"
    asked = {"source": str(source.resolve()) if source else "digits", "train": train, "val": val}
    if mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == asked:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    whole = folder / "all"
    if source is None:
        write_digits(whole, train // 10, val // 10)
    else:
        copy_some(source, whole, train, val)
    names = sorted(p.name for p in (whole / "train").iterdir())
    for part, chosen in (("first", names[: len(names) // 2]), ("second", names[len(names) // 2 :])):
        for split in ("train", "val"):
            for name in chosen:
                shutil.copytree(whole / split / name, folder / part / split / name)
    mark.write_text(json.dumps(asked), encoding="utf-8")
    return folder


def copy_some(source: Path, folder: Path, train: int, val: int) -> None:
    """Copy the first images of every class, after a shuffle that is always the same."""
    from vtk.data.audit.folder_scan import scan

    audit = scan(source)
    for split, samples, most in (("train", audit.train, train), ("val", audit.val, val)):
        for label, name in enumerate(audit.classes):
            paths = sorted(sample.path for sample in samples if sample.label == label)
            order = np.random.default_rng(label).permutation(len(paths))[: max(1, most // len(audit.classes))]
            target = folder / split / name
            target.mkdir(parents=True)
            for number, i in enumerate(sorted(order.tolist())):
                shutil.copyfile(paths[i], target / f"{number:04d}{paths[i].suffix}")


def write_digits(folder: Path, train: int, val: int) -> None:
    """Write so many images of each digit; an original that is trained on is not held out."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    rng = np.random.default_rng(0)
    glyphs = [np.uint8(image * (255 / 16)) for image in bunch.images]
    for digit in range(10):
        own = np.flatnonzero(bunch.target == digit)
        own = own[rng.permutation(len(own))]
        others = np.flatnonzero(bunch.target != digit)
        parts = {"train": own[:train], "val": own[train : train + val]}
        for split, chosen in parts.items():
            target = folder / split / str(digit)
            target.mkdir(parents=True)
            for number in chosen.tolist():
                clutter = [glyphs[i] for i in rng.choice(others, 4)]
                picture(glyphs[number], clutter, rng).save(target / f"{number:04d}.png")


def picture(glyph: np.ndarray, clutter: Sequence[np.ndarray], rng: np.random.Generator) -> Image.Image:
    """Return a digit (8×8 uint8) on 32×32 px, with pieces of others behind it."""
    coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
    ground = np.asarray(Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float32)
    ground = 20 + 0.2 * ground
    for piece in clutter:
        half = piece[:, :4] if rng.random() < 0.5 else piece[:4]
        _paste(ground, half, int(rng.integers(7, 11)), rng, 0.2)
    _paste(ground, glyph, int(rng.integers(26, 32)), rng, 1.0)
    ground += rng.normal(0, 8, ground.shape)
    return Image.fromarray(np.uint8(ground.clip(0, 255)))


def _paste(ground: np.ndarray, glyph: np.ndarray, side: int, rng: np.random.Generator, strength: float) -> None:
    """Blend a glyph, turned and in one colour, into a place that is drawn."""
    small = Image.fromarray(glyph).resize((side, side), Image.Resampling.BICUBIC)
    mask = np.asarray(small.rotate(float(rng.uniform(-12, 12)), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    top, left = (int(v) for v in rng.integers(0, SIDE - side + 1, 2))
    colour = rng.uniform(150, 255, 3)
    place = ground[top : top + side, left : left + side]
    place += strength * mask[..., None] * (colour - place)
