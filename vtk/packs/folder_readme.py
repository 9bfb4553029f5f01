"""Writes the README of a folder that timm and transformers load, with the lines that do it."""

from vtk.card import Card
from vtk.markdown import span
from vtk.marks import begins
from vtk.packs.readme import card_sections, code_block

FOLDER = "# A model of "
"""First words of the page, by which it is recognised."""
IS_FOLDER = begins(FOLDER)


def folder_page(card: Card, folder: str, *, native: bool) -> str:
    """Return the page.

    Args:
        card: of the model.
        folder: its name.
        native: the tensors have the names of a class of transformers.
    """
    if native:
        what = "A class of transformers' own: its `AutoModelForImageClassification` loads this folder."
        code = transformers_code(card, folder)
    else:
        what = "timm loads this folder, and transformers does through its wrapper of timm."
        code = f"{timm_code(card, f'local-dir:{folder}')}\nWith transformers:\n\n{transformers_code(card, folder)}"
    return f"{FOLDER}{span(card.model.name)}\n\n{what} From the folder above:\n\n{code}\n{card_sections(card)}"


def timm_code(card: Card, name: str) -> str:
    """Return the code block that loads the model with timm and labels an image; ``name`` has its ``local-dir:``."""
    load = f"model = timm.create_model({name!r}, pretrained=True).eval()\n"
    transform = "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))\n"
    lines = ["import timm", "import torch", *_image_import(card), load]
    if not _image_import(card):
        lines.append("logits = model(images)  # (B, C, H, W), prepared as below")
    else:
        lines.append(
            f"{transform}{_open(card)}with torch.no_grad():\n    logits = model(transform(image).unsqueeze(0))[0]"
        )
    names = 'model.pretrained_cfg["label_names"]'
    return code_block("\n".join([*lines, _print(card, names)]))


def transformers_code(card: Card, name: str, revision: str | None = None) -> str:
    """Return the code block that loads the model with transformers and labels an image.

    Args:
        card: of the model.
        name: a path or an id of the hub.
        revision: branch on the hub.
    """
    place = repr(name) + (f", revision={revision!r}" if revision else "")
    lines = [
        "import torch", *_image_import(card),
        "from transformers import AutoImageProcessor, AutoModelForImageClassification",
        f"model = AutoModelForImageClassification.from_pretrained({place}).eval()",
    ]  # fmt: skip
    if not _image_import(card):
        lines.append("logits = model(images).logits  # (B, C, H, W), prepared as below")
    else:
        lines.append(
            f"processor = AutoImageProcessor.from_pretrained({place})  # needs timm\n{_open(card)}"
            'with torch.no_grad():\n    logits = model(**processor(image, return_tensors="pt")).logits[0]'
        )
    return code_block("\n".join([*lines, _print(card, "model.config.id2label")]))


def _image_import(card: Card) -> list[str]:
    return ["from PIL import Image, ImageOps"] if card.input.in_chans in (1, 3) else []


def _open(card: Card) -> str:
    mode = "L" if card.input.in_chans == 1 else "RGB"
    return f'image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("{mode}")\n'


def _print(card: Card, names: str) -> str:
    if not _image_import(card):
        return ""
    if card.multi_label:
        return f"print([{names}[i] for i in (logits.sigmoid() >= 0.5).nonzero().flatten().tolist()])"
    return f"print({names}[int(logits.argmax())])"
