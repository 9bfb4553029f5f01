"""Loads base weights from the hub, by timm's names."""

import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlparse

import huggingface_hub

from vtk.errors import DataError, VtkError
from vtk.models import parallel_models as parallel
from vtk.models.inputs import check_size, model_error
from vtk.models.task_parameters import grid_of, head_names, position_names
from vtk.models.weights.base import Base, make_base


def hub_base(name: str, kwargs: Mapping[str, Any]) -> Base:
    """Return the pretrained weights of a timm model, at their own size.

    Raises:
        DataError: the hub has none, or cannot be reached.
        UsageError: timm does not know the model.
    """
    with _offline_if_unreachable():
        try:
            model = parallel.build(name, pretrained=True, **kwargs)
        except RuntimeError as error:
            if "pretrained weights" in str(error).lower() and "exist" in str(error).lower():
                hint = "give --weights FILE or --no-pretrained"
                raise DataError(f"the hub has no weights for `{name}`; {hint}") from error
            raise model_error(name, kwargs, error) from error
        except OSError as error:  # raised by huggingface_hub for a file that is neither online nor cached
            raise DataError(
                f"the weights of `{name}` cannot be downloaded from the hub; give --weights FILE, or --no-pretrained "
                "to start from random numbers"
            ) from error
        except VtkError:
            raise
        except Exception as error:  # timm raises many kinds, and so does a damaged file of the cache
            raise model_error(name, kwargs, error) from error
    tensors = {k: v.detach() for k, v in model.state_dict().items()}
    task = head_names(model) | position_names(model)
    size = check_size(name, None, kwargs)
    return make_base(tensors, source=f"hub:{name}", task_names=task, grid=grid_of(model), size=size)


def reachable(endpoint: str) -> bool:
    """Return whether a server's name can be resolved, or a proxy is set."""
    if any(os.environ.get(k) for k in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        return bool(socket.getaddrinfo(urlparse(endpoint).hostname, 443))
    except (OSError, ValueError):  # ValueError: HF_ENDPOINT is not a URL
        return False


@contextlib.contextmanager
def _offline_if_unreachable() -> Iterator[None]:
    """Use only the hub's cache if its host cannot be resolved: its client would retry for most of a minute."""
    constants = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if not before and not reachable(constants.ENDPOINT):
        constants.HF_HUB_OFFLINE = True
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # --json keeps stdout for the result
            yield
    finally:
        constants.HF_HUB_OFFLINE = before
        logger.setLevel(level)
