"""Disables TF32 while a back-end is loaded, so that fp32 products have the full 24-bit mantissa.

By default torch lets cuDNN convolutions round to TF32 (11 bits), and a program may have allowed TF32 or bf16 for all
products. A patch embedding would then not be computed in fp32, and rows of one table would not be comparable.
"""

import threading

import torch

_lock = threading.RLock()  # reentrant: garbage collection may call `release` while it is held
_holders: set[int] = set()
_before: tuple[str, bool] = ("highest", True)


class FullPrecision:
    """Holds the setting from construction to `release`; the last holder restores what the first one found.

    Back-ends are closed in any order, so each cannot restore its own former setting.
    """

    def __init__(self) -> None:
        global _before
        with _lock:
            if not _holders:
                _before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            _holders.add(id(self))
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False

    def release(self) -> None:
        """Release the setting; a second call does nothing."""
        with _lock:
            if id(self) not in _holders:
                return
            _holders.discard(id(self))
            if not _holders:
                precision, torch.backends.cudnn.allow_tf32 = _before
                torch.set_float32_matmul_precision(precision)

    def __del__(self) -> None:
        """Release the setting if loading failed."""
        self.release()
