"""Requests to rows of images by task, and rows of logits to answers; part of a model of many tasks.

Needs numpy and the server's own module. A request has `pixel_values` (b, channels, height, width) and `task` (b, 1), a
name for each image; the server hands over several requests at once, and all images of a task become one batch.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

LOWEST = np.finfo(np.float32).min
"""Stands behind the classes that a task has, where another has more."""

_SHOWN = 20
_LONGEST = 1000
"""Most characters of a message: a client's own words come back in it."""

Batches = dict[str, np.ndarray]
Run = Callable[[Batches], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Task:
    """What the model knows of a task.

    Attributes:
        classes: names in index order.
        shape: (channels, height, width) of its images.
        temperature: divisor of the logits before the softmax.
    """

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    temperature: float = 1.0
    labels: np.ndarray = field(init=False, compare=False)

    def __post_init__(self) -> None:
        names = [name.encode("utf-8", "surrogateescape") for name in self.classes]
        object.__setattr__(self, "labels", np.array(names, dtype=np.object_))


@dataclass
class Counts:
    """What a call was about.

    Attributes:
        images: by task, in requests that were answered.
        answered: requests with images of the task.
        failed: requests with images of the task that got an error.
        unknown: requests that named a task which the model does not have.
    """

    images: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    unknown: int = 0

    def add(self, names: Sequence[str], tasks: Mapping[str, "Task"], answered: bool) -> None:
        """Add a request by the task of each of its images."""
        images = Counter(name for name in names if name in tasks)
        (self.answered if answered else self.failed).update(images.keys())
        self.unknown += any(name not in tasks for name in names)
        if answered:
            self.images.update(images)


class Refused(Exception):
    """The request cannot be answered; the text says why and goes to the client."""


class _Rows:
    """The rows of a request: which task each is of, and its logits when they are there."""

    def __init__(self, request: Any, tasks: Mapping[str, Task], called: Mapping[str, str]) -> None:
        image, task = (called.get(name, name) for name in ("pixel_values", "task"))
        pixels = pb_utils.get_input_tensor_by_name(request, image).as_numpy()
        names = _names(request, called)
        if pixels.ndim != 4 or not len(pixels):
            raise Refused(f"`{image}` are {pixels.shape}; send (batch, channels, height, width), one image or more")
        if len(names) != len(pixels):
            raise Refused(f"`{task}` has {len(names)} names for {len(pixels)} images; give one for each")
        self.names = names
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
        if not np.isfinite(pixels).all():
            bad = int(np.flatnonzero(~np.isfinite(pixels.reshape(self.count, -1)).all(1))[0])
            raise Refused(f"image {bad + 1} of {self.count} holds NaN or infinite values; send normalised pixels")

    def answer(self, tasks: Mapping[str, Task], width: int, softmax: bool, called: Mapping[str, str]) -> Any:
        values = np.full((self.count, width), 0 if softmax else LOWEST, dtype=np.float32)
        label = np.empty((self.count, 1), dtype=np.object_)
        score = np.empty((self.count, 1), dtype=np.float32)
        for name, (at, found) in self.found.items():
            if not np.isfinite(found).all():
                bad = int(at[~np.isfinite(found).all(1)][0])
                raise Refused(
                    f"image {bad + 1} of {self.count}: its values are too large, its logits of {name!r} are not finite"
                )
            share = np.exp((found - found.max(1, keepdims=True)) / np.float32(tasks[name].temperature))
            share /= share.sum(1, keepdims=True)
            values[at, : found.shape[1]] = share if softmax else found
            label[at, 0] = tasks[name].labels[found.argmax(1)]
            score[at, 0] = share.max(1)
        tensors = {"probabilities" if softmax else "logits": values, "label": label, "score": score}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(called.get(name, name), value) for name, value in tensors.items()]
        )


def answer(
    requests: Sequence[Any], tasks: Mapping[str, Task], run: Run, *, softmax: bool = False,
    count: Callable[[Counts], None] | None = None, names: Mapping[str, str] = MappingProxyType({}),
) -> list[Any]:  # fmt: skip
    """Answer requests, each on its own where something is wrong with it.

    Args:
        requests: of the server.
        tasks: those that may be asked for now.
        run: maps a batch (n, channels, height, width) for each task to logits (n, classes). It may fail: then tasks are
            run one by one, of a task that fails the requests, and those that fail alone are told why.
        softmax: give probabilities in place of logits.
        count: is told what the call was about.
        names: of inputs and outputs that the config calls otherwise, by those of this file (`names_in`).

    Returns:
        A response for each request.
    """
    width = max((len(task.classes) for task in tasks.values()), default=1)
    rows: dict[int, _Rows] = {}
    answers: list[Any] = [None] * len(requests)
    for i, request in enumerate(requests):
        try:
            rows[i] = _Rows(request, tasks, names)
        except Exception as error:  # `Refused`, or what only a faulty client brings about
            answers[i] = failure(why(error))
    wrong = _run(rows, run)
    for i, entry in rows.items():
        try:
            answers[i] = failure(wrong[i]) if i in wrong else entry.answer(tasks, width, softmax, names)
        except Exception as error:
            answers[i] = failure(why(error))
            wrong[i] = why(error)
    if count is not None:
        counts = Counts()
        for i, request in enumerate(requests):
            counts.add(_named(rows.get(i), request, names), tasks, i in rows and i not in wrong)
        count(counts)
    return answers


def _names(request: Any, called: Mapping[str, str]) -> list[str]:
    """Return the task of each image."""
    given = pb_utils.get_input_tensor_by_name(request, called.get("task", "task"))
    return [text(name) for name in given.as_numpy().reshape(-1)]


def _named(entry: "_Rows | None", request: Any, called: Mapping[str, str]) -> list[str]:
    """Return the task of each image; of a request that could not be read none."""
    if entry is not None:
        return entry.names
    with contextlib.suppress(Exception):
        return _names(request, called)
    return []


def _run(rows: Mapping[int, _Rows], run: Run) -> dict[int, str]:
    """Run all rows and hand out the logits; return why requests failed, by their number."""
    parts: dict[str, list[int]] = {}
    for i, entry in rows.items():
        for name in entry.pixels:
            parts.setdefault(name, []).append(i)
    if not parts:
        return {}
    wrong: dict[int, str] = {}
    try:
        _hand_out(parts, rows, run)
    except Exception as error:  # whatever it was, other requests are not to suffer from it
        log(f"a call of {len(rows)} requests failed and is made again task by task: {why(error)}")
        for name, some_rows in parts.items():
            try:
                _hand_out({name: some_rows}, rows, run)
            except Exception:  # one of its requests may be the cause
                for i in some_rows:
                    try:
                        _hand_out({name: [i]}, rows, run)
                    except Exception as alone:
                        wrong[i] = f"task {name!r}: {why(alone)}"
    return wrong


def _hand_out(parts: Mapping[str, Sequence[int]], rows: Mapping[int, _Rows], run: Run) -> None:
    """Run the rows of requests by task, and give each request the logits of its own."""
    found = run({name: _join([rows[i].pixels[name][1] for i in part]) for name, part in parts.items()})
    for name, part in parts.items():
        start = 0
        for i in part:
            at = rows[i].pixels[name][0]
            rows[i].found[name] = (at, found[name][start : start + len(at)])
            start += len(at)


def failure(text: str) -> Any:
    """Return the response that tells a client what is wrong with its request."""
    text = plain(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …")
    code = getattr(pb_utils.TritonError, "INVALID_ARG", None)
    error = pb_utils.TritonError(text) if code is None else pb_utils.TritonError(text, code)
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


def log(text: str, level: str = "error") -> None:
    """Write a line into the server's log; what cannot be said stops nothing."""
    with contextlib.suppress(Exception):
        getattr(pb_utils.Logger, f"log_{level}")(plain(text))


def plain(text: str) -> str:
    """Return a text with escapes in place of what ends a C string, moves a terminal's cursor or is no UTF-8."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def why(error: BaseException) -> str:
    """Return one line about an error."""
    return " ".join(str(error).split()) or type(error).__name__


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of a model's config, which the server hands over as JSON."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


def names_in(told: Mapping[str, str]) -> dict[str, str]:
    """Return what a config calls inputs and outputs otherwise than these files, from its parameters."""
    return dict(json.loads(told.get("names", "{}")))


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts))


def text(name: Any) -> str:
    """Return a name that was sent."""
    return name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else str(name)


def some(names: list[str]) -> str:
    """Return names for a message, of very many the first."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more if names else "none"
