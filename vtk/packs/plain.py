"""Finds the call of plain timm that builds the model of a card, where there is one."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

from vtk.card import Card, ModelSpec
from vtk.errors import UsageError
from vtk.models import lvvit
from vtk.models import parallel_models as parallel
from vtk.models.alternet import names
from vtk.models.inputs import blank_model, model_error
from vtk.models.meta_model import shapes_only

_WIDTH = 80


@dataclass(frozen=True)
class PlainCall:
    """A call of ``timm.create_model``.

    Attributes:
        name: of a model of plain timm.
        kwargs: its arguments, without the class of its blocks.
        branches: of a parallel block; 1 for the model's own blocks.
        separate_bias: qkv is called and its bias added after it (`separate_qkv_bias`).
    """

    name: str
    kwargs: dict[str, Any]
    branches: int = 1
    separate_bias: bool = False

    def build(self) -> nn.Module:
        """Build the model."""
        block = {"block_fn": partial(ParallelThingsBlock, num_parallel=self.branches)} if self.branches > 1 else {}
        model = timm.create_model(self.name, **self.kwargs, **block)
        if self.separate_bias:
            separate_qkv_bias(model)
        return model

    def code(self, file: str) -> str:
        """Return the Python lines that build the model and load a checkpoint, without their imports.

        Args:
            file: Python expression for its path.
        """
        words = [repr(self.name), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        if self.branches > 1:
            words.append(f"block_fn=partial(ParallelThingsBlock, num_parallel={self.branches})")
        lines = [f"model = timm.create_model({', '.join(words)})"]
        if len(lines[0]) > _WIDTH:
            lines = ["model = timm.create_model(", *_fill(words), ")"]
        if self.separate_bias:
            lines += [
                "for module in model.modules():",
                '    if hasattr(module, "qkv_bias_separate"):',
                "        module.qkv_bias_separate = True  # else timm reads the weight of qkv and ignores its adapter",
            ]
        return "\n".join([*lines, f"model.load_state_dict(safetensors.torch.load_file({file}), strict=True)"])

    def program(self, file: str) -> str:
        """Return a Python file that loads the checkpoint called ``file`` beside it."""
        lines = ["from pathlib import Path", "", "import safetensors.torch", "import timm"]
        if self.branches > 1:
            lines = ["from functools import partial", *lines]
            lines.append("from timm.models.vision_transformer import ParallelThingsBlock")
        return "\n".join([*lines, "", self.code(f"Path(__file__).with_name({file!r})"), "model.eval()", ""])


def separate_qkv_bias(model: nn.Module) -> bool:
    """Let attention modules call their qkv layer, in place; return whether there are such modules.

    With biases of queries and values in ``q_bias`` and ``v_bias``, timm's Eva and BEiT read the weight of ``qkv``, so
    that an adapter on the layer would have no effect. Their own option calls the layer and adds the bias after it,
    which is equal up to rounding.
    """
    found: list[Any] = [
        module for module in model.modules()
        if getattr(module, "qkv_bias_separate", None) is False and getattr(module, "q_bias", None) is not None
    ]  # fmt: skip
    for module in found:
        module.qkv_bias_separate = True
    return bool(found)


def plain_call(card: Card) -> PlainCall:
    """Return the call that builds a card's model with timm alone.

    Raises:
        UsageError: the model has something that timm cannot build.
    """
    name, kwargs, branches = _own_name(card.model)
    for transform in card.transforms:
        if transform.op == "parallelize":
            branches = transform.args["branches"]
            blocks: Any = blank_model(card.model.name, card.model.kwargs).blocks
            kwargs["depth"] = len(blocks) // branches
        elif transform.op != "adapt_input":
            raise UsageError(
                f"timm has no `{transform.op}`: it would compute something else with these tensors, without an error "
                "where no tensor is left over; load the file with vtk.packs.load_checkpoint"
            )
    first: dict[str, Any] = {"num_classes": len(card.classes), "img_size": card.input.size}
    if card.input.in_chans != 3:
        first["in_chans"] = card.input.in_chans
    call = PlainCall(name, first | kwargs, branches)
    try:
        with shapes_only():
            call.build()
    except TypeError as error:  # convolutional networks take any size, and no argument for it
        if "img_size" not in str(error):
            raise model_error(name, call.kwargs, error) from error
        del first["img_size"]
        call = dataclasses.replace(call, kwargs=first | kwargs)
    except Exception as error:  # timm raises many kinds for a wrong name or value
        raise model_error(name, call.kwargs, error) from error
    return call


def _own_name(spec: ModelSpec) -> tuple[str, dict[str, Any], int]:
    """Return a model's name, arguments and branches without the names that only this toolkit knows."""
    if lvvit.is_ours(spec.name) or names.is_ours(spec.name):
        own_vit = names.VITS.get(spec.name.split(".")[0])
        if own_vit is None:
            raise UsageError(f"timm alone has no `{spec.name}`; load the file with vtk.packs.load_checkpoint")
        return names.TIMM_VIT, {**own_vit, **spec.kwargs}, 1
    shape = parallel.parse(spec.name)
    if shape is None or not parallel.is_ours(spec.name):
        return spec.name, dict(spec.kwargs), 1
    size, depth, branches = shape
    own = {"depth": depth, "init_values": parallel.INIT_VALUES, **spec.kwargs}
    if not own["init_values"]:  # no LayerScale, as the name it now gets has it
        del own["init_values"]
    return f"vit_{size}_patch16_224", own, branches


def _fill(words: list[str]) -> list[str]:
    """Return indented lines of whole arguments."""
    lines = ["   "]
    for word in words:
        if len(lines[-1]) + len(word) + 2 > _WIDTH and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {word},"
    return lines
