"""Changes of a model that papers B and C compare with; of a pre-activation ResNet, and of a Vision Transformer."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.training.options.checks import require


@dataclass(frozen=True)
class VariantOptions:
    """Attention blocks in a ResNet; local attention, uniform heads and squeeze-and-excitation in a ViT."""

    msa_blocks: tuple[int, ...] = field(
        default=(),
        metadata={
            "help": "attention blocks in a pre-activation ResNet (resnetv2_50, preact_resnet_18 …): one number, or one "
            "for each stage"
        },
    )
    msa_window: int = field(default=7, metadata={"help": "of --msa-blocks: side of a window in positions"})
    local_attention: int = field(
        default=0, metadata={"help": "let a patch attend to K×K patches around it only, K odd; 0 for all patches"}
    )
    uniform_heads: Literal["none", "a", "b", "c"] = field(
        default="none",
        metadata={
            "help": "one head of uniform attention per layer: in place of one (a), with the others' queries wider (b), "
            "or one more (c)"
        },
    )
    se: bool = field(default=False, metadata={"help": "squeeze-and-excitation at the end of each FFN"})

    def variants(self) -> list[Transform]:
        """Return the changes that the flags ask for, in order.

        Raises:
            UsageError: ``--msa-window`` is given without ``--msa-blocks``.
        """
        result = []
        if self.msa_blocks:
            blocks = self.msa_blocks[0] if len(self.msa_blocks) == 1 else list(self.msa_blocks)
            result.append(Transform("build_up", {"msa_blocks": blocks, "window_size": self.msa_window}))
        elif self.msa_window != 7:
            raise UsageError("`--msa-window` says how; add --msa-blocks")
        if self.local_attention:
            result.append(Transform("local_attention", {"kernel": self.local_attention}))
        if self.uniform_heads != "none":
            result.append(Transform("uniform_heads", {"variant": self.uniform_heads}))
        if self.se:
            result.append(Transform("add_squeeze_excite", {}))
        return result

    def _check_variants(self) -> None:
        require(self.local_attention >= 0, "local_attention", self.local_attention, "0, or an odd number")
        self.variants()
