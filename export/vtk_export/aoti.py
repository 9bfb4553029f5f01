"""AOTInductor export: the fused model compiled to one ``.pt2``, kept only if its values are torch's.

For C++ servers and Python programs that cannot wait for `torch.compile` at every start. torch's own compiler was chosen
over a runtime of another project: nothing is converted, so nothing can be lost on the way.
"""

import contextlib
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vtk import console
from vtk.card import Card
from vtk.data.bands import pixel_limit
from vtk.errors import DataError, UsageError, VerificationError, VtkError
from vtk.files import as_data_error
from vtk.formats import write_json
from vtk.fused import fuse
from vtk.models.devices import DTYPES, resolve_device
from vtk.options import expect
from vtk.runtime import aoti_backend
from vtk.runtime.backend import load_backend
from vtk.runtime.opening import open_and_tell
from vtk.runtime.source import Opening, Source
from vtk.runtime.torch_backend import EagerBackend
from vtk_export.aoti_config import AotiConfig
from vtk_export.convert import silence
from vtk_export.given import give_images, judging
from vtk_export.images import gate_images
from vtk_export.limits import LIMITS
from vtk_export.place import CARD, LATENCY, move, workspace
from vtk_export.verify import BATCHES, GateRow, check_rows

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

_COMMAND = "vtk export aoti"
MARKS = {"model.pt2": aoti_backend.is_ours, "model.json": CARD, **LATENCY}
"""Files of an export, and how they are recognised."""
FILES = ("model.pt2", "model.json")
"""Everything an export leaves in its folder."""


@dataclass(frozen=True)
class AotiResult:
    """A verified ``.pt2``.

    Attributes:
        path: ``DIR/model.pt2``.
        precision: of weights, input and output.
        device: that it runs on.
        bytes: of the file.
        rows: the gate, per batch size.
        images: what it was verified with.
        seconds: of export, compilation and verification.
        fused: whether norms and scales are folded and parallel branches merged.
    """

    path: Path
    precision: str
    device: str
    bytes: int
    rows: tuple[GateRow, ...]
    images: str
    seconds: float
    fused: bool

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        rows = [
            {"batch": r.batch, "error": r.error, "cosine": r.cosine, "agreed": r.agreed, "compared": r.compared,
             "excluded": r.excluded, "passed": r.passed}
            for r in self.rows
        ]  # fmt: skip
        return {
            "path": str(self.path), "precision": self.precision, "device": self.device, "size_bytes": self.bytes,
            "images": self.images, "verified": rows, "export_ms": 1000 * self.seconds, "fused": self.fused,
        }  # fmt: skip


def export_aoti(source: "Openable", config: AotiConfig, *, show: bool = True, **opening: Unpack[Opening]) -> AotiResult:
    """Compile, load back, verify, and put the files into ``config.out``; a file that fails is not kept.

    Args:
        source: a pack, a merged checkpoint, a timm model name, a `Task` or a module in memory, or an open source.
        config: options.
        show: print the gate's table.
        opening: how to open the source, see `vtk.open_source`.

    Raises:
        UsageError: the source is an exported file itself, or ``fuse`` was asked for and cannot be.
        DataError: the folder holds other files, or cannot be written.
        UnavailableError: the device or a C++ compiler is not here.
        VerificationError: torch cannot compile the model, or the file's values are not torch's.
    """
    expect(config, AotiConfig, "export_aoti")
    source = open_and_tell(source, **opening)
    if source.kind in ("onnx", "aoti"):
        raise UsageError(f"{source.path} is an exported file already; give the pack it was made from")
    aoti_backend.AotiBackend.check_compiler()
    device, dtype = resolve_device(config.device), DTYPES[config.dtype]
    start = time.perf_counter()
    with workspace(config.out, overwrite=config.overwrite, command=_COMMAND, marks=MARKS) as folder:
        card = dataclasses.replace(source.card, base=None, pack={})
        given = give_images(source.card, config.data, config.split, described=source.described)
        images, what = gate_images(
            card.input, sum(BATCHES), chosen=judging(given), seed=config.seed, max_pixels=pixel_limit(card),
        )  # fmt: skip
        model, fused = _form(source.model(), dtype, config.fuse)
        made = folder / "model.pt2"
        with as_data_error(config.out):
            compile_package(model.to(device), images[:2].to(device, dtype), card, config.dtype, made)
        del model
        rows = verify_aoti(made, source, images, device, config.dtype, config.threads)
        if show or not all(row.passed for row in rows):
            _print(rows, what)
        check_rows(rows)
        size = made.stat().st_size
        write_json(folder / "model.json", json.loads(card.to_json()))
        move(folder, config.out, command=_COMMAND, marks=MARKS)
    seconds = time.perf_counter() - start
    path = config.out / "model.pt2"
    return AotiResult(path, config.dtype, str(device), size, tuple(rows), what, seconds, fused)


@contextlib.contextmanager
def temporary_aoti(
    source: Source, *, precision: str = "fp32", device: str | torch.device = "cpu", threads: int | None = None
) -> Iterator[Source]:
    """Export and verify into a temporary folder, for the back-end ``aoti``; gone at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="vtk-aoti-", ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {"dtype": precision, "device": str(device), "threads": threads}
        config = AotiConfig(out=Path(folder) / "export", **options)
        result = export_aoti(source, config, show=False)
        worst = max(row.error for row in result.rows)
        console.say(f"{source.name}: compiled by AOTInductor and verified (max error {worst:.1e})")
        yield dataclasses.replace(aoti_backend.open_aoti(result.path), name=source.name)


def compile_package(model: nn.Module, example: Tensor, card: Card, precision: str, path: Path) -> None:
    """Write ``model`` as a ``.pt2`` that takes any batch up to `aoti_backend.MAX_BATCH`.

    Args:
        model: in eval mode, on the device and in the type it is to run in.
        example: two images or more: with a batch of one torch.export would take the batch for a constant.
        card: goes into the file.
        precision: name of the type.
        path: ends in ``.pt2``.

    Raises:
        VerificationError: torch cannot compile it.
    """
    import torch._inductor

    metadata = {
        aoti_backend.CARD: card.to_json(), aoti_backend.DTYPE: precision, aoti_backend.CPU: aoti_backend.cpu_level(),
        aoti_backend.TORCH: aoti_backend.torch_release(),
    }  # fmt: skip
    # threads are those of the run, not those of the machine that compiled
    configs: dict[str, Any] = {"aot_inductor.metadata": metadata, "cpp.dynamic_threads": True}
    dynamic = ({0: torch.export.Dim("batch", min=1, max=aoti_backend.MAX_BATCH)},)
    try:
        with silence(), torch.no_grad():
            program = torch.export.export(model.eval().requires_grad_(False), (example,), dynamic_shapes=dynamic)
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=configs)
    except VtkError:
        raise
    except Exception as error:  # export and inductor raise whatever the operator at hand raises
        reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        raise VerificationError(f"AOTInductor cannot compile {type(model).__name__}: {reason}") from error


def verify_aoti(
    path: Path, source: Source, images: Tensor, device: torch.device, precision: str, threads: int | None
) -> list[GateRow]:
    """Load the file as a back-end and compare it with the source in fp32 on the CPU, at every size of `BATCHES`.

    Raises:
        VerificationError: it cannot be loaded or run.
    """
    reference = EagerBackend(source.model(), torch.device("cpu"), torch.float32)
    backend = load_backend("aoti", aoti_backend.open_aoti(path), device=device, dtype=precision, threads=threads)
    rows, start = [], 0
    try:
        for batch in BATCHES:
            part = images[start : start + batch]
            start += batch
            expected = reference.run({"pixel_values": part})["logits"]
            rows.append(_row(expected, backend.run({"pixel_values": part})["logits"].float().cpu(), precision))
    except (DataError, RuntimeError) as error:
        raise VerificationError(f"the file does not run: {str(error).strip().splitlines()[0]}") from error
    finally:
        backend.close()
    return rows


def _row(expected: Tensor, found: Tensor, precision: str) -> GateRow:
    """Compare (B, classes) logits of the file with torch's."""
    if found.shape != expected.shape:
        raise VerificationError(f"the file gives {tuple(found.shape)}, torch {tuple(expected.shape)}")
    if not expected.isfinite().all() or not expected.any():
        raise VerificationError("torch's own logits are all zero or not finite: nothing can be compared")
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


def _form(model: nn.Module, dtype: torch.dtype, wanted: bool | None) -> tuple[nn.Module, bool]:
    """Return the fused model, or the model itself where it cannot be fused and nobody insists."""
    if wanted is not False:
        try:
            return fuse(model, dtype, keep_source=False), True
        except UsageError as error:
            if wanted:
                raise
            console.say(f"compiled as it is: {str(error).partition(';')[0]}")
    return model.to(dtype), False


def _print(rows: list[GateRow], images: str) -> None:
    cells = [(r.batch, f"{r.error:.1e}", f"{r.cosine:.6f}", f"{r.agreed} of {r.compared}", r.excluded) for r in rows]
    columns = ("batch", "max error", "least cosine", "argmax agreed", "rows excluded")
    console.table("AOTInductor's file against torch in fp32", columns, cells, left=())
    console.say(f"verified with {images}")
