"""Routes an operation: plain torch, an opaque operator, or the Triton launcher itself.

- *reference*: plain torch, transparent to autograd and to exporters. CPU tensors, fp64, fp32 on CUDA (Triton's matrix
  product would be TF32), and everything while `torch.compiler.is_exporting()`.
- *operator*: ``torch.ops.vtk_kernels.NAME``, a custom operator of torch with a fake and, where training needs it, a
  gradient. Taken while torch.compile or a fake tensor looks on, or when a gradient is wanted. Opaque on purpose:
  through an `autograd.Function` the compiler's partitioner would look inside and keep what an operation meant to drop.
- *launcher*: the Python function that starts the kernel. An operator costs about 14 µs a call, the launcher 5; a
  forward pass of 18 blocks makes over 70 calls.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from vtk_kernels.support import interpreting, triton_status

Route = Literal["reference", "operator", "launcher"]

LAUNCHES: dict[str, int] = {}
"""Name of an operation, as in ``torch.ops.vtk_kernels``, to the number of kernels that one call starts on CUDA."""

HALF = (torch.float16, torch.bfloat16)
"""The types that a kernel takes on CUDA by itself."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type of sums and statistics: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def route(x: Tensor, use_triton: bool | None, *others: Tensor | None) -> Route:
    """Choose the way for an operation on ``x``.

    Args:
        x: first operand.
        use_triton: None for the kernel on CUDA in fp16 and bf16; False for the reference; True for the launcher, on
            the CPU too (Triton's interpreter), without gradient.
        others: further operands whose gradients may be wanted.

    Raises:
        ValueError: ``use_triton=True`` where no kernel can run.
    """
    if use_triton is True:
        _require_kernel(x)
        return "launcher"
    if use_triton is False or not x.is_cuda or x.dtype not in HALF or torch.compiler.is_exporting():
        return "reference"
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return "operator"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)):
        return "operator"
    return "launcher"


def opaque(way: Route, x: Tensor, use_triton: bool | None) -> Route:
    """Return "operator" in place of "reference" where something traces ``x``: for a reference that reads values.

    A compiler cannot look into it; the operator computes the same reference, unseen.
    """
    traced = torch.compiler.is_compiling() or type(x) is not Tensor
    if way == "reference" and use_triton is None and traced and not torch.compiler.is_exporting():
        return "operator"
    return way


def inference(way: Route, *operands: Tensor | None) -> Route:
    """Return "reference" in place of "operator" where a gradient is wanted: for an operator without one."""
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    return "reference" if way == "operator" and wanted else way


def runs_kernel(x: Tensor) -> bool:
    """Return whether the body of an operator should launch its kernel for ``x`` (else it computes the reference)."""
    return x.is_cuda and x.dtype in HALF


@contextlib.contextmanager
def on_device(x: Tensor) -> Iterator[None]:
    """Make ``x``'s CUDA device current: Triton launches on the current one."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            yield
    else:
        yield


def _require_kernel(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise ValueError("`use_triton=True` takes float32, float16 and bfloat16, not float64; use use_triton=False")
    if x.is_cuda or interpreting():
        status = triton_status()
        if status.usable:
            if not x.is_cuda and x.dtype == torch.bfloat16:
                raise ValueError("Triton's interpreter computes bfloat16 wrongly; give float32 or float16 on the CPU")
            return
        raise ValueError(f"`use_triton=True`: {status.reason}")
    raise ValueError(
        "`use_triton=True` needs a CUDA tensor, or the environment variable TRITON_INTERPRET=1 before the first import"
    )
