"""Result of a pre-training run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PretrainResult:
    """Files and numbers of a run.

    Attributes:
        out: folder of the run.
        backbone: the checkpoint of the last epoch: timm's keys and a card, no classifier.
        method: ``beit``, ``mae`` or ``simmim``.
        rows: numbers of every epoch.
        numbers: what the method tells of itself: patches and how many are hidden; of beit, how good the tokenizer is.
        images_per_second: of training, without evaluation; NaN when nothing was left to train.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        tokenizer: file with the tokenizer; of beit only.
        trial: ``limit`` and ``max_steps``, where they were given.
    """

    out: Path
    backbone: Path
    method: str
    rows: list[dict[str, float]]
    numbers: dict[str, Any]
    images_per_second: float
    precision: str
    tokenizer: Path | None = None
    trial: Mapping[str, int] = field(default_factory=dict)

    @property
    def val_loss(self) -> float:
        """Loss on the held-out images after the last epoch."""
        return self.rows[-1]["val_loss"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        last = {k: v for k, v in self.rows[-1].items() if k in ("loss", "lr") or k.startswith("val_")}
        return {
            "out": str(self.out),
            "backbone": str(self.backbone),
            "method": self.method,
            "epochs": len(self.rows),
            **last,
            **self.numbers,
            "images_per_second": self.images_per_second,
            "precision": self.precision,
            **self.trial,
            **({} if self.tokenizer is None else {"tokenizer_file": str(self.tokenizer)}),
        }
