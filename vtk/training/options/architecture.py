"""Options that change the architecture of the model before training."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from vtk.card import InitName, Transform
from vtk.errors import UsageError
from vtk.models.stems.names import LOCAL, PLAIN, ActivationName, StemName, check_arguments
from vtk.options import Option
from vtk.training.options.variants import VariantOptions

_FLAGS = {
    "replace_stem": "stem", "change_mlp": "mlp", "build_up": "msa-blocks", "local_attention": "local-attention",
    "uniform_heads": "uniform-heads", "softmax_free": "softmax-free", "add_squeeze_excite": "se",
    "add_smoothing": "spatial-smoothing", "add_block": "extra-block",
}  # fmt: skip
"""Flags of the changes that timm cannot build, by transform; Context Broadcasting has two."""
_OUTSIDE = ("stem", "mlp", "se", "extra-block")
"""Flags whose new weights are outside of what a task of several owns: attention, classifier and positions."""
Branches = Annotated[
    int, Option("consecutive blocks to join into parallel branches; the depth must be a multiple", least=1)
]


@dataclass(frozen=True, kw_only=True)
class ArchitectureOptions(VariantOptions):
    """Stem, FFN, parallel branches and Context Broadcasting."""

    GROUP: ClassVar[str] = "architecture variants"

    stem: Annotated[
        StemName | None,
        Option("untrained stem in place of the patch projection (default: the model's own, 1proj)", metavar="STEM"),
    ] = None
    stem_act: Annotated[
        ActivationName | None,
        Option("activation of the stem (default: ReLU for conv, GELU for other stems)"),
    ] = None
    stem_strides: Annotated[
        tuple[int, ...] | None,
        Option("strides of a conv stem's four layers (default: 2,1,1 and half the patch)", least=1, nonempty=True),
    ] = None
    stem_depth: Annotated[int | None, Option("layers of the local-transformer stem (default: 24)", least=1)] = None
    mlp: Annotated[
        Literal["relu", "bn", "no-norm"] | None,
        Option("FFN variant: relu, bn or no-norm (Wang et al. 2022, Table 5)"),
    ] = None
    init: Annotated[
        InitName, Option("initial weights of layers that are not timm's: the papers' codes, or version 0.1's")
    ] = "papers"
    branches: Branches = 1
    cb: Annotated[bool, Option("Context Broadcasting: mix the mean of all tokens into each")] = False
    cb_scale: Annotated[
        bool, Option("Context Broadcasting with a trained scale per channel, in place of the fixed ½")
    ] = False
    cb_layers: Annotated[
        tuple[str, ...] | None,
        Option("blocks with CB: upper (half; default of --cb), all (of --cb-scale), or numbers from 0", nonempty=True),
    ] = None
    cb_on: Annotated[Literal["mlp", "msa", "both"], Option("CB on the FFN, the attention, or both")] = "mlp"
    cb_placement: Annotated[
        Literal["end", "mid", "front"], Option("CB after the module, before its last layer (FFN only), or before it")
    ] = "end"

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
            result.append(Transform("add_context_broadcast", {**arguments, "layers": _layers(self.context_layers)}))
        # the files of older runs have ("upper",) without Context Broadcasting
        elif self.cb_layers not in (None, ("upper",)) or (self.cb_on, self.cb_placement) != ("mlp", "end"):
            raise UsageError("`--cb-layers`, `--cb-on` and `--cb-placement` need --cb or --cb-scale; add one of them")
        if self.extra_block != "none":  # the last: other changes are of the model's own blocks
            result.append(Transform("add_block", {"kind": self.extra_block}))
        return tuple(result)

    @property
    def context_layers(self) -> tuple[str, ...]:
        """``--cb-layers``, or its default: CB_S is in all layers (Hyeon-Woo et al. 2023, Figure 8), CB in the upper."""
        return self.cb_layers or (("all",) if self.cb_scale else ("upper",))

    def _stem_transform(self) -> list[Transform]:
        if self.stem in (None, PLAIN):
            for name, other in (("act", "conv"), ("strides", "conv"), ("depth", LOCAL)):
                if getattr(self, f"stem_{name}") is not None:
                    raise UsageError(f"`--stem-{name}` needs another stem than the model's own; add --stem {other}")
            # the model knows whether that is its own (`vtk.models.stems.own`)
            return [] if self.stem is None else [Transform("replace_stem", {"stem": self.stem})]
        check_arguments(self.stem, self.stem_act, self.stem_strides, self.stem_depth)
        arguments: dict[str, Any] = {"stem": "conv" if self.stem == "3conv+3bn+3relu+1proj" else self.stem}
        if self.stem_act is not None:
            arguments["act"] = self.stem_act
        if self.stem_strides is not None:
            arguments["strides"] = list(self.stem_strides)
        if self.stem_depth is not None:
            arguments["depth"] = self.stem_depth
        return [Transform("replace_stem", arguments)]

    def _check_trained_parts(self, policy: str, tasks: bool) -> None:
        """Refuse changes of the architecture whose trained weights could not be written or shared.

        Args:
            policy: ``--train``.
            tasks: whether several tasks share what is frozen.

        Raises:
            UsageError: names the flag.
        """
        flags = [_FLAGS[t.op] for t in self.transforms() if t.op in _FLAGS and t.args != {"stem": PLAIN}]
        if flags and policy == "lora":
            raise UsageError(
                f"`--{flags[0]}`: timm cannot build it, so PEFT could not use the adapter; use --train attn"
            )
        if tasks and (outside := [flag for flag in flags if flag in _OUTSIDE]):
            raise UsageError(f"`--{outside[0]}` changes what the tasks of one run share; give one run for each")

    def _check_architecture(self) -> None:
        self._check_variants()
        self.transforms()


def _layers(words: tuple[str, ...]) -> str | list[int]:
    if words in (("all",), ("upper",)):
        return words[0]
    if words and all(word.isdecimal() and len(word) < 6 for word in words):
        return [int(word) for word in words]
    raise UsageError(f"`--cb-layers` {' '.join(words) or 'nothing'}: give upper, all, or block numbers such as 0,3,5")
