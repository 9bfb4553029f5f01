"""Cases of the stage ``bank`` with low-rank packs: tasks kept as factors, against one fused model of as many images.

All are synthetic packs of rank 16 on a random base at 224 px. The single model has one task's weights for all images:
what its graph takes is the floor of a call of many tasks.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vtk.bank import TaskBank
from vtk.fused import fuse
from vtk.models.create import build_model
from vtk.packs import load_task, store_base
from vtk.packs.synthetic import write_synthetic

FACTORS = {"bf16": "bank factors", "int8": "bank int8 factors"}
ALONE = "one model, fused+graph"
CASES = (("S/16", 16), ("S/16", 64), ("B/16", 16), ("B/16", 64))
"""Model and number of tasks, one image each; `FACTORS` may take `BOUND` times as long as `ALONE`."""
BOUND, RANK = 1.25, 16
MODELS = {"S/16": "vit_small_patch16_224", "B/16": "vit_base_patch16_224"}


def sides(
    model: str, count: int, device: torch.device, smoke: bool, tolerance: float
) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Return the calls to time, and the bytes of weights that each side holds; the banks' logits are right.

    Raises:
        ValueError: a bank's logits are not those of timm's model with the changes added.
    """
    kwargs = {"depth": 2, "embed_dim": 64, "num_heads": 2} if smoke else {}
    name, size = ("vit_tiny_patch16_224", 32) if smoke else (MODELS[model], 224)
    created = build_model(name, num_classes=10, img_size=size, pretrained=False, kwargs=kwargs)
    cuda, banks, wanted = device.type == "cuda", dict[str, TaskBank](), dict[str, Tensor]()
    dtype = torch.bfloat16 if cuda else torch.float32
    images = {str(i): torch.randn(1, 3, size, size, device=device).to(dtype) for i in range(count)}
    base = store_base(created.base)
    with tempfile.TemporaryDirectory() as folder:
        for kind, label in FACTORS.items():
            bank = banks[label] = TaskBank(base, device=device, dtype=dtype)
            for i in range(count):
                pack = write_synthetic(Path(folder) / f"{kind}{i}", created, rank=RANK, dtype=kind, seed=i)
                bank.add(str(i), pack)
            for i in (0, count - 1):  # others are as these
                task = load_task(Path(folder) / f"{kind}{i}", base=base).model.to(device)
                with torch.no_grad():
                    wanted[f"{label} {i}"] = task(images[str(i)].float())
        alone = fuse(load_task(Path(folder) / "bf160", base=base).model.to(device, dtype), keep_source=False)
    if cuda:
        alone.capture([count])
    for label, bank in banks.items():
        found = bank(images)
        for i in (0, count - 1):
            right = wanted[f"{label} {i}"]
            error = float((found[str(i)].float() - right).abs().max() / right.abs().max())
            if not error <= tolerance:
                raise ValueError(f"{label} differs from timm by {error:.2g} for task {i}; nothing was timed")
    batch = torch.cat(list(images.values()))

    def single() -> Tensor:
        with torch.no_grad():
            return alone(batch)  # type: ignore[no-any-return]

    calls: dict[str, Callable[[], object]] = {label: partial(bank, images) for label, bank in banks.items()}
    held = {label: bank.memory().device_bytes for label, bank in banks.items()}
    return calls | {ALONE: single}, held | {ALONE: sum(t.nbytes for t in alone.state_dict().values())}
