"""ViT-22B's block as one stage (Dehghani et al., 2023): attention and FFN read the same norm, and their outputs add."""

from collections.abc import Iterator
from typing import Any

from vtk.fused.stage_input import Pair, Reading
from vtk.fused.stages import AttentionStage, MlpStage, Plan, Stage


class ScalingStage(Stage):
    """Attention and FFN side by side from one norm (ViT-22B's block): two pairs of one sum."""

    def __init__(self, attention: AttentionStage, mlp: MlpStage, **common: Any) -> None:
        super().__init__(**common)
        self.attention, self.mlp = attention, mlp

    def widest(self) -> int:
        """The wider of both."""
        return max(self.attention.widest(), self.mlp.widest())

    def hidden(self) -> int:
        """Of its FFN."""
        return self.mlp.hidden()

    @property
    def reads_raw(self) -> bool:
        """Whether it can do without normalised tokens, as its attention says."""
        return super().reads_raw and self.attention.reads_raw

    def pairs(self, h: Reading, queries: int | None, plan: Plan, split: bool) -> Iterator[Pair]:
        """Yield attention's pair, then the FFN's."""
        yield from self.attention.pairs(h, queries, plan, split)
        yield from self.mlp.pairs(h, queries, plan, split)
