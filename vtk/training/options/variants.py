"""Options of architecture variants: those of Park and Kim 2022, Hyeon-Woo et al. 2023 and Chen et al. 2022."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.options import Config, Option, require


@dataclass(frozen=True, kw_only=True)
class VariantOptions(Config):
    """Attention blocks and smoothing in a ResNet; other attention, heads and layers in a ViT."""

    GROUP: ClassVar[str] = "architecture variants"

    msa_blocks: Annotated[
        tuple[int, ...],
        Option("attention blocks in a pre-activation ResNet: one number, or one per stage", least=0),
    ] = ()
    msa_window: Annotated[int, Option("side of the attention window of --msa-blocks, in positions", least=1)] = 7
    local_attention: Annotated[
        int, Option("attention within K×K patches, K odd; 0 = all patches", least=0, allowed="0, or an odd number")
    ] = 0
    uniform_heads: Annotated[
        Literal["none", "a", "b", "c"],
        Option("uniform attention: replace one head (a), replace and widen the others (b), or add one (c)"),
    ] = "none"
    softmax_free: Annotated[bool, Option("attention without softmax (Chen et al. 2022, ViT-B/16-Free)")] = False
    se: Annotated[bool, Option("squeeze-and-excitation at the end of each FFN")] = False
    extra_block: Annotated[
        Literal["none", "msa", "mlp"], Option("one more attention (msa) or FFN (mlp) after the last block of a ViT")
    ] = "none"
    spatial_smoothing: Annotated[
        Literal["none", "blur", "tanh-blur"],
        Option("2×2 box blur at the end of each stage of a ResNet, plain or after tanh and ReLU"),
    ] = "none"

    def variants(self) -> list[Transform]:
        """Return the changes that the options ask for, in order.

        Raises:
            UsageError: ``--msa-window`` is given without ``--msa-blocks``.
        """
        result = []
        if self.msa_blocks:
            blocks = self.msa_blocks[0] if len(self.msa_blocks) == 1 else list(self.msa_blocks)
            result.append(Transform("build_up", {"msa_blocks": blocks, "window_size": self.msa_window}))
        elif self.msa_window != 7:
            raise UsageError("`--msa-window` needs --msa-blocks; add it")
        if self.local_attention:
            result.append(Transform("local_attention", {"kernel": self.local_attention}))
        if self.uniform_heads != "none":
            result.append(Transform("uniform_heads", {"variant": self.uniform_heads}))
        if self.softmax_free:
            result.append(Transform("softmax_free", {}))
        if self.se:
            result.append(Transform("add_squeeze_excite", {}))
        if self.spatial_smoothing != "none":
            result.append(Transform("add_smoothing", {"kind": self.spatial_smoothing}))
        return result

    def _check_variants(self) -> None:
        size = self.local_attention
        require(not size or size % 2 == 1, "local_attention", size, "0, or an odd number")
        self.variants()
