"""Writes the folder of a merged model that timm loads by itself: ``config.json`` and ``model.safetensors``.

``timm.create_model("local-dir:FOLDER", pretrained=True)`` reads it, ``hf-hub:USER/NAME`` once it is uploaded, and
transformers' ``AutoModelForImageClassification`` and ``AutoImageProcessor`` through their wrapper of timm.
"""

import dataclasses
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vtk.card import Card, InputSpec
from vtk.data.loading.eval_pipeline import CROP_MODES
from vtk.errors import UsageError, VerificationError
from vtk.formats import save_tensors, write_json
from vtk.models.inputs import blank_model
from vtk.packs.load import card_metadata
from vtk.packs.plain import PlainCall, plain_call

CONFIG, WEIGHTS = "config.json", "model.safetensors"
"""Files of the folder, under the names that timm and transformers look for."""

_TWO_BRANCHES = "vit_small_patch16_18x2_224"
"""The model of timm whose entry point sets ``ParallelThingsBlock``: a class that no config.json can name."""


@dataclasses.dataclass(frozen=True)
class Named:
    """What a config.json says of a model.

    Attributes:
        architecture: a name of timm, without a tag.
        arguments: of the model, plain JSON values, without the number of classes.
    """

    architecture: str
    arguments: dict[str, Any]

    def build(self, classes: int) -> nn.Module:
        """Build the model with random weights."""
        model: nn.Module = timm.create_model(self.architecture, num_classes=classes, **self.arguments)
        return model


def named_model(card: Card, model: nn.Module) -> Named:
    """Return the architecture and the arguments by which timm builds the model of a card from a config.json.

    Args:
        card: of the model.
        model: it, for what the card leaves to timm's defaults.

    Raises:
        UsageError: timm has no such model, or only one that needs a Python object.
    """
    call = plain_call(card)
    arguments = {name: value for name, value in call.kwargs.items() if name != "num_classes"}
    if call.branches > 1:
        return _parallel(call, arguments, model)
    if call.name.startswith(("hf-hub:", "hf_hub:")):
        blank: Any = blank_model(card.model.name, card.model.kwargs)
        own = getattr(blank, "_model_args", {})
        return Named(blank.pretrained_cfg["architecture"], {**own, **arguments})
    return Named(call.name.partition(".")[0], arguments)


def timm_config(card: Card, named: Named, model: nn.Module) -> dict[str, Any]:
    """Return ``config.json``: the architecture, its arguments, the classes and the preprocessing.

    Args:
        card: of the model.
        named: from `named_model`.
        model: it, for facts that are timm's own.
    """
    own: dict[str, Any] = dict(getattr(model, "pretrained_cfg", None) or {})
    config: dict[str, Any] = {
        "architecture": named.architecture,
        "num_classes": len(card.classes),
        "num_features": getattr(model, "num_features", None),
        "label_names": list(card.classes),
        "model_args": named.arguments,
        "pretrained_cfg": {
            # the file holds timm's own keys for this size and these channels: nothing is to be converted
            "custom_load": False,
            "num_classes": len(card.classes),
            "fixed_input_size": bool(own.get("fixed_input_size", False)),
            # older timm takes every stem for one of three channels
            "first_conv": own.get("first_conv") if card.input.in_chans == 3 else None,
            "classifier": own.get("classifier"),
            **data_config(card.input),
        },
    }
    if card.multi_label:  # of transformers; timm does not read it
        config["problem_type"] = "multi_label_classification"
    return config


def data_config(spec: InputSpec) -> dict[str, Any]:
    """Return the preprocessing in the words of timm's ``resolve_data_config``."""
    return {
        "input_size": [spec.in_chans, *spec.size],
        "interpolation": spec.interpolation,
        "crop_pct": spec.crop_pct if spec.resize_mode == "crop" else 1.0,
        "crop_mode": CROP_MODES[spec.resize_mode],
        "mean": list(spec.mean),
        "std": list(spec.std),
    }


def write_timm(folder: Path, card: Card, model: nn.Module) -> None:
    """Write ``config.json`` and ``model.safetensors`` (fp32) into a folder, and load them with timm to see.

    Args:
        folder: exists.
        card: of the model.
        model: on the CPU.

    Raises:
        UsageError: timm has no such model.
        VerificationError: what timm loads is not the model.
    """
    named = named_model(card, model)
    save_tensors(folder / WEIGHTS, model.state_dict(), card_metadata(card.merged()))
    write_json(folder / CONFIG, timm_config(card, named, model))
    verify_timm(folder, card, model)


def verify_timm(folder: Path, card: Card, model: nn.Module) -> None:
    """Load a folder as its users do; every tensor and the logits of two random images must be equal.

    Raises:
        VerificationError: they are not.
    """
    loaded: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    own, other = model.state_dict(), loaded.state_dict()
    differ = sorted(own.keys() ^ other.keys()) or [key for key in own if not torch.equal(own[key], other[key])]
    if differ:
        raise VerificationError(
            f"timm {timm.__version__} reads `{differ[0]}` of the folder in another way, so nothing is written; "
            "a merged checkpoint (`--format file`) names the call that loads it"
        )
    images = random_images(card.input)
    with torch.no_grad():
        difference = relative_difference(loaded.eval()(images), model(images))
    if not difference <= 1e-4:
        raise VerificationError(
            f"timm {timm.__version__} loads the folder, but its logits differ by {difference:.1e} of the largest one, "
            "so nothing is written; a merged checkpoint (`--format file`) names the call that loads it"
        )


def random_images(spec: InputSpec) -> Tensor:
    """Return two normalised random images, always the same."""
    return torch.randn(2, spec.in_chans, *spec.size, generator=torch.Generator().manual_seed(0))


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of logits as a share of the largest logit; NaN where a value is not finite."""
    if found.shape != wanted.shape:
        return float("nan")
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))


def _parallel(call: PlainCall, arguments: dict[str, Any], model: Any) -> Named:
    """Return the name of a model of parallel blocks: timm has entry points with two branches only."""
    if call.branches != 2:
        raise UsageError(
            f"a config.json cannot name timm's block of {call.branches} parallel branches (timm's own models have 2); "
            "`--format file` writes one checkpoint and shows the call that loads it"
        )
    original: Any = blank_model(call.name, {k: v for k, v in arguments.items() if k not in ("depth", "img_size")})
    block = original.blocks[0]
    scale = getattr(block.ls1, "gamma", None)
    derived = {
        "patch_size": list(original.patch_embed.patch_size),
        "embed_dim": original.embed_dim,
        "depth": len(model.blocks),
        "num_heads": block.attn.num_heads,
        "mlp_ratio": _ratio(original.embed_dim, block.mlp.fc1.out_features),
        "qkv_bias": block.attn.qkv.bias is not None,
        "init_values": None if scale is None else 1e-5,
        "reg_tokens": original.num_reg_tokens,
        "no_embed_class": original.no_embed_class,
        "global_pool": original.global_pool,
    }
    # timm drops arguments of None, and its own LayerScale would then stay
    plain = {key: 0 if value is None else value for key, value in derived.items()}
    return Named(_TWO_BRANCHES, {**plain, **arguments})


def _ratio(dim: int, hidden: int) -> float:
    """Return the number whose product with ``dim`` is ``hidden`` once timm cuts off its fraction."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else (hidden + 0.5) / dim
