"""Learning from a teacher: a trained model whose answers, or features, are a second target."""

from dataclasses import dataclass, field, fields
from typing import Literal

from vtk.errors import UsageError
from vtk.training.options.checks import require

DistillKind = Literal["soft", "hard", "features", "tokens"]
KINDS: tuple[DistillKind, ...] = ("soft", "hard", "features", "tokens")
LOGIT_KINDS = ("soft", "hard")
"""Kinds that compare classes, and so need a teacher of the same classes."""


@dataclass(frozen=True)
class DistillOptions:
    """The teacher, what of it is matched, and how much that counts."""

    distill_from: str | None = field(
        default=None,
        metadata={
            "help": "learn from a trained model as well as from the labels: a pack, a run folder, a .safetensors with "
            "a card, or a timm name"
        },
    )
    distill_kind: DistillKind = field(
        default="soft",
        metadata={
            "help": "what of the teacher is matched: soft (its probabilities), hard (its most likely class), features "
            "(what its classifier is given), tokens (its last tokens); the last two need no classes of their own"
        },
    )
    distill_alpha: float = field(
        default=0.5, metadata={"help": "share of the loss that the teacher has; the labels have the rest"}
    )
    distill_temperature: float = field(
        default=1.0, metadata={"help": "of --distill-kind soft: logits are divided by it before they are compared"}
    )

    def check(self) -> None:
        """Refuse values that cannot be.

        Raises:
            UsageError: names the flag.
        """
        self._check_distill()

    def _check_distill(self) -> None:
        kind: str = self.distill_kind
        require(kind in KINDS, "distill_kind", kind, ", ".join(KINDS))
        require(0 < self.distill_alpha <= 1, "distill_alpha", self.distill_alpha, "above 0 to 1")
        require(self.distill_temperature > 0, "distill_temperature", self.distill_temperature, "above 0")
        if self.distill_from is None:
            for f in fields(DistillOptions):
                if getattr(self, f.name) != f.default:
                    raise UsageError(f"`--{f.name.replace('_', '-')}` says how to learn from a teacher; add "
                                     "--distill-from TEACHER")  # fmt: skip
        elif not self.distill_from.strip():
            raise UsageError("`--distill-from` is empty; give a pack, a run folder, a .safetensors or a timm name")
        if kind != "soft" and self.distill_temperature != 1:
            raise UsageError(f"`--distill-temperature` softens probabilities; --distill-kind {kind} has none")
