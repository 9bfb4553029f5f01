"""Options of fine-tuning: the weights to train, LoRA, the memory mode, and the number format of packs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, get_args

from vtk.errors import UsageError
from vtk.options import Config, Option, require
from vtk.options.config import flag_of
from vtk.packs.config import StoredAs

PolicyName = Literal["attn", "full", "ffn", "head", "attn+norm", "lora"]
MemoryMode = Literal["plain", "act8", "recompute", "minimal"]
MODES: tuple[MemoryMode, ...] = get_args(MemoryMode)
"""Fastest first; each saves less for backward than the one before."""


def current_mode(name: Any) -> Any:
    """Return a memory mode by its name of today: ``act8`` was ``gelu8`` while it knew no other activation than GELU."""
    return "act8" if name == "gelu8" else name


Policy = Annotated[PolicyName, Option("weights to train, besides the head", "what to train", often=True)]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Config):
    """The policy, and the ranks and layers of LoRA."""

    GROUP: ClassVar[str] = "what to train"

    train: Policy = "attn"
    attn_only: Annotated[bool | None, Option("same as --train attn", often=True, only_yes=True)] = None
    lora_rank: Annotated[int, Option("LoRA rank of the update of each layer", least=1)] = 8
    lora_alpha: Annotated[float, Option("LoRA scaling: updates are multiplied by alpha / rank", above=0)] = 16.0
    lora_dropout: Annotated[float, Option("dropout on the LoRA input", least=0, below=1)] = 0.0
    lora_targets: Annotated[
        tuple[str, ...], Option("linear layers with LoRA; with fc1 or fc2 the FFN is no longer shared")
    ] = ("qkv", "proj")

    def _check_policy(self) -> None:
        if self.attn_only and self.train != "attn":
            raise UsageError(f"`--attn-only` is short for --train attn, but --train is {self.train}; give one of them")
        if self.attn_only is False and self.train == "attn":
            raise UsageError("`attn_only` is False, and --train attn trains attention only; say what with --train")
        if self.train == "lora":
            require(bool(self.lora_targets), "lora_targets", "empty", "names of layers such as qkv,proj")
            return
        for f in fields(self):
            if f.name.startswith("lora_") and getattr(self, f.name) != f.default:
                raise UsageError(
                    f"`{flag_of(type(self), f.name)}` needs --train lora, but --train is {self.train}; leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class PackOptions(Config):
    """The memory mode, and the number format of packs."""

    GROUP: ClassVar[str] = "memory"

    memory: Annotated[
        Literal["auto", "plain", "act8", "recompute", "minimal"],
        Option(
            "what frozen blocks save for backward, fastest to leanest; auto: the fastest that fits",
            often=True,
            convert=current_mode,
        ),
    ] = "auto"
    pack_dtype: StoredAs = "fp32"
    pack_rank: Annotated[
        int | Literal["auto"] | None,
        Option(
            "also write task-small: the best pack as low-rank factors", "output", often=True, least=0,
            allowed="a mean rank, at least 0, or auto",
        ),
    ] = None  # fmt: skip

    def _check_pack(self, train: PolicyName) -> None:
        if self.pack_rank is not None and train in ("lora", "head"):
            why = "packs of --train lora hold factors of --lora-rank already"
            if train == "head":
                why = "--train head changes no matrix that could be cut"
            raise UsageError(f"`--pack-rank` {self.pack_rank}: {why}; leave it out")

    @classmethod
    def upgrade(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a file, the memory mode under its name of today."""
        found = super().upgrade(values)
        return {**found, "memory": current_mode(found["memory"])} if "memory" in found else found
