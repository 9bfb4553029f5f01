import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import nn

from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UnavailableError, UsageError
from vtk.models import compiler as compiling
from vtk.models.devices import resolve_device
from vtk.runtime.backends.base import load_backend, predictor
from vtk.runtime.backends.ort_backend import OrtCpuBackend
from vtk.runtime.backends.ort_session import open_session
from vtk.runtime.opening import open_source
from vtk.runtime.source import Source
from vtk.training.engine.precision import Bf16

Write = Callable[..., Path]
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")


class _Tiny(Source):
    """A ViT of one block, which no timm name gives."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        options = {"img_size": 32, "num_classes": 4, "depth": 1, "embed_dim": 32, "num_heads": 2}
        return timm.create_model("vit_tiny_patch16_224", pretrained=False, **options).eval()


@pytest.fixture
def source() -> Source:
    classes = ("a", "b", "c", "d")
    return _Tiny("timm", "tiny", None, Card(ModelSpec("tiny"), InputSpec(32, 32), classes), described=False)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_eager_is_the_model_bit_for_bit(source: Source, images: torch.Tensor) -> None:
    with torch.no_grad():
        expected = source.model()(images)
    backend = load_backend("eager", source)
    assert (backend.name, backend.provider, backend.device.type) == ("eager", "torch cpu", "cpu")
    assert backend.dtype == torch.float32
    assert backend.load_s > 0
    logits = backend.run({"pixel_values": images})["logits"]
    assert torch.equal(logits, expected)
    assert not logits.requires_grad
    swapped = load_backend("eager", source, channels_last=True).run({"pixel_values": images})["logits"]
    assert torch.allclose(swapped, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_low_precision_holds_every_floating_tensor_in_it(source: Source, images: torch.Tensor, name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    backend = load_backend("eager", source, dtype=name)
    assert {t.dtype for t in backend.model.state_dict().values()} == {dtype}  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = source.model().to(dtype)(images.to(dtype))
    assert torch.equal(backend.run({"pixel_values": images})["logits"], expected)


def test_bf16_is_the_evaluation_of_bf16_training(source: Source, images: torch.Tensor) -> None:
    model = source.model()
    trained = [name for name, _ in model.named_parameters() if ".attn." in name or name.startswith("head.")]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    precision = Bf16()
    precision.prepare(model, trained)
    precision.before_eval(model.eval())
    with torch.no_grad():
        expected = model(images)
    assert torch.equal(load_backend("eager", source, dtype="bf16").run({"pixel_values": images})["logits"], expected)


def test_threads_are_set_while_loaded_and_put_back(source: Source) -> None:
    backend = load_backend("eager", source, threads=2)
    assert torch.get_num_threads() == 2
    backend.close()
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("optimize", [True, False])
def test_ort_computes_what_the_file_says(write_onnx: Write, weight: np.ndarray, optimize: bool) -> None:
    backend = load_backend("ort-cpu", open_source(write_onnx()), optimize=optimize)
    images = torch.randn(5, 3, 4, 6)
    expected = images.numpy().reshape(5, 72).astype(np.float64) @ weight
    np.testing.assert_allclose(backend.run({"pixel_values": images})["logits"].numpy(), expected, atol=1e-4)
    strided = images.to(memory_format=torch.channels_last)
    np.testing.assert_allclose(backend.run({"pixel_values": strided})["logits"].numpy(), expected, atol=1e-4)
    assert (backend.provider, backend.dtype, backend.batch) == ("CPUExecutionProvider", torch.float32, None)


def test_ort_session_takes_threads_and_optimisation(write_onnx: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = onnxruntime.InferenceSession

    def spy(path: object, options: onnxruntime.SessionOptions, **kwargs: object) -> object:
        seen.append((options.intra_op_num_threads, options.graph_optimization_level, kwargs["providers"]))
        return real(path, options, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    load_backend("ort-cpu", open_source(write_onnx()), threads=3, optimize=False)
    load_backend("ort-cpu", open_source(write_onnx()))
    off, on = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    assert seen == [(3, off, ["CPUExecutionProvider"]), (1, on, ["CPUExecutionProvider"])]


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_fixed_batch_takes_any_number_of_images(write_onnx: Write, weight: np.ndarray, count: int) -> None:
    backend = load_backend("ort-cpu", open_source(write_onnx(batch=4)))
    assert backend.batch == 4
    images = torch.randn(count, 3, 4, 6)
    logits = predictor(backend)(images)
    np.testing.assert_allclose(logits.numpy(), images.numpy().reshape(count, 72) @ weight, atol=1e-4)


def test_silent_fall_back_to_the_cpu_is_an_error(write_onnx: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    real = onnxruntime.InferenceSession

    def fall_back(path: object, options: object, **kwargs: object) -> object:
        return real(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", fall_back)
    with pytest.raises(UnavailableError, match=r"CUDAExecutionProvider was requested.*would use CPUExecutionProvider"):
        open_session(write_onnx(), "CUDAExecutionProvider", torch.device("cuda", 0), 1, True)


@no_cuda
def test_absent_devices_and_providers_are_refused(
    write_onnx: Write, source: Source, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnavailableError, match=r"ort-cuda.*no CUDA device"):
        load_backend("ort-cuda", open_source(write_onnx()))
    with pytest.raises(UnavailableError, match="CUDAExecutionProvider"):
        open_session(write_onnx(), "CUDAExecutionProvider", torch.device("cuda", 0), 1, True)
    with pytest.raises(UnavailableError, match="`cuda`: torch sees no CUDA device"):
        load_backend("eager", source, device="cuda")
    assert resolve_device("auto").type == "cpu"
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")  # onnxruntime prints to both on its own


def test_wrong_requests_are_refused_by_name(write_onnx: Write, source: Source, card: Card) -> None:
    onnx_source = open_source(write_onnx(card=card))
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (UsageError, "unknown back-end `eagr`.*did you mean eager", lambda: load_backend("eagr", source)),
        (UnavailableError, "`server` is not in this version", lambda: load_backend("server", source)),
        (UnavailableError, "TensorRT.s Python package|no CUDA device", lambda: load_backend("tensorrt", source)),
        (UsageError, "has no option `fast`; it has channels_last", lambda: load_backend("eager", source, fast=True)),
        (UsageError, "has no option `mode`; it has `optimize`", lambda: load_backend("ort-cpu", onnx_source, mode="x")),
        (UsageError, "back-end `eager` has no fp8; give fused", lambda: load_backend("eager", source, dtype="fp8")),
            (UsageError, "unknown precision `fp4`", lambda: load_backend("eager", source, dtype="fp4")),
        (UsageError, "unknown device `gpu`", lambda: load_backend("eager", source, device="gpu")),
        (UsageError, "`--threads` is 0", lambda: load_backend("eager", source, threads=0)),
        (UsageError, "for .* use ort-cpu", lambda: load_backend("eager", onnx_source)),
        (UsageError, "runs .onnx files, not the timm tiny", lambda: load_backend("ort-cpu", source)),
        (UsageError, "computes in fp32, not in bf16",
         lambda: load_backend("ort-cpu", onnx_source, dtype="bf16")),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def test_compile_makes_one_static_program_per_batch_size(
    source: Source, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[object, ...]] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        shapes.append(tuple(next(t for t in inputs if t.ndim == 4 and t.shape[-1] == 32 and t.shape[1] == 3).shape))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count))
    backend = load_backend("compile", source)
    assert backend.provider == "inductor cpu"
    with torch.no_grad():
        expected = source.model()(images)
    for n in (2, 3, 2):
        torch.testing.assert_close(backend.run({"pixel_values": images[:n]})["logits"], expected[:n])
    assert shapes == [(2, 3, 32, 32), (3, 3, 32, 32)]
    backend.reset()  # type: ignore[attr-defined]
    backend.run({"pixel_values": images[:3]})
    assert shapes[2:] == [(3, 3, 32, 32)]
    backend.close()


def test_compile_without_a_compiler_is_unavailable(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match=r"needs a C\+\+ compiler"):
        load_backend("compile", source)


def test_compile_that_fails_says_so(source: Source, images: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no such compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    backend = load_backend("compile", source)
    with pytest.raises(UnavailableError, match=r"torch.compile failed here .*no such compiler.*--backend eager"):
        backend.run({"pixel_values": images})


@pytest.mark.slow
def test_inductor_agrees_with_the_model(source: Source, images: torch.Tensor) -> None:
    backend = load_backend("compile", source)
    with torch.no_grad():
        expected = source.model()(images)
    torch.testing.assert_close(backend.run({"pixel_values": images})["logits"], expected, atol=1e-4, rtol=1e-4)


def test_loading_frees_what_it_took_when_it_fails(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Source) -> nn.Module:
        raise UsageError("broken")

    monkeypatch.setattr(_Tiny, "model", fail)
    with pytest.raises(UsageError, match="broken"):
        load_backend("eager", source, threads=2)
    assert torch.get_num_threads() == 1


def test_ort_reads_the_batch_axis(write_onnx: Write) -> None:
    assert OrtCpuBackend(write_onnx(batch=2), torch.device("cpu"), 1, True).batch == 2
