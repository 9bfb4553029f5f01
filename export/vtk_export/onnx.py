"""ONNX export with torch's dynamo exporter; a file that fails the gate is not kept.

torch's exporter was chosen over a writer of our own and over optimum (which needs an old transformers): it follows
torch's operators, writes a symbolic batch, and needs only onnxscript.
"""

import contextlib
import dataclasses
import io
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import psutil
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

from vtk import console
from vtk.card import Card, InputSpec
from vtk.errors import DataError, UsageError, VerificationError
from vtk.files import replace_file, write_json
from vtk.fused import fuse, separate_qkv
from vtk.runtime.source import Source, open_onnx
from vtk_export.config import OnnxConfig
from vtk_export.images import gate_images
from vtk_export.verify import BATCHES, GateRow, check_rows, print_rows, verify_structure, verify_values

INLINE_LIMIT = 1_800_000_000
"""Bytes of weights above which they go to ``model.onnx.data``: protobuf cannot hold 2 GiB in one message."""

FILES = ("model.onnx", "model.onnx.data", "model.json")
"""Everything an export can leave in its folder."""

_TMP = ".export-tmp-"


@dataclass(frozen=True)
class ExportResult:
    """A verified ONNX file.

    Attributes:
        path: ``DIR/model.onnx``.
        opset: of the standard domain, read from the file.
        batch: fixed batch size, None for any.
        bytes: of all files of the export.
        rows: the gate, per batch size.
        images: what it was verified with.
        seconds: of export and verification.
        fused: whether norms and scales are folded and parallel branches merged.
        nodes: of the graph.
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

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON values."""
        rows = [{**dataclasses.asdict(row), "passed": row.passed} for row in self.rows]
        return {
            "path": str(self.path), "opset": self.opset, "static_batch": self.batch, "size_bytes": self.bytes,
            "images": self.images, "verified": rows, "export_ms": 1000 * self.seconds,
            "fused": self.fused, "nodes": self.nodes,
        }  # fmt: skip


def export_onnx(source: Source, config: OnnxConfig, *, show: bool = True) -> ExportResult:
    """Export, verify, and put the files into ``config.out``; on a failure that folder is as it was before.

    Args:
        source: a pack, a merged checkpoint or a timm model, from `vtk.runtime.open_source`.
        config: options.
        show: print the gate's table; a failure's table is always printed.

    Raises:
        UsageError: the source is itself an ONNX file.
        DataError: the folder holds other files, or cannot be written.
        VerificationError: torch's exporter cannot convert the model, or the file is not what was asked for.
    """
    if source.kind == "onnx":
        raise UsageError(f"{source.path} is an ONNX file already; give the pack it was exported from")
    start = time.perf_counter()
    with _workspace(config.out, overwrite=config.overwrite) as folder:
        card = dataclasses.replace(source.card, base=None, pack={})
        batches = BATCHES if config.static_batch is None else (config.static_batch,)
        images, what = gate_images(card.input, sum(batches), data=config.data, seed=config.seed)
        model = source.model()
        graph = choose_form(model, config.fuse)
        fused = graph is not model
        proto = convert(graph, card.input, opset=config.opset, static_batch=config.static_batch)
        del graph
        nodes = len(proto.graph.node)
        path = _write(proto, card, folder)
        del proto
        verify_structure(path, card, opset=config.opset, static_batch=config.static_batch)
        rows, remarks = verify_values(path, model, images, batches=batches, threads=config.threads)
        if show or not all(row.passed for row in rows):
            print_rows(rows)
            for line in (f"verified with {what}", *remarks):
                console.say(line)
        check_rows(rows)
        size = sum(file.stat().st_size for file in folder.iterdir())
        _move(folder, config.out)
    return ExportResult(
        path=config.out / "model.onnx",
        opset=config.opset,
        batch=config.static_batch,
        bytes=size,
        rows=tuple(rows),
        images=what,
        seconds=time.perf_counter() - start,
        fused=fused,
        nodes=nodes,
    )


@contextlib.contextmanager
def temporary_onnx(source: Source, *, opset: int = 18, static_batch: int | None = None) -> Iterator[Source]:
    """Export and verify into a temporary folder, for a back-end that runs ONNX files; gone at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="vtk-onnx-", ignore_cleanup_errors=True) as folder:
        config = OnnxConfig(source=source.name, out=Path(folder) / "export", opset=opset, static_batch=static_batch)
        result = export_onnx(source, config, show=False)
        worst = max(max(row.error, row.error_plain) for row in result.rows)
        console.say(f"{source.name}: exported for ONNX Runtime and verified (max error {worst:.1e})")
        yield dataclasses.replace(open_onnx(result.path), name=source.name)


def is_parallel(model: nn.Module) -> bool:
    """Return whether a model has blocks of several parallel branches (paper A): merged, half of its nodes go."""
    return any(isinstance(m, ParallelThingsBlock) and m.num_parallel > 1 for m in model.modules())


def choose_form(model: nn.Module, fuse: bool | None) -> nn.Module:
    """Return what to export: `export_form` where asked for, or unasked (None) for parallel branches, else the model.

    Raises:
        UsageError: asked for, and a part of the model cannot be fused. Unasked, that is said, and the model returned.
    """
    if fuse or (fuse is None and is_parallel(model)):
        try:
            return export_form(model)
        except UsageError as error:
            if fuse:
                raise
            console.say(f"exported as it is: {str(error).partition(';')[0]}")
    return model


def export_form(model: nn.Module) -> nn.Module:
    """Return the folded, merged model with one node per norm and q, k and v as three products.

    That is the form that the attention fusions of ONNX Runtime and TensorRT look for; only standard operators are used.

    Raises:
        UsageError: a part of the model cannot be fused; it is named.
    """
    fused = fuse(model, keep_source=False)
    separate_qkv(fused)
    return fused


def convert(model: nn.Module, spec: InputSpec, *, opset: int, static_batch: int | None = None) -> onnx.ModelProto:
    """Run torch's exporter, quietly, and return the model with its weights.

    Args:
        model: in eval mode, fp32, on the CPU.
        spec: size of the input.
        opset: to ask the exporter for; it may give another one, which `verify_structure` notices.
        static_batch: fixed batch size, None for a symbolic one named ``batch``.

    Raises:
        VerificationError: the exporter cannot convert the model.
    """
    # with a batch of one, torch.export would take the batch for a constant
    example = torch.zeros(static_batch or 2, spec.in_chans, spec.height, spec.width)
    shapes = None if static_batch else ({0: torch.export.Dim("batch")},)
    try:
        with _silence():
            program = torch.onnx.export(
                model.eval().requires_grad_(False), (example,), dynamo=True, verbose=False, opset_version=opset,
                input_names=["pixel_values"], output_names=["logits"], dynamic_shapes=shapes,
            )  # fmt: skip
            if program is None:
                raise RuntimeError("it returned nothing")
            proto: onnx.ModelProto = program.model_proto
    except Exception as error:  # torch.export and onnxscript raise whatever the operator at hand raises
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        raise VerificationError(f"torch's ONNX exporter cannot convert {type(model).__name__}: {reason}") from error
    _strip(proto.graph)
    return proto


def _strip(graph: onnx.GraphProto) -> None:
    """Drop the exporter's notes on every node: they hold stack traces with paths of this machine."""
    for entry in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        entry.ClearField("metadata_props")
        entry.ClearField("doc_string")
    graph.ClearField("metadata_props")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _strip(inner)


def _write(proto: onnx.ModelProto, card: Card, folder: Path) -> Path:
    """Write ``model.onnx``, with its weights inside below `INLINE_LIMIT`, and ``model.json``."""
    path = folder / "model.onnx"
    proto.ClearField("metadata_props")
    onnx.helper.set_model_props(proto, {"vtk": card.to_json()})
    weights = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    external = weights > INLINE_LIMIT
    try:
        onnx.save_model(
            proto, path, save_as_external_data=external, location="model.onnx.data", all_tensors_to_one_file=True
        )
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}; free some space") from error
    write_json(folder / "model.json", json.loads(card.to_json()))
    return path


@contextlib.contextmanager
def _workspace(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder inside ``out``, so that its files reach their place by renaming."""
    if out.exists() and not out.is_dir():
        raise DataError(f"`--out` {out} is a file; give a folder")
    existed = out.is_dir()
    others = [p.name for p in out.iterdir() if p.name not in FILES and not p.name.startswith(_TMP)] if existed else []
    if others and not overwrite:
        raise DataError(f"`--out` {out} holds files that no export wrote ({min(others)}); give another, or --overwrite")
    folder = out / f"{_TMP}{os.getpid()}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"cannot write {out}: {error.strerror or error}; choose another folder") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed:
            with contextlib.suppress(OSError):
                out.rmdir()  # only if nothing was put there


def _move(folder: Path, out: Path) -> None:
    """Put the new files in place of those of an earlier export; ``model.onnx`` comes last, so it is never half new."""
    if (folder / "model.onnx.data").exists() or (out / "model.onnx.data").exists():
        (out / "model.onnx").unlink(missing_ok=True)
        (out / "model.onnx.data").unlink(missing_ok=True)
    for name in ("model.onnx.data", "model.json", "model.onnx"):
        if (folder / name).exists():
            with replace_file(out / name) as tmp:
                os.replace(folder / name, tmp)
    for left in out.glob(f"{_TMP}*"):
        pid = left.name.removeprefix(_TMP)
        if not (pid.isdecimal() and psutil.pid_exists(int(pid))):
            shutil.rmtree(left, ignore_errors=True)  # of an export that was killed


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter's prints, warnings and log lines away: stdout may be a JSON object."""
    level = logging.root.manager.disable
    noise = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(level)
