"""Models in Python with OpenVINO inside, and with names of inputs and outputs that were given, in the real server."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from PIL import Image
from tritonclient.utils import InferenceServerException

from vtk_export.triton.config import TritonConfig
from vtk_export.triton.export import export_triton

pytestmark = pytest.mark.server

CLASSES = {"pets": 3, "cars": 5}
NAMES: dict[str, Any] = {"input_name": ("pixels", "task=what"), "output_name": ("scores", "label=kind")}
CLOSE = {"exact": 1e-4, "usual": 0.1, "named": 0.1}
"""Largest error of a row, relative to its largest logit: fp32, and whatever this processor multiplies best."""


@dataclass
class Running:
    """A server with OpenVINO's models, what clients send, and the answers that torch gives."""

    server: Any
    repo: Path
    images: np.ndarray
    logits: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def running(lab: Any, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("openvino")
    packs = {name: lab.pack(name, classes, 50 + i, "openvino") for i, (name, classes) in enumerate(CLASSES.items())}
    common: dict[str, Any] = {"out": root / "models", "backend": "python", "python_runtime": "openvino"}
    export_triton(packs, TritonConfig(name="exact", precision="fp32", instances=2, warmup=True, **common), show=False)
    export_triton(packs, TritonConfig(name="usual", server_threads=1, **common), show=False)
    export_triton(packs, TritonConfig(name="named", with_preproc=True, **NAMES, **common), show=False)
    export_triton(packs["pets"], TritonConfig(name="broken", **common), show=False)
    export_triton(packs["pets"], TritonConfig(out=root / "models", backend="openvino", name="native"), show=False)
    weights = root / "models" / "broken" / "1" / "0" / "model.bin"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    images = lab.images(12)
    logits = {name: lab.logits(path, images) for name, path in packs.items()}
    server = tools.Server(root / "models", root)
    try:
        for model in ("exact", "usual", "named"):
            server.wait(model)
        yield Running(server, root / "models", images.numpy(), logits)
    finally:
        server.stop()


def send(client: Any, model: str, images: np.ndarray, tasks: list[str], names: tuple[str, ...]) -> dict[str, Any]:
    module = grpc_client if isinstance(client, grpc_client.InferenceServerClient) else http_client
    values = {names[0]: images, names[1]: np.array([[task.encode()] for task in tasks], np.object_)}
    inputs = [module.InferInput(name, list(value.shape), "BYTES" if value.dtype == np.object_ else "FP32")
              for name, value in values.items()]  # fmt: skip
    for entry, value in zip(inputs, values.values(), strict=True):
        entry.set_data_from_numpy(value)
    found = client.infer(model, inputs)
    return {name: found.as_numpy(name) for name in names[2:]}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("model", ["exact", "usual"])
def test_openvino_in_the_server_gives_torch_s_logits_and_labels(running: Running, model: str, protocol: str) -> None:
    tasks = ["cars", "pets", "pets", "cars", "cars"]
    with running.server.client(protocol) as client:
        found = send(client, model, running.images[:5], tasks, ("pixel_values", "task", "logits", "label"))
    for i, task in enumerate(tasks):
        wanted = running.logits[task][i]
        error = np.abs(found["logits"][i, : len(wanted)] - wanted).max() / np.abs(wanted).max()
        assert error < CLOSE[model], (model, i, error)
        assert (found["logits"][i, len(wanted) :] == np.finfo(np.float32).min).all()
        if model == "exact":
            assert found["label"][i, 0].decode() == f'{task} "{wanted.argmax()}"\né'


def test_the_log_says_precision_and_threads_and_a_damaged_file_is_not_served(running: Running) -> None:
    log = running.server.log.read_text(errors="replace")
    assert log.count("products in fp32") >= 2  # once an instance
    assert "usual: OpenVINO" in log and "1 threads" in log
    assert "damaged: it is not the file that was exported" in log
    with running.server.client("grpc") as client:
        assert not client.is_model_ready("broken")


def test_the_server_reads_the_config_for_its_own_back_end_which_it_lacks_here(running: Running) -> None:
    with running.server.client("http") as client:
        index = {entry["name"]: entry for entry in client.get_model_repository_index()}
    assert "unable to find backend library for backend 'openvino'" in index["native"]["reason"], index["native"]


def test_one_client_s_nan_fails_alone_and_calls_of_any_size_agree(running: Running) -> None:
    ends = ("pixel_values", "task", "logits")
    with running.server.client("grpc") as client:
        bad = running.images[:1].copy()
        bad[0, 0, 0, 0] = np.nan
        with pytest.raises(InferenceServerException, match="NaN"):
            send(client, "exact", bad, ["pets"], ends)
        whole = send(client, "exact", running.images, ["pets"] * 12, ends)["logits"]
        alone = np.concatenate([send(client, "exact", running.images[i : i + 1], ["pets"], ends)["logits"]
                                for i in range(12)])  # fmt: skip
    assert np.abs(whole[:, :3] - alone[:, :3]).max() < 1e-4 * np.abs(alone[:, :3]).max()


def test_a_model_and_its_client_have_the_names_that_were_given(running: Running, tmp_path: Path) -> None:
    with running.server.client("http") as client:
        meta = client.get_model_metadata("named")
    assert {entry["name"] for entry in meta["inputs"]} == {"encoded", "pixels", "what"}
    assert {entry["name"] for entry in meta["outputs"]} == {"scores", "kind", "score"}
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    command = [sys.executable, str(running.repo / "named" / "client.py"), str(tmp_path / "a.png"), "--task", "cars",
               "--url", running.server.url["http"]]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'a.png'}: cars" in done.stdout
    raw = np.asarray(Image.open(tmp_path / "a.png"))[None]
    inputs = [
        http_client.InferInput("pixels", list(raw.shape), "UINT8"),
        http_client.InferInput("what", [1, 1], "BYTES"),
    ]
    inputs[0].set_data_from_numpy(raw)
    inputs[1].set_data_from_numpy(np.array([[b"cars"]], np.object_))
    with running.server.client("http") as client:
        kind = client.infer("named", inputs).as_numpy("kind")[0, 0].decode()
    assert kind.split("\n")[0] in done.stdout.replace("\\n", "\n")
