"""Ask a Triton server what is on images: `python client.py photo.jpg --task pets --protocol grpc`.

Needs `pip install "tritonclient[http,grpc]" pillow numpy`, and the `vtk_*.py` and ``client.json`` beside it; the
latter says what the model takes. Tensors travel as bytes, not as JSON numbers.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.dont_write_bytecode = True  # a polling server would take a compiled file for a change of the model
from vtk_images import Unreadable, decode, decode_raw, prepare  # type: ignore[import-not-found]  # noqa: E402

TYPES = {
    "FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8, "INT8": np.int8, "UINT16": np.uint16, "INT16": np.int16,
    "UINT32": np.uint32, "INT32": np.int32, "FP64": np.float64, "BYTES": np.object_,
}  # fmt: skip


def load(path: Path, kind: str, spec: dict[str, Any]) -> np.ndarray:
    """Return what a model takes of a photograph, for a batch of one."""
    data = path.read_bytes()
    if kind == "encoded":
        return np.array([[data]], dtype=np.object_)
    return (decode_raw(data, spec) if kind == "images" else prepare(decode(data, spec), spec))[None]


def infer(url: str, protocol: str, about: dict[str, Any], images: np.ndarray, task: str) -> dict[str, np.ndarray]:
    """Send one request of a batch of images and return its outputs by the names of this file."""
    client = importlib.import_module(f"tritonclient.{protocol}")
    if about["datatype"] not in TYPES:
        raise SystemExit(f"the model takes {about['datatype']}, which numpy has not; export it with --keep-io-types")
    images, called = images.astype(TYPES[about["datatype"]]), about.get("names", {})
    inputs = [client.InferInput(called.get(about["input"], about["input"]), list(images.shape), about["datatype"])]
    values = [images]
    if about["has_task"]:
        numbers = about.get("task_numbers")
        inputs.append(client.InferInput(called.get("task", "task"), [len(images), 1], "INT32" if numbers else "BYTES"))
        name: Any = task.encode("utf-8", "surrogateescape")
        values.append(np.full((len(images), 1), *((numbers[task], np.int32) if numbers else (name, np.object_))))
    wanted = [client.InferRequestedOutput(called.get(name, name)) for name in about["outputs"]]
    for entry, value in zip(inputs, values, strict=True):
        entry.set_data_from_numpy(value)
    with client.InferenceServerClient(url) as server:
        try:
            result = server.infer(about["model"], inputs, outputs=wanted)
        except importlib.import_module("tritonclient.utils").InferenceServerException as error:
            raise SystemExit(text(f"{url}: {error}")) from error
        return {name: result.as_numpy(called.get(name, name)) for name in about["outputs"]}


def shares(found: dict[str, np.ndarray], count: int, *, several: bool = False, temperature: float = 1.0) -> np.ndarray:
    """Return the probabilities of a task's classes, (batch, classes); ``several``: an image may have any number."""
    if "probabilities" in found:
        return found["probabilities"][:, :count]
    logits = found["logits"][:, :count].astype(np.float64)
    if several:
        return np.asarray(1 / (1 + np.exp(-np.clip(logits, -700, 700))))
    share: np.ndarray = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
    return share / share.sum(1, keepdims=True)


def labels(row: np.ndarray, classes: list[str], *, several: bool = False) -> str:
    """Return the class of an image, or all that it has where it may have several, with their shares."""
    best = np.argsort(-row, kind="stable")
    chosen = [i for i in best if row[i] >= 0.5] if several else best[:1]
    return ", ".join(f"{classes[i]} ({100 * row[i]:.1f} %)" for i in chosen) or "none of the classes"


def text(value: str) -> str:
    """Return a line in which control characters are escapes: names and messages come from others."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)


def main() -> None:
    """Print the class of each image and its share."""
    about = json.loads(Path(__file__).with_name("client.json").read_text(encoding="utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="+", type=Path)
    parser.add_argument("--task", default=next(iter(about["tasks"])), choices=list(about["tasks"]), metavar="TASK")
    parser.add_argument("--protocol", default="http", choices=["http", "grpc"])
    parser.add_argument("--url", help="HOST:PORT, by default this machine's")
    args = parser.parse_args()
    url = args.url or ("localhost:8000" if args.protocol == "http" else "localhost:8001")
    task = about["tasks"][args.task]
    rows = []
    for path in args.images:
        try:
            rows.append(load(path, about["input"], task["input"]))
        except (OSError, Unreadable) as error:
            raise SystemExit(text(f"{path}: {error}")) from error
    # raw images of several sizes are no one tensor
    alike = len({row.shape for row in rows}) == 1
    batches = [np.concatenate(rows)] if alike else rows
    fixed = about["static_batch"]
    if fixed and any(len(batch) != fixed for batch in batches):
        raise SystemExit(f"the model takes {fixed} images of one size at once; give as many")
    try:
        found = [infer(url, args.protocol, about, batch, args.task) for batch in batches]
    except Exception as error:  # the client raises its own, those of its transport, and of HTTP OSError
        raise SystemExit(text(f"{url}: {' '.join(str(error).split()) or type(error).__name__}")) from error
    several = task.get("multi_label", False)
    heat = task.get("temperature", 1.0)
    table = np.concatenate([shares(each, len(task["classes"]), several=several, temperature=heat) for each in found])
    wrong = [str(path) for path, row in zip(args.images, table, strict=True) if not np.isfinite(row).all()]
    for path, row in zip(args.images, table, strict=True):
        if str(path) not in wrong:
            print(text(f"{path}: {labels(row, task['classes'], several=several)}"))
    if wrong:
        raise SystemExit(text(f"{', '.join(wrong)}: the model's answer is not a number, so there is no class"))


if __name__ == "__main__":
    main()
