"""Writes the README.md of an adapter, with the lines that load it in plain timm and PEFT."""

from collections.abc import Sequence

from vtk.card import Card
from vtk.markdown import span
from vtk.packs.adapters import CARD_KEY
from vtk.packs.plain import PlainCall
from vtk.packs.prepare_code import prepare_code
from vtk.packs.readme import card_sections, classify_code, code_block

_SHOWN = 8


def readme(
    card: Card, call: PlainCall, in_base: Sequence[str], heads: Sequence[str], *, with_base: bool
) -> tuple[str, str]:
    """Return the README, and from its Python code the lines that load the model.

    Args:
        card: of the pack.
        call: builds its model with timm.
        in_base: changed tensors that ``base.safetensors`` carries.
        heads: names of the classifiers.
        with_base: ``base.safetensors`` lies beside the adapter.
    """
    lines = ["import safetensors.torch", "import timm", "from peft import PeftModel"]
    if call.branches > 1:
        lines = ["from functools import partial", "", *lines]
        lines.append("from timm.models.vision_transformer import ParallelThingsBlock")
    build = call.code('"base.safetensors"')
    if not with_base:
        create = build[: build.rindex("\n")]
        prefixes = tuple(f"{name}." for name in heads)
        build = (
            f'{create}\nbase = safetensors.torch.load_file("base.safetensors")\n'
            f"base = {{k: v for k, v in base.items() if not k.startswith({prefixes!r})}}  # the adapter has its own\n"
            "missing, _ = model.load_state_dict(base, strict=False)\n"
            f'assert all(k.startswith({prefixes!r}) for k in missing), f"base.safetensors lacks {{missing}}"'
        )
    load = 'model = PeftModel.from_pretrained(model, ".").eval()  # optionally: model.merge_and_unload()'
    code = "\n".join([*lines, "", build, load])
    if not with_base:
        assert card.base is not None
        place = f"The base weights are not included: {_put_base(card.base.source)}, with timm's keys."
    elif in_base:
        names = ", ".join(map(span, in_base[:_SHOWN])) + (", …" if len(in_base) > _SHOWN else "")
        place = f"Use it only with this base.safetensors, which also holds tensors that no adapter can: {names}."
    else:
        place = "Its base is base.safetensors."
    logits = classify_code(card, "model(torch.from_numpy(prepare(path)))[0].detach().numpy()")
    page = code_block(
        f"import json\nimport torch\n{code}\n"
        'with safetensors.safe_open("adapter_model.safetensors", "pt") as file:\n'
        f'    classes = json.loads(file.metadata()["{CARD_KEY}"])["classes"]',
        prepare_code(card.input), logits,
    )  # fmt: skip
    text = (
        f"# A PEFT adapter for {span(card.model.name)}\n\n"
        f"{place} In this folder, with timm and peft installed, these lines load the model; then "
        '`classify("photo.jpg")` returns the classes with their probabilities, most likely first:\n\n'
        f"{page}\n{card_sections(card)}"
    )
    return text, code


def _put_base(source: str) -> str:
    """Say how base.safetensors comes beside the adapter: a file is copied, weights of the hub are written by timm."""
    if not source.startswith("hub:"):
        return f"put {span(source)} beside it as base.safetensors"
    create = f"timm.create_model({source.removeprefix('hub:')!r}, pretrained=True)"
    call = f'safetensors.torch.save_file({create}.state_dict(), "base.safetensors")'
    return f"write those of the hub beside it by {span(call)}"
