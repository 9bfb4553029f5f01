"""Hidden activations of a model's blocks: the outputs of ReLU, GELU, SiLU and similar functions.

They are observed by hooks on the modules of these functions, independently of the block. Activations inside attention
(as in a network for relative positions) or inside a gate such as squeeze-and-excitation are not hidden layers and are
skipped.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vtk.analysis.probes.attention_maps import looks_like_attention
from vtk.analysis.probes.depth_points import recognised_blocks

Kind = Literal["MLP", "token MLP", "conv"]

_SIGNED = frozenset(
    "ReLU ReLU6 LeakyReLU PReLU RReLU GELU GELUTanh QuickGELU SiLU Swish SwishMe Mish MishMe Hardswish HardSwish "
    "HardSwishMe HardMish HardMishMe ELU CELU SELU".split()
)  # their output has the sign of their input, or is 0: above 0 where the neuron is active (unlike a sigmoid)
_FUNCTIONS = frozenset({
    F.relu, F.relu_, F.relu6, F.leaky_relu, F.gelu, F.silu, F.mish, F.hardswish, F.elu, F.celu, F.selu,
    torch.relu, torch.relu_, Tensor.relu, Tensor.relu_,
})  # fmt: skip
_GATE = re.compile(r"(Effective)?SE(Module|WithNorm)|SqueezeExcit(e|ation)(Cl)?")
_MAP_LAYERS = (nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm)


@dataclass(frozen=True)
class Hidden:
    """A hidden layer.

    Attributes:
        name: of its module, with a number for further calls of the same one.
        block: number of its block, from 1.
        kind: ``token MLP`` in an MLP-Mixer, where a neuron reads one channel at all positions; ``conv`` if it is a
            channel of a map after a convolution or its norm; else ``MLP``.
        function: class of the activation.
    """

    name: str
    block: int
    kind: Kind
    function: str


See = Callable[[Hidden, Tensor], None]


@contextlib.contextmanager
def watch_activations(model: nn.Module, see: See) -> Iterator[set[str]]:
    """Within the context, pass the output of every activation in a block to ``see``, neurons last.

    Args:
        model: with recognised blocks, such as a timm ViT, Mixer, Swin or ResNet. Of a gated MLP (GluMlp, SwiGLU) the
            gate is observed.
        see: called with the layer and its output (B, …, neurons), B images or windows; must not modify it.

    Yields:
        Names of the blocks that call an activation as a function, which hooks cannot observe; filled as the model runs.

    Raises:
        UsageError: the model has no recognised blocks.
    """
    blocks = recognised_blocks(model)
    watch = _Watch(see)
    handles: list[Any] = []

    def around(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))

    try:
        for module in model.modules():
            if isinstance(module, (*_MAP_LAYERS, nn.Linear)):
                handles.append(module.register_forward_pre_hook(watch.layer))
        for number, (name, block) in enumerate(blocks.items(), start=1):
            around(block, lambda *_, name=name: watch.enter(name), watch.leave)
            passed: list[str] = []
            for inner, module in block.named_modules():
                if any(inner.startswith(f"{outer}.") for outer in passed):
                    continue
                if inner and (looks_like_attention(module) or _GATE.fullmatch(type(module).__name__)):
                    passed.append(inner)
                    around(module, watch.hush, watch.unhush)
                elif function := _signed(module):
                    around(module, watch.hush, watch.unhush)
                    handles.append(module.register_forward_hook(watch.output(f"{name}.{inner}", number, function)))
        with watch:
            yield watch.functional
    finally:
        for handle in handles:
            handle.remove()


def _signed(module: nn.Module) -> str | None:
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _SIGNED), None)


class _Watch(TorchFunctionMode):
    """State of the forward pass: the block, whether activations count, and the kind of the last layer."""

    def __init__(self, see: See) -> None:
        super().__init__()
        self.see = see
        self.functional: set[str] = set()
        self.calls: dict[str, int] = {}
        self.block: str | None = None
        self.quiet = 0
        self.on_map = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a block that calls an activation function; the call itself is unchanged."""
        if self.block is not None and not self.quiet and func in _FUNCTIONS:
            self.functional.add(self.block)
        return func(*args, **(kwargs or {}))

    def enter(self, block: str) -> None:
        self.block = block
        self.calls.clear()

    def leave(self, *_: object) -> None:  # a returned value would replace the output
        self.block = None

    def hush(self, *_: object) -> None:
        self.quiet += 1

    def unhush(self, *_: object) -> None:
        self.quiet -= 1

    def layer(self, module: nn.Module, inputs: Any) -> None:
        self.on_map = isinstance(module, _MAP_LAYERS)

    def output(self, name: str, block: int, function: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            call = self.calls[name] = self.calls.get(name, 0) + 1
            kind: Kind = "token MLP" if ".mlp_tokens." in name else "conv" if self.on_map else "MLP"
            hidden = Hidden(name if call == 1 else f"{name} ({call})", block, kind, function)
            self.see(hidden, output.movedim(1, -1) if self.on_map and output.ndim == 4 else output)

        return hook
