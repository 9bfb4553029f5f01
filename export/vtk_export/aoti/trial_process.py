"""Runs an AOTInductor export as its README says, without vtk, through ``load.py`` and bare: a separate process.

    python -P trial_process.py FOLDER IMAGES ANSWERS [GPU]

IMAGES is a safetensors file of batches. ANSWERS gets, as safetensors, the logits of each batch in every layout, and in
its metadata the invalid inputs that were accepted, which should be none. A library reads once whether it checks its
input, and one that does not may crash the process: so nothing else runs here.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every second": lambda x: x.repeat_interleave(2, 0)[::2],
    "cut out": lambda x: F.pad(x, (1, 2, 3, 4))[:, :, 3:-4, 1:-2],
    "misaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
    "negated view": lambda x: torch._neg_view(-x),
    "parameter": lambda x: torch.nn.Parameter(x),
    "odd stride": lambda x: x.as_strided(x.shape, (7 if len(x) == 1 else x.stride(0), *x.stride()[1:])),
}
"""Memory layouts of the same values."""
SMALL = 2
"""Most images of the batches that are tried in every way: one library takes one, the other two and more."""


def wrong(images: Tensor, max_batch: int) -> Iterator[tuple[str, Tensor]]:
    """Yield names and invalid inputs; ``images`` are valid ones."""
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int64):
        if dtype != images.dtype:
            yield str(dtype).removeprefix("torch."), images.to(dtype)
    batch, channels, height, width = images.shape
    for shape in ((channels, height + 8, width), (channels, height, width - 1), (channels, height - 1, width + 1),
                  (channels + 1, height, width), (channels - 1, height, width)):  # fmt: skip
        if min(shape) > 0:
            yield " × ".join(map(str, shape)), images.new_zeros(batch, *shape)
    yield "no images", images[:0]
    try:
        many = images.new_empty(max_batch + 1, channels, height, width)  # memory that is never touched
    except RuntimeError:
        many = images[:1].expand(max_batch + 1, -1, -1, -1)
    yield f"{max_batch + 1} images", many


def shapeless(images: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield further inputs that ``load.py`` refuses, and that a library does not check."""
    yield "one image without batch", images[0]
    yield "5 dimensions", images[..., None]
    yield "an array", images.float().cpu().numpy()
    yield "sparse", images.to_sparse()
    yield "without memory", images.to("meta")
    if images.shape[1] != images.shape[3]:
        yield "channels at the end", images.transpose(1, 3)


def through_loader(
    folder: Path, batches: dict[str, Tensor], device_index: int | None = None
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the logits of ``load.py``, and the invalid inputs that it accepted."""
    spec = importlib.util.spec_from_file_location("load", folder / "load.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.load(device_index=device_index)
    answers, answered = {}, []
    for batch, images in batches.items():
        images = images.to(model.device)
        small = len(images) <= SMALL
        for layout, lay in LAYOUTS.items() if small else [("contiguous", LAYOUTS["contiguous"])]:
            answers[f"load.py, {layout}, {batch}"] = model(lay(images))
        for name, value in (*wrong(images, model.max_batch), *shapeless(images)) if small else ():
            answered += _answered(f"load.py, {name}", model, value, (TypeError, ValueError))
    return answers, answered


def bare(path: Path, batches: dict[str, Tensor], device_index: int = -1) -> tuple[dict[str, Tensor], list[str]]:
    """Return the logits of the libraries loaded directly, and the invalid inputs that they accepted."""
    from torch._inductor.package import load_package  # type: ignore[attr-defined]

    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    models = {name: load_package(str(path), name, device_index=device_index) for name in ("batch_1", "batch_n")}
    answers, answered = {}, []
    for batch, images in batches.items():
        if len(images) > SMALL:
            continue
        model = models["batch_1" if len(images) == 1 else "batch_n"]
        meta = model.get_metadata()
        images = images.to(meta["AOTI_DEVICE_KEY"] if device_index < 0 else f"cuda:{device_index}")
        answers[f"{path.name}, contiguous, {batch}"] = model(images)
        for name, value in wrong(images, int(meta["vtk.max_batch"])):
            answered += _answered(f"{path.name}, {name}", model, value, (RuntimeError,))
        other = images.expand(2, -1, -1, -1).contiguous() if len(images) == 1 else images[:1].contiguous()
        answered += _answered(f"{path.name}, the other model's batch", model, other, (RuntimeError,))
        for layout in ("channels_last", "transposed", "batch last", "every second", "cut out"):
            laid = LAYOUTS[layout](images)
            if laid.stride() != images.stride():
                answered += _answered(f"{path.name}, {layout}", model, laid, (RuntimeError,))
    return answers, answered


def _answered(name: str, model: Callable[[Any], Any], value: Any, refusal: tuple[type[Exception], ...]) -> list[str]:
    try:
        model(value)
    except refusal:
        return []
    return [name]


def main() -> None:
    """Run the export that the arguments name, and write the answers."""
    folder, source, target = map(Path, sys.argv[1:4])
    index = int(sys.argv[4]) if sys.argv[4:] else None
    sys.dont_write_bytecode = True
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "0"  # the worst that a user's environment may say
    batches = load_file(source)
    answers, answered = through_loader(folder, batches, index)
    more = bare(folder / "model.pt2", batches, -1 if index is None else index)
    assert "vtk" not in sys.modules
    found = {name: logits.float().cpu().contiguous() for name, logits in (answers | more[0]).items()}
    save_file(found, target, {"answered": json.dumps(answered + more[1])})


if __name__ == "__main__":
    main()
