"""Repositories that version 0.1 wrote still serve: their own files, run with the server's module replaced."""

import importlib.util
import json
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.export._fake_server import Response, Tensor
from vtk.__main__ import main
from vtk.card import Card
from vtk.data.decoding.images import load_image
from vtk.data.loading.eval_pipeline import eval_transform

MADE = Path(__file__).resolve().parents[2] / "fixtures" / "v0_1"
RECORDED = json.loads((MADE / "logits.json").read_text())
LOGITS = {name: np.array(RECORDED["logits"][f"runs/{name}"], np.float32) for name in ("digits", "parity")}
LABELS = {"digits": (b"one", b"two", b"zero"), "parity": (b"even", b"odd")}
TOLERANCE = 1e-5


def pixels(card: Path) -> np.ndarray:
    transform = eval_transform(Card.from_json(card.read_text(), card).input)
    return torch.stack([transform(load_image(MADE / name)) for name in RECORDED["images"]]).numpy()


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    return shutil.copytree(MADE / "repositories", tmp_path / "repositories")


Start = Callable[[Path], Any]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Return what starts the `model.py` in a model's folder as a server does, and stops it at the end."""
    utils = types.ModuleType("triton_python_backend_utils")
    vars(utils).update(
        Tensor=Tensor, InferenceResponse=Response, TritonError=RuntimeError, TritonModelException=RuntimeError,
        Logger=types.SimpleNamespace(log_error=pytest.fail, log_warn=pytest.fail),
        get_input_tensor_by_name=lambda request, name: request.get(name),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", utils)
    monkeypatch.setenv("VTK_PREPACKED", str(tmp_path / "packed"))
    models = []

    def begin(folder: Path) -> Any:
        monkeypatch.syspath_prepend(str(folder / "1"))
        for name in ("vtk_rows", "vtk_prepack"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        spec = importlib.util.spec_from_file_location("served_model", folder / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.TritonPythonModel()
        told = {"model_repository": str(folder), "model_version": "1", "model_name": folder.name,
                "model_config": json.dumps({"parameters": {}}), "model_instance_kind": "CPU"}  # fmt: skip
        model.initialize(told)
        models.append(model)
        return model

    yield begin
    for model in models:
        model.finalize()
    for name in ("vtk_rows", "vtk_prepack"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("model", ["python/many", "vtk/bank"])
def test_a_model_of_two_tasks_gives_the_logits_it_gave(repositories: Path, start: Start, model: str) -> None:
    packs = repositories / "vtk" / "bank" / "1" / "packs"
    served = start(repositories / model)
    for name, wanted in LOGITS.items():
        images = pixels(packs / name / "task.json")
        names = np.array([[name.encode()]] * len(images), dtype=np.object_)
        request = {"pixel_values": Tensor("pixel_values", images), "task": Tensor("task", names)}
        found = served.execute([request])[0]
        assert found.error is None
        np.testing.assert_allclose(found.found["logits"][:, : wanted.shape[1]], wanted, atol=TOLERANCE, rtol=0)
        assert found.found["label"][:, 0].tolist() == [LABELS[name][i] for i in wanted.argmax(1)]


def test_a_bank_of_then_is_told_the_new_name(repositories: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "vtk.serving" or name.startswith("vtk.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(FutureWarning, match="vtk.serving is now vtk.bank") as caught:
        start(repositories / "vtk" / "bank")
    assert Path(caught[0].filename) == repositories / "vtk" / "bank" / "1" / "model.py"


SERVER = """
import json, sys, types
import numpy as np
class Tensor:
    def __init__(self, name, value): self.name, self.value = name, value
    def as_numpy(self): return self.value
class Response:
    def __init__(self, output_tensors, error=None): self.found, self.error = output_tensors, error
utils = types.ModuleType("triton_python_backend_utils")
utils.Tensor, utils.InferenceResponse = Tensor, Response
utils.TritonError = utils.TritonModelException = OSError
utils.get_input_tensor_by_name = lambda request, name: request.get(name)
sys.modules["triton_python_backend_utils"] = utils
folder, images, task = sys.argv[1:]
sys.path.insert(0, folder + "/1")
from model import TritonPythonModel
model = TritonPythonModel()
model.initialize({"model_repository": folder, "model_version": "1", "model_name": "bank", "model_config": "{}",
                  "model_instance_kind": "CPU"})
pixels = np.load(images)
names = np.array([[task.encode()]] * len(pixels), np.object_)
answer = model.execute([{"pixel_values": Tensor("", pixels), "task": Tensor("", names)}])[0]
assert answer.error is None
print(json.dumps(next(tensor for tensor in answer.found if tensor.name == "logits").value.tolist()))
model.finalize()
"""


@pytest.mark.slow
def test_a_bank_of_then_serves_in_a_process_of_its_own(repositories: Path, tmp_path: Path) -> None:
    folder = repositories / "vtk" / "bank"
    np.save(tmp_path / "images.npy", pixels(folder / "1" / "packs" / "digits" / "task.json"))
    (tmp_path / "server.py").write_text(SERVER)
    words = [sys.executable, str(tmp_path / "server.py"), str(folder), str(tmp_path / "images.npy"), "digits"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    wanted = LOGITS["digits"]
    np.testing.assert_allclose(np.array(json.loads(run.stdout))[:, : wanted.shape[1]], wanted, atol=TOLERANCE, rtol=0)
    assert run.stderr.count("FutureWarning") == 1
    assert f"{folder / '1' / 'model.py'}:20: FutureWarning: vtk.serving is now vtk.bank" in run.stderr


def test_a_model_on_onnxruntime_has_a_config_that_fits_its_file(repositories: Path) -> None:
    folder = repositories / "onnxruntime" / "digits"
    config = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    session = onnxruntime.InferenceSession(folder / "1" / config.default_model_filename)
    images = pixels(folder / "1" / "model.json")
    assert images.shape[1:] == tuple(config.input[0].dims)
    (found,) = session.run([config.output[0].name], {config.input[0].name: images})
    np.testing.assert_allclose(found, LOGITS["digits"], atol=TOLERANCE, rtol=0)
    assert (folder / "labels.txt").read_bytes().split() == list(LABELS["digits"])


def test_exporting_again_updates_a_bank_of_then(repositories: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server of the bank goes on with its version, and takes up what changed."""
    packs = [f"{name}={MADE / 'runs' / name}" for name in LOGITS]
    argv = ["export", "triton", *packs, f"third={MADE / 'digits-bf16'}", "--backend", "vtk", "--name", "bank"]
    argv += ["--out", str(repositories / "vtk"), "--base", str(MADE / "base.safetensors"), "--json"]
    assert main(argv) == 0
    told = json.loads(capsys.readouterr().out)["models"][0]
    assert (told["version"], told["updated"]) == (1, True)
    index = json.loads((repositories / "vtk" / "bank" / "1" / "tasks.json").read_text())
    before = json.loads((MADE / "repositories" / "vtk" / "bank" / "1" / "tasks.json").read_text())
    assert set(index["tasks"]) == {"digits", "parity", "third"} and index["base"] == before["base"]
    for name, entry in before["tasks"].items():
        assert index["tasks"][name]["digest"] == entry["digest"], "an unchanged pack is not loaded again"
