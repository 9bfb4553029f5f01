"""Models whose right answers are known, and contexts, for the tests of robustness."""

import torch
from torch import nn

from tests.vtk.analysis._models import tiny_vit
from vtk.analysis.config import AnalyzeConfig
from vtk.analysis.diagnostics.base import Context
from vtk.analysis.measures.accuracy import Draws
from vtk.card import InputSpec

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def spec(side: int = 8, channels: int = 3) -> InputSpec:
    return InputSpec(side, side, channels, (MEAN * 9)[:channels], (STD * 9)[:channels])


def to_pixels(x, of: InputSpec):
    mean, std = (torch.tensor(v, dtype=x.dtype)[:, None, None] for v in (of.mean, of.std))
    return x * std + mean


def to_input(x, of: InputSpec):
    mean, std = (torch.tensor(v, dtype=x.dtype)[:, None, None] for v in (of.mean, of.std))
    return (x - mean) / std


def pictures(count: int, of: InputSpec, seed: int = 3, classes: int = 3, sizes: tuple[int, ...] = ()) -> list:
    """Batches of random pixels from 0 to 1, normalised, fp64, with labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, of.in_chans, of.height, of.width, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (count,), generator=generator)
    return list(zip(to_input(x, of).split(sizes or (count,)), y.split(sizes or (count,)), strict=True))


def labelled(model, batches) -> list:
    """The batches with the model's own answers as labels, so that it is always right without changes."""
    with torch.no_grad():
        return [(x, model(x).argmax(1)) for x, _ in batches]


def draws(pixels, seed: int = 0, first: int = 0) -> Draws:
    return Draws(seed, first, pixels)


def linear(side: int = 8, seed: int = 0) -> nn.Module:
    """A classifier whose gradient is known, and that any change of its input moves."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 3)).double()


class Recorder(nn.Module):
    """Keeps what it is shown; answers 0 throughout."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[torch.Tensor] = []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        return torch.tensor([[1.0, 0.0, 0.0]]).to(x).expand(len(x), 3) + self.weight


def context(model=None, batches=None, of: InputSpec | None = None, **options) -> Context:
    """A context of ``vtk analyze`` on a tiny ViT that is right without changes."""
    of = of or spec()
    model = model or tiny_vit()
    batches = labelled(model, batches or pictures(12, of))
    return Context(
        model=model,
        spec=of,
        classes=("a", "b", "c"),
        multi_label=False,
        device=torch.device("cpu"),
        config=AnalyzeConfig(**options),
        loader=lambda size: batches,
        augmented=lambda size: batches,
        count=sum(len(y) for _, y in batches),
    )


def pictures_and_words(one, found: dict, runs: int = 1) -> list[str]:
    """Draw one result, or two as in a comparison, and return what is read off it."""
    import json

    from vtk.analysis.diagnostics.base import Run

    json.dumps(found, allow_nan=False)
    drawn = one.draw([Run(f"$model_{i}$", found) for i in range(runs)])
    for picture in drawn:
        picture.figure.canvas.draw()
        assert picture.name.startswith(one.name) and picture.caption
    assert all(isinstance(value, float) for value in one.numbers(found).values())
    return one.read(found)
