"""Quantises a graph to int8 or fp8, with ranges from the calibration part of ``--data``."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import onnx
from torch import Tensor

from vtk import console
from vtk.card import Card
from vtk.data.decoding.decode import pixel_limit
from vtk.errors import DataError
from vtk.runtime.backends.ort_quantize import quantize_dynamic
from vtk.runtime.data_option import DataImages
from vtk.runtime.photographs import Photographs
from vtk_export.graph.fp8 import quantize_fp8, wide_products
from vtk_export.int8.budget import choose_kept
from vtk_export.int8.plan import prepare
from vtk_export.int8.recipe import recipe_for
from vtk_export.onnx.spec import GateSpec, GraphSpec
from vtk_export.onnx.value_ranges import largest_values
from vtk_export.output_folder import save

_BATCH = 16


def to_int8(
    proto: onnx.ModelProto, card: Card, spec: GraphSpec, options: GateSpec, folder: Path, given: DataImages | None
) -> onnx.ModelProto:
    """Return the int8 graph; nothing else stays in ``folder``."""
    if spec.int8 == "static":
        return _to_static(proto, card, spec, options, folder, given)
    place = folder / "plain"
    place.mkdir()
    plain, target = save(proto, card, place), place / "int8.onnx"
    quantize_dynamic(plain, target)
    quantized: onnx.ModelProto = onnx.load(target)
    shutil.rmtree(place)
    domains = {node.domain for node in quantized.graph.node} | {""}
    kept = [entry for entry in quantized.opset_import if entry.domain in domains]
    del quantized.opset_import[:]
    quantized.opset_import.extend(kept)
    quantized.producer_name, quantized.producer_version = proto.producer_name, proto.producer_version
    return quantized


def _to_static(
    proto: onnx.ModelProto, card: Card, spec: GraphSpec, options: GateSpec, folder: Path, given: DataImages | None
) -> onnx.ModelProto:  # fmt: skip
    recipe = recipe_for(tensorrt=spec.for_tensorrt)
    calibration = _Calibration(card, spec, options, given)
    plan = prepare(proto, calibration.batches(1), card, recipe, folder=folder, threads=options.threads)
    calibration.report()
    if spec.max_drop is None:
        return plan.graph(recipe.kept)
    assert given is not None
    console.stage("choosing what stays in float")
    images = Photographs(given.choice[0], options.images, max_pixels=pixel_limit(card))
    batches = [batch for batch, _ in images.batches(card.input, spec.static_batch or _BATCH)
               if spec.static_batch in (None, len(batch))]  # fmt: skip
    if not batches:
        raise DataError(f"`--max-drop` needs a batch of {spec.static_batch} images (--static-batch), and there are "
                        f"only {len(images.paths)} {images.what}; give more")  # fmt: skip
    choice = choose_kept(plan, batches, spec.max_drop, card, folder=folder, threads=options.threads)
    changed = f"int8 changes the class of {choice.changed} of {choice.count} {images.what}"
    if choice.kept:
        console.say(
            f"{changed}, if the products of {len(choice.kept)} of {len(plan.groups)} activations stay in float; "
            f"of {choice.first}, if none do"
        )
    else:
        console.say(f"{changed}: none of the products of {len(plan.groups)} activations has to stay in float")
    return plan.graph(choice.kept)


def to_fp8(
    proto: onnx.ModelProto, card: Card, spec: GraphSpec, options: GateSpec, folder: Path, given: DataImages | None
) -> None:
    """Quantise the wide products of an fp32 graph to e4m3, in place, with calibrated scales."""
    names = dict.fromkeys(node.input[0] for node in wide_products(proto))
    calibration = _Calibration(card, spec, options, given)
    batches = calibration.batches(4)
    largest = largest_values(proto, names, card, batches, folder=folder, threads=options.threads)
    calibration.report()
    quantize_fp8(proto, largest)


class _Calibration:
    """The calibration images of a file, and how many of them were read."""

    def __init__(self, card: Card, spec: GraphSpec, options: GateSpec, given: DataImages | None) -> None:
        assert given is not None
        self.spec, self.batch, self.used = card.input, spec.static_batch, 0
        self.images = Photographs(given.calibration[0], options.calibration_images, max_pixels=pixel_limit(card))

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield batches of the file's size, or of ``size`` if it takes any."""
        for images, _ in self.images.batches(self.spec, self.batch or size):
            if self.batch in (None, len(images)):
                self.used += len(images)
                yield images

    def report(self) -> None:
        """Print how many were used.

        Raises:
            DataError: too few for one batch of the file.
        """
        if not self.used:
            raise DataError(f"calibration needs a batch of {self.batch} images (--static-batch), and there "
                            f"are only {len(self.images.paths)} {self.images.what}; give more")  # fmt: skip
        console.say(f"calibrated on {self.used} {self.images.what}")
