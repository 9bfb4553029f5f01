"""The back-ends ``fused`` and ``fused+graph`` against the eager one."""

from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

from tests._simulated_cuda import SimulatedCuda
from vtk import console
from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UnavailableError, UsageError
from vtk.fused import FusedViT
from vtk.profiling.profile import default_backends
from vtk.runtime.backends.base import load_backend, predictor
from vtk.runtime.backends.fused_backend import FusedBackend, NoGraphBackend
from vtk.runtime.backends.torch_backend import EagerBackend
from vtk.runtime.source import Source

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")


class _Parallel(Source):
    """Two blocks of two branches."""

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        block = partial(ParallelThingsBlock, num_parallel=2)
        options = {"img_size": 32, "num_classes": 4, "depth": 2, "embed_dim": 32, "num_heads": 2, "block_fn": block}
        return timm.create_model("vit_tiny_patch16_224", pretrained=False, **options).eval()


@pytest.fixture
def source() -> Source:
    card = Card(ModelSpec("parallel"), InputSpec(32, 32), ("a", "b", "c", "d"))
    return _Parallel("timm", "parallel", None, card, described=False)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_fused_gives_the_models_logits(source: Source, images: torch.Tensor) -> None:
    with torch.no_grad():
        expected = source.model()(images)
    backend = load_backend("fused", source)
    assert (backend.name, backend.provider, backend.batch) == ("fused", "torch cpu", None)
    assert isinstance(backend.model, FusedViT)  # type: ignore[attr-defined]
    torch.testing.assert_close(predictor(backend)(images), expected, rtol=0, atol=1e-5)
    backend.close()


def test_low_precision_is_folded_in_fp32_and_rounded_once(source: Source, images: torch.Tensor) -> None:
    model = source.model()
    backend = load_backend("fused", source, dtype="bf16")
    block = model.blocks[0].attns[0]
    k = block.attn.qkv.weight.detach()[32:64] * block.norm.weight.detach()  # k holds no 1/√D
    k = k - k.mean(1, keepdim=True)  # what reads them has mean 0
    found = backend.model.stages[0].w_qkv  # type: ignore[attr-defined]
    assert found.dtype == torch.bfloat16
    # rows: q of both branches (2 · 32), then k of both: the first branch's k starts at 64
    assert torch.equal(found[64:96], k.bfloat16())
    assert backend.run({"pixel_values": images})["logits"].dtype == torch.bfloat16


def test_on_a_card_each_batch_is_captured_once_and_told_of_in_a_command(
    source: Source,
    images: torch.Tensor,
    on_a_card: SimulatedCuda,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def on_the_host(self: EagerBackend, model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model.eval(), torch.device("cuda"), dtype

    monkeypatch.setattr(EagerBackend, "__init__", on_the_host)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "H100")
    fused, plain = (
        kind(source.model(), torch.device("cuda"), torch.float32) for kind in (FusedBackend, NoGraphBackend)
    )
    assert (fused.provider, plain.provider) == ("torch cuda (H100), graph", "torch cuda (H100)")
    assert plain.model.graphs is False and not hasattr(plain, "reset")
    wanted = fused.model.compute(images)
    console.set_command(True)
    for n in (5, 2, 5):
        logits = fused.run({"pixel_values": images[:n]})["logits"]
        torch.testing.assert_close(logits, wanted[:n], rtol=0, atol=1e-5)
    console.set_command(False)
    fused.run({"pixel_values": images[:3]})
    out = capsys.readouterr().out.splitlines()
    assert out == ["CUDA graph of 5 × 3 × 32 × 32: 62.4 kB on the device",
                   "CUDA graph of 2 × 3 × 32 × 32: 25.6 kB on the device"]  # fmt: skip
    fused.reset()
    assert len(fused.model._graph_cache) == 0


def test_without_a_card_every_name_but_the_one_that_insists_works(source: Source, images: torch.Tensor) -> None:
    for name, graphs in (("fused", True), ("fused+nograph", False)):
        backend = load_backend(name, source)
        assert backend.model.graphs is graphs and backend.provider == "torch cpu"  # type: ignore[attr-defined]
        assert not hasattr(backend, "reset")
        backend.run({"pixel_values": images})


@no_cuda
def test_graphs_need_cuda(source: Source) -> None:
    with pytest.raises(UnavailableError, match=r"`fused\+graph` replays CUDA graphs and torch sees no CUDA device"):
        load_backend("fused+graph", source)


def test_a_model_that_cannot_be_fused_is_named(source: Source) -> None:
    class Net(Source):
        def model(self) -> nn.Module:
            return timm.create_model("test_resnet").eval()

    with pytest.raises(UsageError, match="cannot fuse ResNet"):
        load_backend("fused", Net("timm", "net", None, source.card, described=False))


def test_default_backends() -> None:
    assert default_backends(torch.device("cpu")) == ("eager", "compile", "fused", "ort-cpu")
    assert default_backends(torch.device("cuda")) == ("eager", "compile", "fused", "ort-cuda")


@pytest.mark.slow
@no_cuda
def test_profile_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["profile", "test_vit", "--no-pretrained", "--batch-sizes", "2", "--duration", "0.05", "--device", "cpu"]
    assert main([*base, "--backends", "eager,fused"]) == 0
    out = capsys.readouterr().out
    assert "fused: torch cpu" in out
    assert main([*base, "--backends", "fused+graph"]) == 5
    assert "use fused" in capsys.readouterr().err
    assert main(["profile", "test_resnet", *base[2:], "--backends", "fused"]) == 2
    assert "cannot fuse ResNet" in capsys.readouterr().err
