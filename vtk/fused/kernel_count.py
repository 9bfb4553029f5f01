"""Counts the kernels that one forward pass starts on CUDA, without a GPU."""

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vtk.fused.build import fuse
from vtk.fused.model import FusedViT
from vtk.fused.stages import Plan
from vtk_kernels import LAUNCHES

_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view")
"""Operations that allocate or rename, and start nothing."""


def count(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, batch: int = 1, ln_folded: bool | None = None
) -> "Counting":
    """Count one forward pass of ``fuse(model)`` on CUDA: kernels, and elements read and written, by operation.

    Non-view aten operations count one each, operations of `vtk_kernels` what `vtk_kernels.LAUNCHES` declares. The pass
    runs on fake tensors: shapes and devices without data, so any machine counts the CUDA plan.

    Args:
        model: a timm Vision Transformer on the CPU; it is not changed.
        dtype: fp16 or bf16, in which the kernels are used.
        batch: images.
        ln_folded: of `fuse`: by None the form of 7 kernels a block, since no card's measured choices are asked.
    """
    fused: FusedViT = fuse(model, dtype, keep_source=False, ln_folded=ln_folded)
    with FakeTensorMode(), torch.no_grad():
        for module in fused.modules():
            for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                setattr(module, name, nn.Parameter(fake, requires_grad=False) if name in module._parameters else fake)
        height, width = fused.image_size
        images = torch.empty(batch, fused.in_chans, height, width, dtype=dtype, device="cuda")
        with Counting() as counting:
            fused.compute(images, Plan(kernels=True, ln_folded=None))
    return counting


def launches(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, batch: int = 1, ln_folded: bool | None = None
) -> Counter[str]:
    """Return the operations of one forward pass of ``fuse(model)`` on CUDA with their kernels; see `count`."""
    return count(model, dtype, batch=batch, ln_folded=ln_folded).counts


def count_launches(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, batch: int = 1, ln_folded: bool | None = None
) -> int:
    """Return the number of kernels of one forward pass of ``fuse(model)`` on CUDA; see `count`."""
    return sum(launches(model, dtype, batch=batch, ln_folded=ln_folded).values())


class Counting(TorchDispatchMode):
    """Counts kernels below autograd: views and allocations start none.

    Attributes:
        counts: kernels by operation.
        moved: elements of the tensors that an operation takes and gives, each once: what it reads and writes at least.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, _, name = func._schema.name.partition("::")
        tensors = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        if namespace == "prim" or func.is_view or name in _FREE or not (tensors or func._schema.is_mutable):
            return result
        self.counts[name] += LAUNCHES[name] if namespace == "vtk_kernels" else 1
        tensors += [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        self.moved[name] += sum(tensor.numel() for tensor in tensors)
        return result
