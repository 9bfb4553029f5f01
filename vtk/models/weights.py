"""Where base weights come from: a file, the hub, or random numbers. Pickled code is never run."""

import contextlib
import copy
import dataclasses
import inspect
import io
import logging
import math
import os
import pickle
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import huggingface_hub
import safetensors
import torch
from safetensors.torch import load_file
from timm.models import clean_state_dict, model_entrypoint
from torch import Tensor, nn

from vtk.card import Card, Transform
from vtk.errors import DataError, UsageError
from vtk.models import deit, parallel
from vtk.models.base import Base, make_base
from vtk.models.inputs import model_error
from vtk.models.parts import head_names, position_names
from vtk.models.shapes import shapes_only
from vtk.models.transforms import apply_transforms

_NESTED = ("state_dict", "model", "model_state_dict", "teacher")
_MIN_MATCH = 0.9
_DEEP = ("blocks", "layers", "stages")
GRID = "vtk_grid"
"""Metadata key of a stored base: height and width in patches of its position table, such as ``4x6``."""


def read_base(name: str, kwargs: Mapping[str, Any], path: Path) -> tuple[Base, list[str]]:
    """Read a weights file as the base of a model, renamed to timm's keys, at stored size and dtype.

    Args:
        name: timm model name.
        kwargs: arguments for timm.
        path: ``.safetensors``, or a ``.pth``/``.pt``/``.bin`` that torch reads without unpickling code.

    Returns:
        The base and notes for the user (tensors left out, tensors absent).

    Raises:
        DataError: unreadable file, or less than 90 % of the backbone's values are in it.
    """
    raw, card, grid = _read_file(path)
    reference = _reference(name, kwargs, raw, card)
    # an adapted stem is left as it is: its weight does not fit and starts anew, which a note says
    transforms = tuple(t for t in card.transforms if t.op != "adapt_input") if card else ()
    raw, made = _before(raw, transforms, reference, path)
    wanted = reference.state_dict()
    renamed, notes = _rename(name, raw, reference, path)
    tensors = {k: v for k, v in renamed.items() if k in wanted}
    task = head_names(reference, tensors) | position_names(reference, tensors)
    own = head_names(reference) | position_names(reference)
    backbone = {k: v for k, v in wanted.items() if k not in own}
    missing = [k for k, v in backbone.items() if k not in tensors or not _fits(k, tensors[k], v)]
    total = sum(v.numel() for v in backbone.values())
    matched = 1 - sum(backbone[k].numel() for k in missing) / max(total, 1)
    if matched < _MIN_MATCH:
        found = tuple(tensors[missing[0]].shape) if missing[0] in tensors else "absent"
        raise DataError(
            f"{path} holds {100 * matched:.0f} % of the backbone of `{name}`; at least 90 % must match; the first that "
            f"does not is `{missing[0]}` (needed {tuple(backbone[missing[0]].shape)}, found {found}); is --model right?"
        )
    extra = [k for k in renamed if k not in wanted]
    if deep := [k for k in extra if k.split(".")[0] in _DEEP]:
        raise DataError(
            f"{path} has {len(deep)} tensors inside its blocks that `{name}` does not have, such as `{deep[0]}`; "
            "without them it would compute something else; is --model right?"
        )
    if extra:
        notes.append(f"left out {len(extra)} tensors of {path.name} that `{name}` does not have: {_some(extra)}")
    if missing:
        notes.append(f"{len(missing)} tensors are not in {path.name} and start untrained: {_some(missing)}")
        tensors = {k: v for k, v in tensors.items() if k not in missing}
    grid = grid if card is None else _grid(reference)
    base = make_base(tensors, source=str(path.resolve()), task_names=task, grid=grid, file=path.resolve())
    return dataclasses.replace(base, transforms=transforms, made=made), notes


def hub_base(name: str, kwargs: Mapping[str, Any]) -> Base:
    """Fetch the weights timm names for a model, at their own size.

    Raises:
        DataError: the hub has none, or cannot be reached.
        UsageError: timm does not know the model.
    """
    with _offline_if_unreachable():
        try:
            model = parallel.build(name, pretrained=True, **kwargs)
        except RuntimeError as error:
            if "pretrained weights" in str(error).lower() and "exist" in str(error).lower():
                hint = "give --weights FILE or --no-pretrained"
                raise DataError(f"the hub has no weights for `{name}`; {hint}") from error
            raise model_error(name, kwargs, error) from error
        except OSError as error:  # what huggingface_hub raises when a file can be had neither online nor from its cache
            raise DataError(
                f"the hub's weights for `{name}` cannot be fetched here; give --weights FILE, or --no-pretrained to "
                "start from random numbers"
            ) from error
        except (TypeError, AssertionError, KeyError) as error:
            raise model_error(name, kwargs, error) from error
    tensors = {k: v.detach() for k, v in model.state_dict().items()}
    task = head_names(model) | position_names(model)
    return make_base(tensors, source=f"hub:{name}", task_names=task, grid=_grid(model))


def random_base(model: nn.Module, seed: int) -> Base:
    """Take a freshly initialised model's own values as the base."""
    tensors = {k: v.detach().clone() for k, v in model.state_dict().items()}
    task = head_names(model) | position_names(model)
    return make_base(tensors, source=f"random:{seed}", task_names=task, grid=_grid(model))


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file and its metadata.

    Raises:
        DataError: the file is absent, cut short or not safetensors.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        return load_file(path), metadata
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error}); was it cut short?") from error


def _fits(key: str, found: Tensor, needed: Tensor) -> bool:
    """Equal shapes; patch kernels may differ in size, since they are resampled on load."""
    if key.endswith("patch_embed.proj.weight") and found.ndim == needed.ndim == 4:
        return found.shape[:2] == needed.shape[:2]
    return found.shape == needed.shape


def _read_file(path: Path) -> tuple[dict[str, Tensor], Card | None, tuple[int, int] | None]:
    """Return the tensors and, where the file's metadata has them, its card and the grid of its position table."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.suffix == ".safetensors":
        tensors, metadata = read_safetensors(path)
        card = Card.from_json(metadata["vtk"], path) if "vtk" in metadata else None
        sides = [int(side) for side in metadata.get(GRID, "").split("x") if side.isdecimal()]
        return tensors, card, (sides[0], sides[1]) if len(sides) == 2 else None
    if path.suffix not in (".pth", ".pt", ".bin", ".tar"):
        raise UsageError(f"{path}: cannot read `{path.suffix}`; give a .safetensors or a .pth file")
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{path} holds Python objects besides tensors, which could run code, so it is not read; where you trust "
            "it, load it with torch and save its state dict as .safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not a whole torch file ({' '.join(str(error).split())[:120]})") from error
    for _ in range(3):
        if not isinstance(value, Mapping):
            break
        value = next((value[k] for k in _NESTED if isinstance(value.get(k), Mapping)), value)
    if not isinstance(value, Mapping) or not any(isinstance(v, Tensor) for v in value.values()):
        raise DataError(f"{path} holds no state dict; looked in the file itself and under {', '.join(_NESTED)}")
    return {str(k): v for k, v in value.items() if isinstance(v, Tensor)}, None, None


def _reference(name: str, kwargs: Mapping[str, Any], raw: Mapping[str, Tensor], card: Card | None) -> nn.Module:
    """Build the model at the size the file was stored at, so that timm's renaming resamples nothing."""
    with shapes_only():
        try:
            model = parallel.build(name, **kwargs)
            table, own = raw.get("pos_embed"), getattr(model, "pos_embed", None)
            if card is not None:
                # with the file's classifier, which timm's own default may lack
                return _build_sized(name, {**kwargs, "num_classes": len(card.classes)}, card.input.size)
            if table is None or own is None or table.ndim != 3 or table.shape[1] == own.shape[1]:
                return model
            stem: Any = model.patch_embed
            patch = stem.patch_size
            # the model's own table says how many of its rows are not patches: register tokens have none in some
            first = own.shape[1] - math.prod(stem.grid_size)
            for prefix in dict.fromkeys((first, getattr(model, "num_prefix_tokens", 1), 1, 0)):
                patches = table.shape[1] - prefix
                side = math.isqrt(max(patches, 0))
                if 0 < patches == side * side:
                    return parallel.build(name, **{**kwargs, "img_size": (side * patch[0], side * patch[1])})
            return model
        except (RuntimeError, TypeError, AssertionError, AttributeError) as error:
            raise model_error(name, kwargs, error) from error


def _build_sized(name: str, kwargs: Mapping[str, Any], size: tuple[int, int]) -> nn.Module:
    try:
        return parallel.build(name, **{**kwargs, "img_size": size})
    except TypeError as error:  # convolutional networks take any size, and no argument for it
        if "img_size" not in str(error):
            raise
        return parallel.build(name, **kwargs)


def _before(
    raw: dict[str, Tensor], transforms: Sequence[Transform], reference: nn.Module, path: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a file's tensors under the keys from before its transforms, and those that the transforms made."""
    if not transforms:
        return raw, {}
    model = copy.deepcopy(reference)
    try:
        keys = apply_transforms(model, transforms, {k: k for k in reference.state_dict()})
    except UsageError as error:
        raise DataError(f"{path} was made with `{transforms[-1].op}`, which does not fit --model: {error}") from error
    made = {k: v for k, v in raw.items() if keys.get(k, k) is None}
    for key, needed in model.state_dict().items():
        if keys[key] is None and (key not in made or made[key].shape != needed.shape):
            raise DataError(f"{path} lacks `{key}` of shape {tuple(needed.shape)}; was it cut, or is --model wrong?")
    return {keys.get(k) or k: v for k, v in raw.items() if k not in made}, made


def _rename(name: str, raw: dict[str, Tensor], reference: nn.Module, path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors under timm's keys: as they are if they fit, else through the family's own filter in timm.

    deit's own names are changed first. The second value is notes for the user.
    """
    clean = clean_state_dict(raw)
    notes = []
    if deit.is_deit(clean):
        clean = deit.rename_parallel(clean)
        if deit.pad_position_table(clean, reference):
            notes.append(f"the position table of {path.name} has no entry for the class token, as in deit: it gets 0")
    needed = set(reference.state_dict()) - head_names(reference) - position_names(reference)
    if needed <= set(clean):
        return clean, notes
    module = sys.modules[model_entrypoint(name.split(".")[0]).__module__]
    convert = getattr(module, "checkpoint_filter_fn", None)
    if convert is None:
        return clean, notes
    options = {}
    if "adapt_layer_scale" in inspect.signature(convert).parameters:
        options["adapt_layer_scale"] = any(".gamma_" in k for k in clean)
    try:
        result = convert(dict(clean), reference, **options)
    except (KeyError, AttributeError, RuntimeError, ValueError, TypeError) as error:
        raise DataError(f"{path} does not look like weights for `{name}` ({type(error).__name__}: {error})") from error
    return {k: v for k, v in result.items() if isinstance(v, Tensor)}, notes


def _grid(model: nn.Module) -> tuple[int, int] | None:
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    return None if grid is None else (int(grid[0]), int(grid[1]))


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Use only the hub's cache when its host has no address: its client would else retry for most of a minute."""
    constants = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if not before and not reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # --json keeps stdout for the result
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
        logger.setLevel(level)


def reachable(endpoint: str) -> bool:
    """Tell whether a server's name has an address here, or a proxy is set that may know one."""
    if any(os.environ.get(k) for k in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        return bool(socket.getaddrinfo(urlparse(endpoint).hostname, 443))
    except OSError:
        return False


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
