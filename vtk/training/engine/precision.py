"""Number formats of a training run: fp32, and bf16 or fp16 with fp32 masters.

Autocast over fp32 weights keeps a copy of every weight it casts. The regime here stores frozen weights in 16 bits,
once, and casts each trained fp32 master once per forward pass, inside autograd, so that gradients arrive and add up in
fp32. The optimizer, clipping and packs see masters only. fp16 also has a loss scaler.
"""

from collections.abc import Collection
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vtk.errors import UnavailableError, UsageError
from vtk.models.devices import DTYPES
from vtk.training.engine.loss_scale import DynamicScaler, LossScaler, NoScaler

PrecisionName = Literal["fp32", "bf16", "fp16"]


class Precision(Protocol):
    """Number formats of storage and computation during one run.

    Attributes:
        name: as on the command line.
        scaler: of the loss.
    """

    name: PrecisionName
    scaler: LossScaler

    def prepare(self, model: nn.Module, trained: Collection[str]) -> None:
        """Change ``model`` (already on its device) in place; ``trained`` names its trainable parameters."""

    def share(self, other: "Precision") -> None:
        """Share the records of ``other`` on tensors that both models have; called before `prepare`."""

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Run before each forward pass, as a hook: get trained tensors and inputs ready, return the inputs."""

    def after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Run between the last backward pass of a step and clipping: gradients are divided by the loss's factor."""

    def before_eval(self, model: nn.Module) -> None:
        """Run before the model is evaluated."""

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state dict on the CPU: trained tensors as fp32 masters, frozen ones exactly as they were given."""


class Fp32:
    """Everything in fp32."""

    name: PrecisionName = "fp32"

    def __init__(self, scaler: LossScaler | None = None) -> None:
        self.scaler: LossScaler = scaler or NoScaler()

    def prepare(self, model: nn.Module, trained: Collection[str]) -> None:
        """Leave the model as it is."""

    def share(self, other: Precision) -> None:
        """Do nothing."""

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the inputs."""
        return args, kwargs

    def after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss's factor, if it has one."""
        self.scaler.unscale(optimizer)

    def before_eval(self, model: nn.Module) -> None:
        """Do nothing."""

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state dict on the CPU."""
        return {name: _to_cpu(tensor) for name, tensor in model.state_dict().items()}


class _Half:
    """Frozen tensors stored in 16 bits, trained ones as fp32 masters that are cast once per forward pass.

    The cast tensor shadows its master: it is put into the module's ``__dict__``, where Python finds it before it asks
    ``nn.Module`` for the parameter of that name. ``named_parameters`` and ``state_dict`` still give the master, so
    optimizers and DDP need to know nothing. The casts stay in place until the next forward pass, because gradient
    checkpointing runs blocks again during backward.

    A BatchNorm that trains keeps its weights and statistics in fp32 while training (16 bits are too few digits for a
    running mean) and is evaluated in 16 bits like everything else, so that ``model.to(dtype)`` gives the same metric.
    """

    name: PrecisionName

    def __init__(self, scaler: LossScaler | None = None) -> None:
        self.scaler: LossScaler = scaler or NoScaler()
        self.dtype = DTYPES[self.name]
        self._frozen: dict[str, Tensor] = {}
        self._given: dict[int, Tensor] = {}  # by the tensor's id: models of several tasks share their frozen tensors
        self._live: set[str] = set()
        self._casts: list[tuple[nn.Module, str]] = []
        self._norms: list[_BatchNorm] = []

    def prepare(self, model: nn.Module, trained: Collection[str]) -> None:
        """Round what is frozen to 16 bits and arrange that the rest is cast at each call of ``model``.

        Raises:
            ValueError: the model was prepared before.
        """
        if self._casts or self._frozen:
            raise ValueError(f"this {type(self).__name__} was used before; make a new one for each run")
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
                    setattr(module, name, buffer.to(self.dtype))
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True, prepend=True)

    def _store(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            if id(tensor) not in self._given:
                self._given[id(tensor)] = tensor.detach().to("cpu", copy=True)
            self._frozen[name] = self._given[id(tensor)]
            tensor.data = tensor.data.to(self.dtype)

    def share(self, other: Precision) -> None:
        """Keep the frozen tensors that both have as ``other`` was given them; before `prepare`."""
        assert isinstance(other, _Half)
        self._given = other._given

    def before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cast the trained tensors and the inputs."""
        done: dict[int, Tensor] = {}  # a parameter used by two modules is cast once
        for module, name in self._casts:
            master = module._parameters[name]
            assert master is not None
            if id(master) not in done:
                done[id(master)] = master.to(self.dtype)
            module.__dict__[name] = done[id(master)]
        for norm in self._norms:
            self._shadow_norm(norm)
        return tuple(map(self._cast, args)), {k: self._cast(v) for k, v in kwargs.items()}

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def _shadow_norm(self, norm: _BatchNorm) -> None:
        for name, tensor in [*norm._parameters.items(), *norm._buffers.items()]:
            if tensor is None or not tensor.is_floating_point():
                continue
            if norm.training:
                norm.__dict__.pop(name, None)
            else:
                norm.__dict__[name] = tensor.detach().to(self.dtype)

    def after_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss's factor, if it has one."""
        self.scaler.unscale(optimizer)

    def before_eval(self, model: nn.Module) -> None:
        """Drop the casts of the last forward pass and the graph they hold on to, so that parts can be called alone."""
        for module, name in self._casts:
            module.__dict__.pop(name, None)
        for norm in self._norms:
            for name in (*norm._parameters, *norm._buffers):
                norm.__dict__.pop(name, None)

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return masters, and frozen tensors as they were before rounding.

        A frozen tensor that has changed all the same is returned as it is, for the pack's check to find.
        """
        result = {}
        for name, tensor in model.state_dict().items():
            before, now = self._frozen.get(name), _to_cpu(tensor)
            same = before is not None and torch.equal(now.view(torch.int16), before.to(self.dtype).view(torch.int16))
            result[name] = before if before is not None and same else now
        return result


class Bf16(_Half):
    """bf16 has fp32's range, so the loss needs no scaler."""

    name: PrecisionName = "bf16"


class Fp16(_Half):
    """fp16 has three more binary digits than bf16 and a range from 6e-8 to 65504, so the loss is scaled."""

    name: PrecisionName = "fp16"

    def __init__(self, scaler: LossScaler | None = None) -> None:
        super().__init__(scaler or DynamicScaler("cuda"))


def make_precision(
    name: Literal["auto", "fp32", "bf16", "fp16"], device: torch.device, *, train: bool = True
) -> Precision:
    """Return the regime called ``name``; ``auto`` is bf16 on CUDA and fp32 elsewhere.

    Args:
        name: of the regime.
        device: that will run it.
        train: whether steps will be done; otherwise only memory is counted, for whatever device.

    Raises:
        UsageError: the name is not known.
        UnavailableError: fp16 elsewhere than on CUDA.
    """
    if name == "auto":
        name = "bf16" if device.type == "cuda" else "fp32"
    if name == "fp32":
        return Fp32()
    if name == "bf16":
        return Bf16()
    if name == "fp16":
        if train and device.type != "cuda":
            raise UnavailableError(
                f"`--precision` fp16 trains on CUDA only, this is the {device.type}; use fp32 or bf16"
            )
        return Fp16(DynamicScaler("cuda" if device.type == "cuda" else "cpu"))
    raise UsageError(f"`--precision` {name} is not known; choose auto, fp32, bf16 or fp16")


def _to_cpu(tensor: Tensor) -> Tensor:
    """Return a copy that later training steps do not change."""
    return tensor.detach().to("cpu", copy=True)
