"""``vtk demo``: the whole workflow on bundled digits, offline."""

from dataclasses import dataclass
from pathlib import Path

from vtk.commands import _cli
from vtk.options import Config
from vtk.options.shared import Out, Overwrite, Seed

_TEXT = """Run the whole workflow on scikit-learn's handwritten digits, offline, in about two minutes on two CPU cores.

Trains a small ViT as the base, fine-tunes two tasks on it by their attention weights only (the ten digits at 32 px; odd
or even at 48 px), shows that both share every FFN tensor and how much that saves, stores one as low-rank factors,
measures a hundred such tasks on the base, exports one to ONNX, verifies it, and measures its latency per batch size.
Exit code 4 if an accuracy is below its floor."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Config):
    """Options of ``vtk demo``."""

    out: Out = Path("demo-out")
    seed: Seed = 0
    overwrite: Overwrite = False


def main(argv: list[str]) -> int:
    """Run ``vtk demo``."""
    config = _cli.parse(DemoConfig, argv, prog="vtk demo", description=_TEXT, examples=("vtk demo --out demo-out",))
    from vtk.commands._demo import run

    return run(config.out, seed=config.seed, overwrite=config.overwrite)
