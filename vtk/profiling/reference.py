"""The logits that outputs are compared with: by torch where there is a model, else by ONNX Runtime or the file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vtk.errors import UsageError, VerificationError
from vtk.profiling.compare import gives_probabilities, torch_reference
from vtk.profiling.inputs import Inputs
from vtk.runtime.backends.base import Backend, least_images
from vtk.runtime.engine_files import model_beside, read_stamp
from vtk.runtime.onnx_file import open_onnx
from vtk.runtime.source import Source

Loader = Callable[..., Backend]

FILES = ("onnx", "openvino", "aoti", "tensorrt")
"""Kinds of sources that hold no model in torch."""


@dataclass(frozen=True)
class Reference:
    """What outputs are compared with.

    Attributes:
        logits: (n, classes), fp32, CPU.
        described: how they were computed.
        kind: which tolerance holds, see `vtk.profiling.compare.compare`.
        cautions: what weakens them.
        probabilities: they are logarithms of probabilities: of the logits only the differences are known.
    """

    logits: Tensor
    described: str
    kind: str
    cautions: tuple[str, ...] = ()
    probabilities: bool = False


Answers = Callable[[Inputs], Reference]
"""Computes a reference that is no single source, for instance each image's by its own task's model."""


def reference_of(
    profiled: Source,
    source: Source,
    inputs: Inputs,
    precision: str,
    load: Loader,
    device: torch.device,
    threads: int,
) -> Reference:
    """Compute the logits of a profile's inputs.

    Args:
        profiled: what is measured.
        source: whose logits: ``profiled`` itself, or what it was made from.
        inputs: of the profile.
        precision: of the profile.
        load: loads a back-end.
        device: for back-ends that do not run on a CPU.
        threads: of the CPU.

    Raises:
        UsageError: ``source`` takes other images, or has other classes.
    """
    given = "" if source is profiled else f" of {source.name}"
    raw = profiled.facts.preprocessing
    if source is not profiled and source.facts.preprocessing and not raw:
        raise UsageError(f"`--reference` {source.name} takes raw images, {profiled.name} normalised ones; give "
                         "the pack it was made from")  # fmt: skip
    if source is not profiled and (difference := _differ(source, profiled)):
        raise UsageError(f"`--reference` {source.name} is not what {profiled.name} was made from: {difference}; give "
                         "its own pack")  # fmt: skip
    # bytes are prepared by Pillow for all but the file that prepares them itself
    outside = raw and not source.facts.preprocessing
    kind: str = "raw" if outside else precision
    kind = profiled.facts.kind if profiled.facts.kind in ("int8", "fp8") else kind
    how = " with Pillow's preprocessing" if outside else ""
    images = inputs.normalised(source.card.input) if outside else inputs.images
    if source.kind == "tensorrt" and (model := _model_of(source)) is not None:
        given, source = f" of {model.path.name if model.path else model.name}", model
    if source.kind not in FILES:
        return Reference(torch_reference(source.model(), images), f"torch fp32 on the CPU{given}{how}", kind)
    name, options, said, cautions = _reference_backend(source, device)
    # a file of another precision than asked for is refused by its back-end; a reference has its own, and what OpenVINO
    # rounds to bf16 is held against fp32
    own = source is not profiled or source.kind in ("onnx", "openvino")
    dtype = source.facts.precision if own else precision
    backend = load(name, source, dtype=dtype, threads=threads, **options)
    size = backend.batch or max(least_images(backend), 1 if source.kind in ("aoti", "tensorrt") else 8)
    more = inputs.more if source is profiled else {}
    try:
        logits = _rows_of(backend, {inputs.name if not outside else "pixel_values": images, **more}, size)
    finally:
        backend.close()
    return Reference(logits, f"{said}{given}{how}", kind, cautions, gives_probabilities(backend))


def _reference_backend(source: Source, device: torch.device) -> tuple[str, dict[str, Any], str, tuple[str, ...]]:
    """Return back-end and options that run an exported file as a reference, words for it, and what weakens it."""
    if source.kind == "onnx":
        options: dict[str, Any] = {"optimize": False, **({"raw": True} if source.facts.preprocessing else {})}
        if source.facts.precision == "bf16":  # onnxruntime has no bf16 arithmetic on a CPU
            return "ort-cuda", {**options, "device": device}, "onnxruntime on CUDA without optimisation", ()
        return "ort-cpu", {**options, "device": "cpu"}, "onnxruntime on the CPU without graph optimisation", ()
    if source.kind == "openvino":
        caution = f"there is no independent reference for {source.name}: give the pack it was made of as --reference"
        options = {"device": "cpu", **({"raw": True} if source.facts.preprocessing else {})}
        return "openvino", options, "OpenVINO in fp32, the file itself", (caution,)
    caution = f"there is no independent reference for {source.name}: give the pack it was made of as --reference"
    return source.kind, {"device": device}, "the file itself, one image at a time", (caution,)


def _model_of(engine: Source) -> Source | None:
    """Return the ONNX file beside an engine, which onnxruntime runs as something independent."""
    assert engine.path is not None
    path = model_beside(engine.path, read_stamp(engine.path))
    return None if path is None or engine.facts.precision == "bf16" else open_onnx(path)


def _differ(one: Source, other: Source) -> str:
    """Say in which way outputs of two sources cannot be the same; empty where they may."""
    a, b = one.card, other.card
    if len(a.classes) != len(b.classes):
        return f"{len(a.classes)} and {len(b.classes)} classes"
    if one.described and other.described and a.classes != b.classes:
        first, second = next(pair for pair in zip(a.classes, b.classes, strict=True) if pair[0] != pair[1])
        return f"output {a.classes.index(first)} is {first} in one and {second} in the other"
    shapes = [(card.input.in_chans, *card.input.size) for card in (a, b)]
    return "" if shapes[0] == shapes[1] else "images of {} and {}".format(*("×".join(map(str, s)) for s in shapes))


def _rows_of(backend: Backend, inputs: Mapping[str, Tensor], size: int) -> Tensor:
    """Run ``size`` rows at a time, the last call filled up with copies, and return all logits, fp32, CPU."""
    count, found = len(next(iter(inputs.values()))), []
    for start in range(0, count, size):
        index = (torch.arange(start, start + size)).clamp_max(count - 1)
        rows = {name: value[index] for name, value in inputs.items()}
        found.append(backend.run(rows)["logits"].float().cpu()[: count - start])
    logits = torch.cat(found)
    if not bool(torch.isfinite(logits).all()):
        raise VerificationError(f"the reference, {backend.name}, gives logits that are infinite or NaN; the "
                                "file is damaged, or give --reference PACK")  # fmt: skip
    return logits
