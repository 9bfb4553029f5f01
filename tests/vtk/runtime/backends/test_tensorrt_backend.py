"""Engines of TensorRT: the stamp, and the calls of a stand-in that keeps to the Python API of TensorRT 10.

The stand-in computes on the memory that it is given, so a wrong address, shape or type shows in the logits.
"""

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.vtk.runtime._tensorrt import FakeTensorrt, Streams
from vtk.__main__ import main
from vtk.card import Card
from vtk.errors import DataError, UnavailableError, UsageError
from vtk.profiling.config import ProfileConfig
from vtk.profiling.profile import run
from vtk.runtime.backends.base import load_backend, predictor
from vtk.runtime.backends.tensorrt_backend import TensorrtBackend
from vtk.runtime.engine_files import engine_beside, model_beside, read_stamp
from vtk.runtime.opening import open_source
from vtk.runtime.source import Source


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A machine with one H100, whose memory is the CPU's."""
    found: list[str] = []
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda device=None: "NVIDIA H100",
        "get_device_capability": lambda device=None: (9, 0), "device": lambda device: contextlib.nullcontext(),
        "Stream": lambda device: Streams("engine", found), "current_stream": lambda device: Streams("torch", found),
        "synchronize": lambda device=None: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return found


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeTensorrt], FakeTensorrt]:
    def use(fake: FakeTensorrt) -> FakeTensorrt:
        monkeypatch.setitem(__import__("sys").modules, "tensorrt", fake)
        return fake

    return use


@pytest.fixture
def write_engine(tmp_path: Path, card: Card, write_onnx: Callable[..., Path]) -> Callable[..., Path]:
    """Write what `vtk export tensorrt --build` leaves."""

    def write(*, precision: str = "fp32", tf32: bool = False, names: Any = None, **stamp: str) -> Path:
        model = write_onnx("built/model.onnx", card=card)
        folder, sha = model.parent, hashlib.sha256(model.read_bytes()).hexdigest()
        (folder / "model.json").write_text(card.to_json())
        profile = {"precision": precision, "tf32": tf32, "onnx_sha256": sha, **({"names": names} if names else {})}
        (folder / "profile.json").write_text(json.dumps(profile))
        (folder / "model.engine").write_bytes(b"engine")
        found = {
            "tensorrt": "10.9.0.34", "gpu": "NVIDIA H100", "compute_capability": "9.0",
            "engine_sha256": hashlib.sha256(b"engine").hexdigest(), "onnx_sha256": sha, **stamp,
        }  # fmt: skip
        (folder / "model.engine.json").write_text(json.dumps(found))
        return folder / "model.engine"

    return write


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of a loaded engine are made where the stand-in can write."""
    made = TensorrtBackend.__init__

    def init(self: Any, trt: Any, data: bytes, path: Path, device: torch.device, *rest: Any) -> None:
        made(self, trt, data, path, torch.device("cpu"), *rest)

    monkeypatch.setattr(TensorrtBackend, "__init__", init)


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, 4, 6, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("kind", ["FLOAT", "HALF"])
def test_logits_are_the_engines(kind: str, log, install, on_cpu, write_engine, weight: np.ndarray) -> None:
    fake = install(FakeTensorrt(weight, kind=kind))
    precision = {"FLOAT": "fp32", "HALF": "fp16"}[kind]
    source = open_source(write_engine(precision=precision))
    assert (source.kind, source.facts.precision, source.card.classes) == (
        "tensorrt",
        precision,
        ("blue", "green", "red"),
    )
    backend = load_backend("tensorrt", source, device="cuda", dtype=precision)
    assert (backend.provider, backend.batch) == ("TensorRT 10.9.0.34 (NVIDIA H100)", None)
    given = images(3).permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)  # not in the order that memory has
    found = backend.run({"pixel_values": given})
    expected = given.flatten(1).double().numpy() @ weight
    assert found["logits"].dtype == {"fp32": torch.float32, "fp16": torch.float16}[precision]
    np.testing.assert_allclose(found["logits"].float(), expected, atol=0.05 if kind == "HALF" else 1e-4)
    assert found["features"].shape == (3, 2)
    # torch's work on the images first, and what comes afterwards later: also when their memory is given away
    assert log == ["engine waits for torch", "torch waits for engine"] and fake.streams == [4711]
    backend.close()


def test_an_engine_of_other_names_runs_by_this_toolkit_s(log, install, on_cpu, write_engine, weight) -> None:
    install(FakeTensorrt(weight, image="x", logits="scores"))
    source = open_source(write_engine(names={"pixel_values": "x", "logits": "scores"}))
    found = load_backend("tensorrt", source, device="cuda").run({"pixel_values": images(2)})
    assert list(found) == ["logits", "features"]
    np.testing.assert_allclose(found["logits"], images(2).flatten(1).double().numpy() @ weight, atol=1e-4)
    with pytest.raises(DataError, match="are none"):
        open_source(write_engine(names=["x"]))


def test_larger_batches_are_split_and_fixed_ones_filled_up(log, install, on_cpu, write_engine, weight) -> None:
    install(FakeTensorrt(weight, least=2, most=4))
    backend = load_backend("tensorrt", open_source(write_engine()), device="cuda")
    for count in (1, 2, 9):
        expected = images(count).flatten(1).double().numpy() @ weight
        np.testing.assert_allclose(predictor(backend)(images(count)), expected, atol=1e-4)
    for wrong in (images(1), images(5), images(2)[:, :, :3]):
        with pytest.raises(UsageError, match=r"this engine takes \(2 to 4, 3, 4, 6\)"):
            backend.run({"pixel_values": wrong})
    install(FakeTensorrt(weight, least=3, most=3))
    assert load_backend("tensorrt", open_source(write_engine()), device="cuda").batch == 3


@pytest.mark.parametrize(("stamp", "said"), [
    ({"tensorrt": "10.9.0.35"}, "built for tensorrt 10.9.0.35, here is 10.9.0.34"),
    ({"gpu": "NVIDIA A100"}, "built for gpu NVIDIA A100, here is NVIDIA H100"),
    ({"compute_capability": "8.0"}, "built for compute capability 8.0, here is 9.0"),
])  # fmt: skip
def test_an_engine_of_another_machine_is_not_loaded(stamp, said, log, install, write_engine, weight) -> None:
    fake = install(FakeTensorrt(weight))
    fake.Runtime = lambda logger: pytest.fail("it was loaded")
    with pytest.raises(UnavailableError, match=said):
        load_backend("tensorrt", open_source(write_engine(**stamp)), device="cuda")


def test_a_changed_engine_and_one_without_its_files_are_not_loaded(log, install, write_engine, weight) -> None:
    install(FakeTensorrt(weight))
    path = write_engine()
    path.write_bytes(b"changed")
    with pytest.raises(DataError, match=r"not the file that model\.engine\.json describes"):
        load_backend("tensorrt", open_source(path), device="cuda")
    path = write_engine(engine_sha256=hashlib.sha256(b"bad").hexdigest())
    path.write_bytes(b"bad")
    with pytest.raises(DataError, match=r"TensorRT 10\.9\.0\.34 does not load"):
        load_backend("tensorrt", open_source(path), device="cuda")
    for name, said in (
        ("model.json", "no card"), ("model.engine.json", "no stamp"), ("profile.json", "cannot read")
    ):  # fmt: skip
        path = write_engine()
        path.with_name(name).unlink()
        with pytest.raises(DataError, match=said):
            open_source(path)
    path = write_engine(onnx_sha256="0" * 64)
    with pytest.raises(DataError, match="of another model than model"):
        open_source(path)
    write_engine().with_name("model.engine.json").write_text("[]")
    with pytest.raises(DataError, match="not the stamp of an engine"):
        open_source(path)


def test_an_engine_beside_another_model_or_card_is_refused(
    log, install, write_engine, write_onnx, card, weight
) -> None:
    install(FakeTensorrt(weight))
    path = write_engine()
    model = path.with_name("model.onnx")
    proto = onnx.load(model)
    proto.producer_version = "trained again"
    onnx.save(proto, model)
    for source in (path, model):  # the engine itself, and the one beside a model
        with pytest.raises(DataError, match=r"was built from another model\.onnx than the one beside it"):
            load_backend("tensorrt", open_source(source, trust=True), device="cuda")
    path = write_engine()
    profile = json.loads(path.with_name("profile.json").read_text())
    profile["card_sha256"] = hashlib.sha256(path.with_name("model.json").read_bytes()).hexdigest()
    path.with_name("profile.json").write_text(json.dumps(profile))
    open_source(path)
    told = json.loads(card.to_json())
    path.with_name("model.json").write_text(json.dumps({**told, "classes": told["classes"][::-1]}))
    with pytest.raises(DataError, match="is not the card that model"):
        open_source(path)


def test_what_is_not_run_is_refused(log, install, on_cpu, write_engine, write_onnx, weight: np.ndarray) -> None:
    fake = install(FakeTensorrt(weight))
    source = open_source(write_engine())
    for options, said in (
        ({"device": "cpu"}, "runs on CUDA"), ({"dtype": "fp16"}, "give --precision fp32"), ({"x": 1}, "no option `x`")
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            load_backend("tensorrt", source, **{"device": "cuda", **options})
    with pytest.raises(UsageError, match="has none"):
        load_backend("tensorrt", open_source(write_onnx("alone.onnx")), device="cuda")
    with pytest.raises(UsageError, match="for built use tensorrt"):
        load_backend("eager", source)
    backend = load_backend("tensorrt", source, device="cuda")
    fake.refuse = "no memory"
    with pytest.raises(UnavailableError, match="does not run"):
        backend.run({"pixel_values": images(1)})
    fake.names = {"x": "INPUT", "logits": "OUTPUT"}
    with pytest.raises(DataError, match="one input `pixel_values`"):
        load_backend("tensorrt", source, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_tensorrt_or_cuda_it_is_one_line_and_exit_5(
    write_engine, install, weight, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, find = write_engine(), importlib.util.find_spec
    for command in (["profile", str(path)], ["profile", str(path.with_suffix(".onnx")), "--backends", "tensorrt"]):
        for found, said in ((None, "TensorRT's Python package, which is not installed"), (object(), "no CUDA device")):
            fake = partial(lambda found, name, *more: found if name == "tensorrt" else find(name, *more), found)
            monkeypatch.setattr(importlib.util, "find_spec", fake)
            assert main(command) == 5
            (line,) = capsys.readouterr().err.strip().splitlines()
            assert said in line


def test_engine_and_model_find_each_other(write_engine) -> None:
    path = write_engine()
    source = open_source(path.with_suffix(".onnx"))
    assert source.kind == "onnx" and engine_beside(source) == path
    assert model_beside(path, read_stamp(path)) == path.with_suffix(".onnx")
    assert model_beside(path, replace(read_stamp(path), onnx_sha256="0")) is None


@pytest.mark.parametrize("tf32", [False, True])
def test_a_profile_compares_it_with_onnxruntime_and_says_tf32(
    tf32: bool, log, install, on_cpu, write_engine, weight: np.ndarray
) -> None:
    # what TF32 would leave: eleven bits of each weight
    rounded = weight.astype(np.float16).astype(np.float32) if tf32 else weight
    install(FakeTensorrt(rounded))
    path = write_engine(tf32=tf32)
    config = ProfileConfig(batch_sizes=(1, 4, 8), duration=0.02, device="cpu", threads=1)

    def load(name: str, source: Source, **options: Any) -> Any:
        # the device is a CPU to all but the back-end
        return load_backend(name, source, **{**options, "device": "cuda" if name == "tensorrt" else "cpu"})

    result = run(config, open_source(path), load, show_progress=False)
    (backend,) = result.backends
    assert result.reference == "onnxruntime on the CPU without graph optimisation of model.onnx"
    assert [c.status for c in backend.cells] == ["ok", "ok", "skipped"]
    assert "1 to 4 images at once" in backend.cells[2].reason
    assert backend.provider.endswith("TF32") is tf32 and backend.arithmetic == ("tf32" if tf32 else "")
    assert backend.cells[0].tolerance.startswith("cosine" if tf32 else "≤ 0.0001")
    assert any("matrix products use TF32" in text for text in result.warnings) is tf32


def test_an_engine_with_other_logits_than_its_model_gets_no_number(
    log, install, on_cpu, write_engine, weight: np.ndarray
) -> None:
    install(FakeTensorrt(weight[::-1].copy()))
    path = write_engine()
    config = ProfileConfig(batch_sizes=(2,), duration=0.02, device="cpu", threads=1)

    def load(name: str, source: Source, **options: Any) -> Any:
        return load_backend(name, source, **{**options, "device": "cuda" if name == "tensorrt" else "cpu"})

    result = run(config, open_source(path), load, show_progress=False)
    assert result.exit_code == 4 and result.backends[0].cells[0].status == "mismatch"
