"""Context Broadcasting against blocks written out in fp64, and against hooks on timm's own modules."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention, Mlp
from timm.models.mlp_mixer import MlpMixer
from timm.models.vision_transformer import Block, ParallelScalingBlock, ParallelThingsBlock
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm

from vtk.errors import UsageError
from vtk.models.transforms.context_broadcast import ContextBroadcast, attach, attach_to_sum, find_context_broadcast
from vtk.models.transforms.context_layers import add_context_broadcast

C, HEADS = 32, 2


def vit(name: str = "vit_tiny_patch16_224", **kwargs: Any) -> nn.Module:
    """A ViT of width 32 with weights far from their start, in fp64."""
    torch.manual_seed(0)
    small = {"depth": 3, "embed_dim": C, "num_heads": HEADS, "img_size": 32, "num_classes": 5, "init_values": 0.3}
    return moved(timm.create_model(name, **{**small, **kwargs}))


def moved(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model.double().eval()


def draw_scales(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, ContextBroadcast) and module.scale is not None:
            module.scale.data.normal_()


def mix(x: Tensor, scale: Tensor | None) -> Tensor:
    """Hyeon-Woo et al. 2023, eq. 1 and 2, token by token."""
    mean = sum(x[:, j] for j in range(x.shape[1])) / x.shape[1]
    rows = [(x[:, i] + mean) / 2 if scale is None else x[:, i] + scale * mean for i in range(x.shape[1])]
    return torch.stack(rows, 1)


def block_forward(x: Tensor, s: dict[str, Tensor], at: dict[str, str], scale: bool) -> Tensor:
    """One block; ``at`` says where attention (attn) and FFN (mlp) broadcast."""

    def cb(x: Tensor, part: str, place: str) -> Tensor:
        return mix(x, s[f"{part}.cb.scale"] if scale else None) if at.get(part) == place else x

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ s[f"{name}.weight"].T + s[f"{name}.bias"]

    b, n, _ = x.shape
    y = cb(layer_norm(x, (C,), s["norm1.weight"], s["norm1.bias"], 1e-6), "attn", "front")
    q, k, v = linear(y, "attn.qkv").view(b, n, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
    y = ((q @ k.transpose(2, 3) * (C // HEADS) ** -0.5).softmax(-1) @ v).transpose(1, 2).reshape(b, n, C)
    x = x + s["ls1.gamma"] * cb(linear(y, "attn.proj"), "attn", "end")
    y = cb(layer_norm(x, (C,), s["norm2.weight"], s["norm2.bias"], 1e-6), "mlp", "front")
    y = cb(gelu(linear(y, "mlp.fc1")), "mlp", "mid")
    return x + s["ls2.gamma"] * cb(linear(y, "mlp.fc2"), "mlp", "end")


@pytest.mark.parametrize("scale", [False, True], ids=["CB", "CB_S"])
@pytest.mark.parametrize(
    ("on", "placement"),
    [("mlp", "end"), ("mlp", "mid"), ("mlp", "front"), ("msa", "end"), ("msa", "front"), ("both", "end")],
)
def test_a_block_computes_the_papers_formula(on: str, placement: str, scale: bool) -> None:
    model = vit()
    add_context_broadcast(model, scale=scale, placement=placement, on=on)
    draw_scales(model)
    at = {part: placement for part, word in (("mlp", "mlp"), ("attn", "msa")) if on in (word, "both")}
    x = torch.randn(2, 7, C, dtype=torch.float64)
    block = model.blocks[1]
    with torch.no_grad():
        expected = block_forward(x, block.state_dict(), at, scale)
        torch.testing.assert_close(block(x), expected, rtol=1e-10, atol=1e-12)
        assert not torch.allclose(block(x), block_forward(x, block.state_dict(), {}, scale))


def test_the_mean_runs_over_class_and_register_tokens_too() -> None:
    model = vit(reg_tokens=3)
    add_context_broadcast(model)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    seen: list[Tensor] = []
    model.blocks[0].mlp.fc2.register_forward_hook(lambda m, a, y: seen.append(y))
    model.blocks[0].mlp.register_forward_hook(lambda m, a, y: seen.append(y))
    model(x)
    before, after = seen
    assert before.shape == (2, 1 + 3 + 4, C)
    torch.testing.assert_close(after, mix(before, None))


def test_mid_and_end_are_one_function_without_a_factor() -> None:
    plain, x = vit(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    logits = {}
    for place in ("mid", "end", "front"):
        model = copy.deepcopy(plain)
        add_context_broadcast(model, placement=place)
        logits[place] = model(x)
    torch.testing.assert_close(logits["mid"], logits["end"], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(logits["front"], logits["end"])


def test_a_factor_of_zero_changes_nothing() -> None:
    model, x = vit(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    before = model(x)
    key_map = add_context_broadcast(model, scale=True, on="both")
    assert torch.equal(model(x), before)
    made = {k for k, v in key_map.items() if v is None}
    assert made == {f"blocks.{i}.{part}.cb.scale" for i in range(3) for part in ("attn", "mlp")}
    assert all(torch.equal(model.state_dict()[k], torch.zeros(C, dtype=torch.float64)) for k in made)


@pytest.mark.parametrize("scale", [False, True], ids=["CB", "CB_S"])
@pytest.mark.parametrize("on", ["mlp", "msa", "both"])
def test_one_broadcast_of_parallel_branches_is_that_of_each(on: str, scale: bool) -> None:
    block = partial(ParallelThingsBlock, num_parallel=3)
    plain, x = vit(block_fn=block, depth=2), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    model, each = copy.deepcopy(plain), copy.deepcopy(plain)
    add_context_broadcast(model, scale=scale, on=on)
    draw_scales(model)
    for joined, parts in zip(model.blocks, each.blocks, strict=True):
        assert (joined.cb is not None, joined.cb_msa is not None) == (on != "msa", on != "mlp")
        for branch in (*(parts.ffns if joined.cb else ()), *(parts.attns if joined.cb_msa else ())):
            body = branch.mlp if hasattr(branch, "mlp") else branch.attn
            attach(body, joined.cb if hasattr(branch, "mlp") else joined.cb_msa, "end")
    torch.testing.assert_close(model(x), each(x), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(model(x), plain(x))


def test_parallel_branches_pass_a_mask_on() -> None:
    plain = vit(block_fn=ParallelThingsBlock, depth=1).blocks[0]
    block, x = copy.deepcopy(plain), torch.randn(2, 5, C, dtype=torch.float64)
    attach_to_sum(block, ContextBroadcast(C, dtype=torch.float64), "mlp")  # a factor of zero: timm's own block
    mask = torch.eye(5, dtype=torch.bool)
    for options in ({"attn_mask": mask}, {"is_causal": True}, {}):
        torch.testing.assert_close(block(x, **options), plain(x, **options), rtol=1e-12, atol=1e-13)


def test_front_and_mid_of_parallel_branches_have_a_factor_each() -> None:
    for place, width in (("front", C), ("mid", 4 * C)):
        model = vit(block_fn=ParallelThingsBlock, depth=1)
        key_map = add_context_broadcast(model, scale=True, placement=place)
        made = {k: model.state_dict()[k].numel() for k, v in key_map.items() if v is None}
        assert made == {f"blocks.0.ffns.{i}.mlp.cb.scale": width for i in range(2)}


PIT = {"base_dims": (8, 8, 8), "depth": (1, 2, 2), "heads": (2, 2, 2), "num_classes": 3, "img_size": 64}
MIXER = {"num_blocks": 3, "embed_dim": 16, "num_classes": 3, "img_size": 64}
DISTILLED = {"depth": 2, "embed_dim": 32, "num_heads": 2, "img_size": 64}


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (partial(timm.create_model, "pit_ti_224", **PIT),
         ["transformers.1.blocks.1.mlp", "transformers.2.blocks.0.mlp", "transformers.2.blocks.1.mlp"]),
        (partial(MlpMixer, **MIXER), ["blocks.1.mlp_channels", "blocks.2.mlp_channels"]),
        (partial(timm.create_model, "deit_tiny_distilled_patch16_224", **DISTILLED), ["blocks.1.mlp"]),
        (partial(timm.create_model, "vit_base_patch16_rpn_224", **DISTILLED), ["blocks.1.mlp"]),
    ],
    ids=["PiT", "Mixer", "distilled", "post-norm"],
)  # fmt: skip
def test_the_upper_half_of_every_family(build: Any, expected: list[str]) -> None:
    plain = moved(build())
    model = copy.deepcopy(plain)
    add_context_broadcast(model, layers="upper")
    assert [n for n, m in model.named_modules() if find_context_broadcast(m)] == expected
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        before = plain(x)
        for name in expected:
            plain.get_submodule(name).register_forward_hook(lambda m, a, y: mix(y, None))
        torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=1e-11)
        assert not torch.allclose(model(x), before)


@pytest.mark.parametrize(("layers", "expected"), [("all", [0, 1, 2]), ("upper", [1, 2]), ([2, 0], [0, 2]), ((1,), [1])])
def test_which_layers(layers: Any, expected: list[int]) -> None:
    model = vit()
    add_context_broadcast(model, layers=layers)
    assert [i for i, block in enumerate(model.blocks) if find_context_broadcast(block.mlp)] == expected
    assert not any(find_context_broadcast(block.attn) for block in model.blocks)


@pytest.mark.parametrize(
    ("build", "kwargs", "message"),
    [
        (vit, {"placement": "back"}, "`placement` is 'back'; allowed is front, mid, end"),
        (vit, {"on": "ffn"}, "`on` is 'ffn'; allowed is mlp, msa, both"),
        (vit, {"scale": 1}, "`scale` is 1"),
        (vit, {"layers": "lower"}, "`layers` is 'lower'; give all, upper, or block numbers from 0 to 2"),
        (vit, {"layers": []}, r"`layers` is \[\]"),
        (vit, {"layers": [0, 3]}, "`layers` has 3; the model's blocks are 0 to 2"),
        (vit, {"layers": [True]}, "`layers` has True"),
        (vit, {"layers": [-1]}, "`layers` has -1"),
        (vit, {"layers": [1, 1]}, "has a block twice"),
        (vit, {"placement": "mid", "on": "both"}, r"mid: blocks\.0\.attn is a Attention"),
        (partial(vit, block_fn=ParallelScalingBlock), {}, r"blocks\.0 is a ParallelScalingBlock"),
        (partial(timm.create_model, "vit_tiny_patch16_224", mlp_layer=timm.layers.SwiGLU), {"placement": "mid"},
         r"mid: blocks\.0\.mlp is a SwiGLU, and mid needs timm's Mlp"),
        (partial(timm.create_model, "resnet18"), {}, "ResNet cannot have Context Broadcasting; supported are"),
        (partial(timm.create_model, "mixer_s32_224"), {"on": "msa"}, "MixerBlock, which has no attention"),
        (partial(timm.create_model, "resmlp_12_224"), {}, r"blocks\.0 is a ResBlock"),
    ],
)  # fmt: skip
def test_what_cannot_have_it_is_refused_by_name_and_left_alone(
    build: Any, kwargs: dict[str, Any], message: str
) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(UsageError, match=message):
        add_context_broadcast(model, **kwargs)
    assert not any(isinstance(m, ContextBroadcast) for m in model.modules())


@pytest.mark.parametrize("block", [Block, ParallelThingsBlock])
def test_it_is_added_once(block: type[nn.Module]) -> None:
    model = vit(block_fn=block)
    add_context_broadcast(model, layers=[2])
    with pytest.raises(UsageError, match="already has Context Broadcasting"):
        add_context_broadcast(model, layers=[0])


@pytest.mark.parametrize("kind", ["block", "parallel", "swiglu"])
def test_a_model_with_it_copies_pickles_and_keeps_its_names(kind: str) -> None:
    options = {"parallel": {"block_fn": ParallelThingsBlock}, "swiglu": {"mlp_layer": timm.layers.SwiGLU}}.get(kind, {})
    model, x = vit(**options), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    names = list(model.state_dict())
    add_context_broadcast(model, scale=True, on="both")
    assert [k for k in model.state_dict() if not k.endswith(".scale")] == names
    draw_scales(model)
    logits = model(x)
    if kind == "block":
        assert isinstance(model.blocks[0].mlp, Mlp) and isinstance(model.blocks[0].attn, Attention)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(x), logits)
        assert not {p.data_ptr() for p in again.parameters()} & {p.data_ptr() for p in model.parameters()}
    other = vit(**options)
    add_context_broadcast(other, scale=True, on="both")
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(x), logits)


def test_it_is_captured_as_one_graph() -> None:
    model, x = vit(depth=3).float(), torch.randn(2, 3, 32, 32)
    for i, place in enumerate(("end", "mid", "front")):
        attach(model.blocks[i].mlp, ContextBroadcast(4 * C if place == "mid" else C), place)
    draw_scales(model)
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


def test_every_factor_gets_a_gradient() -> None:
    model = vit(block_fn=partial(ParallelThingsBlock, num_parallel=2))
    add_context_broadcast(model, scale=True, on="both")
    model.train()
    model(torch.randn(2, 3, 32, 32, dtype=torch.float64)).square().sum().backward()
    scales = [m.scale for m in model.modules() if isinstance(m, ContextBroadcast)]
    assert len(scales) == 6
    assert all(s is not None and s.grad is not None and float(s.grad.abs().sum()) > 0 for s in scales)
