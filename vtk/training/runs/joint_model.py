"""One model of several tasks: what is frozen is in memory once, and the FFN of a block runs once for all of them.

Attention, classifier, position table and prefix tokens are a task's own. A task's tokens go through its own attention;
then the rows of all tasks and resolutions stand in one matrix (1, T, C), and the frozen norm and FFN see no difference
between them (Touvron et al. 2022: fine-tuning attention only lets tasks share the rest).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.models.structure import unusual_part
from vtk.models.task_parameters import head_names, position_names
from vtk.training.engine.precision import Fp32, Precision
from vtk.training.frozen_ffn.blocks import can_join
from vtk.training.frozen_ffn.stages import attention_stage, ffn_stage
from vtk.training.policies.policy import group_names

_ALONE = "train each task in a run of its own"


class JointModel(nn.Module):
    """The models of several tasks, whose frozen tensors are the same objects (`share_frozen`).

    Args:
        models: by task, of one architecture.

    Attributes:
        models: in the order given.
    """

    def __init__(self, models: Mapping[str, VisionTransformer]) -> None:
        super().__init__()
        for name, model in models.items():
            if why := unusual_part(model):
                raise UsageError(f"task `{name}`: {why}; {_ALONE}")
        self.models = nn.ModuleList(models.values())

    def forward(self, *images: Tensor, tasks: tuple[int, ...]) -> list[Tensor]:
        """Map each task's images to its logits.

        Args:
            images: (B, C, H, W) of each task that takes part, of its own B and size.
            tasks: their numbers, ascending.

        Returns:
            (B, classes) for each.
        """
        models: list[Any] = [self.models[i] for i in tasks]
        tokens = [m.norm_pre(m.patch_drop(m._pos_embed(m.patch_embed(x)))) for m, x in zip(models, images, strict=True)]
        for blocks in zip(*(m.blocks for m in models), strict=True):
            tokens = _joint_block(blocks, tokens)
        return [m.forward_head(m.norm(x)) for m, x in zip(models, tokens, strict=True)]


def share_frozen(name: str, model: nn.Module, first: nn.Module) -> None:
    """Give ``model`` the frozen parameters of ``first``, so that they are in memory once, in place.

    Args:
        name: of the model's task.
        model: its trained parameters require gradients; classifier and position table stay its own in any case.
        first: model of another task, of the same base and policy.

    Raises:
        UsageError: a trained parameter lies outside attention, classifier and positions, or a frozen one differs.
    """
    groups = group_names(model)
    own = head_names(model) | position_names(model)
    theirs = dict(first.named_parameters())
    for prefix, module in model.named_modules():
        for short, parameter in module._parameters.items():
            key = f"{prefix}.{short}".removeprefix(".")
            if parameter is None or key in own:
                continue
            if parameter.requires_grad:
                if groups[key] != "attention":
                    raise UsageError(f"task `{name}` trains `{key}`, which tasks of one run share; {_ALONE}")
                continue
            other = theirs.get(key)
            if other is None or other.requires_grad or not torch.equal(other, parameter):
                raise UsageError(f"task `{name}`: frozen `{key}` is not that of the first task; {_ALONE}")
            module._parameters[short] = other


def count_shared(models: Iterable[nn.Module]) -> int:
    """Return the number of weights that the models of all tasks share."""
    first, *rest = ({id(p): p.numel() for p in m.parameters()} for m in models)
    return sum(n for key, n in first.items() if all(key in other for other in rest))


class JointPrecision(Fp32):
    """The number formats of several tasks, each with the fp32 masters of its own; shared weights are rounded once.

    Args:
        parts: model and number formats of each task.
    """

    def __init__(self, parts: Sequence[tuple[nn.Module, Precision]]) -> None:
        first = parts[0][1]
        super().__init__(first.scaler)
        self.parts, self.name = parts, first.name

    def prepare(self, model: nn.Module, trained: Collection[str]) -> None:
        """Prepare every task's model; ``model`` is a `JointModel` of them."""
        first = self.parts[0][1]
        for own, precision in self.parts:
            if precision is not first:
                precision.share(first)
            precision.prepare(own, [n for n, p in own.named_parameters() if p.requires_grad])
            model.register_forward_pre_hook(precision.before_forward, with_kwargs=True)

    def before_eval(self, model: nn.Module) -> None:
        """Drop the casts of the last training step."""
        for own, precision in self.parts:
            precision.before_eval(own)

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return every task's state dict, its keys after the number of the task."""
        states = [precision.master_state_dict(own) for own, precision in self.parts]
        return {f"models.{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}


def _joint_block(blocks: Sequence[Any], tokens: list[Tensor]) -> list[Tensor]:
    """Run block i of several tasks on the tokens (B, N, C) of each, which are used up."""
    if len(blocks) == 1 or not can_join(blocks):
        return [block(x) for block, x in zip(blocks, tokens, strict=True)]
    for i, block in enumerate(blocks):
        tokens[i] = attention_stage(block, tokens[i])
    shapes = [x.shape[:2] for x in tokens]

    def apart(rows: Tensor) -> list[Tensor]:
        parts = rows[0].split([count * size for count, size in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]

    def each(module: nn.Module, rows: Tensor) -> Tensor:
        return torch.cat([module(part).flatten(0, 1) for part in apart(rows)])[None]

    rows = torch.cat([x.flatten(0, 1) for x in tokens])[None]
    tokens.clear()
    return apart(ffn_stage(blocks[0], rows, each))
