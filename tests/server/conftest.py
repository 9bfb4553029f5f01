"""A real Triton Inference Server from the `nvidia-pytriton` wheel, and packs of small Vision Transformers.

`make test-server` makes the environment: these tests want numpy below 2, which that server's Python back-end wants.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import timm
import torch
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from safetensors.torch import save_file
from torch import Tensor

from vtk.card import Card
from vtk.models.create import build_model
from vtk.packs import load_task, save_task

NAME = "vit_tiny_patch16_224"
TINY = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 8}
START_S = 180


def server_files() -> Path:
    """Return the folder with the server that the wheel holds."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        pytest.fail("there is no nvidia-pytriton in this environment; run `make test-server`")
    if int(np.__version__.split(".")[0]) >= 2:
        pytest.fail(f"numpy {np.__version__}: the server's Python back-end needs one below 2; run `make test-server`")
    return Path(spec.origin).parent / "tritonserver"


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for entry in sockets:
        entry.bind(("127.0.0.1", 0))
    ports = [entry.getsockname()[1] for entry in sockets]
    for entry in sockets:
        entry.close()
    return ports


@dataclass
class Server:
    """A server that completes no config; it polls its repository once a second, or reads it when it starts only."""

    repo: Path
    root: Path
    polls: bool = True
    metrics: bool = False
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        files = server_files()
        backend = self.root / "backends" / "python"
        shutil.copytree(files / "backends" / "python", backend)
        stub = files / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
        shutil.copy(stub / "triton_python_backend_stub", backend)
        binary = shutil.copy(files / "bin" / "tritonserver", self.root)
        for path in (Path(binary), backend / "triton_python_backend_stub"):
            path.chmod(0o755)
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        libraries = files.parents[1] / "nvidia_pytriton.libs"
        env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        self.log = self.root / "server.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [binary, f"--model-repository={self.repo}", f"--backend-directory={self.root / 'backends'}",
                 "--http-address=127.0.0.1", f"--http-port={self.http_port}", "--grpc-address=127.0.0.1",
                 f"--grpc-port={self.grpc_port}", f"--allow-metrics={str(self.metrics).lower()}",
                 "--metrics-address=127.0.0.1", f"--metrics-port={self.metrics_port}", "--disable-auto-complete-config",
                 "--exit-on-error=false", f"--model-control-mode={'poll' if self.polls else 'none'}",
                 "--repository-poll-secs=1"],
                env=env, stdout=out, stderr=subprocess.STDOUT, cwd=self.root,
            )  # fmt: skip

    @property
    def url(self) -> dict[str, str]:
        return {"http": f"127.0.0.1:{self.http_port}", "grpc": f"127.0.0.1:{self.grpc_port}"}

    def client(self, protocol: str = "grpc") -> Any:
        module = grpc_client if protocol == "grpc" else http_client
        return module.InferenceServerClient(self.url[protocol])

    def wait(self, model: str, version: int | None = None, *, client: Any = None) -> None:
        """Wait until a model, or a version of it, is ready."""
        client = client or self.client()
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            assert self.process.poll() is None, self.tail()
            try:
                if client.is_server_live() and client.is_model_ready(model, "" if version is None else str(version)):
                    return
            except Exception:
                assert time.monotonic() < limit
            time.sleep(0.2)
        pytest.fail(f"{model} {version or ''} was not ready after {START_S} s\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])

    def measures(self, model: str) -> dict[str, float]:
        """Return what the server's page of metrics says of our models."""
        return {name: value for (name, task), value in self.counts(model).items() if task == ""}

    def counts(self, model: str) -> dict[tuple[str, str], float]:
        """Return the same by name of the metric and task, "" for those of the whole model."""
        page = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10).read().decode()
        lines = [line.rpartition(" ") for line in page.splitlines() if f'model="{model}"' in line]
        return {
            (name.partition("{")[0], name.partition('task="')[2].partition('"')[0]): float(value)
            for name, _, value in lines if name.startswith("vtk_")
        }  # fmt: skip

    def pss(self, model: str) -> int:
        """Bytes of memory of a model's processes, what several have in common divided among them."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        mine = [c for c in children if any(f"/{model}/" in part for part in c.cmdline())]
        assert mine, [c.cmdline() for c in children]
        return sum(c.memory_full_info().pss for c in mine)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


def infer(client: Any, model: str, images: np.ndarray, tasks: list[str], *, version: str = "") -> dict[str, np.ndarray]:
    """Send one request, tensors as bytes, and return its outputs."""
    module = grpc_client if isinstance(client, grpc_client.InferenceServerClient) else http_client
    names = np.array([[task.encode()] for task in tasks], dtype=np.object_)
    inputs = [module.InferInput("pixel_values", list(images.shape), "FP32"),
              module.InferInput("task", list(names.shape), "BYTES")]  # fmt: skip
    for entry, value in zip(inputs, (images, names), strict=True):
        entry.set_data_from_numpy(value)
    outputs = ("logits", "label", "score")
    found = client.infer(
        model, inputs, model_version=version, outputs=[module.InferRequestedOutput(name) for name in outputs]
    )
    return {name: found.as_numpy(name) for name in outputs}


@dataclass
class Lab:
    """A base, packs of it, and what each pack's own model gives for some images."""

    root: Path
    kwargs: Mapping[str, Any] = field(default_factory=lambda: dict(TINY))
    size: int = 32
    noise: float = 0.2

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.root.mkdir(parents=True, exist_ok=True)
        self.weights = self.root / "base.safetensors"
        save_file(timm.create_model(NAME, img_size=self.size, **self.kwargs).state_dict(), self.weights)

    def pack(self, name: str, classes: int, seed: int, folder: str = "packs") -> Path:
        created = build_model(
            NAME, num_classes=classes, img_size=self.size, weights=self.weights, kwargs=dict(self.kwargs)
        )
        generator = torch.Generator().manual_seed(seed)
        state = {k: v.clone() for k, v in created.model.state_dict().items()}
        trained = [k for k in state if ".attn." in k or k.startswith("head.") or k == "pos_embed"]
        for key in trained:
            state[key] += self.noise * torch.randn(state[key].shape, generator=generator)
        card = Card(created.spec, created.input, tuple(f'{name} "{i}"\né' for i in range(classes)))
        save_task(self.root / folder / name, state=state, created=created, card=card, trained=trained)
        return self.root / folder / name

    def images(self, count: int, seed: int = 0) -> Tensor:
        return torch.randn(count, 3, self.size, self.size, generator=torch.Generator().manual_seed(seed))

    def logits(self, pack: Path, images: Tensor) -> np.ndarray:
        with torch.no_grad():
            return load_task(pack, base=self.weights).model(images).numpy()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VTK_HOME", str(root / "home"))
        yield Lab(root)


@pytest.fixture(scope="session")
def tools() -> Any:
    """What tests share: they cannot import from one another."""

    return SimpleNamespace(infer=infer, Server=Server, Lab=Lab)
