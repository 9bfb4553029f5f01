"""Packs, bundles, merged checkpoints, adapters of PEFT, and the states of runs."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.mutators import flip, zipped
from tests.fuzz.reader import JSON, TENSORS, V0_1, Reader, copy
from tests.fuzz.structured import pickled
from vtk.errors import VtkError


def _read_pack(folder: Path, file: Path) -> None:
    from vtk.packs import load_task

    task = load_task(folder, base=V0_1 / "base.safetensors")
    _check_task(task)


def _check_task(task: Any) -> None:
    assert all(value.isfinite().all() for value in task.model.state_dict().values() if value.is_floating_point())
    spec = task.card.input
    if spec.height * spec.width * spec.in_chans < 1 << 18:
        with torch.inference_mode():
            logits = task.model(torch.zeros(1, spec.in_chans, *spec.size))
        assert logits.shape == (1, len(task.classes))


def _make_factors(folder: Path) -> None:
    from vtk.packs import load_task
    from vtk.packs.synthetic import write_synthetic

    task = load_task(V0_1 / "digits-bf16", base=V0_1 / "base.safetensors")
    for dtype in ("fp32", "int8"):
        write_synthetic(folder / dtype, task, rank=(0, 2, 5), dtype=dtype)  # type: ignore[arg-type]


def _read_factors(folder: Path, file: Path) -> None:
    from vtk.packs.factors import read_pack

    try:
        read_pack(file.parent)
    except VtkError:  # then the other reader must refuse it, too
        _refused(lambda: _read_pack(file.parent, file), file)
    else:
        _read_pack(file.parent, file)


def _refused(read: Callable[[], object], file: Path) -> None:
    read()
    raise AssertionError(f"{file} is refused without its base and taken with it")


def _read_checkpoint(folder: Path, file: Path) -> None:
    from vtk.packs import load_checkpoint

    _check_task(load_checkpoint(file))


def _read_bundle(folder: Path, file: Path) -> None:
    from vtk.packs.hub import check_pack

    check_pack(folder)


def _read_adapter(folder: Path, file: Path) -> None:
    from vtk.packs.from_peft import from_peft

    out = folder.parent / "adapted"
    shutil.rmtree(out, ignore_errors=True)
    from_peft(folder, out, overwrite=True)
    _check_task(__import__("vtk").load_task(out))


def _read_lora(folder: Path, file: Path) -> None:
    """Also back to an adapter: a pack that is taken can be written as one, or is refused in one line."""
    from vtk.packs.from_peft import from_peft
    from vtk.packs.to_peft import to_peft

    out, again = (folder.parent / name for name in ("lora-pack", "lora-again"))
    for path in (out, again):
        shutil.rmtree(path, ignore_errors=True)
    from_peft(folder, out, base=V0_1 / "base.safetensors", overwrite=True)
    _check_task(__import__("vtk").load_task(out, base=V0_1 / "base.safetensors"))
    to_peft(out, again, base=V0_1 / "base.safetensors")


def _read_state(folder: Path, file: Path) -> None:
    from vtk.training.runs.resume_state import load_state

    found = load_state(folder)
    assert len(found.fit.rows) == found.fit.epoch


READERS = {
    "pack": Reader(1000, copy("digits-bf16"), _read_pack, {".json": JSON, ".safetensors": TENSORS}),
    "int8": Reader(300, copy("digits-int8"), _read_pack, {".json": JSON, ".safetensors": TENSORS}),
    "factors": Reader(600, _make_factors, _read_factors, {".json": JSON, ".safetensors": TENSORS}),
    "checkpoint": Reader(700, copy("digits.safetensors"), _read_checkpoint, {".safetensors": TENSORS}),
    "bundle": Reader(500, copy("digits.vtkbundle"), _read_bundle, {".json": JSON, ".safetensors": TENSORS}),
    "adapter": Reader(200, copy("digits-peft"), _read_adapter, {".json": JSON, "model.safetensors": TENSORS}),
    "lora": Reader(200, copy("runs/lora/adapter"), _read_lora, {".json": JSON, "model.safetensors": TENSORS}),
    "state": Reader(
        900,
        copy("runs/digits/last"),
        _read_state,
        {".json": JSON, ".safetensors": TENSORS, ".pt": (flip, zipped(pickled))},
    ),
}
