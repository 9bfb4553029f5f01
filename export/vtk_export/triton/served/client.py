"""Ask a Triton server what is on images: `python client.py photo.jpg --task pets --protocol grpc`.

Needs `pip install "tritonclient[http,grpc]" pillow numpy`. ``client.json`` beside it says what the model takes.
Tensors travel as bytes, not as JSON numbers.
"""

import argparse
import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR,
           "nearest": Image.Resampling.NEAREST}  # fmt: skip


def preprocess(path: Path, spec: dict[str, Any]) -> np.ndarray:
    """Turn a photograph upright, resize, crop or pad, and normalise it: fp32 (channels, height, width)."""
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    high, wide, mode = spec["height"], spec["width"], spec["resize_mode"]
    if mode == "crop":
        target = (math.floor(high / spec["crop_pct"]), math.floor(wide / spec["crop_pct"]))
        scale = max(target[0] / image.height, target[1] / image.width)
        size = [round(image.height * scale), round(image.width * scale)]
        if high == wide:  # of a square crop the longer side is cut off to whole pixels, not rounded
            longer = target[0] * max(image.size) // min(image.size)
            size = [target[0], longer] if image.height <= image.width else [longer, target[0]]
    elif mode == "squash":
        size = [high, wide]
    else:
        scale = min(high / image.height, wide / image.width)
        size = [max(round(image.height * scale), 1), max(round(image.width * scale), 1)]
    image = image.resize((size[1], size[0]), FILTERS[spec["interpolation"]])
    if mode == "pad":
        mean = (spec["mean"] * 3)[:3]
        padded = Image.new("RGB", (wide, high), tuple(round(255 * value) for value in mean))
        padded.paste(image, ((wide - size[1]) // 2, (high - size[0]) // 2))
        image = padded
    else:
        top, left = round((size[0] - high) / 2), round((size[1] - wide) / 2)
        image = image.crop((left, top, left + wide, top + high))
    pixels = np.asarray(image.convert("L") if spec["in_chans"] == 1 else image, dtype=np.float32) / 255
    pixels = (pixels.reshape(high, wide, -1) - np.float32(spec["mean"])) / np.float32(spec["std"])
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)


def infer(url: str, protocol: str, about: dict[str, Any], images: np.ndarray, task: str) -> dict[str, np.ndarray]:
    """Send one request of (B, channels, height, width) images and return its outputs by name."""
    client = importlib.import_module(f"tritonclient.{protocol}")
    to_numpy = {"FP32": np.float32, "FP16": np.float16}
    if about["datatype"] not in to_numpy:
        raise SystemExit(f"the model takes {about['datatype']}, which numpy has not; export it with --keep-io-types")
    images = images.astype(to_numpy[about["datatype"]])
    inputs = [client.InferInput("pixel_values", list(images.shape), about["datatype"])]
    values = [images]
    if about["has_task"]:
        inputs.append(client.InferInput("task", [len(images), 1], "BYTES"))
        values.append(np.full((len(images), 1), task.encode("utf-8", "surrogateescape"), dtype=np.object_))
    wanted = [client.InferRequestedOutput(name) for name in about["outputs"]]
    for entry, value in zip(inputs, values, strict=True):
        entry.set_data_from_numpy(value)
    with client.InferenceServerClient(url) as server:
        result = server.infer(about["model"], inputs, outputs=wanted)
        return {name: result.as_numpy(name) for name in about["outputs"]}


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
    batch = np.stack([preprocess(path, task["input"]) for path in args.images])
    fixed = about["static_batch"]
    if fixed and len(batch) != fixed:
        raise SystemExit(f"the model takes {fixed} images at once, not {len(batch)}")
    found = infer(url, args.protocol, about, batch, args.task)
    logits = found["logits"][:, : len(task["classes"])].astype(np.float64)
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    for path, row in zip(args.images, shares, strict=True):
        print(f"{path}: {task['classes'][int(row.argmax())]} ({100 * row.max():.1f} %)")


if __name__ == "__main__":
    main()
