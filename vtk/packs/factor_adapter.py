"""Describes a LoRA adapter that holds a pack's factors: its targets, ranks, biases and whole modules.

    PEFT: y = x · Wᵀ + b + (x · Aᵀ) · Bᵀ · α / r

The pack's a and b are A and B, bit by bit (int8 expanded), and α is r times the pack's scale. The most common rank is
the adapter's ``r``; ``rank_pattern`` and ``alpha_pattern`` name the others. Biases of the targets go with them
(``bias="lora_only"``), other modules that changed are ``modules_to_save``.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vtk.packs.adapters import PREFIX
from vtk.packs.factors import Factors

_LARGEST = 1 << 16
"""α above it would be refused when the adapter is read again."""


@dataclass(frozen=True)
class FactorAdapter:
    """What an adapter holds.

    Attributes:
        factors: of the weight of each target, by the module's name.
        biases: biases of targets changed.
        whole: names of other modules that are stored as they are.
    """

    factors: Mapping[str, Factors]
    biases: bool
    whole: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules."""
        return tuple(sorted((*self.factors, *self.whole)))

    def carries(self, name: str) -> bool:
        """Return whether the tensor ``name`` of the model is in the adapter."""
        module, _, leaf = name.rpartition(".")
        return module in self.whole or (module in self.factors and (leaf == "weight" or self.biases))

    def config(self, peft: Any, targets: str, names: Collection[str]) -> Any:
        """Return PEFT's config.

        Args:
            peft: the package.
            targets: expression for exactly the modules with factors.
            names: of all modules of the model.
        """
        pairs = {module: (f.rank, _alpha(f)[0]) for module, f in self.factors.items()}
        r, alpha = Counter(pairs.values()).most_common(1)[0][0]
        return peft.LoraConfig(
            r=r, lora_alpha=alpha, target_modules=targets, inference_mode=True,
            rank_pattern={m: pair[0] for m, pair in pairs.items() if pair[0] != r},
            alpha_pattern={m: pair[1] for m, pair in pairs.items() if pair[1] != alpha},
            bias="lora_only" if self.biases else "none",
            modules_to_save=[_to_save(m, names) for m in self.whole] or None,
        )  # fmt: skip

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of the adapter's file, factors in the pack's type; ``state`` is the model's, merged."""
        found: dict[str, Tensor] = {}
        for module, change in self.factors.items():
            rest = _alpha(change)[1]
            a, b = (change.a, change.b) if change.a_scale is None else change.matrices()
            b = b if rest == 1 else b.float() * rest
            found |= {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}
            if self.biases and f"{module}.bias" in state:
                found[f"{PREFIX}{module}.base_layer.bias"] = state[f"{module}.bias"]
        for name, value in state.items():
            if name.rpartition(".")[0] in self.whole:
                found[PREFIX + name] = value
        return found


def describe(
    model: nn.Module,
    factors: Mapping[str, Factors],
    changed: Collection[str],
    holdable: Collection[str],
    heads: Collection[str],
) -> FactorAdapter | None:
    """Return the adapter of a pack; None if it has no factors that LoRA can hold.

    Args:
        model: merged.
        factors: of the pack.
        changed: names of tensors that differ from the base.
        holdable: modules without children that the model calls, and whose tensors the base has.
        heads: classifiers, which are always stored.
    """
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear and name in holdable}
    moved = {name.rpartition(".")[0] for name in changed} & set(holdable)
    own: dict[str, Factors] = {}
    for name in sorted(linear - set(heads)):
        change = factors.get(f"{name}.weight")
        if change is not None and change.rank:
            own[name] = change
    if not own:
        return None
    for name in sorted((moved & linear) - own.keys() - set(heads)):
        if f"{name}.weight" not in changed:  # its bias alone, for which it becomes a target without a change
            layer: Any = model.get_submodule(name)
            own[name] = Factors(torch.zeros(1, layer.in_features), torch.zeros(layer.out_features, 1))
    biases = any(f"{name}.bias" in changed for name in own)
    return FactorAdapter(own, biases, tuple(sorted((moved | set(heads)) - own.keys())))


def _alpha(change: Factors) -> tuple[float | int, float]:
    """Return α with α / r = scale, and a factor for B: 1, or the scale where α would be out of range."""
    rank, scale = change.rank, change.scale
    product = scale * rank
    if not 0 < abs(product) <= _LARGEST:
        return rank, scale
    whole = round(product)
    return (whole if whole / rank == scale else product), 1.0


def _to_save(module: str, names: Iterable[str]) -> str:
    """Return the name for ``modules_to_save``, which PEFT takes for all modules whose names end so."""
    alone = not any(name.endswith(module) and name != module for name in names)
    return module if alone else PREFIX + module
