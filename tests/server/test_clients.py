"""Honest clients beside one that sends NaN, wrong shapes, wrong types and broken files, in the real server.

``VTK_HONEST=500`` asks for fewer honest requests of each model.
"""

import copy
import io
import json
import os
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc
from google.protobuf import text_format
from PIL import Image
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import InferenceServerException

from vtk.data.decoding.images import load_image
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.packs.load import read_card
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton

pytestmark = pytest.mark.server

CLASSES = {"pets": 3, "cars": 7}
CLIENTS, BATCH, IMAGES = 8, 8, 48
HONEST = int(os.environ.get("VTK_HONEST", "5000"))
LEAST_MEAN = 3
TYPES = {"float32": "FP32", "float16": "FP16", "float64": "FP64", "uint8": "UINT8", "int32": "INT32", "object": "BYTES"}


@dataclass
class Running:
    """A server with the three models in Python, what honest clients send, and the answers that torch gives."""

    server: Any
    images: np.ndarray
    files: list[bytes]
    logits: dict[str, np.ndarray]
    of_files: dict[str, np.ndarray]


def write_files(folder: Path) -> list[Path]:
    folder.mkdir()
    rng = np.random.default_rng(7)
    paths = []
    for i in range(IMAGES):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        image = coarse.resize((int(rng.integers(30, 70)), int(rng.integers(30, 70))), Image.Resampling.BICUBIC)
        paths.append(folder / f"{i:02d}.{'png' if i % 2 else 'jpg'}")
        image.save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def running(lab: Any, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("clients")
    packs = {name: lab.pack(name, classes, 30 + i, "clients") for i, (name, classes) in enumerate(CLASSES.items())}
    wider = copy.copy(lab)
    wider.size = 40
    served = {**packs, "food": wider.pack("food", 2, 33, "clients")}  # so that the server itself takes any size
    # calls wait for as many images as they take: that is what brings clients together
    common: dict[str, Any] = {"max_batch_size": BATCH, "max_queue_delay_us": 30_000, "server_threads": 1}
    for name, backend, more in (("many", "python", {}), ("bank", "vtk", {}), ("v", "python", {"with_preproc": True})):
        config = TritonConfig(out=root / "models", backend=backend, name=name, **common, **more)  # type: ignore[arg-type]
        export_triton(served, config, show=False)
    step = root / "models" / "v_preprocess" / "config.pbtxt"  # which by itself joins only what waits for it
    found = text_format.Parse(step.read_text(), ModelConfig())
    found.dynamic_batching.max_queue_delay_microseconds = 30_000
    step.write_text(text_format.MessageToString(found))
    paths = write_files(root / "files")
    images = lab.images(IMAGES)
    logits = {name: lab.logits(path, images) for name, path in packs.items()}
    of_files = {}
    for name, path in packs.items():
        transform = eval_transform(read_card(path).input)
        of_files[name] = lab.logits(path, torch.stack([transform(load_image(p)) for p in paths]))
    server = tools.Server(root / "models", root, polls=False)
    try:
        made = Running(server, images.numpy(), [p.read_bytes() for p in paths], logits, of_files)
        for model in ("many", "bank", "v"):
            server.wait(model)
        yield made
    finally:
        server.stop()


def ask(client: Any, model: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    inputs = []
    for name, value in tensors.items():
        inputs.append(grpc.InferInput(name, list(value.shape), TYPES[value.dtype.name]))
        inputs[-1].set_data_from_numpy(value)
    found = client.infer(model, inputs, client_timeout=60)
    return {name: found.as_numpy(name) for name in ("logits", "label", "score")}


def names(*tasks: bytes) -> np.ndarray:
    return np.array([[task] for task in tasks], dtype=np.object_)


def bomb() -> bytes:
    """A PNG of a few bytes that says that it is of 40,000 × 40,000 pixels."""
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "PNG")
    data = bytearray(file.getvalue())
    data[16:24] = (40_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def faulty(running: Running, model: str) -> dict[str, dict[str, np.ndarray]]:
    """Return what a faulty client sends: nothing of it may be answered with a label."""
    one, task = running.images[:1], names(b"pets")
    words = {
        "unknown task": names(b"birds"), "no UTF-8": names(b"\xff\xfe"), "long name": names(b"x" * 100_000),
        "no name": names(b""), "too many names": names(b"pets", b"cars"), "size": names(b"food"),
    }  # fmt: skip
    if model == "v":
        whole = running.files[0]
        wrong = {
            "cut": {"encoded": names(whole[: len(whole) // 2])}, "no image": {"encoded": names(b"no image")},
            "empty file": {"encoded": names(b"")}, "bomb": {"encoded": names(bomb())},
            "no pixels": {"images": np.zeros((1, 0, 9, 3), np.uint8)},
            "channels": {"images": np.zeros((1, 9, 9, 4), np.uint8)},
            "floats": {"images": np.full((1, 9, 9, 3), np.nan, np.float32)},
            "two sizes": {"encoded": names(whole, whole), "task": names(b"pets", b"food")},
            "second": {"encoded": names(whole, b"?"), "task": names(b"pets", b"pets")},
            "both": {"encoded": names(whole), "images": np.zeros((1, 9, 9, 3), np.uint8)}, "neither": {},
            "too many": {"encoded": names(*[whole] * (BATCH + 1)), "task": names(*[b"pets"] * (BATCH + 1))},
        }  # fmt: skip
        right = {"encoded": names(whole)}
    else:
        spot, huge = one.copy(), np.full_like(one, 3e38)
        spot[0, 2, 30, 31] = np.nan
        two = np.concatenate([one, np.full_like(one, -np.inf)])
        wrong = {
            "NaN": {"pixel_values": np.full_like(one, np.nan)}, "one NaN": {"pixel_values": spot},
            "infinite": {"pixel_values": two, "task": names(b"pets", b"pets")}, "too large": {"pixel_values": huge},
            "height": {"pixel_values": one[:, :, :16]}, "channels": {"pixel_values": one[:, :1]},
            "no batch": {"pixel_values": one[0]}, "no pixels": {"pixel_values": one[:, :, :0]},
            "fp16": {"pixel_values": one.astype(np.float16)}, "fp64": {"pixel_values": one.astype(np.float64)},
            "bytes": {"pixel_values": one.astype(np.uint8)}, "neither": {},
            "too many": {"pixel_values": running.images[: BATCH + 1], "task": names(*[b"pets"] * (BATCH + 1))},
        }  # fmt: skip
        right = {"pixel_values": one}
    if model == "v":
        del words["size"]  # images are brought to it
    return {what: {"task": task, **tensors} for what, tensors in wrong.items()} | {
        what: {**right, "task": value} for what, value in words.items()
    }


@dataclass
class Crowd:
    """Honest clients and a faulty one, all at once, until the honest ones have had their answers."""

    running: Running
    model: str
    least: int
    done: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    told: Counter[str] = field(default_factory=Counter)
    answered: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        self.sends = faulty(self.running, self.model)
        threads = [threading.Thread(target=self._honest, args=(seed,)) for seed in range(CLIENTS)]
        bad = threading.Thread(target=self._faulty)
        for thread in (*threads, bad):
            thread.start()
        for thread in (*threads, bad):
            thread.join()

    def _take(self) -> bool:
        with self.turn:
            self.done += 1
            return self.done <= self.least

    def _honest(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        tasks = list(CLASSES)
        files, images = self.running.files, self.running.images
        known = self.running.of_files if self.model == "v" else self.running.logits
        with self.running.server.client() as client:
            while self._take():
                at = rng.integers(0, IMAGES, rng.integers(1, 3))
                mine = [tasks[i] for i in rng.integers(0, len(tasks), len(at))]
                ours = {"pixel_values": images[at]}
                sent = {"encoded": names(*(files[i] for i in at))} if self.model == "v" else ours
                try:
                    found = ask(client, self.model, {**sent, "task": names(*(task.encode() for task in mine))})
                except InferenceServerException as error:
                    self.failed.append(str(error))
                    continue
                for row, label, score, task, i in zip(*found.values(), mine, at, strict=True):
                    want = known[task][i]
                    share = np.exp(want.astype(np.float64) - want.max())
                    right = np.abs(row[: len(want)] - want).max() <= 1e-4 * np.abs(want).max()
                    right &= label[0].decode() == f'{task} "{want.argmax()}"\né'
                    if not right or abs(score[0] - share.max() / share.sum()) > 1e-3:
                        self.wrong.append(f"{task} {i}: {label} {score} {row.tolist()}")

    def _faulty(self) -> None:
        with self.running.server.client() as client:
            while True:
                for what, tensors in self.sends.items():
                    if self.done > self.least and len(self.told) == len(self.sends):
                        return
                    try:
                        ask(client, self.model, tensors)
                        self.answered.append(what)
                    except InferenceServerException as error:
                        self.said[what] = str(error)
                    self.told[what] += 1


@pytest.mark.parametrize("model", ["many", "bank", "v"])
def test_a_faulty_client_touches_no_other_clients_answers(running: Running, model: str) -> None:
    inner = ["v_preprocess", "v_classifier"] if model == "v" else [model]
    with running.server.client() as client:
        before = {name: calls_and_rows(client, name) for name in inner}
        crowd, start = Crowd(running, model, HONEST), time.perf_counter()
        crowd.run()
        seconds = time.perf_counter() - start
        after = {name: calls_and_rows(client, name) for name in inner}
    mean = {}
    for name in inner:
        calls, rows = (b - a for a, b in zip(before[name], after[name], strict=True))
        mean[name] = round(rows / calls, 2)
    told = {"honest requests": HONEST, "failed": len(crowd.failed), "wrong": len(crowd.wrong), "mean batch": mean,
            "faulty requests": sum(crowd.told.values()), "seconds": round(seconds, 1)}  # fmt: skip
    print(f"{model}, {CLIENTS} honest clients beside a faulty one: {json.dumps(told)}")
    assert crowd.failed == [] and crowd.wrong == []
    assert crowd.answered == [], "a faulty request was answered as if it were right"
    assert min(mean.values()) >= LEAST_MEAN, "the server joined hardly any requests, so this shows little"
    if model == "v":
        assert "image 2 of 2" in crowd.said["second"] and "64,000,000" in crowd.said["bomb"]
    else:
        assert "image 1 of 1 holds NaN" in crowd.said["NaN"] and "image 1 of 1 holds NaN" in crowd.said["one NaN"]
        assert "image 2 of 2 holds NaN or infinite" in crowd.said["infinite"]
        assert "not finite" in crowd.said["too large"] and "(3, 32, 32)" in crowd.said["height"]
    assert len(crowd.said["long name"]) < 2000 and "'birds'" in crowd.said["unknown task"]


def calls_and_rows(client: Any, model: str) -> tuple[int, int]:
    (found,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return int(found.get("execution_count", 0)), int(found.get("inference_count", 0))


def test_an_image_is_answered_alike_alone_and_in_any_company(running: Running) -> None:
    """To the last bit or a rounding of another kernel, whoever shares the call."""
    ask_for: Callable[[Any, np.ndarray, list[bytes]], dict[str, np.ndarray]] = lambda client, x, tasks: ask(  # noqa: E731
        client, "bank", {"pixel_values": x, "task": names(*tasks)}
    )
    extreme = np.stack([np.zeros_like(running.images[0]), 1e4 * running.images[1], np.full_like(running.images[0], -9)])
    with running.server.client() as client:
        for image in running.images[:4]:
            alone = ask_for(client, image[None], [b"pets"])["logits"][0, :3]
            for task in (b"pets", b"cars"):
                found = ask_for(client, np.concatenate([extreme, image[None]]), [task] * 3 + [b"pets"])["logits"][3, :3]
                assert np.abs(found - alone).max() <= 1e-5 * np.abs(alone).max()
