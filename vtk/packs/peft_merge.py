"""Merges a PEFT adapter into timm's model, by PEFT itself, and compares the logits before and after."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vtk.card import InputSpec
from vtk.errors import DataError, VerificationError
from vtk.models.create import Created
from vtk.models.task_parameters import head_names
from vtk.packs.adapters import put_adapter, random_images
from vtk.packs.factors import Factors
from vtk.packs.lora_factors import confirmed, layer_factors
from vtk.packs.plain import separate_qkv_bias
from vtk.readers import short

_TOLERANCE = 1e-4


def merge_adapter(
    peft: Any, created: Created, adapter: Path, tensors: Mapping[str, Tensor], kind: str, spec: InputSpec
) -> tuple[dict[str, Tensor], dict[str, Factors]]:
    """Return the state dict of the model with the adapter merged into it by PEFT, and the changes that are low-rank."""
    where, images = f"{adapter} ({kind})", random_images(spec)
    own = created.model.state_dict()
    plain = _separate(created)
    try:
        wrapped = _put(peft, plain, adapter, seed=0)
        held = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    except Exception as error:  # PEFT raises many kinds for an adapter of another model, and not all on purpose
        raise DataError(
            f"PEFT cannot put {where} on `{created.spec.name}`: {short(error)}; is it of this model, "
            "and is the base right?"
        ) from error
    if wrong := sorted(tensors.keys() ^ held.keys()):
        what = "has no place for" if wrong[0] in tensors else "also needs"
        raise DataError(f"{where}: the model {what} `{wrong[0]}`; is it of `{created.spec.name}` with these arguments?")
    if not all(bool(v.isfinite().all()) for v in tensors.values()):
        raise DataError(f"{where} holds numbers that are not finite; its training went wrong")
    if wrong := sorted(k for k, v in tensors.items() if not torch.equal(v.float(), held[k].float())):
        raise DataError(f"{where}: PEFT did not take `{wrong[0]}` as the file has it; save the adapter again with PEFT")
    if not _same_bits(wrapped, _put(peft, _separate(created), adapter, seed=1)):
        raise DataError(
            f"{where} starts from random numbers that it does not hold, so PEFT makes another model of it each time; "
            "save it as plain LoRA, with path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    try:
        with torch.inference_mode():
            wanted = wrapped(images)
            changes = layer_factors(created, wrapped)
            merged = _unwrap(wrapped.merge_and_unload(safe_merge=True)).eval()
            found = merged(images)
    except Exception as error:
        raise DataError(f"PEFT cannot merge {where} into plain weights: {short(error)}; it cannot be a pack") from error
    state = {k: v.detach().clone() for k, v in merged.state_dict().items()}
    if left := sorted(state.keys() ^ own.keys()) or [k for k, v in state.items() if v.shape != own[k].shape]:
        raise DataError(f"{where}: after PEFT's merge `{left[0]}` is not as timm has it; it cannot be a pack")
    worst = float((found - wanted).abs().max())
    if not worst <= _TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise VerificationError(
            f"{where}: merged by PEFT the logits differ by {worst:.1e} from those with the adapter; nothing was written"
        )
    return state, confirmed(created, changes, state)


def _separate(created: Created) -> nn.Module:
    plain = copy.deepcopy(created.model).eval()
    separate_qkv_bias(plain)
    return plain


def _put(peft: Any, plain: nn.Module, adapter: Path, *, seed: int) -> Any:
    """Put an adapter on a model, in place; some kinds draw random numbers first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return put_adapter(peft, plain, adapter)


def _same_bits(model: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have the same tensors; those that PEFT restores from the file are alike anyway."""
    first, second = model.state_dict(), other.state_dict()
    return all(torch.equal(value, second[name]) for name, value in first.items())


def _unwrap(model: nn.Module) -> nn.Module:
    """Unwrap the modules of ``modules_to_save``, which PEFT's merge of LN_TUNING leaves wrapped."""
    for name, module in list(model.named_modules()):
        unload = getattr(module, "unload_and_optionally_merge_module", None)
        if unload is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, unload(merge=True, safe_merge=True, adapter_names=None))
    return model


def check_complete(created: Created, state: Mapping[str, Tensor], adapter: Path, classes: int) -> None:
    """Refuse parameters that still hold their random initial values."""
    heads = head_names(created.model)
    for name, _ in created.model.named_parameters():
        if name in created.base.transform_tensors or (name in created.base.tensors and name not in heads):
            continue  # an adapted stem is made from the base's
        if created.key_map[name] is None and torch.equal(state[name], created.initial[name]):
            what = f" for {classes} classes" if name in heads else ""
            raise DataError(
                f"neither {adapter} nor its base has `{name}`{what}; give the base that the adapter was trained on"
            )
