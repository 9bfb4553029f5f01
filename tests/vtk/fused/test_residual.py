"""A residual stream without biases: the same numbers, fewer elements moved, the same number of kernels."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

from tests._simulated_cuda import SimulatedCuda
from vtk.errors import UsageError
from vtk.fused import fuse
from vtk.fused.kernel_count import count
from vtk.fused.stages import Plan
from vtk.models.transforms.context_layers import add_context_broadcast

Answer = Callable[[dict[str, str]], None]


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Lets a measurement choose for the products that end a stage, by their length."""

    def use(answers: dict[str, str]) -> None:
        def choose(op: str, rows: int, n: int, k: int, *_: Any) -> str:
            plain = {"linear_gelu": "triton", "splitk_linear": "aten", "ln_folded": "separate"}
            return answers.get(str(k), answers["all"]) if op == "residual" else plain[op]

        for module in ("model", "stage_output", "mlp_stage", "residual"):
            monkeypatch.setattr(f"vtk.fused.{module}.choose", choose)

    return use


def tiny(**kwargs: Any) -> nn.Module:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=48, num_heads=3, **kwargs)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return model.eval()


def parallel() -> nn.Module:
    model = timm.create_model("vit_small_patch16_18x2_224", img_size=32, depth=2, embed_dim=48, num_heads=3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.mark.parametrize("pool", ["token", "avg"])
@pytest.mark.parametrize(
    "kind",
    [tiny, lambda **k: tiny(block_fn=ParallelScalingBlock, **k), lambda **k: tiny(norm_layer="rmsnorm", **k)],
    ids=["block", "scaling", "rms"],
)
def test_it_is_timms_model(kind: Callable[..., nn.Module], pool: str, answer: Answer) -> None:
    answer({"all": "addmm"})
    model = kind(global_pool=pool).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    fused = fuse(model, torch.float64)
    with torch.no_grad():
        found, again = (fused.compute(images, Plan(kernels=True)) for _ in range(2))
    expected = model(images).detach()
    assert torch.equal(found, again)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max().clamp_min(1)
    assert "bias_sums" not in fused.state_dict()


def test_with_branches_gradients_of_images_and_other_weights(answer: Answer) -> None:
    answer({"all": "addmm"})
    model, other = parallel().double(), parallel().double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)
    fused = fuse(model, torch.float64)
    fused.load_state_dict(fuse(other, torch.float64).state_dict())
    found, expected = fused.compute(images, Plan(kernels=True)), other(images)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    g, wanted = (torch.autograd.grad(t.square().sum(), images)[0] for t in (found, expected))
    assert (g - wanted).abs().max() <= 1e-11 * wanted.abs().max()


def test_as_many_kernels_and_a_fifth_fewer_elements_at_the_end_of_a_stage(answer: Answer) -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=4)
    found = {}
    for way in ("separate", "addmm"):
        answer({"all": way})
        found[way] = count(model, batch=8)
    assert found["addmm"].counts.total() == found["separate"].counts.total()
    assert found["addmm"].counts["norm"] == 8 and found["addmm"].counts["add_norm"] == 1  # the embedding's
    assert found["separate"].counts["norm"] == 0 and found["separate"].counts["add_norm"] == 9
    # of the six ends of whole stages (the last block computes one token): five times tokens · channels, and four
    units = (found["separate"].moved.total() - found["addmm"].moved.total()) / (8 * 197 * 192)
    assert 6 <= units <= 6 * 1.01


def with_context(model: nn.Module) -> nn.Module:
    add_context_broadcast(model, layers=[0])
    return model


@pytest.mark.parametrize(
    ("make", "answers"),
    [
        (tiny, {"all": "addmm", "48": "separate"}), (tiny, {"all": "separate", "48": "addmm"}),
        (lambda: with_context(tiny()), {"all": "addmm"}),
    ],
    ids=["only fc2", "only the projection", "context broadcasting"],
)  # fmt: skip
def test_all_ends_of_stages_or_none(make: Callable[[], nn.Module], answers: dict[str, str], answer: Answer) -> None:
    model = make()
    answer({"all": "separate"})
    plain = count(model).counts
    answer(answers)
    assert count(model).counts == plain


def test_the_stream_is_changed_in_place_only_where_nobody_looks(answer: Answer) -> None:
    from vtk.fused.residual import close_by_products

    x, a, w, b = torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.randn(8, 4), torch.randn(8)
    expected = x + a @ w.T
    for grad in (True, False):
        stream: Tensor = x.clone()
        leaf = a.clone().requires_grad_(grad)
        y, h = close_by_products(stream, b, [(leaf, w)], 1e-6)
        assert (y.data_ptr() == stream.data_ptr()) is not grad
        assert torch.allclose(y, expected, atol=1e-5)
        assert torch.allclose(h, torch.nn.functional.layer_norm(expected + b, (8,), eps=1e-6), atol=1e-5)


@pytest.mark.parametrize("way", ["part by part", "in place", "another tensor", "a copy"])
def test_sums_of_biases_follow_the_biases(way: str, answer: Answer, on_a_card: SimulatedCuda) -> None:
    """One by one and in graphs, of the cache and of one caller."""
    answer({"all": "addmm"})
    model, other = tiny().double(), tiny().double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    fused, new = fuse(model, torch.float64), fuse(other, torch.float64)
    if way == "a copy":
        fused.compute(images, Plan(kernels=True))
        fused = copy.deepcopy(fused)
    fused.compute = partial(fused.compute, plan=Plan(kernels=True))  # type: ignore[method-assign]
    with torch.no_grad():
        graph = fused.graph(2)
        for x in (images, images):
            assert torch.allclose(fused(x), model(x), rtol=0, atol=1e-11)
        for stage, another in zip(fused.stages, new.stages, strict=True):
            if way == "part by part":
                stage.load_state_dict(another.state_dict())
                continue
            for (name, tensor), fresh in zip(stage.named_parameters(), another.parameters(), strict=True):
                if way == "another tensor":
                    setattr(stage, name, fresh)
                else:
                    tensor.copy_(fresh)
        fused.embed.load_state_dict(new.embed.state_dict())
        fused.head.load_state_dict(new.head.state_dict())
        with pytest.raises(UsageError, match="out of date"):
            graph(images)
        for _ in range(2):
            assert torch.allclose(fused(images), other(images), rtol=0, atol=1e-11)
        assert torch.allclose(fused.graph(2)(images), other(images), rtol=0, atol=1e-11)
        assert torch.allclose(fused.compute(images), other(images), rtol=0, atol=1e-11)
