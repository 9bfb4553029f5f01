"""Writes LoRA (Hu et al., 2021) as a PEFT adapter, and merges it into plain weights.

    y = x · Wᵀ + b + (x · Aᵀ) · Bᵀ · α / r,    merged: W + B · A · α / r

PEFT replaces a linear layer by one with ``base_layer``, ``lora_A`` and ``lora_B``. A model in training has those names,
a pack has timm's. Modules that are trained without factors (the classifier, an adapted stem) are ``modules_to_save``.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vtk.card import Card
from vtk.errors import VerificationError
from vtk.files import existing_dir, replace_dir, replace_file, write_text
from vtk.formats import read_header, save_tensors
from vtk.models.meta_model import shapes_only
from vtk.models.weights.files import read_safetensors
from vtk.packs.adapters import (
    BASE,
    CARD_KEY,
    PREFIX,
    README,
    WEIGHTS,
    import_peft,
    put_adapter,
    random_images,
    timm_call,
)
from vtk.packs.peft_readme import readme
from vtk.packs.plain import PlainCall, separate_qkv_bias

ADAPTER = "default"
"""Name of the adapter inside a model in training; files do not have it."""

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Lora:
    """LoRA options, and the names of the layers that have factors.

    Attributes:
        rank: r, columns of B and rows of A.
        alpha: α.
        dropout: of the factors' input in training.
        modules: names of the layers.
        whole: names of the modules that are trained without factors.
        pattern: regular expression for exactly ``modules``.
    """

    rank: int
    alpha: float
    dropout: float
    modules: tuple[str, ...]
    whole: tuple[str, ...]
    pattern: str

    @property
    def scaling(self) -> float:
        """α / r."""
        return self.alpha / self.rank

    def config(self, *, inference: bool) -> Any:
        """Return PEFT's config; for training without the modules kept whole, which need no layer of PEFT's."""
        alpha = int(self.alpha) if float(self.alpha).is_integer() else self.alpha
        return import_peft().LoraConfig(
            r=self.rank, lora_alpha=alpha, lora_dropout=self.dropout, target_modules=self.pattern, bias="none",
            modules_to_save=list(self.whole) if inference else None, inference_mode=inference,
        )  # fmt: skip

    def factors(self, module: str) -> tuple[str, str]:
        """Return the names of A and B in a model in training."""
        return f"{module}.lora_A.{ADAPTER}.weight", f"{module}.lora_B.{ADAPTER}.weight"

    def plain_name(self, name: str) -> str:
        """Return timm's name of a tensor in training; a factor's is that of the weight it changes."""
        for part in (f".lora_A.{ADAPTER}", f".lora_B.{ADAPTER}", ".base_layer"):
            name = name.replace(part, "")
        return name

    def start(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict of a model in training under timm's names, without what the factors add."""
        factors = {name for module in self.modules for name in self.factors(module)}
        return {self.plain_name(name): tensor for name, tensor in state.items() if name not in factors}

    def merge(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict of a model in training under timm's names, the factors folded into the weights.

        Args:
            state: on the CPU, in fp32. PEFT's own merge gives the same bits.
        """
        merged = self.start(state)
        for module in self.modules:
            a, b = (state[name] for name in self.factors(module))
            merged[f"{module}.weight"] = merged[f"{module}.weight"] + (b @ a) * self.scaling
        return merged


def save_lora(path: Path, lora: Lora, state: Mapping[str, Tensor], card: Card) -> None:
    """Write ``adapter_config.json``, ``adapter_model.safetensors`` and ``README.md``; replaces the folder.

    Args:
        path: the adapter's folder.
        lora: its layers.
        state: state dict of the model in training, fp32.
        card: goes into the file, so that `vtk.packs.from_peft` needs no flags.

    Raises:
        DataError: the folder cannot be written.
    """
    tensors = {}
    for module in lora.modules:
        for letter, name in zip("AB", lora.factors(module), strict=True):
            tensors[f"{PREFIX}{module}.lora_{letter}.weight"] = state[name]
    for module in lora.whole:
        tensors |= {f"{PREFIX}{name}": state[name] for name in _inside(module, state)}
    with replace_dir(path) as tmp:
        save_tensors(tmp / WEIGHTS, tensors, {CARD_KEY: card.merged().to_json()})
        lora.config(inference=True).save_pretrained(str(tmp))
        _write_readme(tmp, lora, card, in_base=None)


def finish_lora(path: Path, lora: Lora, start: Mapping[str, Tensor], shared: Collection[str], card: Card) -> float:
    """Complete a folder of `save_lora`, then load it with plain timm and PEFT.

    PEFT needs the same start. So ``base.safetensors`` is added where the model does not start from the base's own
    tensors (a position table at another size, parallel branches), since no adapter can hold those, and where the base
    is no file with timm's names (random weights, Meta's or transformers' layout).

    Args:
        path: the adapter's folder.
        lora: its layers.
        start: what the model started from, under timm's names, fp32.
        shared: names of the tensors that the base's file has just so.
        card: of the adapter.

    Returns:
        The largest difference between the logits of PEFT's model and of the merged weights.

    Raises:
        VerificationError: PEFT's logits differ.
        DataError: the folder is damaged or cannot be written.
    """
    peft, path = import_peft(), existing_dir(path)
    whole = {name for module in lora.whole for name in _inside(module, start)}
    own = sorted(name for name in start if name not in shared and name not in whole)
    assert card.base is not None
    with_base = bool(own) or not has_timms_names(card.base.source, start.keys() - whole)
    if with_base:
        with replace_file(path / BASE) as tmp:
            save_tensors(tmp, start, {CARD_KEY: card.merged().to_json()})
        _write_readme(path, lora, card, in_base=own)
    adapter, images = read_safetensors(path / WEIGHTS)[0], random_images(card.input)
    call = _call(lora, card)
    trained = {k.removeprefix(PREFIX): v for k, v in adapter.items()}
    for letter in "AB":
        trained = {k.replace(f".lora_{letter}.", f".lora_{letter}.{ADAPTER}."): v for k, v in trained.items()}
    ours, theirs = (each.build().eval() for each in (timm_call(card), call))
    ours.load_state_dict(lora.merge({**_wrapped(lora, start), **trained}), strict=True)
    theirs.load_state_dict(load_file(path / BASE) if with_base else dict(start), strict=True)
    with torch.inference_mode():
        wanted = ours(images)
        worst = float((put_adapter(peft, theirs, path)(images) - wanted).abs().max())
    if not worst <= _TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise VerificationError(
            f"{path}: with this adapter PEFT's logits differ by {worst:.1e} from those of the merged weights; use the "
            "pack, and please report this with the command you ran"
        )
    return worst


def has_timms_names(source: str, names: Collection[str]) -> bool:
    """Return whether the source of a base is a file that plain timm loads: the hub's, or one with all these names."""
    if source.startswith("hub:"):
        return True
    path = Path(source)
    return path.suffix == ".safetensors" and path.is_file() and read_header(path).keys() >= set(names)


def _wrapped(lora: Lora, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``start`` under the names of a model in training."""
    result = dict(start)
    for module in lora.modules:
        for leaf in _inside(module, start):
            result[f"{module}.base_layer.{leaf.rpartition('.')[2]}"] = result.pop(leaf)
    return result


def _inside(module: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.rpartition(".")[0] == module]


def _write_readme(folder: Path, lora: Lora, card: Card, in_base: list[str] | None) -> None:
    text, _ = readme(card, _call(lora, card), in_base or (), lora.whole, with_base=in_base is not None)
    write_text(folder / README, text)


def _call(lora: Lora, card: Card) -> PlainCall:
    """Return the call that builds the model for the adapter: it calls every layer that has factors."""
    call = timm_call(card)
    if not any(name.rpartition(".")[2] == "qkv" for name in lora.modules):
        return call
    with shapes_only():
        return dataclasses.replace(call, separate_bias=separate_qkv_bias(call.build()))
