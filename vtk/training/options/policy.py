"""Which weights a run trains."""

from dataclasses import dataclass, field, fields
from typing import Literal

from vtk.errors import UsageError
from vtk.training.options.checks import require

PolicyName = Literal["attn", "full", "ffn", "head", "attn+norm", "lora"]


@dataclass(frozen=True)
class PolicyOptions:
    """The policy, and the ranks and layers of LoRA."""

    train: PolicyName = field(default="attn", metadata={"help": "which weights to train"})
    attn_only: bool = field(default=False, metadata={"help": "short for --train attn"})
    lora_rank: int = field(default=8, metadata={"help": "of --train lora: rank of each layer's update"})
    lora_alpha: float = field(default=16.0, metadata={"help": "of --train lora: updates count alpha / rank times"})
    lora_dropout: float = field(default=0.0, metadata={"help": "of --train lora: of the input of the factors"})
    lora_targets: tuple[str, ...] = field(
        default=("qkv", "proj"),
        metadata={
            "help": "of --train lora: names of the linear layers, with fc1 and fc2 the FFN is no longer the base's"
        },
    )

    def _check_policy(self) -> None:
        if self.attn_only and self.train != "attn":
            raise UsageError(f"`--attn-only` is short for --train attn, but --train is {self.train}; give one of them")
        require(self.lora_rank >= 1, "lora_rank", self.lora_rank, "at least 1")
        require(self.lora_alpha > 0, "lora_alpha", self.lora_alpha, "above 0")
        require(0 <= self.lora_dropout < 1, "lora_dropout", self.lora_dropout, "from 0 to below 1")
        if self.train == "lora":
            require(bool(self.lora_targets), "lora_targets", "empty", "names of layers such as qkv,proj")
            return
        for f in fields(self):
            if f.name.startswith("lora_") and getattr(self, f.name) != f.default:
                raise UsageError(f"`--{f.name.replace('_', '-')}` is of --train lora, but --train is {self.train}")
