"""Flags that the stages of `gpu.sh` share, and the check that the device is a CUDA one."""

import argparse
import sys
from pathlib import Path

import torch


def parser(doc: str, smoke: str, seconds: float = 220) -> argparse.ArgumentParser:
    """Return a parser with the flags that `gpu.sh` gives every stage.

    Args:
        doc: the stage's docstring; its first line is shown.
        smoke: what ``--smoke`` does.
        seconds: by default at most.
    """
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--seconds", type=float, default=seconds)
    made.add_argument("--smoke", action="store_true", help=smoke)
    return made


def device(smoke: bool) -> torch.device:
    """Return the CUDA device, or to try a stage out the CPU; fp32 products are exact ones.

    Raises:
        SystemExit: there is no CUDA device to measure.
    """
    if not torch.cuda.is_available() and not smoke:
        sys.exit("this stage measures a CUDA device and none is here; --smoke tries it on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
