"""Compiles a model to a ``.pt2`` that holds two libraries: one for a batch of one, one for larger batches.

torch.export treats a batch of one as a constant, and a library whose batch may vary refuses it when it checks its input
(`vtk.runtime.aoti_load`). With two libraries every check can be on.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk import console
from vtk.card import Card
from vtk.errors import VerificationError, VtkError
from vtk.runtime import aoti_file
from vtk.runtime.aoti_load import MORE, ONE
from vtk_export.graph.convert import silence


def compile_package(
    model: nn.Module, example: Tensor, card: Card, precision: str, path: Path,
    max_batch: int = aoti_file.MAX_BATCH,
) -> None:  # fmt: skip
    """Write ``model`` as a ``.pt2`` that takes 1 to ``max_batch`` images.

    Args:
        model: in eval mode, on the device and in the type it is to run in.
        example: two images.
        card: goes into the file.
        precision: name of the type.
        path: ends in ``.pt2``.
        max_batch: 2 or more.

    Raises:
        VerificationError: torch cannot compile it.
    """
    from torch._inductor.package import package_aoti  # type: ignore[attr-defined]

    metadata = {
        aoti_file.CARD: card.to_json(), aoti_file.DTYPE: precision, aoti_file.CPU: aoti_file.cpu_level(),
        aoti_file.TORCH: aoti_file.torch_release(), aoti_file.INPUT: ",".join(map(str, example.shape[1:])),
        aoti_file.BATCH: str(max_batch),
    }  # fmt: skip
    # threads are those of the run, not those of the machine that compiled
    options: dict[str, Any] = {"aot_inductor.package": True, "aot_inductor.metadata": metadata}
    options["cpp.dynamic_threads"] = True
    model = model.eval().requires_grad_(False)
    try:
        console.stage("compiling for a batch of one")  # `silence` keeps lines back
        with silence(), torch.no_grad():
            files = {ONE: _compile(model, example[:1].contiguous(), None, options)}
        console.stage(f"compiling for batches of 2 to {max_batch:,} images")
        with silence(), torch.no_grad():
            files[MORE] = _compile(model, example, torch.export.Dim("batch", min=2, max=max_batch), options)
            package_aoti(str(path), files)
    except VtkError:
        raise
    except Exception as error:  # export and inductor raise whatever the operator at hand raises
        reason = (str(error.__cause__ or error).strip().splitlines() or [type(error).__name__])[0]
        raise VerificationError(f"AOTInductor cannot compile {type(model).__name__}: {reason}") from error


def _compile(model: nn.Module, example: Tensor, batch: Any, options: dict[str, Any]) -> list[Any]:
    """Compile a library for images like ``example`` and batches in the range ``batch``; return its files."""
    import torch._inductor

    dynamic = None if batch is None else ({0: batch},)
    program = torch.export.export(model, (example,), dynamic_shapes=dynamic)
    args, kwargs = program.example_inputs or ((example,), {})
    files: Any = torch._inductor.aot_compile(program.module(), args, kwargs, options=dict(options))  # type: ignore[arg-type]
    return list(files)
