"""timm's optimizers by name: a check that the loop can drive one, and its state per weight."""

import difflib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from torch import nn

from vtk.errors import UnavailableError, UsageError
from vtk.models.arguments import parse_pairs

_PACKAGES = {"bnb": "bitsandbytes", "fused": "NVIDIA's apex"}  # timm's prefixes of other people's optimizers
_OWN = {
    "lr": "--lr", "weight_decay": "--weight-decay", "momentum": "--momentum", "params": "--train",
}  # fmt: skip


def check_optimizer(name: str, kwargs: Sequence[str] = ()) -> None:
    """Refuse an optimizer that cannot be used, before anything is read.

    Raises:
        UsageError: timm has none of that name, it needs a loop of its own, or it has no such argument.
        UnavailableError: a package or device that it needs is not available.
    """
    create([{"params": [nn.Parameter(torch.zeros(2, 2))]}], name, kwargs, lr=1e-3, momentum=0.9)


def create(
    groups: list[dict[str, Any]], name: str, kwargs: Sequence[str], *, lr: float, momentum: float
) -> torch.optim.Optimizer:
    """Return the optimizer ``name`` over parameter groups that have their own learning rates and weight decay.

    torch's own ones keep their fast path: neither ``foreach`` nor ``fused`` is set, so torch chooses.

    Args:
        groups: of parameters.
        name: of timm; see ``timm.optim.list_optimizers``.
        kwargs: further arguments as ``key=value``.
        lr: learning rate of groups without one.
        momentum: of optimizers that have one.

    Raises:
        UsageError: see `check_optimizer`.
        UnavailableError: see `check_optimizer`.
    """
    known = list_optimizers()
    if name not in known:
        near = difflib.get_close_matches(name, known, 3, 0.5)
        hint = f"is it {' or '.join(near)}?" if near else "adamw, sgd, lamb, lion, adan and nadamw are some"
        raise UsageError(f"`--optimizer` {name} is not one of timm's {len(known)}: {hint}")
    info = get_optimizer_info(name)
    if info.second_order:
        raise UsageError(
            f"`--optimizer` {name} needs the graph of its gradients, which this loop does not keep; choose a "
            "first-order one such as adamw"
        )
    arguments = parse_opt_kwargs(kwargs)
    if not momentum and (info.defaults or {}).get("nesterov"):
        arguments.setdefault("nesterov", False)  # there is no such thing without a momentum
    package = next((text for prefix, text in _PACKAGES.items() if name.startswith(prefix)), None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # timm's advice about parameters that fall back to AdamW
            return create_optimizer_v2(groups, opt=name, lr=lr, weight_decay=0.0, momentum=momentum, **arguments)
    except (AssertionError, ImportError, RuntimeError) as error:
        needs = f"{package} and a CUDA device" if package else str(error).partition("\n")[0]
        raise UnavailableError(f"`--optimizer` {name} needs {needs}; choose another, such as adamw") from error
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(
            f"`--opt-kwargs` {' '.join(kwargs) or 'none'}: {name} does not take that "
            f"({str(error).partition(chr(10))[0]}); it takes {', '.join(_arguments(name))}"
        ) from error


def parse_opt_kwargs(words: Sequence[str]) -> dict[str, Any]:
    """Read ``key=value`` words; a value is a number, yes or no, or a list such as ``[0.9,0.95]``.

    Raises:
        UsageError: another form, or a key that has a flag of its own.
    """
    return parse_pairs("--opt-kwargs", words, _OWN, "eps=1e-6")


def state_floats(name: str, kwargs: Sequence[str] = ()) -> float:
    """Return how many fp32 numbers an optimizer keeps for each weight of a large matrix, by letting it do one step."""
    if name == "adamw":  # the usual one; measuring gives the same
        return 2.0
    weight = nn.Parameter(torch.zeros(64, 128))
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = create([{"params": [weight]}], name, kwargs, lr=1e-3, momentum=0.9)
    try:
        with torch.random.fork_rng(devices=[]):
            optimizer.step()
    except (AssertionError, RuntimeError, NotImplementedError):  # one that steps on CUDA only
        return 2.0
    return sum(_bytes(value) for value in optimizer.state[weight].values()) / (4 * weight.numel())


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.numel() > 1 else 0
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _arguments(name: str) -> list[str]:
    kind = get_optimizer_info(name).opt_class
    names = inspect.signature(kind).parameters if callable(kind) else {}
    return [key for key in names if key not in (*_OWN, "self")]
