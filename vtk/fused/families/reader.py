"""Base of the readers of timm's families: what `fuse`, the bank and the exporters ask of a model."""

import abc
from typing import Any, ClassVar

from torch import Tensor, nn

from vtk.errors import UsageError
from vtk.fused.checks import check_silent
from vtk.fused.embed import Embedding, TokenParts
from vtk.fused.head import Head, HeadParts
from vtk.fused.norms import refusal
from vtk.fused.rotary import Rotary
from vtk.fused.stages import Stage


class Reader(abc.ABC):
    """Reads the models of one class of timm.

    Attributes:
        kind: the class; a subclass of it is read where it has replaced none of ``forwards``.
        forwards: methods that compute the forward pass, which must be timm's own.
        blocks: class of the container of blocks.
        silent: names of parts that do nothing in eval mode.
    """

    kind: ClassVar[type[nn.Module]]
    forwards: ClassVar[tuple[str, ...]] = ("forward", "forward_features", "forward_head", "_pos_embed", "pool")
    blocks: ClassVar[type[nn.Module]] = nn.Sequential
    silent: ClassVar[tuple[str, ...]] = ("pos_drop", "patch_drop", "head_drop")

    @abc.abstractmethod
    def token_parts(self, model: Any) -> TokenParts:
        """Return what the tokens are made of."""

    @abc.abstractmethod
    def head_parts(self, model: Any) -> HeadParts:
        """Return what the logits are made of."""

    @abc.abstractmethod
    def stages(self, model: Any, i: int, like: Tensor, *, ffn: bool = True) -> list[Stage]:
        """Fold block ``i``.

        Args:
            model: of `kind`.
            i: number of the block.
            like: device and dtype of the arithmetic.
            ffn: False to leave the FFN out, where it is a stage of its own.

        Raises:
            UsageError: a part that is not known.
        """

    def rotary(self, model: Any, like: Tensor) -> Rotary | None:
        """Return the model's rotary tables, None for a model without."""
        return None

    def embedding(self, model: Any, like: Tensor) -> Embedding:
        """Fold what comes before the blocks."""
        return Embedding(self.token_parts(model), like)

    def head(self, model: Any, like: Tensor) -> Head:
        """Fold what comes behind the blocks."""
        return Head(self.head_parts(model), like)

    def check(self, model: Any) -> None:
        """Refuse what computes something else than the forward pass that the stages repeat.

        Raises:
            UsageError: a method or a part of the model's own, a hook, or a model without blocks.
        """
        kind: Any = type(model)
        for name in self.forwards:
            if getattr(kind, name) is not getattr(self.kind, name) or name in vars(model):
                raise UsageError(
                    f"cannot fuse {kind.__name__}: its `{name}` is its own; use the back-end eager or compile"
                )
        if type(model.blocks) is not self.blocks:
            raise refusal("blocks", model.blocks, f"only torch.nn.{self.blocks.__name__} is known here")
        check_silent(model, "", *self.silent)
        if not any(True for _ in model.blocks.children()):
            raise UsageError(f"cannot fuse {kind.__name__}: it has no blocks")
        for name, module in model.named_modules():
            where = name or kind.__name__
            if module._forward_hooks or module._forward_pre_hooks:
                raise UsageError(f"cannot fuse `{where}`: it has forward hooks, which would be lost; remove them")
            if "forward" in vars(module):
                raise UsageError(
                    f"cannot fuse `{where}`: its `forward` was replaced; use the back-end eager or compile"
                )
