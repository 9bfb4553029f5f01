"""Loads a plain timm model from a pack or a merged checkpoint."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from vtk.card import Card
from vtk.errors import DataError, UsageError
from vtk.files import existing_dir
from vtk.models.create import Created, build_model
from vtk.models.inputs import blank_model
from vtk.models.task_parameters import head_names
from vtk.models.weights.base import Base
from vtk.models.weights.files import read_safetensors
from vtk.models.weights.torch_file import NARROW
from vtk.packs.base_files import BUNDLED, base_keys, base_start, bundled_base, find_base
from vtk.packs.cards import CARD, find_pack, read_card
from vtk.packs.factor_facts import WRONG, check_names, read_facts, read_layout
from vtk.packs.factors import Factors, PackTensors, check_trained, merge_factors, read_files
from vtk.packs.int8 import differences, expand
from vtk.text import printable

if TYPE_CHECKING:  # Pillow and timm's transforms are for those who give images
    from vtk.evaluation.labels import Prediction
    from vtk.packs.prediction import Images, ImageTransform

_TIMES, _SMALL = 2, 2_000_000
"""A model may have at most `_TIMES` the numbers of its files plus `_SMALL`: position embeddings may differ in size."""


@dataclass
class Task:
    """A trained model with its card.

    Attributes:
        model: plain timm, fp32, on the CPU, in eval mode.
        card: of the model.
        path: the pack or checkpoint it was read from.
        base: the shared weights; None for a merged checkpoint.
        carried: names of the tensors in the pack, of matrices stored as factors too.
        needed: names of the base tensors that the pack needs.
        bundled: the base came with the pack, and has only the needed tensors.
        factors: changes of matrices that the pack stores as factors, by name; the model has them merged.
    """

    model: nn.Module
    card: Card
    path: Path
    base: Base | None = None
    carried: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    bundled: bool = False
    factors: Mapping[str, Factors] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the logits."""
        return self.card.classes

    @property
    def transform(self) -> "ImageTransform":
        """The evaluation transform: a PIL image, an array or a path to a normalised tensor (C, H, W)."""
        from vtk.packs.prediction import ImageTransform

        return ImageTransform(self.card)

    def predict(
        self,
        images: "Images",
        *,
        top_k: int = 3,
        threshold: float | Literal["auto"] | None = None,
        risk: float | None = None,
        batch_size: int | None = None,
        device: str | torch.device | None = None,
        precision: str | None = None,
    ) -> "list[Prediction]":
        """Predict labels as ``vtk predict`` does, with the card's preprocessing, precision and batch size.

        Args:
            images: a path (a folder stands for its images), a PIL image, a uint8 array (H, W, C), or a list of these;
                or a floating tensor (B, C, H, W) of normalised images, as `transform` returns them.
            top_k: labels of each image.
            threshold: ``auto`` marks as ``unknown`` what scores below a threshold chosen for ``risk``; of multi-label
                models the least probability of a label, by default 0.5.
            risk: of ``auto``, the largest share of errors among the answers given; by default 0.02.
            batch_size: images per forward pass.
            device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``; by default the model's. On another device or in
                another precision a copy of the model runs.
            precision: ``fp32``, ``bf16`` or ``fp16``.

        Returns:
            One prediction for each image, in order.

        Raises:
            UsageError: an invalid image or option.
            DataError: a file that cannot be read; ``vtk predict`` skips such files.
            VerificationError: logits that are not finite.
        """
        from vtk.packs.prediction import predict

        return predict(
            self.model, self.card, images, top_k=top_k, threshold=threshold, risk=risk, batch_size=batch_size,
            device=device, precision=precision,
        )  # fmt: skip


def load_task(path: str | Path, *, base: str | Path | None = None) -> Task:
    """Load a pack onto its base.

    Args:
        path: folder of a pack, of a bundle (a pack with its base), or of a run (its best pack).
        base: file with the base weights; by default they are looked up.

    Raises:
        DataError: the pack is damaged.
        BaseError: no base fits.
    """
    _check_path(path, "load_task")
    folder = existing_dir(Path(path))
    if not folder.is_dir():
        what = f"there is no folder {folder}" if not folder.exists() else f"{folder} is a file"
        raise DataError(f"{what}; give the folder of a pack, which holds {CARD}")
    pack = read_files(find_pack(folder))
    card, folder, factors = pack.card, pack.path, pack.factors
    _blank(card, folder)  # a name or an argument that timm does not know is the card's fault, not a base's
    keys = base_keys(card, folder)
    needed, starts = base_needs(pack, keys)
    bundled = base is None and (folder / BUNDLED).is_file()
    if bundled:
        found = bundled_base(folder, card, pack.hashes, needed, starts)
    else:
        found = find_base(card, pack.hashes, needed, None if base is None else Path(base), starts)
    tensors = expand(pack.dense, base_start(found, keys), folder)
    _check_amount(card, folder, [*tensors.values(), *found.tensors.values()])
    # only what the pack lacks: its own position table would else be resampled from the base's first
    tensors_left = {k: v for k, v in found.tensors.items() if k in needed}
    # the pack's card says what is done to the model, whatever was done to the one that the base was read from
    rest = dataclasses.replace(start_base(found, card, folder), tensors=tensors_left)
    created = _create(card, folder, base=rest)
    required = created.initial.keys() - factors.keys()
    check_complete(folder, tensors, created.model.state_dict(), required)
    check_trained(pack)
    created.model.load_state_dict({k: full_precision(v) for k, v in tensors.items()}, strict=False)
    if new := next((name for name in factors if created.key_map.get(name, name) is None), None):
        raise DataError(f"{folder} holds factors of `{new}`, which its base does not have in this shape; {WRONG}")
    merge_factors(created.model, factors, folder)
    carried = frozenset({**tensors, **factors})
    return Task(created.model.eval(), card, folder, found, carried, needed, bundled, factors)


def start_base(base: Base, card: Card, where: str | Path) -> Base:
    """Return a base as the model of a card starts from it; ``where`` names the pack in messages."""
    start = dataclasses.replace(base, transforms=(), transform_tensors={})
    if not read_facts(card, where):
        return start
    # tables are resampled as when the pack was made, whatever this file knows of its own
    grid, size = read_layout(card, where)
    return dataclasses.replace(start, grid=grid, size=size)


def base_needs(pack: PackTensors, keys: Callable[[str], str | None]) -> tuple[frozenset[str], dict[str, str]]:
    """Return the base tensors that a pack needs, and the hashes of those among them that the base's id leaves out.

    Args:
        pack: as read.
        keys: name in the model to name in the base.

    Raises:
        DataError: factors that start from no tensor of the base.
    """
    facts = read_facts(pack.card, pack.path)
    check_names(facts, keys, pack.hashes, pack.path)
    starts = {str(keys(name)): fact.start for name, fact in facts.items() if fact.start is not None}
    return needed_names(pack.dense, pack.hashes, keys) | starts.keys(), starts


def needed_names(
    stored: Mapping[str, Tensor], hashes: Mapping[str, str], keys: Callable[[str], str | None]
) -> frozenset[str]:
    """Return the base tensors that a pack needs: those it lacks, and those it stores differences from.

    Args:
        stored: tensors of the pack's file, factors left out.
        hashes: of every tensor of the base.
        keys: name in the model to name in the base.
    """
    own = stored.keys() | {keys(name) for name in stored}
    return frozenset(hashes) - (own - {keys(name) for name in differences(stored)})


def load_checkpoint(path: str | Path) -> Task:
    """Load a merged checkpoint, which needs no base.

    Raises:
        DataError: damaged, or its tensors are not those of its card.
    """
    _check_path(path, "load_checkpoint")
    path = Path(path)
    card = read_card(path)
    tensors, _ = read_safetensors(path)
    _check_amount(card, path, tensors.values())
    # random numbers stand in for the base and are all overwritten: the load is strict
    created = _create(card, path, pretrained=False)
    check_complete(path, tensors, created.model.state_dict(), created.model.state_dict().keys())
    created.model.load_state_dict({k: full_precision(v) for k, v in tensors.items()}, strict=True)
    return Task(created.model.eval(), card, path)


def _check_path(path: object, function: str) -> None:
    if not isinstance(path, (str, os.PathLike)) or not str(path).strip():
        given = "an empty string" if isinstance(path, str) else f"a {type(path).__name__}"
        raise UsageError(
            f"`{function}` takes the path of a pack or checkpoint, and was given {given}; give its folder or file"
        )


def _blank(card: Card, where: Path) -> Any:
    try:
        return blank_model(card.model.name, card.model.kwargs)
    except UsageError as error:
        raise DataError(f"the card of {where} fits no model: {error}") from error


def _check_amount(card: Card, where: Path, tensors: Iterable[Tensor]) -> None:
    """Refuse a card whose model has many times the values at hand, before that model takes its memory."""
    blank = _blank(card, where)
    heads = head_names(blank)
    wanted = sum(p.numel() for name, p in blank.named_parameters() if name not in heads)
    wanted += len(card.classes) * int(getattr(blank, "num_features", 1))
    held = sum(tensor.numel() for tensor in tensors)
    if wanted > _TIMES * held + _SMALL:
        raise DataError(
            f"{where}: its card asks for a model of {wanted:,} numbers, the file and its base hold {held:,}; the card "
            "was edited or is of another pack"
        )


def build_from_card(card: Card, **source: Any) -> Created:
    """Build the model of a card; ``source`` is ``base`` or ``pretrained`` of `build_model`."""
    return build_model(
        card.model.name,
        num_classes=len(card.classes),
        img_size=card.input.size,
        in_chans=card.input.in_chans,
        transforms=card.transforms,
        kwargs=card.model.kwargs,
        input=card.input,
        init=card.init,
        **source,
    )


def _create(card: Card, where: Path, **source: Any) -> Created:
    try:
        return build_from_card(card, **source)
    except UsageError as error:  # nobody gave a flag: the card is what is wrong
        raise DataError(f"the card of {where} fits no model: {error}") from error


def check_complete(
    where: Path,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    required: Collection[str],
) -> None:
    """Refuse a pack whose whole tensors are not those of its model.

    Args:
        where: names the pack in messages.
        tensors: of the pack.
        state: of the model; their values are not read.
        required: names that the base cannot supply.

    Raises:
        DataError: a tensor is unknown, of another shape or type, not finite or absent.
    """
    for key, value in tensors.items():
        if key not in state:
            raise DataError(f"{where} holds `{printable(key)}`, which its model does not have; {WRONG}")
        if value.shape != state[key].shape:
            raise DataError(f"{where}: `{key}` has shape {tuple(value.shape)}, its card says {tuple(state[key].shape)}")
        if value.is_floating_point() != state[key].is_floating_point() or value.dtype in NARROW:
            raise DataError(f"{where}: `{key}` holds {value.dtype}, its model needs {state[key].dtype}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise DataError(f"{where}: `{key}` holds numbers that are not finite; its training went wrong")
    absent = next((k for k in state if k in required and k not in tensors), None)
    if absent is not None:
        raise DataError(
            f"{where} lacks `{absent}`, which the base cannot supply; the file is truncated or of another pack"
        )


def full_precision(tensor: Tensor) -> Tensor:
    """Return floating-point values in fp32, others as they are."""
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor


def card_metadata(card: Card) -> dict[str, str]:
    """Return the safetensors metadata that carries a card."""
    return {"format": "pt", "vtk": card.to_json()}
