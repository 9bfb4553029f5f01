"""The gate an ONNX file passes before it is kept: structure first, then values against torch in fp32.

Each row of a batch is another image, so that an output that mixes rows up, or repeats the first one, is seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from torch import Tensor, nn

from vtk import console
from vtk.card import Card
from vtk.errors import DataError, VerificationError
from vtk.runtime.backend import Backend, load_backend
from vtk.runtime.source import open_onnx
from vtk.runtime.torch_backend import EagerBackend

BATCHES = (1, 2, 3, 7, 16)
"""Batch sizes that a file with a dynamic batch is run with."""

RELATIVE_BOUND = 1e-4
"""Largest error of an fp32 file, as a fraction of the batch's largest absolute logit."""


@dataclass(frozen=True)
class GateRow:
    """One batch size of the gate.

    Attributes:
        batch: number of images, all different.
        error: largest absolute difference from torch, graph optimisations on.
        error_plain: the same with the optimisations off.
        bound: largest error allowed.
        agreed: rows whose most likely class is torch's in both sessions, among those compared.
        compared: rows whose two largest logits in torch are further apart than twice the error.
        excluded: the other rows, where the order of two classes may depend on rounding.
    """

    batch: int
    error: float
    error_plain: float
    bound: float
    agreed: int
    compared: int
    excluded: int

    @property
    def passed(self) -> bool:
        """Whether errors are within the bound (NaN is not) and all compared rows agree."""
        return self.error <= self.bound and self.error_plain <= self.bound and self.agreed == self.compared


def verify_structure(path: Path, card: Card, *, opset: int, static_batch: int | None) -> None:
    """Parse the file and check opset, names, types, axes, operators and the card.

    Raises:
        VerificationError: the first thing that differs from the request.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise VerificationError(f"onnx.checker refuses the file: {str(error).strip().splitlines()[0]}") from error
    proto = onnx.load(path, load_external_data=False)
    versions = {entry.domain or "ai.onnx": entry.version for entry in proto.opset_import}
    if versions.get("ai.onnx") != opset:
        raise VerificationError(f"opset {opset} was asked for, the exporter wrote {versions}; choose the one it writes")
    if foreign := sorted({node.domain for node in proto.graph.node} - {"", "ai.onnx"}):
        raise VerificationError(f"the file uses operators of {', '.join(foreign)}; only the standard one is portable")
    spec = card.input
    batch = "batch" if static_batch is None else static_batch
    wanted = {"pixel_values": [batch, spec.in_chans, spec.height, spec.width], "logits": [batch, len(card.classes)]}
    values = {"pixel_values": proto.graph.input, "logits": proto.graph.output}
    for name, entries in values.items():
        if [entry.name for entry in entries] != [name]:
            raise VerificationError(f"expected `{name}` alone, the file has {[entry.name for entry in entries]}")
        kind = entries[0].type.tensor_type
        if kind.elem_type != onnx.TensorProto.FLOAT:
            raise VerificationError(f"`{name}` is {onnx.TensorProto.DataType.Name(kind.elem_type)}, expected FLOAT")
        # a symbolic axis has a name and no number; ONNX allows an axis with neither
        shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]
        if shape != wanted[name]:
            raise VerificationError(f"`{name}` has the shape {shape} in the file, expected {wanted[name]}")
    if open_onnx(path).card.to_json() != card.to_json():
        raise VerificationError("the card in the file's metadata is not the one that was written")


def verify_values(
    path: Path, model: nn.Module, images: Tensor, *, batches: Sequence[int], threads: int | None = None
) -> tuple[list[GateRow], list[str]]:
    """Run the file with graph optimisations on and off, and compare with torch in fp32 on the CPU.

    Args:
        path: the ONNX file.
        model: what it was exported from; set to eval mode.
        images: (N, C, H, W) fp32, at least ``sum(batches)``, all different.
        batches: sizes to run, each on the next images.
        threads: CPU threads.

    Returns:
        One row per batch size, passed or not, and lines to say about how much the comparison means.

    Raises:
        VerificationError: the file cannot be loaded or run, or there is nothing to compare.
    """
    reference = EagerBackend(model, torch.device("cpu"), torch.float32)
    source = open_onnx(path)
    sessions: list[Backend] = []
    try:
        for optimize in (True, False):
            sessions.append(load_backend("ort-cpu", source, threads=threads, optimize=optimize))
        rows, logits, start = [], [], 0
        for batch in batches:
            part = images[start : start + batch]
            start += batch
            expected = reference.run({"pixel_values": part})["logits"]
            logits.append(expected)
            rows.append(_compare(expected, [_run(session, part) for session in sessions]))
    except DataError as error:
        raise VerificationError(str(error)) from error
    finally:
        for session in sessions:
            session.close()
    return rows, _remarks(torch.cat(logits), rows)


def print_rows(rows: Sequence[GateRow]) -> None:
    """Print the gate's table."""
    columns = ("batch", "max error", "unoptimised", "bound", "argmax agreed", "rows excluded")
    cells = [
        (r.batch, f"{r.error:.1e}", f"{r.error_plain:.1e}", f"{r.bound:.1e}", f"{r.agreed} of {r.compared}", r.excluded)
        for r in rows
    ]
    console.table("ONNX Runtime on the CPU against torch in fp32", columns, cells, left=())


def check_rows(rows: Sequence[GateRow]) -> None:
    """Raise for the first row that failed.

    Raises:
        VerificationError: names the batch size and what was exceeded.
    """
    for row in rows:
        worst = max(row.error, row.error_plain, key=lambda e: (e != e, e))
        if not worst <= row.bound:
            raise VerificationError(f"batch {row.batch}: max error {worst:.1e} is above the bound {row.bound:.1e}")
        if not row.passed:
            raise VerificationError(f"batch {row.batch}: the class agrees with torch in {row.agreed} of {row.compared}")


def _run(session: Backend, images: Tensor) -> Tensor:
    try:
        return session.run({"pixel_values": images})["logits"]
    except Exception as error:  # onnxruntime has no common base class for its errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise VerificationError(f"batch {len(images)} does not run: {reason}") from error


def _compare(expected: Tensor, results: Sequence[Tensor]) -> GateRow:
    """Compare (B, classes) logits of both sessions with torch's."""
    for result in results:
        if result.shape != expected.shape:
            raise VerificationError(f"the file gives {tuple(result.shape)}, torch {tuple(expected.shape)}")
    if not expected.isfinite().all() or not expected.any():
        raise VerificationError("torch's own logits are all zero or not finite: nothing can be compared")
    errors = [(result - expected).abs().max().item() for result in results]
    if expected.shape[1] > 1:
        top = expected.topk(2).values
        clear = (top[:, 0] - top[:, 1]) > 2 * max(errors)
    else:
        clear = torch.ones(len(expected), dtype=torch.bool)
    same = torch.stack([result.argmax(1) == expected.argmax(1) for result in results]).all(0)
    return GateRow(
        batch=len(expected),
        error=errors[0],
        error_plain=errors[1],
        bound=RELATIVE_BOUND * expected.abs().max().item(),
        agreed=int((same & clear).sum()),
        compared=int(clear.sum()),
        excluded=int((~clear).sum()),
    )


def _remarks(logits: Tensor, rows: Sequence[GateRow]) -> list[str]:
    remarks = []
    if excluded := sum(row.excluded for row in rows):
        remarks.append(f"{excluded} of {len(logits)} rows excluded: their two best classes are within twice the error")
    spread = (logits - logits.mean(0)).abs().max().item()
    if len(logits) > 1 and spread <= max(row.bound for row in rows):
        remarks.append("the logits of different images differ by less than the bound (are the weights random?), so "
                       "rows that changed places could not be seen")  # fmt: skip
    return remarks
