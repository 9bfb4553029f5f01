"""What a run changes in the model's architecture before it trains."""

from dataclasses import dataclass, field
from typing import Any, Literal

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.models.stems.names import PLAIN, ActivationName, StemName
from vtk.training.options.checks import require
from vtk.training.options.variants import VariantOptions


@dataclass(frozen=True)
class ArchitectureOptions(VariantOptions):
    """Stem, FFN, parallel branches and Context Broadcasting."""

    stem: StemName | None = field(
        default=None,
        metadata={
            "help": "stem in place of the patch projection: hmlp (paper A), conv or some of its parts (paper E), "
            "levit; it starts untrained. Default the model's own, which 1proj is, too"
        },
    )
    stem_act: ActivationName | None = field(
        default=None,
        metadata={"help": "activation of the stem; default ReLU of conv stems, GELU of hmlp and levit"},
    )
    stem_strides: tuple[int, ...] | None = field(
        default=None,
        metadata={"help": "strides of a conv stem's four layers, such as 2,2,2,2; default 2,1,1 and half the patch"},
    )
    mlp: Literal["relu", "bn", "no-norm"] | None = field(
        default=None,
        metadata={"help": "FFN of paper E's Table 5: ReLU, BatchNorm before GELU, or no norm before it; default none"},
    )
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
            UsageError: ``--cb-layers`` cannot be read, or a flag of a stem or Context Broadcasting is given without it.
        """
        result = self._stem_transform()
        if self.branches > 1:
            result.append(Transform("parallelize", {"branches": self.branches}))
        if self.mlp is not None:
            result.append(Transform("change_mlp", {"design": self.mlp}))
        result += self.variants()
        if self.cb or self.cb_scale:
            arguments = {"scale": self.cb_scale, "placement": self.cb_placement, "on": self.cb_on}
            result.append(Transform("add_context_broadcast", {**arguments, "layers": _layers(self.cb_layers)}))
        elif (self.cb_layers, self.cb_on, self.cb_placement) != (("upper",), "mlp", "end"):
            raise UsageError("`--cb-layers`, `--cb-on` and `--cb-placement` say how; add --cb or --cb-scale")
        return tuple(result)

    def _stem_transform(self) -> list[Transform]:
        if self.stem in (None, PLAIN):
            for name, value in (("act", self.stem_act), ("strides", self.stem_strides)):
                if value is not None:
                    raise UsageError(f"`--stem-{name}` is of another stem than the model's own; add --stem conv")
            return []
        arguments: dict[str, Any] = {"stem": "conv" if self.stem == "3conv+3bn+3relu+1proj" else self.stem}
        if self.stem_act is not None:
            arguments["act"] = self.stem_act
        if self.stem_strides is not None:
            arguments["strides"] = list(self.stem_strides)
        return [Transform("replace_stem", arguments)]

    def _check_trained_parts(self, policy: str, tasks: bool) -> None:
        """Refuse a stem or FFN where what they train could not be written or shared.

        Args:
            policy: ``--train``.
            tasks: whether several tasks share what is frozen.

        Raises:
            UsageError: names the flag.
        """
        flag = next((f"--{name}" for name in ("stem", "mlp") if getattr(self, name) not in (None, PLAIN)), None)
        if flag and policy == "lora":
            raise UsageError(f"`{flag}`: timm cannot build it, so PEFT could not use the adapter; use --train attn")
        if flag and tasks:
            raise UsageError(f"`{flag}` changes what the tasks of one run share; give one run for each")

    def _check_architecture(self) -> None:
        require(self.branches >= 1, "branches", self.branches, "at least 1")
        self._check_variants()
        self.transforms()


def _layers(words: tuple[str, ...]) -> str | list[int]:
    if words in (("all",), ("upper",)):
        return words[0]
    if words and all(word.isdecimal() and len(word) < 6 for word in words):
        return [int(word) for word in words]
    raise UsageError(f"`--cb-layers` {' '.join(words) or 'nothing'}: give upper, all, or block numbers such as 0,3,5")
