"""fp32 means fp32: as long as a back-end is loaded, torch multiplies with all 24 bits of a mantissa.

By itself torch lets cuDNN's convolutions round to TF32 (11 bits), and a program may have allowed it, or bf16, for all
products. Then a patch embedding would be no fp32 result, and the rows of one table would do different work.
"""

import threading

import torch

_lock = threading.RLock()  # garbage may be collected, and let go, while it is held
_holders: set[int] = set()
_before: tuple[str, bool] = ("highest", True)


class FullPrecision:
    """Holds the setting from its making to `release`; the last holder puts back what the first one found.

    Back-ends are closed in any order, so each cannot put back what it found itself.
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
        """Let go; a second time does nothing."""
        with _lock:
            if id(self) not in _holders:
                return
            _holders.discard(id(self))
            if not _holders:
                precision, torch.backends.cudnn.allow_tf32 = _before
                torch.set_float32_matmul_precision(precision)

    def __del__(self) -> None:
        """Let go where loading failed halfway."""
        self.release()
