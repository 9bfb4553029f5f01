"""The graph of a file: converted, then lowered to the precision asked for."""

import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from torch import Tensor, nn

from vtk import console
from vtk.card import Card
from vtk.data.decoding.decode import pixel_limit
from vtk.errors import DataError, UsageError
from vtk.runtime.backends.ort_quantize import quantize_dynamic, quantize_static
from vtk.runtime.data_option import DataImages
from vtk.runtime.export_facts import Facts
from vtk.runtime.photographs import Photographs
from vtk_export.gate.judge import Judgement
from vtk_export.gate.neighbours import Dependence
from vtk_export.gate.verify import GateRow
from vtk_export.graph.convert import choose_form, convert, explicit_attention
from vtk_export.graph.fp8 import quantize_fp8, wide_products
from vtk_export.graph.nonfinite import mark_rows
from vtk_export.graph.opset17 import lower
from vtk_export.graph.outputs import WithFeatures, append_softmax, output_names, split_classifier
from vtk_export.graph.overflow import check_range, largest_values
from vtk_export.graph.precision import to_half
from vtk_export.graph.sizes import Sizes, check_sizes, probe_sizes
from vtk_export.onnx.config import OnnxConfig
from vtk_export.place import save, write

_RANGE_IMAGES = 8


@dataclass(frozen=True)
class File:
    """A written file and what the gate needs of it.

    ``model`` is in torch what the file should give, ``sizes`` what it takes where height and width are open.
    """

    path: Path
    model: nn.Module
    names: tuple[str, ...]
    facts: Facts
    fused: bool
    nodes: int
    rows: tuple[GateRow, ...] = ()
    judgement: Judgement | None = None
    dependence: Dependence | None = None
    sizes: Sizes | None = None

    def widths(self, card: Card) -> dict[str, int]:
        """Return the last axis of every output."""
        features = self.model.classifier_width if isinstance(self.model, WithFeatures) else 0
        return {name: features if name == "features" else len(card.classes) for name in self.names}


def build(
    model: nn.Module, card: Card, config: OnnxConfig, folder: Path, images: Tensor, given: DataImages | None = None, *,
    divide_scores: bool | None = None,
) -> File:  # fmt: skip
    """Convert ``model``, lower it, and write it into ``folder``.

    Args:
        model: fp32, on the CPU.
        card: written into the file.
        config: options.
        folder: of the new files.
        images: model inputs, of which some show what is too large for fp16.
        given: images of ``--data``, which ``int8`` static calibrates on.
        divide_scores: of `vtk_export.graph.convert.export_form`; None: in fp32, unless for TensorRT.

    For TensorRT the graph has the form that its parser takes, and the opset of its version.

    Raises:
        UsageError: the model cannot give what was asked for.
        VerificationError: it cannot be converted, or a number is too large for the precision.
    """
    if config.softmax and card.multi_label:
        raise UsageError(
            "`--softmax` is of one label an image; this model gives several: take the sigmoid of each of its logits"
        )
    names = output_names(config.output, softmax=config.softmax)
    sizes = None
    if config.dynamic_size:
        console.stage("trying which sizes the model takes")
        check_sizes(model, card.input, card.model.name)
        sizes = probe_sizes(model, card.input)
    # q, k and v of a fused block read one quantised input, and onnxruntime then makes no int8 product of a QDQ graph
    vits = config.int8 != "static" or config.for_tensorrt
    if divide_scores is None:  # ONNX Runtime's fusion takes fp32 alone
        divide_scores = config.dtype == "fp32" and not config.for_tensorrt
    if config.for_tensorrt:
        explicit_attention(model)
    form = {"vits": vits, "divide_scores": divide_scores}
    if config.output == "logits":
        graph = choose_form(model, config.fuse, **form)
        fused = graph is not model
    else:
        model = split_classifier(model, logits=config.output == "both")
        graph = WithFeatures(choose_form(model.body, config.fuse, **form), model.classifier, model.classifier_width)
        fused = graph.body is not model.body
    raw = output_names(config.output, softmax=False)
    console.stage(f"converting it to a graph of opset {config.graph_opset}")
    proto = convert(graph, card.input, opset=config.graph_opset, static_batch=config.static_batch, names=raw,
                    sizes=sizes)  # fmt: skip
    _check_resize(proto, config)
    del graph
    if config.softmax:
        append_softmax(proto)
    proto.ir_version = config.ir
    if config.dtype == "fp8":
        console.stage("rounding its wide products to fp8")
        _round(proto, card, config, folder, given)
    if config.dtype != "fp32":
        console.stage(f"lowering the graph to {config.rest}")
        plain = copy.deepcopy(proto)
        makers = to_half(proto, config.rest, keep_io_types=config.keep_io_types)
        check_range(plain, makers, card, images[:_RANGE_IMAGES], dtype=config.rest, folder=folder,
                    threads=config.threads, static_batch=config.static_batch)  # fmt: skip
        del plain
    elif config.int8:
        console.stage(f"quantising its products ({config.int8})")
        proto = _quantize(proto, card, config, folder, given)
        mark_rows(proto, clean=config.int8 == "dynamic")
        proto.ir_version = config.ir
    facts = Facts(
        precision=config.rest,
        int8=config.int8 or "",
        fp8=config.dtype == "fp8",
        keep_io_types=config.keep_io_types,
        dynamic_size=config.dynamic_size,
        target=config.target or "",
    )
    if config.file_opset < config.graph_opset:
        lower(proto, ir_version=config.ir)
    nodes = len(proto.graph.node)
    return File(write(proto, card, folder, facts), model, names, facts, fused, nodes, sizes=sizes)


def _check_resize(proto: onnx.ModelProto, config: OnnxConfig) -> None:
    """Refuse a position table that is resampled at every call where the run time cannot do that as torch does."""
    if config.for_tensorrt and any(node.op_type == "Resize" for node in proto.graph.node):
        raise UsageError(
            f"{config.target} cannot resample this model's position table, which --dynamic-size needs; leave it out"
        )


def _quantize(
    proto: onnx.ModelProto, card: Card, config: OnnxConfig, folder: Path, given: DataImages | None
) -> onnx.ModelProto:
    """Return the int8 graph; the files that onnxruntime's quantiser reads and writes do not stay."""
    place = folder / "plain"
    place.mkdir()
    plain, target = save(proto, card, place), place / "int8.onnx"
    if config.int8 == "dynamic":
        quantize_dynamic(plain, target)
    else:
        calibration = _Calibration(card, config, given)
        quantize_static(plain, target, calibration.batches(1))
        calibration.tell()
    quantized: onnx.ModelProto = onnx.load(target)
    shutil.rmtree(place)
    domains = {node.domain for node in quantized.graph.node} | {""}
    kept = [entry for entry in quantized.opset_import if entry.domain in domains]
    del quantized.opset_import[:]
    quantized.opset_import.extend(kept)
    quantized.producer_name, quantized.producer_version = proto.producer_name, proto.producer_version
    return quantized


def _round(proto: onnx.ModelProto, card: Card, config: OnnxConfig, folder: Path, given: DataImages | None) -> None:
    """Put e4m3 before the wide products of an fp32 graph, with scales from the images of the calibration. In place."""
    names = dict.fromkeys(node.input[0] for node in wide_products(proto))
    calibration = _Calibration(card, config, given)
    batches = calibration.batches(4)
    largest = largest_values(proto, names, card, batches, folder=folder, threads=config.threads)
    calibration.tell()
    quantize_fp8(proto, largest)


class _Calibration:
    """The images that calibrate a file, and how many of them were read."""

    def __init__(self, card: Card, config: OnnxConfig, given: DataImages | None) -> None:
        assert given is not None
        self.spec, self.batch, self.used = card.input, config.static_batch, 0
        self.images = Photographs(given.calibration[0], config.calibration_images, max_pixels=pixel_limit(card))

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield them in batches of the file's size, or of ``size`` where it takes any."""
        for images, _ in self.images.batches(self.spec, self.batch or size):
            if self.batch in (None, len(images)):
                self.used += len(images)
                yield images

    def tell(self) -> None:
        """Say how many there were.

        Raises:
            DataError: too few for one batch of the file.
        """
        if not self.used:
            raise DataError(f"calibration needs a batch of {self.batch} images, which --static-batch says, and there "
                            f"are only {len(self.images.paths)} {self.images.what}; give more")  # fmt: skip
        console.say(f"calibrated on {self.used} {self.images.what}")
