"""The work of ``vtk parallelize``: join, check, measure, write, and train where asked."""

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vtk import console
from vtk.card import Card, Transform
from vtk.commands.parallelize import ParallelizeConfig
from vtk.data.audit import scan
from vtk.data.bands import pixel_limit
from vtk.data.loader import make_loader
from vtk.data.transforms import eval_transform
from vtk.errors import DataError, UsageError, VerificationError
from vtk.evaluation.metrics import evaluate
from vtk.files import prepare_output, replace_file, write_text
from vtk.formats import write_json
from vtk.models.create import check_transforms
from vtk.models.parallel import parallel_spec
from vtk.models.parallel_blocks import parallelize
from vtk.runtime.backend import resolve_device
from vtk.runtime.drift import Drift, measure_drift
from vtk.runtime.source import Source, open_source
from vtk.tasks.load import card_metadata
from vtk.tasks.plain import plain_call
from vtk.training.outputs import versions
from vtk_export.images import gate_images

MODEL, LOAD, DRIFT, RUN = "model.safetensors", "load.py", "drift.json", "finetune"

_ROUNDING = 1e-5  # of the largest logit: one model, built in two ways


def run(config: ParallelizeConfig) -> dict[str, Any]:
    """Make the parallel model, write it to ``config.out`` and return what was measured.

    Raises:
        UsageError: the source is no sequential ViT, its depth no multiple of the branches, or flags contradict it.
        DataError: the source, the images or the output folder cannot be used.
        VerificationError: plain timm computes something else with the written weights.
    """
    source = open_source(
        config.source, base=config.base, pretrained=config.pretrained, num_classes=config.num_classes,
        img_size=config.img_size, seed=config.seed,
    )  # fmt: skip
    for note in source.notes:
        console.say(note)
    if source.kind == "onnx":
        raise UsageError(f"{source.path} is an ONNX file; give the pack it was exported from")
    if config.finetune and source.card.input.in_chans != 3:
        raise UsageError(f"`--finetune` trains on images of 3 channels; this model takes {source.card.input.in_chans}")
    spec, join = source.card.model, Transform("parallelize", {"branches": config.branches})
    check_transforms(spec.name, (*source.card.transforms, join), spec.kwargs)
    prepare_output(config.out, overwrite=config.overwrite)
    sequential = source.model()
    blocks: Any = sequential.blocks
    depth = len(blocks)
    joined = copy.deepcopy(sequential)
    parallelize(joined, branches=config.branches)
    card = _card(source.card, depth, join, config)
    images, what = gate_images(card.input, config.images, data=config.data, seed=config.seed)
    _verify(card, joined, images[:2])
    device = resolve_device(config.device)
    drift = measure_drift(sequential.to(device), joined.to(device), config.branches, images)
    _print(drift, config, depth, what)
    before = _accuracies(source, (sequential, joined), config, device)
    result = {
        "out": str(config.out), "branches": config.branches, "depth": depth // config.branches,
        "model": dataclasses.asdict(card.model), "transforms": [dataclasses.asdict(t) for t in card.transforms],
        "images": what, **_plain(drift), "top1_sequential": before[0], "top1_parallel": before[1],
    }  # fmt: skip
    _write(config, card, joined, result)
    if config.finetune:
        result |= _finetune(config, card, before)
    return result


def _card(card: Card, depth: int, join: Transform, config: ParallelizeConfig) -> Card:
    """Return the card of the parallel model: a name of its own where there is one, else a transform of the original."""
    spec, transforms = parallel_spec(card.model, depth, config.branches), card.transforms
    if spec is None:
        spec, transforms = card.model, (*transforms, join)
    command = f"vtk parallelize {config.source} --branches {config.branches}"
    return dataclasses.replace(
        card, model=spec, transforms=transforms, base=None, pack={}, metrics={}, versions=versions(), command=command
    )


@torch.inference_mode()
def _verify(card: Card, model: nn.Module, images: Tensor) -> None:
    """Build the model as load.py will, and compare."""
    plain = plain_call(card).build()
    plain.load_state_dict(model.state_dict(), strict=True)
    want, got = model(images), plain.eval()(images)
    if not bool(torch.isfinite(want).all()):
        raise DataError("the parallel model's logits are infinite or not a number; the weights are damaged")
    if float((want - got).abs().max()) > _ROUNDING * float(want.abs().max()):
        raise VerificationError(
            f"timm builds `{card.model.name}` with parallel blocks to compute something else; nothing was written"
        )


def _write(config: ParallelizeConfig, card: Card, model: nn.Module, result: dict[str, Any]) -> None:
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    with replace_file(config.out / MODEL) as tmp:
        save_file(state, tmp, metadata=card_metadata(card))
    call = plain_call(card)
    write_text(config.out / LOAD, f'"""Loads {MODEL} with plain timm."""\n\n{call.program(MODEL)}')
    write_json(config.out / DRIFT, result)
    console.say(f"wrote {config.out / MODEL}, {LOAD} and {DRIFT}; plain timm loads it with\n{call.code(repr(MODEL))}")


def _split(card: Card, config: ParallelizeConfig) -> dict[str, Any]:
    """Return how a folder without a held-out part is divided: as the training run did, where the card tells it."""
    if card.data.get("layout") == "flat" and {"val_split", "seed"} <= card.data.keys():
        return {"val_split": card.data["val_split"], "seed": card.data["seed"]}
    return {"seed": config.seed}


def _accuracies(
    source: Source, models: tuple[nn.Module, nn.Module], config: ParallelizeConfig, device: torch.device
) -> tuple[float | None, float | None]:
    """Return top-1 of the two models on the folder's held-out images, None where its classes are not the model's."""
    if config.data is None or not source.described or not config.data.is_dir():
        return None, None
    try:
        channels, limit = source.card.input.in_chans, pixel_limit(source.card)
        division = _split(source.card, config)
        audit = scan(config.data, **division, in_chans=channels, max_pixels=limit, show_progress=False)
    except DataError:
        if config.finetune:
            raise
        return None, None  # loose images, which the drift was measured on all the same
    if audit.classes != source.card.classes or not audit.val:
        return None, None
    loader = make_loader(
        audit.val, eval_transform(source.card.input), batch_size=64, shuffle=False, seed=0, workers=0, max_pixels=limit
    )
    found = [
        evaluate(_on(model, device), loader, audit.classes, device=device, show_progress=False).top1 for model in models
    ]
    told = ", ".join(f"{n} {console.percent(v)}" for n, v in zip(("sequential", "parallel"), found, strict=True))
    console.say(f"top-1 on {len(audit.val)} held-out images: {told}")
    return found[0], found[1]


def _on(model: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    def predict(images: Tensor) -> Tensor:
        logits: Tensor = model(images.to(device))
        return logits

    return predict


def _finetune(config: ParallelizeConfig, card: Card, before: tuple[float | None, float | None]) -> dict[str, Any]:
    from vtk.training.config import FinetuneConfig
    from vtk.training.finetune import finetune

    spec = card.input
    options: dict[str, Any] = {
        "model_kwargs": tuple(f"{k}={json.dumps(v)}" for k, v in card.model.kwargs.items()),
        "branches": next((t.args["branches"] for t in card.transforms if t.op == "parallelize"), 1),
        "interpolation": spec.interpolation, "seed": config.seed, **_split(card, config),
    }  # fmt: skip
    result = finetune(
        FinetuneConfig(
            data=config.data, out=config.out / RUN, model=card.model.name, weights=config.out / MODEL,
            img_size=spec.size, mean=spec.mean, std=spec.std, crop_pct=spec.crop_pct, resize_mode=spec.resize_mode,
            train=config.train, epochs=config.finetune or 1, lr=config.lr, batch_size=config.batch_size,
            device=config.device, overwrite=config.overwrite, **options,
        )
    )  # fmt: skip
    told = [
        f"{n} {console.percent(v)}" for n, v in zip(("sequential", "parallel"), before, strict=True) if v is not None
    ]
    told.append(f"parallel after {config.finetune} epochs {console.percent(result.top1)}")
    console.say(f"held-out top-1: {', '.join(told)}")
    return {"top1_finetuned": result.top1, "finetune": result.to_dict()}


def _print(drift: Drift, config: ParallelizeConfig, depth: int, what: str) -> None:
    rows = [
        (f"{row.blocks[0]}–{row.blocks[1]}", console.percent(row.output, 2), console.percent(row.update, 1))
        for row in drift.blocks
    ]
    title = f"{depth} blocks as {depth // config.branches} of {config.branches} branches, on {what}"
    console.table(title, ("blocks", "off, of the output", "off, of the update"), rows)
    console.say(
        f"logits: cosine {drift.cosine_mean:.4f} on average, {drift.cosine_min:.4f} at least; most likely class equal "
        f"for {console.percent(drift.agreement)} of {drift.count} images"
    )
    if config.data is None:
        console.say("random images are no photographs: --data FOLDER gives the drift on your own")


def _plain(drift: Drift) -> dict[str, Any]:
    """Return JSON values; a ratio to nothing is null."""
    return {
        "count": drift.count, "logit_cosine_mean": drift.cosine_mean, "logit_cosine_min": drift.cosine_min,
        "top1_agreement": drift.agreement,
        "blocks": [
            {"first": row.blocks[0], "last": row.blocks[1], "output_ratio": _number(row.output),
             "update_ratio": _number(row.update)}
            for row in drift.blocks
        ],
    }  # fmt: skip


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
