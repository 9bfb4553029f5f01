"""Result of a pre-training run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PretrainResult:
    """Result of a pre-training run: files and numbers.

    Attributes:
        out: folder of the run.
        backbone: the checkpoint of the last epoch: timm's keys and a card, no classifier.
        method: ``beit``, ``dino``, ``mae``, ``simmim`` or ``supcon``.
        rows: numbers of every epoch.
        numbers: of the method: patches and masked patches; for beit also statistics of the tokenizer.
        images_per_second: of training, without evaluation; NaN when nothing was left to train.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        tokenizer: file of the tokenizer; only for beit.
        trial: ``limit`` and ``max_steps``, if they were given.
        train_share: fraction of the training images that was used.
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
    train_share: float = 1.0

    @property
    def val_loss(self) -> float:
        """Loss on the held-out images after the last epoch."""
        return self.rows[-1]["val_loss"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        named = ("loss", "lr", "knn_top1", "probe_top1")
        last = {k: v for k, v in self.rows[-1].items() if k in named or k.startswith("val_")}
        return {
            "out": str(self.out),
            "backbone": str(self.backbone),
            "method": self.method,
            "epochs": len(self.rows),
            **last,
            **self.numbers,
            "images_per_second": self.images_per_second,
            "precision": self.precision,
            **({} if self.train_share == 1 else {"train_share": self.train_share}),
            **self.trial,
            **({} if self.tokenizer is None else {"tokenizer_file": str(self.tokenizer)}),
        }
