"""Loss scaling (Micikevicius et al., 2017): fp16 has no room for small gradients, so the loss is multiplied first.

Gradients of fp32 masters are divided by the same factor before they are clipped. Where a gradient overflowed the step
is left out and the factor halved; after many good steps it is doubled. A factor is always a power of two, so that
multiplying and dividing by it changes no digit.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

SMALLEST = 1.0
"""A gradient that overflows at this factor overflows by itself: the run diverges."""


class LossScaler(Protocol):
    """What the engine asks around backward passes and optimizer steps.

    Attributes:
        skips: whether a step may be left out.
        factor: on the loss.
    """

    @property
    def skips(self) -> bool: ...  # noqa: D102
    @property
    def factor(self) -> float: ...  # noqa: D102

    def scale(self, loss: Tensor) -> Tensor:
        """Return what backward is called on."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients, once after all backward passes; they may then be computed anew."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer step if every gradient since its last step was finite; return whether it did."""

    def update(self) -> None:
        """Adapt the factor, once all optimizers of a step have had their turn."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""


class NoScaler:
    """Leave loss and gradients as they are: fp32 and bf16 have the range."""

    skips = False
    factor = 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss``."""
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing."""

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer step."""
        optimizer.step()
        return True

    def update(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


class DynamicScaler:
    """torch's GradScaler, for step rules that compute gradients more than once before they step.

    GradScaler divides the gradients of an optimizer once per step. A rule that looks at gradients, moves the weights
    and asks for gradients again (SAM) needs it twice, so each time the scaler is shown a new view of the optimizer. The
    views are stepped in a chain, last first: GradScaler stops it at the first with a gradient that is not finite.

    With several processes gradients are summed before they are divided, so all see the same overflow and skip alike.

    Args:
        device: kind of device that holds the gradients.
        factor: the first, a power of two.
        growth_interval: good steps after which the factor is doubled.
    """

    skips = True

    def __init__(
        self, device: Literal["cuda", "cpu"] = "cuda", factor: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self._scaler = torch.amp.GradScaler(device, init_scale=factor, growth_interval=growth_interval)
        self._views: dict[int, list[_View]] = {}

    @property
    def factor(self) -> float:
        """The present factor; reading it waits for the device."""
        return float(self._scaler.get_scale())

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the factor."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the factor and note whether all are finite."""
        views = self._views.setdefault(id(optimizer), [])
        view = _View(self._scaler, optimizer, views[-1] if views else None)
        self._scaler.unscale_(view)  # type: ignore[arg-type]
        views.append(view)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let the optimizer step if every gradient since its last step was finite.

        Returns:
            Whether the optimizer stepped.

        Raises:
            ValueError: `unscale` was not called since the last step.
        """
        views = self._views.pop(id(optimizer), [])
        if not views:
            raise ValueError("step without unscale: the gradients are still multiplied")
        self._scaler.step(views[-1])  # type: ignore[arg-type]
        return views[0].stepped

    def update(self) -> None:
        """Halve the factor if a gradient overflowed, double it after many steps without."""
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the factor and the good steps since it changed."""
        return dict(self._scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; an empty one, from a run without a scaler, changes nothing."""
        if state:
            self._scaler.load_state_dict(dict(state))


class _View:
    """What GradScaler reads of an optimizer; stepping it steps the view before it, the first one the optimizer."""

    def __init__(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, before: "_View | None") -> None:
        self.param_groups = optimizer.param_groups
        self.stepped = False
        self._scaler, self._optimizer, self._before = scaler, optimizer, before

    def step(self) -> None:
        if self._before is not None:
            self._scaler.step(self._before)  # type: ignore[arg-type]
        else:
            self._optimizer.step()
            self.stepped = True
