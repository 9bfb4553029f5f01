"""Saves and restores the states of random generators, as plain values and tensors."""

import random
from typing import Any

import numpy as np
import torch

NumpyState = Any
"""Result of ``numpy.random.RandomState.get_state``."""


def numpy_state(state: NumpyState) -> list[Any]:
    """Return a state of numpy's Mersenne twister as numbers and a tensor; `to_numpy` turns it back."""
    name, keys, position, has_gauss, gauss = state
    return [str(name), torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(gauss)]


def to_numpy(state: list[Any]) -> NumpyState:
    """Return the numpy state of what `numpy_state` returned."""
    name, keys, position, has_gauss, gauss = state
    return name, keys.numpy().astype(np.uint32), position, has_gauss, gauss


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of torch's generators (of the CPU, and of ``device`` if it is a GPU), numpy's and Python's."""
    version, keys, gauss = random.getstate()
    states = {
        "torch": torch.default_generator.get_state(),
        "numpy": numpy_state(np.random.get_state()),
        "python": [version, torch.tensor(keys, dtype=torch.int64), gauss],
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the generators from what `random_states` returned.

    A run that goes on where there is a GPU, and began where there was none, keeps the GPU's generator as it is.
    """
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    np.random.set_state(to_numpy(states["numpy"]))
    torch.default_generator.set_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
