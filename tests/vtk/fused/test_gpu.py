"""On a CUDA device: kernels, low precision and graphs against timm in fp32."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vtk.fused import fuse
from vtk.models.transforms.context_layers import add_context_broadcast

pytestmark = pytest.mark.gpu


def rms(value: Tensor) -> float:
    return float(value.double().pow(2).mean().sqrt())


@pytest.fixture
def images() -> Tensor:
    return torch.randn(33, 3, 56, 56, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("branches", [None, 2, 3])
@pytest.mark.parametrize("cb", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("ln_folded", [False, True])
def test_error_is_that_of_plain_torch(
    vit: Callable[..., nn.Module],
    images: Tensor,
    dtype: torch.dtype,
    branches: int | None,
    cb: bool,
    graphs: bool,
    ln_folded: bool,
) -> None:
    model = vit(branches=branches, dim=192, heads=3, grid=14, init_values=0.1, depth=4).float()
    if cb:
        add_context_broadcast(model, layers="all")
    model.cuda().eval()
    fused = fuse(model, dtype, ln_folded=ln_folded, graphs=graphs)
    with torch.no_grad():
        expected = model(images)
        plain = model.to(dtype)(images.to(dtype))
        for batch in (1, 8, 33):
            got = fused(images[:batch].to(dtype))
            error = rms(got - expected[:batch])
            assert error <= 2 * rms(plain[:batch] - expected[:batch]), batch
    assert len(fused._graph_cache) == (3 if graphs else 0)


@pytest.mark.parametrize("ln_folded", [False, True])
def test_replays_give_what_the_model_gives(vit: Callable[..., nn.Module], images: Tensor, ln_folded: bool) -> None:
    model = vit(branches=2, grid=14).float().cuda()
    fused = fuse(model, torch.bfloat16, ln_folded=ln_folded)
    images = images.bfloat16()
    with torch.no_grad():
        expected = {n: fused.compute(images[:n]) for n in (1, 3, 33)}
        fused.capture([1, 3, 33])
        assert len(fused._graph_cache) == 3
        for _ in range(2):
            for n, value in expected.items():
                assert torch.equal(fused(images[:n]), value)
        fused.half()
        assert len(fused._graph_cache) == 0


def test_fp32_takes_torch_and_stays_exact(vit: Callable[..., nn.Module], images: Tensor) -> None:
    model = vit(branches=2, grid=14).float().cuda()
    torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        torch.testing.assert_close(fuse(model)(images), model(images), rtol=1e-4, atol=1e-4)


def test_graphs_whose_products_finish_themselves_run_at_once_with_the_same_bits(vit: Callable[..., nn.Module]) -> None:
    """Two models' graphs race on two streams; each pass counts in memory of its own."""
    model = vit(branches=2, dim=384, heads=6, grid=14, depth=3).float().cuda()
    images = torch.randn(8, 3, 56, 56, device="cuda").bfloat16()
    twins = [fuse(model, torch.bfloat16, ln_folded=True) for _ in range(2)]
    with torch.no_grad():
        for batch in (1, 2, 8):
            expected = [twin.compute(images[:batch]) for twin in twins]
            assert torch.equal(*expected)
            streams = [torch.cuda.Stream() for _ in twins]
            for _ in range(200):
                found = []
                for stream, twin in zip(streams, twins, strict=True):
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        found.append(twin(images[:batch]))
                torch.cuda.synchronize()
                assert all(torch.equal(one, expected[0]) for one in found), batch
