"""Models that take images, and options of the graph, in the real server: JPEG in, torch's logits out."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tritonclient.utils import InferenceServerException

from vtk.data.decoding.images import load_image
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.formats import write_json
from vtk.packs import load_task
from vtk.packs.cards import read_card
from vtk_export.tensorrt import scripts
from vtk_export.tensorrt.served import build_engine
from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton

pytestmark = pytest.mark.server

CLASSES = {"pets": 3, "cars": 7}
CLIENTS, REQUESTS = 8, 600
both = pytest.mark.parametrize("protocol", ["http", "grpc"])
models = pytest.mark.parametrize("model", ["v", "bank"])


def export(repo: Path, packs: dict[str, Path], backend: str, base: Path | None = None, **options: Any) -> Any:
    config = TritonConfig(out=repo, backend=backend, **options)  # type: ignore[arg-type]
    return export_triton(packs, config, show=False, measure=leave_latency, base=base)


def leave_latency(graph: Path, shown: Path, options: Any, source: Any) -> tuple[int, dict[str, Any]]:
    """Leave the files of a measurement, which takes longer than these tests have."""
    for name in ("latency.json", "latency.png"):
        graph.with_name(name).write_text("{}")
    return 0, {}


def photographs(folder: Path, count: int) -> list[Path]:
    """Write JPEG files of several sizes, one of them turned, and PNG files with transparent parts."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    paths = []
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 4), dtype=np.uint8), "RGBA")
        image = coarse.resize((int(rng.integers(30, 90)), int(rng.integers(30, 90))), Image.Resampling.BICUBIC)
        paths.append(folder / f"{i}.{'png' if i % 3 == 2 else 'jpg'}")
        exif = Image.Exif()
        exif[0x0112] = 6 if i == 0 else 1
        if i % 3 == 2:
            image.save(paths[-1])
        else:
            image.convert("RGB").save(paths[-1], exif=exif)
    return paths


def ask(client: Any, model: str, tensors: dict[str, np.ndarray], outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Send one request, and return its outputs."""
    import tritonclient.grpc as grpc_client
    import tritonclient.http as http_client

    module = grpc_client if isinstance(client, grpc_client.InferenceServerClient) else http_client
    kinds = {np.dtype("float32"): "FP32", np.dtype("uint8"): "UINT8", np.dtype("object"): "BYTES"}
    inputs = []
    for name, value in tensors.items():
        inputs.append(module.InferInput(name, list(value.shape), kinds[value.dtype]))
        inputs[-1].set_data_from_numpy(value)
    found = client.infer(model, inputs, outputs=[module.InferRequestedOutput(name) for name in outputs])
    return {name: found.as_numpy(name) for name in outputs}


def column(values: list[bytes]) -> np.ndarray:
    return np.array([[value] for value in values], dtype=np.object_)


def files(paths: list[Path], tasks: list[str]) -> dict[str, np.ndarray]:
    return {"encoded": column([path.read_bytes() for path in paths]), "task": column([t.encode() for t in tasks])}


@dataclass
class Running:
    """Two servers, one of which polls; packs, photographs, and torch's logits of them."""

    polling: Any
    fixed: Any
    packs: dict[str, Path]
    photos: list[Path]
    logits: dict[str, np.ndarray]
    calm: Callable[[torch.Tensor], np.ndarray]

    def of(self, model: str) -> Any:
        return self.fixed if model == "bank" else self.polling


def torch_logits(lab: Any, pack: Path, photos: list[Path]) -> np.ndarray:
    """Return what a pack's own model gives, with the toolkit's own preprocessing."""
    transform = eval_transform(read_card(pack).input)
    images = torch.stack([transform(load_image(path)) for path in photos])
    with torch.no_grad():
        logits: np.ndarray = load_task(pack, base=lab.weights).model(images).numpy()
    return logits


def made_up_engine(repo: Path, folder: Path) -> Path:
    """Make the folder of an engine of a published ONNX model: real shapes and stamp, no engine."""
    import onnx

    from vtk_export.targets import parse_target

    folder.mkdir()
    for name in ("model.onnx", "model.json"):
        (folder / name).write_bytes((repo / "plain_classifier" / "1" / name).read_bytes())
    (folder / scripts.ENGINE).write_bytes(b"no engine")
    proto = onnx.load(folder / "model.onnx")
    found = scripts.profile(proto, parse_target("trt:10.3"), (1, 8, 32), precision="fp32", tf32=True, workspace=64)
    write_json(folder / scripts.PROFILE, {**found, "onnx_sha256": build_engine.digest(folder / "model.onnx")})
    build_engine.stamp(folder, "10.3.0", {"gpu": "none", "compute_capability": "9.0"})
    return folder


@pytest.fixture(scope="module")
def once() -> Iterator[None]:
    """Let torch's exporter convert a model once, however many files are made of it; it takes seconds."""
    import copy

    import vtk_export.onnx.build

    plain, made = vtk_export.onnx.build.convert, {}

    def convert(model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        weights = sum(p.double().abs().sum().item() for p in model.parameters())
        key = repr((weights, args, options))
        if key not in made:
            made[key] = plain(model, *args, **options)
        return copy.deepcopy(made[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vtk_export.onnx.build, "convert", convert)
        yield


@pytest.fixture(scope="module")
def running(lab: Any, tools: Any, once: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("images")
    packs = {name: lab.pack(name, classes, 10 + i, "seen") for i, (name, classes) in enumerate(CLASSES.items())}
    photos = photographs(root / "photos", 9)
    one = {"pets": packs["pets"]}
    polling, fixed = root / "polling", root / "fixed"
    common = {"data": root / "photos", "max_batch_size": 16, "server_threads": 1}
    export(polling / "models", packs, "python", name="v", with_preproc=True, **common)
    export(fixed / "models", packs, "vtk", name="bank", with_preproc=True, **common)
    export(polling / "models", one, "python", name="soft", softmax=True, warmup=True)
    calm = tools.Lab(root / "calm", noise=0.05)  # whose attention is as soft as a trained one's
    calm_packs = {"pets": calm.pack("pets", 3, 20)}
    export(polling / "models", calm_packs, "python", name="eight", int8="dynamic", base=calm.weights, server_threads=1,
           profile=(1,), max_batch_size=1)  # fmt: skip
    export(polling / "models", one, "onnxruntime", name="plain", with_preproc=True, ensemble=True)
    export(polling / "models", one, "onnxruntime", name="graph", with_preproc=True, softmax=True, warmup=True)
    engine = made_up_engine(polling / "models", root / "engine")
    export(polling / "models", one, "tensorrt", name="plan", engine=engine, warmup=True)
    logits = {name: torch_logits(lab, path, photos) for name, path in packs.items()}
    servers = []
    try:
        servers = [tools.Server(polling / "models", polling), tools.Server(fixed / "models", fixed, polls=False)]
        found = Running(*servers, packs, photos, logits, lambda images: calm.logits(calm_packs["pets"], images))
        for model in ("v", "soft", "eight", "bank"):
            found.of(model).wait(model)
        yield found
    finally:
        for server in servers:
            server.stop()


def check(found: np.ndarray, wanted: list[np.ndarray]) -> None:
    for row, logits in zip(found, wanted, strict=True):
        np.testing.assert_allclose(row[: len(logits)], logits, atol=1e-4 * np.abs(logits).max())


@both
@models
def test_files_of_mixed_tasks_give_torch_s_logits(running: Running, model: str, protocol: str) -> None:
    tasks = [("cars", "pets")[i % 2] for i in range(len(running.photos))]
    with running.of(model).client(protocol) as client:
        found = ask(client, model, files(running.photos, tasks), ("logits", "label", "score"))
    wanted = [running.logits[task][i] for i, task in enumerate(tasks)]
    check(found["logits"], wanted)
    labels = [f'{task} "{row.argmax()}"\né'.encode() for task, row in zip(tasks, wanted, strict=True)]
    assert found["label"][:, 0].tolist() == labels


@models
def test_raw_images_of_any_size_give_torch_s_logits(running: Running, model: str) -> None:
    with running.of(model).client() as client:
        for i, path in enumerate(running.photos):
            raw = np.asarray(load_image(path))[None]
            found = ask(client, model, {"images": raw, "task": column([b"cars"])}, ("logits",))
            check(found["logits"], [running.logits["cars"][i]])


@models
def test_a_broken_file_is_told_so_while_others_go_on(running: Running, model: str) -> None:
    load = Load(running, model)
    whole = running.photos[1].read_bytes()
    task = column([b"pets"])
    wrong = {
        "cut": {"encoded": column([whole[: len(whole) // 2]]), "task": task},
        "second": {"encoded": column([whole, b"no image"]), "task": column([b"pets"] * 2)},
        "empty": {"encoded": column([b""]), "task": task},
        "both": {"encoded": column([whole]), "images": np.zeros((1, 9, 9, 3), np.uint8), "task": task},
        "neither": {"task": task},
        "task": {"encoded": column([whole]), "task": column([b"birds"])},
        "many": {"encoded": column([whole] * 17), "task": column([b"pets"] * 17)},
    }
    said = {}

    def complain() -> None:
        with running.of(model).client() as client:
            for name, tensors in wrong.items():
                with pytest.raises(InferenceServerException) as caught:
                    ask(client, model, tensors, ("logits",))
                said[name] = str(caught.value)

    load.run(complain)
    assert load.failed == [] and load.wrong == []
    assert "image 1 of 1" in said["cut"] and "image 2 of 2: not an image" in said["second"]
    assert "either `encoded`" in said["both"] and "either `encoded`" in said["neither"] and "'birds'" in said["task"]


def test_shares_sum_to_one(running: Running, lab: Any) -> None:
    images, tasks = lab.images(6), ["pets"] * 6
    with running.polling.client() as client:
        meta = client.get_model_metadata("soft", as_json=True)
        tensors = {"pixel_values": images.numpy(), "task": column([task.encode() for task in tasks])}
        found = ask(client, "soft", tensors, ("probabilities", "score"))
    assert [entry["name"] for entry in meta["outputs"]] == ["probabilities", "label", "score"]
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, atol=1e-5)
    np.testing.assert_allclose(found["probabilities"].max(1), found["score"][:, 0], atol=1e-6)
    wanted = torch.from_numpy(lab.logits(running.packs["pets"], images)).softmax(1)
    np.testing.assert_allclose(found["probabilities"], wanted, atol=1e-4)


def test_int8_agrees_with_torch(running: Running, lab: Any) -> None:
    images = lab.images(64, seed=4)
    wanted = running.calm(images)
    assert (running.polling.repo / "eight" / "1" / "latency.json").exists(), "a server takes no notice of such files"
    rows = []
    with running.polling.client() as client:
        for image in images:  # whose ranges are found at every call: one image a call
            tensors = {"pixel_values": image[None].numpy(), "task": column([b"pets"])}
            rows.append(ask(client, "eight", tensors, ("logits",))["logits"])
    found = np.concatenate(rows)
    assert np.abs(found - wanted).max() > 1e-5 * np.abs(wanted).max(), "these are the logits of fp32"
    agreed = (found.argmax(1) == wanted.argmax(1)).mean()
    print(f"int8 in the server: {100 * agreed:.1f} % of 64 images with torch's class")
    assert agreed >= 0.9


def test_configs_of_other_back_ends_are_understood(running: Running) -> None:
    with running.polling.client("http") as client:
        index = {entry["name"]: entry.get("reason", "") for entry in client.get_model_repository_index()}
    for name, missing in (("plain_classifier", "onnxruntime"), ("graph", "onnxruntime"), ("plan", "tensorrt")):
        assert f"unable to find backend library for backend '{missing}'" in index[name], index[name]
    # the ensemble lacks nothing but its step
    log = running.polling.log.read_text(errors="replace")
    assert "ensemble 'plain' depends on 'plain_classifier' which has no loaded version" in log


@both
def test_the_client_sends_the_file(running: Running, protocol: str) -> None:
    best = int(running.logits["cars"][0].argmax())
    client = running.fixed.repo / "bank" / "client.py"
    told = subprocess.run(
        [sys.executable, client, running.photos[0], running.photos[2], "--task", "cars", "--protocol", protocol,
         "--url", running.fixed.url[protocol]],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f'0.jpg: cars "{best}"\\né' in told.stdout and "2.png: cars" in told.stdout
    assert not list(client.parent.glob("__pycache__"))


def test_an_ensemble_exported_again_fails_no_request(running: Running, lab: Any) -> None:
    dogs = lab.pack("dogs", 5, seed=88, folder="seen-further")
    further = {"pets": lab.pack("pets", 3, seed=87, folder="seen-further"), "cars": running.packs["cars"], "dogs": dogs}
    new = torch_logits(lab, further["pets"], running.photos)
    assert np.abs(new - running.logits["pets"]).max() > 0.1 * np.abs(new).max()
    load = Load(running, "v", {"pets": [running.logits["pets"], new]})

    def publish() -> None:
        result = export(running.polling.repo, further, "python", name="v", with_preproc=True, max_batch_size=16,
                        server_threads=1)  # fmt: skip
        assert result.models[0].version == 2
        assert result.models[0].steps == {"v_preprocess": 2, "v_classifier": 2}
        running.polling.wait("v", 2)

    load.run(publish, REQUESTS)
    print(f"{load.done} requests of {CLIENTS} clients, {len(load.failed)} failed, {len(load.wrong)} wrong rows")
    assert load.failed == [] and load.wrong == []
    with running.polling.client() as client:
        found = ask(client, "v", files(running.photos[:2], ["pets", "dogs"]), ("logits",))
    check(found["logits"], [new[0], torch_logits(lab, further["dogs"], running.photos)[1]])


def test_a_pack_comes_to_an_ensemble_while_it_serves(running: Running, lab: Any) -> None:
    more = {**running.packs, "birds": lab.pack("birds", 4, seed=89, folder="seen-further")}
    wanted = torch_logits(lab, more["birds"], running.photos)
    load = Load(running, "bank")

    def add() -> None:
        result = export(running.fixed.repo, more, "vtk", name="bank", with_preproc=True, max_batch_size=16,
                        server_threads=1, data=running.photos[0].parent)  # fmt: skip
        assert result.models[0].updated and result.models[0].steps == {"bank_preprocess": 1, "bank_classifier": 1}
        limit, said = time.monotonic() + 120, ""
        with running.fixed.client() as client:
            while time.monotonic() < limit:
                try:
                    found = ask(client, "bank", files(running.photos, ["birds"] * len(running.photos)), ("logits",))
                    return check(found["logits"], list(wanted))
                except InferenceServerException as error:
                    said = str(error)
                    time.sleep(0.2)
        pytest.fail(f"{said}\n{running.fixed.tail()}")

    load.run(add)
    assert load.failed == [] and load.wrong == []


class Load:
    """Clients that send files of random tasks, one request after the other, and check every row.

    Attributes:
        done: requests that were answered.
        failed: what was not answered.
        wrong: answers that none of the known models gives.
    """

    def __init__(self, running: Running, model: str, known: dict[str, list[np.ndarray]] | None = None) -> None:
        self.running, self.model = running, model
        self.known = {name: [logits] for name, logits in running.logits.items()} | (known or {})
        self.done, self.failed, self.wrong = 0, [], []  # type: tuple[int, list[str], list[str]]
        self.stop = threading.Event()

    def run(self, meanwhile: Callable[[], object], least: int = 0) -> None:
        """Send while ``meanwhile`` works, and on until ``least`` requests and some more after it were answered."""
        with self.running.of(self.model).client() as client:
            threads = [threading.Thread(target=self._send, args=(client, seed)) for seed in range(CLIENTS)]
            for thread in threads:
                thread.start()
            try:
                meanwhile()
                least = max(least, self.done + 2 * CLIENTS)
                while self.done < least and not self.failed and not self.wrong:
                    time.sleep(0.1)
            finally:
                self.stop.set()
                for thread in threads:
                    thread.join()

    def _send(self, client: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        photos, names = self.running.photos, list(self.known)
        while not self.stop.is_set():
            at = rng.integers(0, len(photos), rng.integers(1, 3))
            tasks = [names[i] for i in rng.integers(0, len(names), len(at))]
            try:
                found = ask(client, self.model, files([photos[i] for i in at], tasks), ("logits",))["logits"]
            except InferenceServerException as error:
                self.failed.append(str(error))
                continue
            self.done += 1
            for row, task, image in zip(found, tasks, at, strict=True):
                wanted = [logits[image] for logits in self.known[task]]
                if min(np.abs(row[: len(w)] - w).max() / np.abs(w).max() for w in wanted) > 1e-4:
                    self.wrong.append(f"{task} {image}: {row.tolist()}")
