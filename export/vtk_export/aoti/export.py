"""Exports one model with AOTInductor: fuses and compiles it to one ``.pt2``, and keeps it only if verified.

For C++ servers, and for Python programs that cannot wait for `torch.compile` at every start. The compiler is PyTorch's
own, so no operator has to be converted.
"""

import contextlib
import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from vtk import console
from vtk.errors import UsageError
from vtk.files import as_data_error
from vtk.formats import write_json
from vtk.fused import fuse
from vtk.models.devices import DTYPES, resolve_device
from vtk.options import expect
from vtk.runtime import aoti_file
from vtk.runtime.backends import aoti_backend
from vtk.runtime.opening import open_with_notes
from vtk.runtime.source import Opening, Source
from vtk_export.aoti.compile import compile_package
from vtk_export.aoti.config import AotiConfig
from vtk_export.aoti.files import MARKS, write_beside
from vtk_export.aoti.gate import check_zeros, print_rows, verify_aoti
from vtk_export.gate.images import gate_inputs
from vtk_export.gate.verify import GateRow, check_rows
from vtk_export.gate.zero_head import FILLED, fill_zero_head, say_zero_head
from vtk_export.output_folder import move, workspace

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

_COMMAND = "vtk export aoti"


@dataclass(frozen=True)
class AotiResult:
    """A verified ``.pt2``.

    Attributes:
        path: ``DIR/model.pt2``.
        precision: of weights, input and output.
        device: that it runs on.
        bytes: size of the file.
        rows: results of the gate, per batch size.
        images: description of the images that it was verified with.
        seconds: time of export, compilation and verification.
        fused: the model was fused before compilation.
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
    """Compile, verify in a separate process, and put the files into ``config.out``; nothing is kept that fails.

    Args:
        source: the model, as for `vtk.export_onnx`.
        config: options, among them the device to compile for.
        show: print the gate's table.
        opening: keyword arguments of `vtk.open_source`.

    Raises:
        UsageError: the source is an exported file, or ``fuse`` is True and the model cannot be fused.
        DataError: the folder holds other files, or cannot be written.
        UnavailableError: there is no such device, or no C++ compiler.
        VerificationError: torch cannot compile the model, or the file's values are not torch's.
    """
    expect(config, AotiConfig, "export_aoti")
    source = open_with_notes(source, **opening)
    if source.kind in ("onnx", "aoti"):
        raise UsageError(f"{source.path} is already an exported file; give the pack it was made from")
    aoti_backend.AotiBackend.check_compiler()
    device, dtype = resolve_device(config.device), DTYPES[config.dtype]
    start = time.perf_counter()
    with (
        console.stages(show),
        workspace(config.out, overwrite=config.overwrite, command=_COMMAND, marks=MARKS) as folder,
    ):
        inputs = gate_inputs(source, data=config.data, split=config.split, seed=config.seed)
        card, images = inputs.card, inputs.images
        console.stage(f"loading {source.name}")

        def make(model: nn.Module, where: Path) -> bool:
            form, fused = _form(model, dtype, config.fuse)
            console.stage("compiling two models, for one image and for more")
            with as_data_error(config.out):
                example = images[:2].to(device, dtype)
                compile_package(form.to(device), example, card, config.dtype, where / "model.pt2")
            write_beside(where, card, config.dtype, device.type)
            return fused

        # each form uses its model up, so the gate has another of the same weights
        filled = fill_zero_head(source.model(), config.seed)
        compared = folder if filled is None else folder / FILLED
        if filled is not None:
            say_zero_head()
            compared.mkdir()
        fused = make(source.model() if filled is None else filled, compared)
        console.stage(f"comparing the file with PyTorch at {len(inputs.batches)} batch sizes, in a separate process")
        plain = source.model()
        reference = plain if filled is None else fill_zero_head(plain, config.seed) or plain
        rows = verify_aoti(compared, reference, images, device, config.dtype, config.threads)
        if show or not all(row.passed for row in rows):
            print_rows(rows, inputs.what)
        check_rows(rows)
        if filled is not None:
            make(source.model(), folder)
            check_zeros(folder, images, device, config.dtype, config.threads)
            shutil.rmtree(compared)
        write_json(folder / "model.json", json.loads(card.to_json()))
        size = (folder / "model.pt2").stat().st_size
        move(folder, config.out, command=_COMMAND, marks=MARKS)
    seconds = time.perf_counter() - start
    path = config.out / "model.pt2"
    return AotiResult(path, config.dtype, str(device), size, tuple(rows), inputs.what, seconds, fused)


@contextlib.contextmanager
def temporary_aoti(
    source: Source, *, precision: str = "fp32", device: str | torch.device = "cpu", threads: int | None = None
) -> Iterator[Source]:
    """Export and verify into a temporary folder, for the back-end ``aoti``; it is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="vtk-aoti-", ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {"dtype": precision, "device": str(device), "threads": threads}
        config = AotiConfig(out=Path(folder) / "export", **options)
        result = export_aoti(source, config, show=False)
        worst = max(row.error for row in result.rows)
        console.say(f"{source.name}: compiled by AOTInductor and verified (max error {worst:.1e})")
        yield dataclasses.replace(aoti_file.open_aoti(result.path), name=source.name)


def _form(model: nn.Module, dtype: torch.dtype, wanted: bool | None) -> tuple[nn.Module, bool]:
    """Return the fused model; the model itself if it cannot be fused and ``wanted`` is None."""
    if wanted is not False:
        try:
            return fuse(model, dtype, keep_source=False), True
        except UsageError as error:
            if wanted:
                raise
            console.say(f"compiled unfused: {str(error).partition(';')[0]}")
    return model.to(dtype), False
