"""Writes the README of a merged checkpoint and of a bundle, with the lines that load it in plain timm."""

from pathlib import Path

from vtk.card import Card
from vtk.errors import UsageError
from vtk.markdown import span
from vtk.marks import begins
from vtk.packs.plain import PlainCall, plain_call
from vtk.packs.prepare_code import prepare_code
from vtk.packs.readme import card_sections, classify_code, code_block

MERGED, BUNDLE = "# A merged checkpoint of ", "# A bundle of "
"""First words of the pages, by which they are recognised."""
IS_MERGED, IS_BUNDLE = begins(MERGED), begins(BUNDLE)


def page_beside(file: Path) -> Path:
    """Return the path of a file's README: ``NAME.README.md``, so that several files may share a folder."""
    return file.with_name(f"{file.stem}.README.md")


def merged_page(card: Card, file: str) -> str:
    """Return the page of a merged checkpoint.

    Args:
        card: in its metadata.
        file: its name; the page lies beside it.
    """
    title = f"{MERGED}{span(card.model.name)}\n\n"
    try:
        call = plain_call(card)
    except UsageError as error:
        code = f"from vtk.packs import load_checkpoint\n\nmodel = load_checkpoint({file!r}).model"
        text = f"{span(file)} needs vit-toolkit, because {str(error).partition(';')[0]}. In this folder:\n\n"
        return f"{title}{text}{code_block(code)}\n{card_sections(card)}"
    classes = (
        f'with safetensors.safe_open({file!r}, "pt") as weights:\n'
        '    classes = json.loads(weights.metadata()["vtk"])["classes"]'
    )
    return f"{title}{span(file)} has timm's keys, in fp32. {_page(card, call, call.code(repr(file)), classes)}"


def bundle_page(card: Card, base: str, tensors: str, *, union: bool) -> str:
    """Return the page of a bundle.

    Args:
        card: ``task.json``.
        base: name of the file with the base's tensors.
        tensors: name of the file with the task's.
        union: both files together are, name for name, the model's tensors.
    """
    title = f"{BUNDLE}{span(card.model.name)}\n\n"
    try:
        call = plain_call(card) if union else None
    except UsageError:
        call = None
    if call is None:
        code = 'from vtk.packs import load_task\n\nmodel = load_task(".").model'
        text = (
            "A task pack with the base tensors that it needs, for vit-toolkit; `vtk tasks merge` makes a checkpoint of "
            "it, and `vtk export` files for other programs. In this folder:\n\n"
        )
        return f"{title}{text}{code_block(code)}\n{card_sections(card)}"
    build = call.code("").rpartition("\n")[0]
    load = (
        f"{build}\n"
        f"state = safetensors.torch.load_file({base!r}) | safetensors.torch.load_file({tensors!r})\n"
        "model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)"
    )
    classes = 'with open("task.json", encoding="utf-8") as card:\n    classes = json.load(card)["classes"]'
    text = f"{span(tensors)} has the tensors of the task, {span(base)} those of its base. "
    return f"{title}{text}{_page(card, call, load, classes)}"


def _page(card: Card, call: PlainCall, load: str, classes: str) -> str:
    imports = ["import json", "", "import safetensors.torch", "import timm", "import torch"]
    if call.branches > 1:
        imports = ["import json", "from functools import partial", *imports[1:]]
        imports.append("from timm.models.vision_transformer import ParallelThingsBlock")
    code = code_block(
        "\n".join([*imports, "", load, "model.eval()", classes]), prepare_code(card.input),
        classify_code(card, "model(torch.from_numpy(prepare(path)))[0].detach().numpy()"),
    )  # fmt: skip
    return (
        'In this folder, with timm and Pillow installed, these lines load the model; then `classify("photo.jpg")` '
        f"returns the classes with their probabilities, most likely first:\n\n{code}\n{card_sections(card)}"
    )
