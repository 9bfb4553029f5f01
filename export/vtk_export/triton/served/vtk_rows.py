"""Requests to rows of images by task, and rows of logits to answers; part of a model of many tasks.

Needs numpy and the server's own module. A request has `pixel_values` (b, channels, height, width) and `task` (b, 1), a
name for each image; the server hands over several requests at once, and all images of a task become one batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

LOWEST = np.finfo(np.float32).min
"""Stands behind the classes that a task has, where another has more."""

_SHOWN = 20

Batches = dict[str, np.ndarray]
Run = Callable[[Batches], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Task:
    """What the model knows of a task.

    Attributes:
        classes: names in index order.
        shape: (channels, height, width) of its images.
    """

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    labels: np.ndarray = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names = [name.encode("utf-8", "surrogateescape") for name in self.classes]
        object.__setattr__(self, "labels", np.array(names, dtype=np.object_))


class Refused(Exception):
    """The request cannot be answered; the text says why and goes to the client."""


class _Rows:
    """The rows of a request: which task each is of, and its logits when they are there."""

    def __init__(self, request: Any, tasks: Mapping[str, Task]) -> None:
        pixels = pb_utils.get_input_tensor_by_name(request, "pixel_values").as_numpy()
        names = pb_utils.get_input_tensor_by_name(request, "task").as_numpy().reshape(-1)
        if len(names) != len(pixels):
            raise Refused(f"`task` has {len(names)} names for {len(pixels)} images; give one for each")
        self.names = [text(name) for name in names]
        self.count = len(pixels)
        self.found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.pixels: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        order = np.array(self.names, dtype=np.object_)
        for name in dict.fromkeys(self.names):
            if name not in tasks:
                raise Refused(f"unknown task {name!r}; this model has {some(list(tasks))}")
            if pixels.shape[1:] != tasks[name].shape:
                raise Refused(f"images of task {name!r} are {tasks[name].shape}, not {pixels.shape[1:]}; resize them")
            at = np.flatnonzero(order == name)
            self.pixels[name] = (at, pixels if len(at) == self.count else pixels[at])

    def answer(self, tasks: Mapping[str, Task], width: int, softmax: bool) -> Any:
        values = np.full((self.count, width), 0 if softmax else LOWEST, dtype=np.float32)
        label = np.empty((self.count, 1), dtype=np.object_)
        score = np.empty((self.count, 1), dtype=np.float32)
        for name, (at, found) in self.found.items():
            share = np.exp(found - found.max(1, keepdims=True))
            share /= share.sum(1, keepdims=True)
            values[at, : found.shape[1]] = share if softmax else found
            label[at, 0] = tasks[name].labels[found.argmax(1)]
            score[at, 0] = share.max(1)
        tensors = {"probabilities" if softmax else "logits": values, "label": label, "score": score}
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()])


def answer(requests: Sequence[Any], tasks: Mapping[str, Task], run: Run, *, softmax: bool = False) -> list[Any]:
    """Answer requests, each on its own where something is wrong with it.

    Args:
        requests: of the server.
        tasks: those that may be asked for now.
        run: maps a batch (n, channels, height, width) for each task to logits (n, classes). It may fail: then tasks are
            run one by one, and the requests of those that fail alone are told why.

    Returns:
        A response for each request.
    """
    width = max((len(task.classes) for task in tasks.values()), default=1)
    taken: list[_Rows | None] = []
    answers: list[Any] = []
    for request in requests:
        try:
            taken.append(_Rows(request, tasks))
            answers.append(None)
        except Refused as error:
            taken.append(None)
            answers.append(failure(str(error)))
    rows = [entry for entry in taken if entry is not None]
    wrong = _run(rows, run)
    for i, entry in enumerate(taken):
        if entry is not None:
            reasons = [wrong[name] for name in entry.pixels if name in wrong]
            answers[i] = failure(reasons[0]) if reasons else entry.answer(tasks, width, softmax)
    return answers


def _run(rows: Sequence[_Rows], run: Run) -> dict[str, str]:
    """Run all rows and hand out the logits; return why a task failed."""
    parts: dict[str, list[tuple[_Rows, np.ndarray, np.ndarray]]] = {}
    for entry in rows:
        for name, (at, pixels) in entry.pixels.items():
            parts.setdefault(name, []).append((entry, at, pixels))
    if not parts:
        return {}
    batches = {name: _join([pixels for _, _, pixels in part]) for name, part in parts.items()}
    wrong: dict[str, str] = {}
    try:
        logits = dict(run(batches))
    except Exception:  # whatever it was, the other tasks' requests are not to suffer from it
        logits = {}
        for name, batch in batches.items():
            try:
                logits.update(run({name: batch}))
            except Exception as error:
                wrong[name] = f"task {name!r}: {' '.join(str(error).split()) or type(error).__name__}"
    for name, part in parts.items():
        start = 0
        for entry, at, _ in part:
            if name in logits:
                entry.found[name] = (at, logits[name][start : start + len(at)])
            start += len(at)
    return wrong


def failure(text: str) -> Any:
    """Return the response that tells a client what is wrong with its request."""
    code = getattr(pb_utils.TritonError, "INVALID_ARG", None)
    error = pb_utils.TritonError(text) if code is None else pb_utils.TritonError(text, code)
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of a model's config, which the server hands over as JSON."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))


def text(name: Any) -> str:
    """Return a name that was sent."""
    return name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else str(name)


def some(names: list[str]) -> str:
    """Return names for a message, of very many the first."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more if names else "none"
