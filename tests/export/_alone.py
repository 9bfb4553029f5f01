"""Follow the pages of artefacts without vtk: `python -I _alone.py CASES.json ANSWERS.json`.

A case names a page, the folder that it lies in and images. Its code block is run there, and ``classify`` is called.
`tritonclient.http` is replaced by one that runs the model's ONNX file where a server would.
"""

import json
import os
import re
import sys
import types
from pathlib import Path

import numpy as np

OURS = ("vtk", "vtk_kernels", "vtk_export")


class Blocked:
    """A finder without this toolkit."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OURS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class Input:
    def __init__(self, name, shape, datatype):
        self.name, self.shape, self.datatype = name, shape, datatype

    def set_data_from_numpy(self, value):
        assert list(value.shape) == list(self.shape), (value.shape, self.shape)
        self.value = value


class Server:
    def __init__(self, url):
        assert url == "localhost:8000"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def infer(self, model, inputs, outputs):
        import onnxruntime

        (file,) = Path(".").glob("[0-9]*/model.onnx")
        assert model == Path(".").resolve().name
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        values = session.run(list(outputs), {entry.name: entry.value for entry in inputs})
        found = dict(zip(outputs, values, strict=True))
        return types.SimpleNamespace(as_numpy=found.get)


def stub_client():
    client = types.ModuleType("tritonclient.http")
    client.InferInput, client.InferRequestedOutput, client.InferenceServerClient = Input, str, Server
    package = types.ModuleType("tritonclient")
    package.http = client
    sys.modules |= {"tritonclient": package, "tritonclient.http": client}


def follow(case):
    (code,) = re.findall(r"```python\n(.*?)\n```", Path(case["page"]).read_text("utf-8"), re.DOTALL)
    os.chdir(case["folder"])
    space = {"__name__": "page"}
    exec(compile(code, case["page"], "exec"), space)
    answers = [space["classify"](image, *case.get("more", ())) for image in case["images"]]
    if "inputs" in case:
        answers += odd_inputs(space["session"], space["prepare"](case["images"][0]))
    return answers


def odd_inputs(session, images):
    """Return the outputs for one batch in several layouts, and which other inputs are answered."""
    (entry,) = session.get_inputs()
    name = entry.name
    batch = np.concatenate([images, images[..., ::-1], np.zeros_like(images), 1 - images])

    def run(value):
        return session.run(None, {name: value})[0]

    moved = np.ascontiguousarray(batch.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    layouts = {
        "contiguous": batch,
        "channels last": moved,
        "Fortran": np.asfortranarray(batch),
        "every second": np.repeat(batch, 2, 0)[::2],
        "reversed": batch[::-1][::-1],
        "turned": np.ascontiguousarray(batch.swapaxes(2, 3)).swapaxes(2, 3),
        "odd address": np.frombuffer(b"\0" + batch.tobytes(), np.uint8)[1:].view(batch.dtype).reshape(batch.shape),
    }
    found = {key: run(value).tolist() for key, value in layouts.items()}
    other = np.float64 if batch.dtype == np.float32 else np.float32
    height, width = batch.shape[2:]
    refused = {
        "type": batch.astype(other),
        "bytes": batch.astype(np.uint8),
        "channel": batch[:, :1],
        "axes": batch[0],
        "smaller": batch[..., : height - 8, : width - 8],
        "wider": np.concatenate([batch, batch], 3),
        "channels behind": np.ascontiguousarray(moved.transpose(0, 2, 3, 1)),
        "no pixels": batch[..., :0],
    }
    answered = []
    for key, value in refused.items():
        try:
            run(value)
            answered.append(key)
        except Exception:
            pass
    return [found, answered, list(run(batch[:0]).shape)]


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocked())
    stub_client()
    cases = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    out = Path(sys.argv[2]).resolve()
    answers = {name: follow(case) for name, case in cases.items()}
    for name in OURS:
        assert name not in sys.modules
    out.write_text(json.dumps(answers), "utf-8")
