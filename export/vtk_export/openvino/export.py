"""Exports one model to OpenVINO: converts the ONNX graph, verifies the file, and keeps it only if it is right."""

import dataclasses
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from torch import nn

from vtk import console
from vtk.errors import UsageError
from vtk.evaluation.abstention import with_threshold
from vtk.files import write_text
from vtk.formats import write_json
from vtk.options import expect
from vtk.packages import require
from vtk.runtime.export_facts import PLAIN, Facts
from vtk.runtime.opening import open_with_notes
from vtk.runtime.openvino_runtime import check_precision, default_precision
from vtk.runtime.source import Opening
from vtk_export.gate.images import GateInputs, gate_inputs
from vtk_export.gate.openvino_sessions import opener
from vtk_export.gate.zero_head import FILLED, fill_zero_head, say_zero_head
from vtk_export.graph.unknown import UNKNOWN
from vtk_export.onnx.build import File, build
from vtk_export.onnx.spec import GateSpec, GraphSpec
from vtk_export.onnx.unknown_gate import gate_unknown
from vtk_export.openvino import ir, preproc
from vtk_export.openvino.config import OpenvinoConfig
from vtk_export.openvino.gate import Verified, check_zeros, verify, verify_preproc, verify_structure
from vtk_export.openvino.readme import MARKS, page
from vtk_export.output_folder import move, workspace
from vtk_export.readme import README

if TYPE_CHECKING:
    from openvino import Model

    from vtk.runtime.source import Openable

_COMMAND = "vtk export openvino"


@dataclass(frozen=True)
class OpenvinoResult:
    """A verified OpenVINO model.

    Attributes:
        path: ``DIR/model.xml``.
        precision: of products, that README.md asks for.
        batch: fixed batch size, None for any.
        bytes: size of both files.
        verified: results of the gate, per precision.
        images: description of the images that it was verified with.
        seconds: time of export and verification.
        fused: norms and scales are folded, parallel branches merged.
        facts: of the file.
        outputs: as this toolkit calls them.
    """

    path: Path
    precision: str
    batch: int | None
    bytes: int
    verified: tuple[Verified, ...]
    images: str
    seconds: float
    fused: bool
    facts: Facts = PLAIN
    outputs: tuple[str, ...] = ("logits",)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        verified = [
            {**dataclasses.asdict(each), "rows": [{**dataclasses.asdict(r), "passed": r.passed} for r in each.rows]}
            for each in self.verified
        ]
        return {
            "path": str(self.path), "precision": self.precision, "static_batch": self.batch, "size_bytes": self.bytes,
            "images": self.images, "verified": verified, "export_ms": 1000 * self.seconds, "fused": self.fused,
            "facts": dataclasses.asdict(self.facts), "outputs": list(self.outputs),
        }  # fmt: skip


def export_openvino(
    source: "Openable", config: OpenvinoConfig, *, show: bool = True, **opening: Unpack[Opening]
) -> OpenvinoResult:
    """Export, verify, and put the files into ``config.out``; a failure leaves that folder as it was.

    The file is run in fp32 and, where ``config.precision`` is bf16, in that too.

    Args:
        source: a pack, a merged checkpoint, a timm model name, a `Task` or a module in memory, or an open source.
        config: options.
        show: print the gate's tables; a failure's table is always printed.
        opening: keyword arguments of `vtk.open_source`.

    Raises:
        UsageError: the source is itself an exported file, or the options do not fit the model.
        DataError: the folder holds other files, or cannot be written.
        VerificationError: the model cannot be converted, or the file fails the gate.
        UnavailableError: OpenVINO is not installed, or the processor does not compute in ``config.precision``.
    """
    expect(config, OpenvinoConfig, "export_openvino")
    require("openvino", "onnxscript", *(("onnxruntime",) if config.int8 else ()))
    precision = config.precision or default_precision()
    check_precision(precision)
    source = open_with_notes(source, **opening)
    if source.kind in ("onnx", "openvino", "aoti", "tensorrt"):
        raise UsageError(f"{source.path} is already an exported file; give the pack it was made from")
    start, options = time.perf_counter(), config.onnx()
    with (
        console.stages(show),
        workspace(config.out, overwrite=config.overwrite, command=_COMMAND, marks=MARKS) as folder,
    ):
        inputs = gate_inputs(source, data=config.data, split=config.split, seed=config.seed,
                             static_batch=config.static_batch)  # fmt: skip
        card = with_threshold(inputs.card, config.threshold, config.risk, source.name)
        inputs = dataclasses.replace(inputs, card=card)
        if config.with_preproc:
            preproc.check(inputs.card.input)
        console.stage(f"loading {source.name}")
        export = _Export(config, inputs, options.graph, options.gate, precision, show)
        model = source.model()
        # int8 rounds a classifier by its own numbers, so that of another one says nothing
        compare = not config.int8 and config.output != "features"
        filled = fill_zero_head(model, config.seed) if compare else None
        if filled is None:
            file, verified = export.run(model, folder)
        else:
            say_zero_head()
            (folder / FILLED).mkdir()
            _, verified = export.run(filled, folder / FILLED)
            shutil.rmtree(folder / FILLED)
            file = export.zeros(model, folder)
        if card.threshold is not None:
            file = export.add_unknown(file)
        write_json(folder / "model.json", json.loads(inputs.card.to_json()))
        text = page(inputs.card, file.facts, names=file.names, precision=precision, batch=config.static_batch,
                    sizes=file.sizes)  # fmt: skip
        write_text(folder / README, text)
        size = sum((folder / name).stat().st_size for name in (ir.NAME, ir.WEIGHTS))
        move(folder, config.out, command=_COMMAND, marks=MARKS)
    return OpenvinoResult(
        config.out / ir.NAME, precision, config.static_batch, size, verified, inputs.what,
        time.perf_counter() - start, file.fused, file.facts, file.names,
    )  # fmt: skip


@dataclass(frozen=True)
class _Export:
    """Writes and verifies the files of one model."""

    config: OpenvinoConfig
    inputs: GateInputs
    spec: GraphSpec
    options: GateSpec
    precision: str
    show: bool

    def run(self, model: nn.Module, folder: Path) -> tuple[File, tuple[Verified, ...]]:
        """Write a model's file into a folder, and return it with the results of the gate."""
        file, converted = self.write(model, folder)
        precisions = dict.fromkeys(("fp32", self.precision))
        found = [verify(file, self.inputs, self.spec, self.options, name, show=self.show) for name in precisions]
        if self.config.with_preproc:
            console.stage("putting the preprocessing into the model")
            file = self.add_preproc(file, converted)
            drifts = [verify_preproc(file, self.inputs, self.options, name) for name in precisions]
            found = [dataclasses.replace(each, drift=drift) for each, drift in zip(found, drifts, strict=True)]
        return file, tuple(found)

    def zeros(self, model: nn.Module, folder: Path) -> File:
        """Write the file of a model whose classifier is all zero, of which a copy has passed the gate."""
        file, converted = self.write(model, folder)
        check_zeros(file, self.inputs.images[: self.inputs.batches[0]], self.options)
        return self.add_preproc(file, converted) if self.config.with_preproc else file

    def write(self, model: nn.Module, folder: Path) -> tuple[File, "Model"]:
        """Write a model's file, without preprocessing, and check its structure."""
        place = folder / "graph"
        place.mkdir()
        file = build(model, self.inputs, self.spec, self.options, place)
        console.stage("converting it to OpenVINO")
        converted = ir.convert(file.path)
        facts = dataclasses.replace(file.facts, stored="fp16" if self.config.dtype == "fp16" else "")
        path = ir.write(converted, self.inputs.card, folder, facts)
        shutil.rmtree(place)
        file = dataclasses.replace(file, path=path, facts=facts)
        verify_structure(file, self.inputs.card, self.spec)
        return file, converted

    def add_unknown(self, file: File) -> File:
        """Write a file again with the output ``unknown``, and verify that."""
        console.stage("appending the output `unknown`")
        card, facts = self.inputs.card, dataclasses.replace(file.facts, names=dict(self.spec.names))
        model = ir.read(file.path)
        answer = next(name for name in file.names if name != "features")
        shares = answer == "probabilities"
        ir.append_unknown(model, card, answer=facts.name(answer), shares=shares, name=facts.name(UNKNOWN))
        path, names = ir.write(model, card, file.path.parent, facts), (*file.names, UNKNOWN)
        file = dataclasses.replace(file, path=path, facts=facts, names=names)
        for precision in dict.fromkeys(("fp32", self.precision)):
            sessions = opener(path, precision, self.options.threads)
            gate_unknown(file, self.inputs, self.options, sessions, exact=precision == "fp32")
        return file

    def add_preproc(self, file: File, converted: "Model") -> File:
        """Write a file again with the preprocessing in it."""
        facts = dataclasses.replace(file.facts, preprocessing=True, names=dict(self.spec.names))
        card = self.inputs.card
        whole = preproc.prepend(converted, card.input, self.config.static_batch, facts.name("images"))
        file = dataclasses.replace(file, path=ir.write(whole, card, file.path.parent, facts), facts=facts)
        verify_structure(file, card, self.spec)
        return file
