"""Exports one model to ONNX: builds the graph, verifies the file, and keeps it only if it is right."""

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from torch import nn

from vtk import console
from vtk.card import Card
from vtk.errors import UsageError
from vtk.evaluation.abstention import with_threshold
from vtk.files import write_text
from vtk.options import expect
from vtk.packages import require
from vtk.runtime.export_facts import PLAIN, Facts
from vtk.runtime.onnx_file import open_onnx
from vtk.runtime.opening import open_with_notes
from vtk.runtime.source import Opening, Source
from vtk_export.gate.drift import Drift
from vtk_export.gate.images import gate_inputs
from vtk_export.gate.judge import Judgement
from vtk_export.gate.neighbours import Dependence
from vtk_export.gate.verify import GateRow
from vtk_export.gate.zero_head import FILLED
from vtk_export.graph.preproc import check_preproc
from vtk_export.lint.linter import check, load
from vtk_export.onnx.build import File, build
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.gate import write_verified
from vtk_export.onnx.preproc_gate import add_preproc, gate_preproc
from vtk_export.onnx.unknown_gate import add_unknown, gate_unknown
from vtk_export.output_folder import move, workspace
from vtk_export.readme import README, onnx_page
from vtk_export.targets import describe_oldest, oldest, parse_target

if TYPE_CHECKING:
    from vtk.runtime.source import Openable
_COMMAND = "vtk export onnx"


@dataclass(frozen=True)
class ExportResult:
    """A verified ONNX file.

    Attributes:
        path: ``DIR/model.onnx``.
        opset: of the standard domain.
        batch: fixed batch size, None for any.
        bytes: size of the file and of its external weights.
        rows: results of the gate, per batch size; empty if ``unverified`` kept a file that cannot run here.
        images: description of the images that it was verified with.
        seconds: time of export and verification.
        fused: norms and scales are folded, parallel branches merged.
        nodes: number of nodes in the graph.
        facts: precision and other changes of the graph.
        outputs: names of the outputs.
        judgement: top-1 agreement on the images of ``--data``, of a file that is not fp32.
        ir_version: of the file.
        drift: effect of preprocessing in the graph on the outputs.
        dependence: effect of the other images of a call on an image's outputs.
    """

    path: Path
    opset: int
    batch: int | None
    bytes: int
    rows: tuple[GateRow, ...]
    images: str
    seconds: float
    fused: bool
    nodes: int
    facts: Facts = PLAIN
    outputs: tuple[str, ...] = ("logits",)
    judgement: Judgement | None = None
    ir_version: int = 10
    drift: Drift | None = None
    dependence: Dependence | None = None

    def needs(self) -> str:
        """Return one line with the oldest runtimes that take the file."""
        return describe_oldest(self.opset, self.ir_version, tensorrt=self._tensorrt)

    @property
    def _tensorrt(self) -> bool:
        """Whether TensorRT takes the file: it has no zero points but 0, and no antialiased resizing."""
        target = parse_target(self.facts.target) if self.facts.target else None
        symmetric = not self.facts.int8 or (target is not None and target.kind == "trt")
        return symmetric and not self.facts.preprocessing

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        rows = [{**dataclasses.asdict(row), "passed": row.passed} for row in self.rows]
        return {
            "path": str(self.path), "opset": self.opset, "static_batch": self.batch, "size_bytes": self.bytes,
            "images": self.images, "verified": rows, "export_ms": 1000 * self.seconds,
            "fused": self.fused, "nodes": self.nodes, "facts": dataclasses.asdict(self.facts),
            "outputs": list(self.outputs),
            "judged": None if self.judgement is None else dataclasses.asdict(self.judgement),
            "ir_version": self.ir_version, "oldest": oldest(self.opset, self.ir_version, tensorrt=self._tensorrt),
            "preprocessing_drift": None if self.drift is None else dataclasses.asdict(self.drift),
            "batch_dependence": None if self.dependence is None else dataclasses.asdict(self.dependence),
        }  # fmt: skip


def export_onnx(
    source: "Openable", config: OnnxConfig, *, show: bool = True, **opening: Unpack[Opening]
) -> ExportResult:
    """Export, verify, and put the files into ``config.out``; a failure leaves that folder as it was.

    Args:
        source: a pack, a merged checkpoint, a timm model name, a `Task` or a module in memory, or an open source.
        config: options.
        show: print the gate's table; a failure's table is always printed.
        opening: keyword arguments of `vtk.open_source`.

    Raises:
        UsageError: the source is itself an ONNX file, or the options do not fit the model.
        DataError: the folder holds other files, or cannot be written.
        VerificationError: torch's exporter cannot convert the model, or the file fails the gate.
        UnavailableError: the file's precision cannot run here, and ``unverified`` is False.
    """
    expect(config, OnnxConfig, "export_onnx")
    require("onnxscript", "onnxruntime", *config.verify_with)
    source = open_with_notes(source, **opening)
    if source.kind == "onnx":
        raise UsageError(f"{source.path} is already an ONNX file; give the pack it was exported from")
    start = time.perf_counter()
    spec, options = config.graph, config.gate
    with (
        console.stages(show),
        workspace(config.out, overwrite=config.overwrite, command=_COMMAND) as folder,
    ):
        inputs = gate_inputs(source, data=config.data, split=config.split, seed=config.seed,
                             static_batch=config.static_batch)  # fmt: skip
        card = with_threshold(inputs.card, config.threshold, config.risk, source.name)
        inputs = dataclasses.replace(inputs, card=card)
        if config.with_preproc:
            check_preproc(card.input)

        def make(model: nn.Module, where: Path) -> File:
            file = build(model, inputs, spec, options, where)
            if spec.for_tensorrt:
                assert spec.runtime is not None
                check(load(file.path), spec.runtime)
            return file

        console.stage(f"loading {source.name}")
        file, other = write_verified(
            source.model(), make, inputs, spec, options, folder, show=show,
            # int8 rounds a classifier by its own numbers, so that of another one says nothing
            compare=not config.int8 and config.output != "features",
        )  # fmt: skip
        drift = None
        if config.with_preproc:
            console.stage("putting the preprocessing into the graph")
            if other is not None:
                other = add_preproc(other, card, other.path.parent, spec.names)
                drift = gate_preproc(other, inputs, spec, options)
            file = add_preproc(file, card, folder, spec.names)
            drift = drift or gate_preproc(file, inputs, spec, options)
        if other is not None:
            shutil.rmtree(folder / FILLED)
        if card.threshold is not None:
            console.stage("appending the output `unknown`")
            file = add_unknown(file, card, folder, spec.names)
            gate_unknown(file, inputs, options)
            if spec.for_tensorrt and spec.runtime is not None:
                check(load(file.path), spec.runtime)
        _write_readme(file, card, config, folder)
        size = sum(entry.stat().st_size for entry in folder.glob("model.onnx*"))
        move(folder, config.out, command=_COMMAND)
    return ExportResult(
        config.out / "model.onnx", config.file_opset, config.static_batch, size, file.rows, inputs.what,
        time.perf_counter() - start, file.fused, file.nodes, facts=file.facts, outputs=file.names,
        judgement=file.judgement, ir_version=config.ir, drift=drift, dependence=file.dependence,
    )  # fmt: skip


def _write_readme(file: File, card: Card, config: OnnxConfig, folder: Path) -> None:
    """Write the README.md beside a file."""
    page = onnx_page(
        card, names=file.names, precision=file.facts.precision, int8=file.facts.int8, fp8=file.facts.fp8,
        in_graph=config.with_preproc,
        half_io=file.facts.precision != "fp32" and not config.keep_io_types, batch=config.static_batch,
        sizes=file.sizes, verified=file.facts.verified, called=file.facts.names,
    )  # fmt: skip
    write_text(folder / README, page)


@contextlib.contextmanager
def temporary_onnx(
    source: Source, *, opset: int = 18, static_batch: int | None = None,
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32", output: Literal["logits", "features"] = "logits",
) -> Iterator[Source]:  # fmt: skip
    """Export and verify into a temporary folder, for a back-end that runs ONNX files; it is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="vtk-onnx-", ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "export"
        config = OnnxConfig(out=out, opset=opset, static_batch=static_batch, dtype=dtype, output=output)
        result = export_onnx(source, config, show=False)
        worst = max(max(row.error, row.error_plain) for row in result.rows)
        console.say(f"{source.name}: exported to ONNX and verified (max error {worst:.1e})")
        yield dataclasses.replace(open_onnx(result.path), name=source.name)
