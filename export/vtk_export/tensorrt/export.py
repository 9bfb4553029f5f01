"""Exports one model for TensorRT: the fused graph, verified and linted, with the scripts that build its engine.

An engine is built where it runs: it is machine code for one GPU and one version. The graph has standard operators only;
a plugin of TensorRT would tie the file to a version.
"""

import dataclasses
import importlib.util
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import onnx
from torch import nn

from vtk import console
from vtk._path import child, environment
from vtk.errors import DataError, UnavailableError, UsageError, VerificationError
from vtk.files import write_text
from vtk.formats import read_json, write_json
from vtk.options import expect
from vtk.packages import require
from vtk.runtime.opening import open_with_notes
from vtk.runtime.source import Opening
from vtk.runtime.weight_digests import file_digest
from vtk_export.gate.images import GateInputs, gate_inputs
from vtk_export.gate.verify import GateRow
from vtk_export.gate.zero_head import FILLED
from vtk_export.lint.finding import Finding
from vtk_export.lint.linter import check, load
from vtk_export.onnx.build import File, build
from vtk_export.onnx.gate import write_verified
from vtk_export.onnx.spec import GateSpec, GraphSpec
from vtk_export.output_folder import DATA, MARKS, move, workspace
from vtk_export.readme import README
from vtk_export.targets import Target
from vtk_export.tensorrt import scripts
from vtk_export.tensorrt.config import TensorrtConfig

if TYPE_CHECKING:
    from vtk.runtime.source import Openable

KNOWN = {**MARKS, **scripts.MARKS}
"""Files that an export and its scripts leave in its folder, and how they are recognised."""
_COMMAND = "vtk export tensorrt"

_SCRIPT = Path(__file__).with_name("served") / scripts.PYTHON
_ERRORS: dict[int, type[DataError | VerificationError | UnavailableError]] = {3: DataError, 5: UnavailableError}


@dataclass(frozen=True)
class TensorrtResult:
    """A verified, linted ONNX file and its scripts.

    Attributes:
        path: ``DIR/model.onnx``.
        tensorrt: oldest version that takes it.
        opset: of the standard domain.
        precision: of weights and arithmetic.
        fused: q, k and v are separate products, norms and scales are folded.
        nodes: number of nodes in the graph.
        bytes: size of the file and of its external weights.
        rows: results of the gate; empty if ``unverified`` kept a file that cannot run here.
        images: description of the images that it was verified with.
        findings: of the linter: nodes that miss a fused kernel.
        profile: content of ``profile.json``.
        seconds: time of export, verification and, with ``build``, building.
        engine: stamp of the engine, None if none was built.
    """

    path: Path
    tensorrt: str
    opset: int
    precision: str
    fused: bool
    nodes: int
    bytes: int
    rows: tuple[GateRow, ...]
    images: str
    findings: tuple[Finding, ...]
    profile: dict[str, Any]
    seconds: float
    engine: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            "path": str(self.path), "tensorrt": self.tensorrt, "opset": self.opset, "precision": self.precision,
            "fused": self.fused, "nodes": self.nodes, "size_bytes": self.bytes, "images": self.images,
            "verified": [{**dataclasses.asdict(row), "passed": row.passed} for row in self.rows],
            "findings": [dataclasses.asdict(finding) for finding in self.findings], "profile": self.profile,
            "trtexec": scripts.trtexec(self.profile), "export_ms": 1000 * self.seconds, "engine": self.engine,
        }  # fmt: skip


def export_tensorrt(
    source: "Openable", config: TensorrtConfig, *, show: bool = True, **opening: Unpack[Opening]
) -> TensorrtResult:
    """Export, verify, lint, and put the files into ``config.out``; a failure leaves that folder as it was.

    Args:
        source: the model, as for `vtk.export_onnx`.
        config: options; with ``build`` the engine is built too.
        show: print the gate's table; a failure's table is always printed.
        opening: keyword arguments of `vtk.open_source`.

    Raises:
        UsageError: the source is an exported file, or the options do not fit the model.
        DataError: the folder holds other files, or cannot be written.
        UnavailableError: ``build`` without TensorRT, or the file cannot run here and ``unverified`` is False.
        VerificationError: the outputs differ from PyTorch's, or TensorRT would refuse the file or cannot build it.
    """
    expect(config, TensorrtConfig, "export_tensorrt")
    source = open_with_notes(source, **opening)
    if source.kind in ("onnx", "aoti"):
        raise UsageError(f"{source.path} is already an exported file; give the pack it was made from, or --lint")
    if config.build and importlib.util.find_spec("tensorrt") is None:
        raise UnavailableError("`--build` needs TensorRT's Python package, which is not installed; leave it out, and "
                               "run build_engine.py on the target GPU")  # fmt: skip
    require("onnxscript", "onnxruntime")
    assert config.out is not None
    start, target = time.perf_counter(), config.runtime
    spec, options = config.graph, config.gate
    with (
        console.stages(show),
        workspace(config.out, overwrite=config.overwrite, command=_COMMAND, marks=KNOWN, left=scripts.LEFT) as folder,
    ):
        inputs = gate_inputs(source, data=config.data, split=config.split, seed=config.seed,
                             static_batch=config.static_batch)  # fmt: skip
        console.stage(f"loading {source.name}")
        file, other = write_verified(
            source.model(), lambda model, where: _build(model, inputs, spec, options, where), inputs, spec, options,
            folder, show=show,
        )  # fmt: skip
        if other is not None:
            shutil.rmtree(folder / FILLED)
        proto = load(file.path)
        console.stage(f"checking the graph for TensorRT {target.version}")
        findings = check(proto, target)
        found = _write_side_files(proto, file, config, target, folder, findings)
        half = "" if file.facts.precision == "fp32" or config.keep_io_types else file.facts.precision
        page = scripts.tensorrt_page(inputs.card, half=half, batch=config.static_batch, version=target.version,
                                     called=file.facts.names)  # fmt: skip
        write_text(folder / README, page)
        size = sum(entry.stat().st_size for entry in folder.glob(f"{scripts.MODEL}*"))
        # an engine is of the file before and goes, the timing cache stays
        move(folder, config.out, command=_COMMAND, marks=KNOWN, kept=(scripts.CACHE,))
    engine = build_engine(config.out) if config.build else None
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    return TensorrtResult(
        config.out / scripts.MODEL, target.version, opset, config.dtype, file.fused, len(proto.graph.node), size,
        file.rows, inputs.what, tuple(findings), found, time.perf_counter() - start, engine,
    )  # fmt: skip


def build_engine(folder: Path) -> dict[str, Any]:
    """Run ``build_engine.py`` of an export in a separate process, and return the engine's stamp.

    Raises:
        UnavailableError, DataError, VerificationError: by the exit code of the script.
    """
    console.say("building the engine; kernel selection takes minutes")
    command = child(str(folder / scripts.PYTHON))
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"it ended with {run.returncode} and said nothing"]
        kind = _ERRORS.get(run.returncode, VerificationError)
        raise kind(f"{lines[-1].removeprefix(f'{scripts.PYTHON}: ')} (the ONNX file is kept)")
    console.say(*run.stdout.strip().splitlines())
    stamp: dict[str, Any] = read_json(folder / scripts.STAMP)
    return stamp


def _build(model: nn.Module, inputs: GateInputs, spec: GraphSpec, options: GateSpec, folder: Path) -> File:
    """Write the fused form, or the model as it is with attention written out."""
    if spec.fuse is not False:
        try:
            fused = dataclasses.replace(spec, fuse=True)
            return build(model, inputs, fused, options, folder, divide_scores=False)
        except UsageError as error:
            if spec.fuse:
                raise
            console.say(f"exported unfused: {str(error).partition(';')[0]}")
    return build(model, inputs, dataclasses.replace(spec, fuse=False), options, folder)


def _write_side_files(
    proto: onnx.ModelProto, file: File, config: TensorrtConfig, target: Target, folder: Path, findings: list[Finding]
) -> dict[str, Any]:
    found = scripts.profile(
        proto,
        target,
        config.shapes,
        precision=file.facts.precision,
        tf32=config.tf32,
        workspace=config.workspace,
        fp8=file.facts.fp8,
        names=file.facts.names,
    )
    found["onnx_sha256"], found["card_sha256"] = file_digest(file.path), file_digest(folder / scripts.CARD)
    if (folder / DATA).exists():
        found["data_sha256"] = file_digest(folder / DATA)
    found["slow"] = [finding.line() for finding in findings]
    write_json(folder / scripts.PROFILE, found)
    write_text(folder / scripts.BUILD, scripts.build_script(found))
    write_text(folder / scripts.COMPARE, scripts.compare_script(found))
    shutil.copyfile(_SCRIPT, folder / scripts.PYTHON)
    return found
