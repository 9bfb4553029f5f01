"""The README.md beside an adapter: how to load it with timm and PEFT alone."""

from collections.abc import Sequence

from vtk.card import Card
from vtk.markdown import block, span
from vtk.tasks.plain import PlainCall

_SHOWN = 8


def readme(
    card: Card, call: PlainCall, in_base: Sequence[str], heads: Sequence[str], *, with_base: bool
) -> tuple[str, str]:
    """Return the page, and the Python code in it.

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
            "model.load_state_dict(base, strict=False)"
        )
    load = 'model = PeftModel.from_pretrained(model, ".").eval()  # then, if you like, model.merge_and_unload()'
    code = "\n".join([*lines, "", build, load])
    spec = card.input
    if not with_base:
        assert card.base is not None
        source = span(card.base.source)
        place = f"The base weights are not here: put {source} beside it as base.safetensors, with timm's keys."
    elif in_base:
        names = ", ".join(map(span, in_base[:_SHOWN])) + (", …" if len(in_base) > _SHOWN else "")
        place = f"Use it on this base.safetensors only, which holds what no adapter can: {names}."
    else:
        place = "Its base is base.safetensors."
    classes = ", ".join(map(span, card.classes[:_SHOWN])) + (", …" if len(card.classes) > _SHOWN else "")
    text = (
        f"# A PEFT adapter for {span(card.model.name)}\n\n"
        f"{place} In this folder, with timm and peft installed:\n\n"
        f"{block(code, 'python')}\n"
        f"Input: {spec.in_chans}×{spec.height}×{spec.width}, {spec.interpolation}, crop_pct {spec.crop_pct:g} "
        f"({spec.resize_mode}), mean {spec.mean}, std {spec.std}. "
        f"{f'More than 8 bits: {spec.describe_range()}. ' if spec.value_range else ''}"
        f"{len(card.classes)} classes in this order: {classes}\n"
    )
    return text, code
