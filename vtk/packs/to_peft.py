"""Converts a pack to an adapter that plain PEFT loads onto a model that plain timm builds.

A pack that holds factors becomes LoRA (`vtk.packs.factor_adapter`), every other one ``LN_TUNING``, which is not about
LayerNorm: it keeps a full copy of any targeted module and swaps it in. So it carries trained weights without rounding,
where LoRA could only approximate them. Both take modules without children, and only where the model calls them.
Parameters that lie in larger modules (``pos_embed``, ``cls_token``) are beyond them; those that training changed go to
``base.safetensors``.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from vtk.errors import UsageError, VerificationError
from vtk.files import replace_dir, write_text
from vtk.formats import save_tensors
from vtk.marks import begins, beside, json_with, safetensors_with
from vtk.models.task_parameters import head_names
from vtk.packs.adapters import (
    BASE,
    CARD_KEY,
    CONFIG,
    README,
    WEIGHTS,
    called_leaves,
    exact_pattern,
    import_peft,
    put_adapter,
    random_images,
    timm_call,
)
from vtk.packs.base_files import base_keys
from vtk.packs.bundle import claim_out
from vtk.packs.factor_adapter import describe
from vtk.packs.load import Task, load_task
from vtk.packs.peft_readme import readme
from vtk.packs.plain import PlainCall, separate_qkv_bias

_TOLERANCE, _ROUNDING = 1e-6, 1e-4
"""Largest difference of logits, and of those of W · x + B · (A · x) and (W + B · A) · x, over the largest."""

_OURS = safetensors_with(CARD_KEY)
_MARKS = {
    CONFIG: json_with("peft_type"), WEIGHTS: _OURS, BASE: beside(WEIGHTS, _OURS),
    README: begins("# A PEFT adapter for "),
}  # fmt: skip
"""Files of an adapter, and how they are recognised."""


@dataclass(frozen=True)
class Adapter:
    """Result of `to_peft`.

    Attributes:
        path: the folder.
        tuner: ``LORA`` or ``LN_TUNING``.
        modules: names of the modules that the adapter carries.
        ranks: of the modules that LoRA has factors of.
        in_base: tensors that training changed and that ``base.safetensors`` carries.
        code: Python lines that load it with timm and PEFT.
        adapter_bytes: size of the adapter's weights.
        base_bytes: size of ``base.safetensors``; 0 without.
        max_difference: largest difference between the logits of the pack and of what PEFT loads.
    """

    path: Path
    tuner: str
    modules: tuple[str, ...]
    ranks: Mapping[str, int]
    in_base: tuple[str, ...]
    code: str
    adapter_bytes: int
    base_bytes: int
    max_difference: float


def to_peft(
    path: Path, out: Path, *, base: Path | None = None, adapter_only: bool = False, overwrite: bool = False
) -> Adapter:
    """Write ``base.safetensors`` and an adapter for stock PEFT, then check the logits that timm and PEFT get from them.

    Args:
        path: the pack, or a bundle. Of tensors that a bundle lacks, the pack's own values are used.
        out: folder to write; it is the adapter's folder.
        base: file with the base weights; by default they are looked up.
        adapter_only: leave ``base.safetensors`` out, for use on the base itself.
        overwrite: replace an existing folder of this kind.

    Raises:
        UnavailableError: PEFT is not installed.
        UsageError: ``out`` exists, timm cannot build the model, or ``adapter_only`` is not possible.
        VerificationError: the logits of timm and PEFT differ; nothing is kept.
        DataError: the pack is damaged, or ``out`` cannot be written.
        BaseError: no base fits.
    """
    peft = import_peft()
    with claim_out(out, _MARKS, overwrite=overwrite):
        task = load_task(path, base=base)
        low = any(change.rank for change in task.factors.values())
        separate = low and separate_qkv_bias(task.model)  # else no adapter has an effect there
        call = dataclasses.replace(timm_call(task.card), separate_bias=separate)
        state = task.model.state_dict()
        first, changed, members = _compare(task, state)
        called = called_leaves(task.model, task.card.input)
        heads = {_module(key) for key in head_names(task.model)}
        if not heads <= called:
            raise UsageError(f"{path}: the model does not call its classifier as a module, so no adapter can carry it")
        holdable = {name for name in called if None not in members[name]}
        lora = describe(task.model, task.factors, changed, holdable, heads) if low else None
        if lora is None:
            modules = sorted(heads | {name for name in holdable if not members[name].isdisjoint(changed)})
            carried = {key for key in state if _module(key) in modules}
        else:
            modules = list(lora.modules)
            carried = {key for key in state if lora.carries(key)}
        in_base = tuple(sorted(changed - carried))
        if adapter_only:
            _check_adapter_only(task, in_base)
        below = {k: first[k] if k in carried and k in first else v for k, v in state.items()}
        names = [name for name, _ in task.model.named_modules() if name]
        if lora is None:
            config, tensors = _ln_tuning(peft, call, below, state, modules)
        else:
            config, tensors = lora.config(peft, exact_pattern(list(lora.factors), names), names), lora.tensors(state)
        metadata = {"format": "pt", CARD_KEY: task.card.merged().to_json()}
        text, code = readme(task.card, call, in_base, sorted(heads), with_base=not adapter_only)
        with replace_dir(out) as tmp:
            save_tensors(tmp / WEIGHTS, tensors, metadata)
            config.save_pretrained(str(tmp))
            if not adapter_only:
                save_tensors(tmp / BASE, below, metadata)
            write_text(tmp / README, text)
            rounded = frozenset() if lora is None else frozenset(f"{name}.weight" for name in lora.factors)
            worst = _verify(peft, task, call, tmp, below if adapter_only else load_file(tmp / BASE), rounded)
        base_bytes = 0 if adapter_only else (out / BASE).stat().st_size
        ranks = {} if lora is None else {name: change.rank for name, change in lora.factors.items()}
        size = (out / WEIGHTS).stat().st_size
        return Adapter(out, config.peft_type.value, tuple(modules), ranks, in_base, code, size, base_bytes, worst)


def _compare(
    task: Task, state: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], set[str], "dict[str, set[str | None]]"]:
    """Return the base's tensors of equal shape, the names that differ from them, and the names per module.

    Among a module's names is None where the base has a tensor of another shape, or none at all, so that only
    ``base.safetensors`` can carry it (an adapted stem).
    """
    assert task.base is not None
    keys = base_keys(task.card, task.path)
    heads = head_names(task.model)
    first: dict[str, Tensor] = {}
    changed: set[str] = set()
    members: dict[str, set[str | None]] = {}
    for name, value in state.items():
        key = keys(name)
        start = None if key is None else task.base.tensors.get(key)
        own = members.setdefault(_module(name), set())
        own.add(name)
        if start is not None and start.shape == value.shape:
            first[name] = start.to(value.dtype)
        elif name not in heads and (start is not None or key not in task.base.hashes):
            own.add(None)
        if name not in first or not torch.equal(first[name], value):
            changed.add(name)
    return first, changed, members


def _check_adapter_only(task: Task, in_base: tuple[str, ...]) -> None:
    if any(t.op == "parallelize" for t in task.card.transforms):
        raise UsageError(
            "`--adapter-only`: the model has parallel branches made of a sequential base, whose tensors have other "
            "names; leave the flag out, and base.safetensors has the names"
        )
    if in_base:
        raise UsageError(
            f"`--adapter-only`: no adapter of PEFT can hold `{in_base[0]}`, which is not the base's "
            f"({len(in_base)} such tensors); leave the flag out, and base.safetensors carries them"
        )


def _ln_tuning(
    peft: Any, call: PlainCall, below: Mapping[str, Tensor], state: Mapping[str, Tensor], modules: list[str]
) -> tuple[Any, dict[str, Tensor]]:
    """Return config and tensors of an adapter that holds full copies of modules."""
    plain = call.build()
    plain.load_state_dict(below, strict=True)
    names = [name for name, _ in plain.named_modules() if name]
    config = peft.LNTuningConfig(target_modules=exact_pattern(modules, names), inference_mode=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(plain, config).eval()
    for name in modules:
        layer: Any = wrapped.base_model.model.get_submodule(name)
        layer.ln_tuning_layers["default"].load_state_dict(
            {k: state[f"{name}.{k}"] for k in layer.base_layer.state_dict()}
        )
    tensors = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return wrapped.peft_config["default"], tensors


def _verify(
    peft: Any, task: Task, call: PlainCall, folder: Path, below: Mapping[str, Tensor], rounded: frozenset[str]
) -> float:
    """Load the adapter with plain timm and PEFT, and return the largest difference from the pack's logits.

    PEFT's merge must give the pack's tensors: with factors (``rounded``) up to fp32 rounding, others bit by bit.
    """
    plain = call.build()
    plain.load_state_dict(below, strict=True)
    images = random_images(task.card.input)
    with torch.inference_mode():
        wanted = task.model(images)
        loaded = put_adapter(peft, plain, folder)
        with_adapter = loaded(images)
        merged = loaded.merge_and_unload().eval()
        worst = float(torch.stack([(found - wanted).abs().max() for found in (with_adapter, merged(images))]).max())
    state = task.model.state_dict()
    wrong = next(
        (k for k, v in merged.state_dict().items() if k not in state or not _equal(v, state[k], k in rounded)), None
    )
    tolerance = _ROUNDING if rounded else _TOLERANCE
    if wrong is not None or not worst <= tolerance * max(1.0, float(wanted.abs().max())):
        what = f"`{wrong}` differs" if wrong else "some of its modules are read without being called"
        raise VerificationError(
            f"PEFT's model does not compute what the pack does (logits differ by {worst:.1e}; {what}); nothing was "
            "written; use `vtk tasks merge` for a checkpoint of plain timm"
        )
    return worst


def _equal(value: Tensor, other: Tensor, rounded: bool) -> bool:
    if not rounded:
        return torch.equal(value, other)
    return value.shape == other.shape and bool((value - other).abs().max() <= _TOLERANCE * other.abs().max())


def _module(key: str) -> str:
    return key.rpartition(".")[0]
