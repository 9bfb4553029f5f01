"""What a run changes in the model's architecture before it trains."""

from dataclasses import dataclass, field
from typing import Literal

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.training.options.checks import require


@dataclass(frozen=True)
class ArchitectureOptions:
    """Parallel branches and Context Broadcasting."""

    branches: int = field(
        default=1,
        metadata={"help": "run so many consecutive blocks of a sequential ViT in parallel (as `vtk parallelize` does)"},
    )
    cb: bool = field(default=False, metadata={"help": "Context Broadcasting: mix the mean of all tokens into each"})
    cb_scale: bool = field(
        default=False,
        metadata={"help": "CB with a trained factor per channel and layer, from 0, in place of the fixed ½"},
    )
    cb_layers: tuple[str, ...] = field(
        default=("upper",),
        metadata={"help": "of CB: upper (the upper half of the blocks), all, or block numbers from 0"},
    )
    cb_on: Literal["mlp", "msa", "both"] = field(default="mlp", metadata={"help": "of CB: FFN, attention or both"})
    cb_placement: Literal["end", "mid", "front"] = field(
        default="end",
        metadata={"help": "of CB: after the module, before its last layer (FFN only), or before it"},
    )

    def transforms(self) -> tuple[Transform, ...]:
        """Return the changes of the architecture that the flags ask for, in order.

        Raises:
            UsageError: ``--cb-layers`` cannot be read, or a flag of Context Broadcasting is given without it.
        """
        result = [Transform("parallelize", {"branches": self.branches})] if self.branches > 1 else []
        if self.cb or self.cb_scale:
            arguments = {"scale": self.cb_scale, "placement": self.cb_placement, "on": self.cb_on}
            result.append(Transform("add_context_broadcast", {**arguments, "layers": _layers(self.cb_layers)}))
        elif (self.cb_layers, self.cb_on, self.cb_placement) != (("upper",), "mlp", "end"):
            raise UsageError("`--cb-layers`, `--cb-on` and `--cb-placement` say how; add --cb or --cb-scale")
        return tuple(result)

    def _check_architecture(self) -> None:
        require(self.branches >= 1, "branches", self.branches, "at least 1")
        self.transforms()


def _layers(words: tuple[str, ...]) -> str | list[int]:
    if words in (("all",), ("upper",)):
        return words[0]
    if words and all(word.isdecimal() and len(word) < 6 for word in words):
        return [int(word) for word in words]
    raise UsageError(f"`--cb-layers` {' '.join(words) or 'nothing'}: give upper, all, or block numbers such as 0,3,5")
