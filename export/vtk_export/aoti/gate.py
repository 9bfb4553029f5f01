"""Verifies an AOTInductor export: follows its README in a process without vtk, and compares with PyTorch in fp32."""

import json
import math
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from vtk import console
from vtk._path import child, environment
from vtk.errors import VerificationError
from vtk.models.devices import DTYPES
from vtk.runtime.backends.torch_backend import EagerBackend
from vtk_export.aoti import trial_process as aoti_child
from vtk_export.gate.limits import LIMITS
from vtk_export.gate.verify import BATCHES, GateRow

_LONGEST = 3600
"""Seconds that the process may take."""


def verify_aoti(
    folder: Path, model: nn.Module, images: Tensor, device: torch.device, precision: str, threads: int | None
) -> list[GateRow]:
    """Compare the logits of the export in ``folder`` with the model in fp32 on the CPU, at every size of `BATCHES`.

    Each batch is given in every layout to ``load.py``, and to the libraries themselves as C++ programs use them; both
    must refuse images of other types, sizes and numbers.

    Returns:
        The worst result of each batch size.

    Raises:
        VerificationError: the process ended early, or invalid input was accepted.
    """
    reference = EagerBackend(model, torch.device("cpu"), torch.float32)
    parts = _batches(images)
    found = _answers_checked(folder, parts, device, precision, threads)
    rows = []
    for batch, part in parts.items():
        expected = reference.run({"pixel_values": part})["logits"]
        mine = [
            _row(expected, logits, precision, name) for name, logits in found.items() if name.endswith(f", {batch}")
        ]
        rows.append(max(mine, key=lambda row: (not row.passed, row.error)))
    return rows


def check_zeros(folder: Path, images: Tensor, device: torch.device, precision: str, threads: int | None) -> None:
    """Check that the files of a model whose classifier is all zero return zeros, as in PyTorch.

    Raises:
        VerificationError: they do not, or the process ended early, or invalid input was accepted.
    """
    for name, logits in _answers_checked(folder, _batches(images), device, precision, threads).items():
        if bool(logits.any()):
            raise VerificationError(f"the classifier is all zero, but the logits of the file are not ({name})")


def _batches(images: Tensor) -> dict[str, Tensor]:
    return dict(zip(map(str, BATCHES), images[: sum(BATCHES)].split(BATCHES), strict=True))


def _answers_checked(
    folder: Path, parts: dict[str, Tensor], device: torch.device, precision: str, threads: int | None
) -> dict[str, Tensor]:
    given = {batch: part.to(DTYPES[precision]) for batch, part in parts.items()}
    found, answered = answers(folder, given, device.index, threads)
    if answered:
        raise VerificationError(f"the file accepts invalid input ({answered[0]}); it is not kept")
    return found


def answers(
    folder: Path, batches: dict[str, Tensor], device_index: int | None, threads: int | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Run `vtk_export.aoti.trial_process` on the export in ``folder``; ``device_index`` is of a GPU, None on a CPU.

    Returns:
        Logits by "way, layout, batch", and the invalid inputs that were accepted.

    Raises:
        VerificationError: the process ended early.
    """
    variables = environment() | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with tempfile.TemporaryDirectory(prefix="vtk-aoti-", ignore_cleanup_errors=True) as scratch:
        given, target = Path(scratch) / "images.safetensors", Path(scratch) / "answers.safetensors"
        save_file({name: part.contiguous() for name, part in batches.items()}, given)
        words = child(str(Path(aoti_child.__file__)), str(folder.resolve()), str(given), str(target))
        words += [] if device_index is None else [str(device_index)]
        try:
            run = subprocess.run(
                words, env=variables, capture_output=True, check=False, timeout=_LONGEST, text=True, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise VerificationError(f"the file cannot be tested in a separate process: {error}") from error
        if run.returncode:
            said = run.stderr.strip().splitlines()
            how = f"signal {-run.returncode}" if run.returncode < 0 else said[-1] if said else f"code {run.returncode}"
            raise VerificationError(f"the file does not run in a separate process: it ended with {how}")
        with safe_open(target, "pt") as file:
            answered = json.loads(file.metadata()["answered"])
            return {name: file.get_tensor(name) for name in file.keys()}, answered


def _row(expected: Tensor, found: Tensor, precision: str, name: str) -> GateRow:
    """Compare (B, classes) logits of the file with torch's."""
    if found.shape != expected.shape:
        raise VerificationError(f"the file gives {tuple(found.shape)}, torch {tuple(expected.shape)} ({name})")
    if not expected.isfinite().all() or not expected.any():
        raise VerificationError("PyTorch's logits are all zero or not finite; nothing can be compared")
    limits = LIMITS[precision]
    error = (found - expected).abs().max().item()
    top = expected.topk(min(2, expected.shape[1])).values
    clear = (top[:, 0] - top[:, -1]) > 2 * error if expected.shape[1] > 1 else torch.ones(len(top), dtype=torch.bool)
    same = found.argmax(1) == expected.argmax(1)
    return GateRow(
        batch=len(expected), error=error, error_plain=error,
        bound=math.inf if limits.error is None else limits.error * expected.abs().max().item(),
        agreed=int((same & clear).sum()), compared=int(clear.sum()), excluded=int((~clear).sum()),
        cosine=F.cosine_similarity(found.double(), expected.double(), dim=1).min().item(),
        least_cosine=-math.inf if limits.cosine is None else limits.cosine,
    )  # fmt: skip


def print_rows(rows: list[GateRow], images: str) -> None:
    """Print the gate's table."""
    cells = [(r.batch, f"{r.error:.1e}", f"{r.cosine:.6f}", f"{r.agreed} of {r.compared}", r.excluded) for r in rows]
    columns = ("batch", "max error", "least cosine", "argmax agreed", "rows excluded")
    console.table("AOTInductor against PyTorch in fp32", columns, cells, left=())
    ways = f"{len(aoti_child.LAYOUTS)} memory layouts"
    console.say(f"verified with {images}, in {ways}; other types, sizes and numbers of images are refused")
