"""Chooses back-end, precision, device and batch size: by default those that measured the training run's metrics."""

from dataclasses import dataclass

import torch

from vtk import console
from vtk.errors import DataError
from vtk.evaluation.config import RunOptions
from vtk.models.devices import DTYPES, FP8, resolve_device
from vtk.runtime.source import Source


@dataclass(frozen=True)
class Conditions:
    """Back-end, precision, device and batch size of a run.

    Attributes:
        backend: name of the back-end.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        device: for `load_backend`.
        batch_size: images per call.
        same: whether ``card.metrics`` were measured like this, so that they are reproduced exactly.
        notes: lines on differences from that which no option requested.
    """

    backend: str
    precision: str
    device: str
    batch_size: int
    same: bool
    notes: tuple[str, ...] = ()


def conditions_of(source: Source, config: RunOptions) -> Conditions:
    """Return what a config says, filled in by `choose_conditions`, and print the notes."""
    conditions = choose_conditions(
        source,
        backend=config.backend,
        precision=config.precision,
        device=config.device,
        batch_size=config.batch_size,
    )
    for note in conditions.notes:
        console.say(note)
    return conditions


def choose_conditions(
    source: Source,
    *,
    backend: str | None = None,
    precision: str | None = None,
    device: str | None = None,
    batch_size: int | None = None,
) -> Conditions:
    """Fill in options that are None from the card's ``regime``.

    Args:
        source: what will run.
        backend: None for ``ort-cpu`` with an ONNX file, ``openvino`` with an IR, ``aoti`` with a .pt2, ``tensorrt``
            with an engine, else ``eager``, or ``fused`` in fp8.
        precision: None for the regime's; exported files have their own, and ``openvino`` the processor's.
        device: None for the regime's if it is available, else the CPU.
        batch_size: None for the regime's.

    Raises:
        DataError: the card's precision is not one of this version.
        UnavailableError: ``device`` is not available.
    """
    regime = source.card.regime
    if regime.precision not in DTYPES:
        raise DataError(f"the card says precision `{regime.precision}`; this version runs {', '.join(DTYPES)}")
    if source.kind == "aoti":
        from vtk.runtime.aoti_file import device_of

        name, own = backend or "aoti", precision or source.facts.precision
        return Conditions(name, own, device or device_of(source), batch_size or regime.batch_size, same=False)
    if source.kind == "tensorrt":
        own = precision or source.facts.precision
        return Conditions(
            backend or "tensorrt", own, device or "cuda", batch_size or regime.batch_size, same=False
        )  # fmt: skip
    if backend == "openvino" or (source.kind == "openvino" and backend is None):
        chosen, said = openvino_precision(precision)
        return Conditions("openvino", chosen, device or "cpu", batch_size or regime.batch_size, same=False, notes=said)
    if source.kind == "onnx" or (backend or "").startswith("ort-"):
        name = backend or "ort-cpu"
        place = "cuda" if name == "ort-cuda" else "cpu"
        own = precision or source.facts.precision
        return Conditions(name, own, device or place, batch_size or regime.batch_size, same=False)
    notes: list[str] = []
    place = device or regime.device
    if device is None and regime.device.startswith("cuda") and not torch.cuda.is_available():
        place = "cpu"
        notes.append(
            f"the training run was evaluated on {regime.device}, which is not available: this runs on the CPU, and the "
            "metric may differ for a few images"
        )
    chosen = precision or regime.precision
    kind = resolve_device(place).type
    same = (
        (backend or "eager") == "eager"
        and chosen == regime.precision
        and kind == regime.device.partition(":")[0]
        and (batch_size or regime.batch_size) == regime.batch_size
    )
    name = backend or ("fused" if chosen == FP8 else "eager")
    return Conditions(name, chosen, place, batch_size or regime.batch_size, same, tuple(notes))


def openvino_precision(precision: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the precision of OpenVINO's products, and a line about it where nobody chose it.

    Args:
        precision: that was requested; None for bf16 where the processor multiplies it, else fp32.
    """
    if precision is not None:
        return precision, ()
    from vtk.runtime.openvino_runtime import default_precision

    chosen = default_precision()
    said = "OpenVINO multiplies in bf16, which this processor does natively; --precision fp32 is more exact"
    return chosen, (said,) if chosen == "bf16" else ()
