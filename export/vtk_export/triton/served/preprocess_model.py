"""Triton model that makes a classifier's `pixel_values` of images; the first step of an ensemble.

Needs numpy and Pillow, and the `vtk_*.py` beside it. A request has `encoded` (b, 1), whole files of JPEG, PNG or
another format, or `images` (b, height, width, 3), RGB of any size, as bytes or in the type of the tasks' value range;
and where the classifier has tasks the `task` (b, 1) of each. ``tasks.json`` says what each task's model takes; it is
read again when it was replaced (`vtk_index`).
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from vtk_images import Unreadable, decode, from_array, prepare  # type: ignore[import-not-found]
from vtk_index import Index  # type: ignore[import-not-found]
from vtk_rows import Refused, failure, parameters, some, text, why  # type: ignore[import-not-found]

MOST_THREADS = 16
_KEYS = ("height", "width", "in_chans", "mean", "std", "interpolation", "crop_pct", "resize_mode")
Spec = dict[str, Any]


class TritonPythonModel:
    """What the server calls."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read what the tasks take, and start the threads that prepare the images of a call."""
        here = Path(args["model_repository"], args["model_version"]).absolute()
        told = parameters(json.loads(args["model_config"]))
        self.type = np.float16 if told.get("pixel_type") == "TYPE_FP16" else np.float32
        # Pillow lets go of Python's lock while it decodes and resizes
        threads = int(told.get("threads", 0)) or min(os.cpu_count() or 1, MOST_THREADS)
        self.pool = ThreadPoolExecutor(threads, "vtk-images")
        self.index = Index(here / "tasks.json", args)
        self.specs: dict[str, Spec] = {}
        self._follow()
        if not self.specs:
            raise pb_utils.TritonModelException("; ".join(self.index.wrong))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests, each on its own where something is wrong with it."""
        self._follow()
        started: list[list[Future[np.ndarray]] | str] = []
        for request in requests:
            try:
                started.append(self._start(request))
            except Exception as error:  # `Refused`, or what only a faulty client brings about
                started.append(why(error))
        return [failure(each) if isinstance(each, str) else _collect(each) for each in started]

    def finalize(self) -> None:
        """Let the threads end."""
        self.pool.shutdown()

    def _start(self, request: Any) -> list["Future[np.ndarray]"]:
        sent = [pb_utils.get_input_tensor_by_name(request, name) for name in ("encoded", "images")]
        if sum(tensor is not None for tensor in sent) != 1:
            raise Refused("give either `encoded`, files such as JPEG, or `images` (batch, height, width, 3)")
        rows = next(tensor for tensor in sent if tensor is not None).as_numpy()
        rows = rows.reshape(-1) if sent[0] is not None else rows
        specs = self._specs(pb_utils.get_input_tensor_by_name(request, "task"), len(rows))
        shapes = {(spec["in_chans"], spec["height"], spec["width"]) for spec in specs}
        if len(shapes) > 1:
            raise Refused(f"tasks of {len(shapes)} image sizes cannot be in one request; send one for each size")
        return [self.pool.submit(self._prepare, row, spec) for row, spec in zip(rows, specs, strict=True)]

    def _specs(self, names: Any, count: int) -> list[Spec]:
        if names is None:
            return [next(iter(self.specs.values()))] * count
        wanted = [text(name) for name in names.as_numpy().reshape(-1)]
        if len(wanted) != count:
            raise Refused(f"`task` has {len(wanted)} names for {count} images; give one for each")
        for name in wanted:
            if name not in self.specs:
                raise Refused(f"unknown task {name!r}; this model has {some(list(self.specs))}")
        return [self.specs[name] for name in wanted]

    def _prepare(self, row: Any, spec: Spec) -> np.ndarray:
        image = decode(row, spec) if isinstance(row, bytes) else from_array(row, spec)
        return prepare(image, spec).astype(self.type, copy=False)

    def _follow(self) -> None:
        """Read the index if it is another one; one that cannot be read leaves things as they are."""
        if not self.index.due():
            return
        wrong = []
        try:
            found = self.index.read()
            if lacking := [f"task {name!r}: it has no `{key}`" for name, spec in found.items() for key in _KEYS
                           if key not in spec]:  # fmt: skip
                raise ValueError(lacking[0])
            self.specs = found
        except Exception as error:
            wrong.append(f"{self.index.path} cannot be read ({why(error)})")
        self.index.done(len(self.specs), wrong)


def _collect(rows: list["Future[np.ndarray]"]) -> Any:
    made = []
    for i, row in enumerate(rows):
        try:
            made.append(row.result())
        except Unreadable as error:
            return failure(f"image {i + 1} of {len(rows)}: {error}")
        except Exception as error:  # whatever it was, other requests are not to suffer from it
            return failure(f"image {i + 1} of {len(rows)}: {why(error)}")
    return pb_utils.InferenceResponse([pb_utils.Tensor("pixel_values", np.stack(made))])
