"""``triton`` and ``tl`` where Triton can be imported, else stand-ins under which kernel files can still be imported.

A kernel's signature names ``tl.constexpr`` and its decorator ``triton.jit`` when the file is read. With the stand-ins a
file defines plain functions that nothing calls: `vtk_kernels._dispatch.route` refuses before.
"""

from typing import Any

__all__ = ["gdc_launch_dependents", "gdc_wait", "libdevice", "tl", "triton"]

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except Exception:  # not on this platform, or a broken pairing: `triton_status` says which

    class _Absent:
        """Takes the place of both modules: its `jit` changes nothing, its constants are plain values."""

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

        @staticmethod
        def jit(function: Any = None, **_: Any) -> Any:
            return function if function is not None else _Absent.jit

        @staticmethod
        def cdiv(x: int, y: int) -> int:
            return -(-x // y)

        @staticmethod
        def next_power_of_2(n: int) -> int:
            return 1 << max(n - 1, 0).bit_length()

    triton = tl = _Absent  # type: ignore[assignment]
    libdevice = gdc_wait = gdc_launch_dependents = None  # type: ignore[assignment]
