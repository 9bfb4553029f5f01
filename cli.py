"""Run vtk from a checkout, also before it is installed: ``python cli.py --help``."""

import sys
from pathlib import Path

_root = Path(__file__).resolve().parent
sys.path[:0] = [str(_root), str(_root / "kernels"), str(_root / "export")]

from vtk.__main__ import entry  # noqa: E402  the paths above must come first

if __name__ == "__main__":
    entry()
