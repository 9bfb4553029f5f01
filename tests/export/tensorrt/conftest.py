"""A script folder, and a TensorRT that writes down how it was called."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest

from vtk_export.graph.convert import convert, export_form

FAKE = '''
import ctypes, json, os

__version__ = os.environ["FAKE_VERSION"]
calls = []
_log = os.environ["FAKE_LOG"]

def note(*call):
    calls.append(call)
    with open(_log, "w") as file:
        json.dump(calls, file)

class _Driver:
    """The CUDA driver: one GPU."""
    def cuInit(self, flags): return int(os.environ.get("FAKE_CUDA", "0"))
    def cuDeviceGet(self, device, index): return 0
    def cuDeviceGetName(self, name, size, device): name.value = os.environ["FAKE_GPU"].encode(); return 0
    def cuDeviceGetAttribute(self, number, attribute, device):
        number._obj.value = {75: 9, 76: 0}[attribute]; return 0

ctypes.CDLL = lambda name: _Driver()

class Logger:
    WARNING = 2
    def __init__(self, level): pass

class NetworkDefinitionCreationFlag:
    EXPLICIT_BATCH, STRONGLY_TYPED = 0, 1

class MemoryPoolType: WORKSPACE = "workspace"
class ProfilingVerbosity: DETAILED = "detailed"
class BuilderFlag: TF32 = "tf32"

class _Named:
    def __init__(self, name): self.name = name

class _Network:
    names = json.loads(os.environ.get("FAKE_INPUTS", '["pixel_values"]'))
    num_inputs = len(names)
    def get_input(self, i): return _Named(self.names[i])

class OnnxParser:
    num_errors = 1
    def __init__(self, network, logger): pass
    def parse_from_file(self, path): note("parse", os.path.basename(path)); return not os.environ.get("FAKE_ERROR")
    def get_error(self, i): return os.environ["FAKE_ERROR"]

class _Cache:
    def __init__(self, data): self.data = data
    def serialize(self): return b"times"

class _Profile:
    def set_shape(self, *args): note("set_shape", *args)

class _Config:
    def set_memory_pool_limit(self, *args): note("memory", *args)
    def clear_flag(self, flag): note("clear", flag)
    def add_optimization_profile(self, profile): note("add_profile")
    def create_timing_cache(self, data): note("cache", len(data)); return _Cache(data)
    def set_timing_cache(self, cache, ignore_mismatch): return cache.data != b"of another version"

class Builder:
    def __init__(self, logger): pass
    def create_network(self, flags): note("network", flags); return _Network()
    def create_builder_config(self): return _Config()
    def create_optimization_profile(self): return _Profile()
    def build_serialized_network(self, network, config):
        return None if os.environ.get("FAKE_NONE") else memoryview(b"engine")

class _Engine:
    num_io_tensors = 2
    def get_tensor_name(self, i): return ["pixel_values", "logits"][i]

class Runtime:
    def __init__(self, logger): pass
    def deserialize_cuda_engine(self, data): note("load", data.decode()); return _Engine()
'''


@dataclass
class Scripts:
    """A folder as an export leaves it, around a graph of one node, and the fake TensorRT."""

    folder: Path
    path: Path

    def run(self, *argv: str, **fake: str) -> subprocess.CompletedProcess[str]:
        """Run ``build_engine.py`` with a Python that finds nothing of this toolkit."""
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.path), **self.env(**fake)}
        argv = (sys.executable, "-B", str(self.folder / "build_engine.py"), *argv)
        return subprocess.run(argv, capture_output=True, text=True, env=env, cwd="/", check=False)

    def env(self, **fake: str) -> dict[str, str]:
        return {"FAKE_LOG": str(self.path / "log"), "FAKE_VERSION": "10.9.0.34", "FAKE_GPU": "NVIDIA H100", **fake}

    def calls(self) -> list[list[Any]]:
        found: list[list[Any]] = json.loads((self.path / "log").read_text())
        return found


@pytest.fixture
def fake_tensorrt(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH."""
    path = tmp_path / "site"
    path.mkdir()
    (path / "tensorrt.py").write_text(FAKE)
    return path


@pytest.fixture(scope="session")
def fused(calm: Any) -> onnx.ModelProto:
    """What torch's exporter makes of the calm pack's fused form."""
    return convert(export_form(calm.model(), divide_scores=False), calm.card.input, opset=18)


Fault = Callable[[onnx.ModelProto], None]


@pytest.fixture
def use_fused(fused: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault | None], None]:
    """Make the exporter return that graph, with a fault put in; saves its seconds."""

    def use(fault: Fault | None = None) -> None:
        def fake(*args: object, opset: int, **kwargs: object) -> onnx.ModelProto:
            proto = onnx.ModelProto()
            proto.CopyFrom(fused)
            proto.opset_import[0].version = opset
            if fault is not None:
                fault(proto)
            return proto

        monkeypatch.setattr("vtk_export.onnx.build.convert", fake)

    return use
