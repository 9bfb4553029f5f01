"""Products by oneDNN: the same numbers as torch's, never a stale weight, and torch wherever oneDNN does not fit."""

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.fused import fuse
from vtk.fused import onednn_prepack as prepacked
from vtk.fused.onednn_prepack import available, wide_linear

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture(autouse=True)
def amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the way of AMD's processors on any processor, from an empty cache."""
    monkeypatch.setattr(prepacked, "available", lambda: True)
    prepacked._packed.clear()
    yield
    prepacked._packed.clear()


def weights(k: int = 24, f: int = 72, seed: int = 0) -> tuple[nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(f, k, generator=generator), False), torch.randn(f, generator=generator)


def exact(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x.double() @ w.double().T + b.double()


@pytest.mark.parametrize("shape", [(1, 1), (2, 17), (3, 197), (1, 577)])
@pytest.mark.parametrize(("k", "f"), [(24, 72), (100, 301), (64, 192)])
def test_values(shape: tuple[int, int], k: int, f: int) -> None:
    (w, b), x = weights(k, f), torch.randn(*shape, k, generator=torch.Generator().manual_seed(1))
    y = wide_linear(x, w, b)
    assert w in prepacked._packed
    assert y.shape == (*shape, f) and y.is_contiguous()
    torch.testing.assert_close(y.double(), exact(x, w, b), rtol=1e-5, atol=1e-4)
    strided = torch.randn(shape[1], shape[0], 2 * k)[..., ::2].transpose(0, 1)
    torch.testing.assert_close(wide_linear(strided, w, b).double(), exact(strided, w, b), rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 for this processor")
@pytest.mark.parametrize("post", ["none", "gelu", "silu"])
def test_bf16_is_rounded_once(post: prepacked.Post) -> None:
    w, b = (t.detach().bfloat16() for t in weights(100, 301))
    x = torch.randn(3, 17, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    function = {"none": lambda y: y, "gelu": F.gelu, "silu": F.silu}[post]
    parameter = nn.Parameter(w, False)
    y, right = wide_linear(x, parameter, b, post), function(exact(x, w, b))
    assert parameter in prepacked._packed and y.dtype == torch.bfloat16
    # half of the last of 8 bits, and the sum of 100 products in fp32; GELU of a rounded sum would be off by more
    torch.testing.assert_close(y.double(), right, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.mul_(2),
        lambda w: w.copy_(torch.ones_like(w)),
        lambda w: setattr(w, "data", w.data + 1),
    ],
    ids=["in place", "copied into", "exchanged"],
)
def test_a_changed_weight_is_seen(change: Callable[[Tensor], object]) -> None:
    (w, b), x = weights(), torch.randn(2, 5, 24)
    wide_linear(x, w, b)
    change(w)
    torch.testing.assert_close(wide_linear(x, w, b).double(), exact(x, w, b), rtol=1e-5, atol=1e-4)


def test_nothing_outlives_its_weight() -> None:
    w, b = weights()
    wide_linear(torch.randn(2, 24), w, b)
    assert len(prepacked._packed) == 1
    del w
    gc.collect()
    assert len(prepacked._packed) == 0


def test_torch_multiplies_what_does_not_fit() -> None:
    (w, b), x = weights(), torch.randn(2, 5, 24)
    for a, weight in (
        (x, w[:30]),  # a view
        (x, w.detach().clone()),  # no parameter
        (x.double(), nn.Parameter(w.detach().double(), False)),
        (x.half(), nn.Parameter(w.detach().half(), False)),
        (x[:0], w),
        (x.clone().requires_grad_(), w),
    ):
        bias = b[: len(weight)].to(weight.dtype)
        assert torch.equal(wide_linear(a, weight, bias), F.linear(a, weight, bias))
    assert len(prepacked._packed) == 0


def test_gradients_flow() -> None:
    (w, b), x = weights(), torch.randn(2, 5, 24, requires_grad=True)
    wide_linear(x, w, b).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, w.sum(0).expand_as(x))


def test_other_processors_and_systems_keep_torchs_way(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nvendor_id : GenuineIntel\n\nprocessor : 1\n", encoding="utf-8")
    assert not available(info)
    assert not available(tmp_path / "none")
    info.write_text("processor : 0\nvendor_id : AuthenticAMD\n\nprocessor : 1\n", encoding="utf-8")
    available.cache_clear()
    assert available(info) == torch.backends.mkl.is_available()
    available.cache_clear()


def test_a_fused_model_takes_it_for_its_matrices() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5).eval()
    fused, images = fuse(model), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(fused(images), model(images), rtol=1e-4, atol=1e-5)
    wide = {id(p) for name, p in fused.named_parameters() if name.endswith(("w_qkv", "w_in", "w_out"))}
    held = {id(p) for p in prepacked._packed}
    assert held and held < wide  # the pruned last attention multiplies by views

    with torch.inference_mode():
        torch.testing.assert_close(fused(images), model(images), rtol=1e-4, atol=1e-5)
    other = copy.deepcopy(fused).double()
    with torch.no_grad():
        torch.testing.assert_close(other(images.double()), model.double()(images.double()))
    state = {k: torch.zeros_like(v) for k, v in fused.state_dict().items()}
    fused.load_state_dict(state)
    with torch.no_grad():
        assert not fused(images).any()


def test_an_address_that_is_used_again_is_seen() -> None:
    """Two exchanges, and the new values lie where the old ones lay, under the same version."""
    (w, b), x = weights(), torch.randn(2, 24)
    values = w.detach().clone()
    for i in range(60):
        wide_linear(x, w, b)
        w.data = values * (1 + i)
        w.data = values * (0.5 - i)
        torch.testing.assert_close(wide_linear(x, w, b).double(), exact(x, w, b), rtol=1e-4, atol=1e-2)


def test_no_copy_outlives_a_change_of_type() -> None:
    model = fuse(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5).eval())
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert len(prepacked._packed)
    model.bfloat16()
    assert not len(prepacked._packed)


def test_tracers_see_plain_operators() -> None:
    fused, x = fuse(timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = fused(x)
        torch.testing.assert_close(torch.jit.trace(fused, x)(x), expected, rtol=1e-4, atol=1e-5)
        compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)


def test_a_flop_counter_finds_timms_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    # pooled by mean, so that no token is left out of the last block
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, class_token=False, global_pool="avg").eval()
    counted = []
    for net in (model, fuse(model)):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            net(torch.randn(1, 3, 32, 32))
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5).eval()
        images = torch.randn(1, 3, 32, 32)
        torch.testing.assert_close(fuse(model)(images), model(images), rtol=1e-4, atol=1e-5)
