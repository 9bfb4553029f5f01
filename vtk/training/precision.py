"""Number formats of a training run: fp32, and bf16 with fp32 masters.

Autocast over fp32 weights keeps a copy of every weight it casts. The bf16 regime here stores frozen weights in bf16,
once, and casts each trained fp32 master once per forward pass, inside autograd, so that gradients arrive and add up in
fp32. The optimiser, clipping and packs see masters only.
"""

from collections.abc import Collection
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vtk.errors import UsageError

PrecisionName = Literal["fp32", "bf16"]


class Precision(Protocol):
    """How numbers are stored and computed during one run."""

    name: PrecisionName

    def prepare(self, model: nn.Module, trained: Collection[str]) -> None:
        """Change ``model`` (already on its device) in place; ``trained`` names its trainable parameters."""

    def after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Run between the last backward pass of a step and clipping (a loss scaler would divide here)."""

    def before_eval(self, model: nn.Module) -> None:
        """Run before the model is evaluated."""

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state dict on the CPU: trained tensors as fp32 masters, frozen ones exactly as they were given."""


class Fp32:
    """Everything in fp32."""

    name: PrecisionName = "fp32"

    def prepare(self, model: nn.Module, trained: Collection[str]) -> None:
        """Leave the model as it is."""

    def after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def before_eval(self, model: nn.Module) -> None:
        """Do nothing."""

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state dict on the CPU."""
        return {name: _to_cpu(tensor) for name, tensor in model.state_dict().items()}


class Bf16:
    """Frozen tensors stored in bf16, trained ones as fp32 masters that are cast once per forward pass.

    The cast tensor shadows its master: it is put into the module's ``__dict__``, where Python finds it before it asks
    ``nn.Module`` for the parameter of that name. ``named_parameters`` and ``state_dict`` still give the master, so
    optimisers and DDP need to know nothing. The casts stay in place until the next forward pass, because gradient
    checkpointing runs blocks again during backward.

    A BatchNorm that trains keeps its weights and statistics in fp32 while training (bf16 has too few digits for a
    running mean) and is evaluated in bf16 like everything else, so that ``model.to(bfloat16)`` gives the same metric.
    """

    name: PrecisionName = "bf16"

    def __init__(self) -> None:
        self._frozen: dict[str, Tensor] = {}
        self._live: set[str] = set()
        self._casts: list[tuple[nn.Module, str]] = []
        self._norms: list[_BatchNorm] = []

    def prepare(self, model: nn.Module, trained: Collection[str]) -> None:
        """Round what is frozen to bf16 and arrange that the rest is cast at each call of ``model``.

        Raises:
            ValueError: the model was prepared before.
        """
        if self._casts or self._frozen:
            raise ValueError("this Bf16 was used before; make a new one for each run")
        trained = set(trained)
        keys = model.state_dict().keys()
        for prefix, module in model.named_modules():
            prefix = f"{prefix}." if prefix else ""
            names = {prefix + n for n, _ in module.named_parameters(recurse=False)}
            live_norm = isinstance(module, _BatchNorm) and bool(names & trained)
            if live_norm:
                self._norms.append(module)  # type: ignore[arg-type]
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    if not live_norm:
                        self._casts.append((module, name))
                else:
                    self._store(prefix + name, parameter)
            for name, buffer in module.named_buffers(recurse=False):
                if live_norm or not buffer.is_floating_point():
                    self._live.add(prefix + name)
                elif prefix + name in keys:
                    self._store(prefix + name, buffer)
                else:
                    setattr(module, name, buffer.to(torch.bfloat16))
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)

    def _store(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            if name not in self._frozen:
                self._frozen[name] = tensor.detach().to("cpu", copy=True)
            tensor.data = tensor.data.to(torch.bfloat16)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        done: dict[int, Tensor] = {}  # a parameter used by two modules is cast once
        for module, name in self._casts:
            master = module._parameters[name]
            assert master is not None
            if id(master) not in done:
                done[id(master)] = master.to(torch.bfloat16)
            module.__dict__[name] = done[id(master)]
        for norm in self._norms:
            self._shadow_norm(norm)
        return tuple(map(_to_bf16, args)), {k: _to_bf16(v) for k, v in kwargs.items()}

    @staticmethod
    def _shadow_norm(norm: _BatchNorm) -> None:
        for name, tensor in [*norm._parameters.items(), *norm._buffers.items()]:
            if tensor is None or not tensor.is_floating_point():
                continue
            if norm.training:
                norm.__dict__.pop(name, None)
            else:
                norm.__dict__[name] = tensor.detach().to(torch.bfloat16)

    def after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: bf16 has fp32's range, so the loss needs no scale."""

    def before_eval(self, model: nn.Module) -> None:
        """Drop the casts of the last training step and the graph they hold on to."""
        for module, name in self._casts:
            module.__dict__.pop(name, None)

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return masters, and frozen tensors as they were before rounding.

        A frozen tensor that has changed all the same is returned as it is, for the pack's check to find.
        """
        result = {}
        for name, tensor in model.state_dict().items():
            given, now = self._frozen.get(name), _to_cpu(tensor)
            same = given is not None and torch.equal(now.view(torch.int16), given.to(torch.bfloat16).view(torch.int16))
            result[name] = given if given is not None and same else now
        return result


def make_precision(name: Literal["auto", "fp32", "bf16"], device: torch.device) -> Precision:
    """Return the regime called ``name``; ``auto`` is bf16 on CUDA and fp32 elsewhere.

    Raises:
        UsageError: the name is not known.
    """
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    if name == "fp32":
        return Fp32()
    if name == "bf16":
        return Bf16()
    raise UsageError(f"`--precision` {name} is not in this version; choose auto, fp32 or bf16")


def _to_bf16(value: Any) -> Any:
    return value.to(torch.bfloat16) if isinstance(value, Tensor) and value.is_floating_point() else value


def _to_cpu(tensor: Tensor) -> Tensor:
    """Return a copy that later training steps do not change."""
    return tensor.detach().to("cpu", copy=True)
