"""Writes a merged model as a folder that timm and transformers load by themselves, and looks whether they do."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vtk.card import Card
from vtk.errors import UsageError, VerificationError
from vtk.files import replace_dir, write_text
from vtk.formats import save_tensors, write_json
from vtk.marks import beside
from vtk.packs.adapters import README
from vtk.packs.bundle import claim_out
from vtk.packs.config import FolderFormat
from vtk.packs.folder_readme import IS_FOLDER, folder_page
from vtk.packs.load import Task, load_task
from vtk.packs.native import Native, native_form
from vtk.packs.timm_folder import CONFIG, WEIGHTS, data_config, random_images, relative_difference, write_timm

PROCESSOR = "preprocessor_config.json"
FOLDER_FILES = frozenset({CONFIG, WEIGHTS, PROCESSOR})
"""Files of such a folder beside its README."""
FOLDER_MARKS = {README: IS_FOLDER, **dict.fromkeys(sorted(FOLDER_FILES), beside(README, IS_FOLDER))}
"""How they are recognised."""

_ATOL = 1e-4
"""Largest difference of logits as a share of the largest one: transformers adds in another order than timm."""


@dataclass(frozen=True)
class Form:
    """How a model was written.

    Attributes:
        native: under the names of a class of transformers' own; else timm's, which transformers wraps.
        reason: why it is not native though that was wanted; empty where it is, or was not.
        verified: names of the libraries that loaded the folder with equal logits.
    """

    native: bool = False
    reason: str = ""
    verified: tuple[str, ...] = ()


def merge_folder(
    path: str | Path, out: str | Path, format: FolderFormat, *, base: str | Path | None = None, overwrite: bool = False
) -> tuple[Task, Form]:
    """Write a pack and its base as a folder of ``config.json``, ``model.safetensors`` (fp32) and ``README.md``.

    Args:
        path: the pack.
        out: folder to write.
        format: ``timm``, which transformers loads too through its wrapper of timm; or ``hf``, a class of transformers'
            own where there is one that computes the same, else as ``timm``.
        base: file with the base weights; by default they are looked up.
        overwrite: replace an earlier folder of this command.

    Returns:
        The task, and how it was written.

    Raises:
        UsageError: ``out`` exists or holds something else, or timm has no such model.
        DataError: the pack is damaged, or ``out`` cannot be written.
        BaseError: no base fits.
        VerificationError: what timm or transformers loads is not the model; nothing is written then.
    """
    out = Path(out)
    if out.suffix == ".safetensors":
        raise UsageError(f"`--out` {out}: --format {format} writes a folder; give its name, or --format file")
    with claim_out(out, FOLDER_MARKS, overwrite=overwrite, command="vtk tasks merge"):
        task = load_task(path, base=base)
        with replace_dir(out) as tmp:
            form = write_form(tmp, task.card, task.model, format)
            write_text(tmp / README, folder_page(task.card, out.name, native=form.native))
    return task, form


def write_form(folder: Path, card: Card, model: nn.Module, format: FolderFormat) -> Form:
    """Write the files of a model into a folder that exists, without a README; see `merge_folder`."""
    reason = ""
    if format == "hf":
        try:
            native = native_form(model)
        except UsageError as error:
            reason = str(error)
        else:
            _write_native(folder, card, native)
            return Form(native=True, verified=_transformers(folder, card, model))
    write_timm(folder, card, model)
    return Form(reason=reason, verified=("timm", *(_transformers(folder, card, model) if format == "hf" else ())))


def _write_native(folder: Path, card: Card, native: Native) -> None:
    """Write the files of a class of transformers' own; images go through its wrapper of timm's transforms.

    Its own image processors crop one pixel beside timm's centre where a margin is odd, and have no padding in a colour.
    The wrapper reads ``config.json``; where its name is looked for depends on the version.
    """
    processor = {"image_processor_type": "TimmWrapperImageProcessor", "pretrained_cfg": data_config(card.input)}
    config: dict[str, Any] = {
        **native.config,
        "id2label": {str(i): name for i, name in enumerate(card.classes)},
        "label2id": {name: i for i, name in enumerate(card.classes)},
        "problem_type": "multi_label_classification" if card.multi_label else "single_label_classification",
        **processor,
    }
    save_tensors(folder / WEIGHTS, native.tensors, {"format": "pt"})
    write_json(folder / CONFIG, config)
    write_json(folder / PROCESSOR, processor)


def _transformers(folder: Path, card: Card, model: nn.Module) -> tuple[str, ...]:
    """Load a folder with transformers, where that is installed, and compare the logits of two random images.

    Raises:
        VerificationError: it lacks tensors, or its logits or classes are others.
    """
    try:
        import transformers
    except ImportError:  # absent, or beside other packages than it wants
        return ()
    named = f"transformers {transformers.__version__}"
    try:
        with _quiet(transformers.utils.logging):
            loaded, info = transformers.AutoModelForImageClassification.from_pretrained(
                folder, output_loading_info=True
            )
    except Exception as error:  # of any kind, by its version
        text = " ".join(str(error).split())[:200]
        raise VerificationError(f"{named} cannot load the folder, so nothing is written: {text}") from error
    if absent := sorted(info["missing_keys"]) + sorted(info["unexpected_keys"]):
        raise VerificationError(f"{named} has no place or no value for `{absent[0]}`, so nothing is written")
    if tuple(loaded.config.id2label[i] for i in range(len(card.classes))) != card.classes:
        raise VerificationError(f"{named} reads other names of classes, so nothing is written")
    images = random_images(card.input)
    with torch.no_grad():
        difference = relative_difference(loaded.eval()(images).logits, model(images))
    if not difference <= _ATOL:
        raise VerificationError(
            f"{named} loads the folder, but its logits differ by {difference:.1e} of the largest one, so nothing is "
            "written"
        )
    return ("transformers",)


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Turn off transformers' report and progress bar: what matters of them is compared by the caller."""
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
