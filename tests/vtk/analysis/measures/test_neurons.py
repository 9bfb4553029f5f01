"""Active neurons against forward passes written by hand."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import GluMlp, SwiGLU, SwiGLUPacked
from timm.models.mlp_mixer import MlpMixer
from torch import nn

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.diagnostics.neurons import DIAGNOSTIC, by_block
from vtk.analysis.measures.neurons import active_neurons
from vtk.analysis.probes.activations import watch_activations
from vtk.errors import DataError, UsageError
from vtk.models.create import build_model
from vtk.models.transforms.mlp_layers import change_mlp
from vtk.models.transforms.squeeze_excite import add_squeeze_excite


def counted(hidden):
    """(share above 0, never, always) of activations or inputs of activations (…, neurons)."""
    above = (hidden > 0).reshape(-1, hidden.shape[-1])
    return float(above.double().mean()), int((~above.any(0)).sum()), int(above.all(0).sum())


def as_tuple(layer):
    return layer.active, layer.never, layer.always


def push_down(linear, rows=2):
    """Make the first neurons of a layer never active and the next one always."""
    with torch.no_grad():
        linear.bias[:rows] = -1e3
        linear.bias[rows] = 1e3


def test_a_vit_is_counted_as_its_blocks_run_by_hand():
    model = tiny_vit(depth=3)
    push_down(model.blocks[1].mlp.fc1)
    batches = images(5, sizes=(3, 2))
    found = active_neurons(model, batches)
    with torch.no_grad():  # in front of GELU, which has the sign of its input
        x = model._pos_embed(model.patch_embed(torch.cat([x for x, _ in batches])))
        expected = []
        for block in model.blocks:
            y = x + block.attn(block.norm1(x))
            expected.append(counted(F.linear(block.norm2(y), block.mlp.fc1.weight, block.mlp.fc1.bias)))
            x = block(x)
    assert found.images == 5 and found.unseen == ()
    assert [(layer.name, layer.block, layer.kind, layer.function, layer.neurons) for layer in found.layers] == [
        (f"blocks.{i}.mlp.act", i + 1, "MLP", "GELU", 16) for i in range(3)
    ]
    for layer, values in zip(found.layers, expected, strict=True):
        assert as_tuple(layer) == pytest.approx(values, abs=1e-12)
    assert found.layers[1].never >= 2 and found.layers[1].always >= 1


def test_both_mlps_of_a_mixer_have_neurons_of_their_own():
    torch.manual_seed(0)
    model = MlpMixer(num_classes=3, img_size=32, patch_size=8, num_blocks=2, embed_dim=16).double()
    batches = images(3, side=32)
    found = active_neurons(model, batches)
    with torch.no_grad():
        x = model.stem(batches[0][0])
        expected = []
        for block in model.blocks:
            tokens = block.mlp_tokens.fc1(block.norm1(x).transpose(1, 2))  # (B, C, hidden): a neuron reads all tokens
            y = x + block.mlp_tokens(block.norm1(x).transpose(1, 2)).transpose(1, 2)
            expected += [("token MLP", *counted(tokens)), ("MLP", *counted(block.mlp_channels.fc1(block.norm2(y))))]
            x = block(x)
    assert [layer.kind for layer in found.layers] == ["token MLP", "MLP"] * 2
    for layer, (_, *values) in zip(found.layers, expected, strict=True):
        assert as_tuple(layer) == pytest.approx(tuple(values), abs=1e-9)
    assert found.layers[0].neurons == model.blocks[0].mlp_tokens.fc1.out_features


def test_channels_of_a_resnet_are_neurons_in_every_relu():
    model = timm_model("test_resnet")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.bias.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))
    block = model.layer1[0]
    with torch.no_grad():
        block.bn1.bias[0] = -1e3
    x = images(2, side=32)[0][0].float()
    found = active_neurons(model, [(x, torch.zeros(2))])
    with torch.no_grad():
        stem = model.maxpool(model.act1(model.bn1(model.conv1(x))))
        expected = block.bn1(block.conv1(stem)).relu().movedim(1, -1)
    first = found.layers[0]
    assert (first.name, first.block, first.kind, first.function) == ("layer1.0.act1", 1, "conv", "ReLU")
    assert as_tuple(first) == pytest.approx(counted(expected), abs=1e-9) and first.never >= 1
    relus = sum(isinstance(m, nn.ReLU) for name, m in model.named_modules() if name.startswith("layer"))
    assert len(found.layers) == relus


@pytest.mark.parametrize(
    "mlp, gate",
    [
        (SwiGLU, lambda mlp, x: mlp.fc1_g(x)),
        (SwiGLUPacked, lambda mlp, x: mlp.fc1(x).chunk(2, -1)[0]),
    ],
    ids=["swiglu", "packed"],
)
def test_of_a_gated_mlp_the_gate_counts(mlp, gate):
    model = tiny_vit(mlp_layer=mlp, act_layer=nn.SiLU)
    x = images(3)[0][0]
    (layer,) = active_neurons(model, images(3)).layers
    with torch.no_grad():
        block, tokens = model.blocks[0], model._pos_embed(model.patch_embed(x))
        expected = gate(block.mlp, block.norm2(tokens + block.attn(block.norm1(tokens))))
    assert layer.function == "SiLU" and layer.neurons == expected.shape[-1]
    assert as_tuple(layer) == pytest.approx(counted(expected), abs=1e-12)


def build(name):
    if name == "swin":
        return timm_model("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(1, 1),
                          num_heads=(2, 4)), 32  # fmt: skip
    if name == "swinv2":  # has a ReLU of its own in the attention's table of positions
        return timm_model("swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=24, depths=(1, 1),
                          num_heads=(2, 4)), 32  # fmt: skip
    if name == "pit":
        return timm_model("pit_ti_224", img_size=64, depth=(1, 1, 1), base_dims=(8, 8, 8)), 64
    if name == "parallel":
        return timm_model("vit_small_patch16_18x2_224", img_size=32, depth=2, embed_dim=24, num_heads=3), 32
    if name == "22b":
        return tiny_vit(block_fn=timm.models.vision_transformer.ParallelScalingBlock).float(), 8
    if name == "convnext":
        return timm_model("test_convnext"), 32
    if name == "alternet":
        return build_model("alternet_18_cifar", num_classes=3, pretrained=False, kwargs={
            "channels": (8, 8, 8, 8), "heads": (1, 2, 2, 2), "head_dim": 4}).model, 32  # fmt: skip
    if name == "preact":
        return timm_model("resnetv2_18", channels=(8, 8, 8, 8), stem_chs=8), 32
    if name == "bn":
        model = tiny_vit(depth=2).float()
        change_mlp(model, design="bn")
        return model, 8
    model = tiny_vit(depth=2).float()
    add_squeeze_excite(model, reduction=2)
    return model, 8


@pytest.mark.parametrize(
    "name, kinds, widths",
    [
        ("swin", {"MLP"}, [96, 192]),
        ("swinv2", {"MLP"}, [96, 192]),
        ("pit", {"MLP"}, None),
        ("parallel", {"MLP"}, [96] * 4),
        ("22b", {"MLP"}, [16]),
        ("convnext", {"MLP"}, None),
        ("alternet", {"conv"}, None),
        ("preact", {"conv"}, [8] * 16),
        ("bn", {"MLP"}, [16, 16]),
        ("squeeze", {"MLP"}, [16, 16]),
    ],
)
def test_families_have_the_widths_of_their_hidden_layers(name, kinds, widths):
    model, side = build(name)
    batches = [(x.float(), y) for x, y in images(2, side=side)]
    found = active_neurons(model.eval(), batches)
    assert {layer.kind for layer in found.layers} == kinds and not found.unseen
    if widths is not None:
        assert [layer.neurons for layer in found.layers] == widths
    for layer in found.layers:  # the layer behind reads as many channels
        if layer.name.endswith(".mlp.act"):
            assert layer.neurons == model.get_submodule(layer.name.removesuffix("act") + "fc2").weight.shape[1]
    assert all(0 < layer.active < 1 for layer in found.layers)


class Functional(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


def test_activations_that_are_functions_are_named_and_refused_where_nothing_else_is_seen():
    model = tiny_vit(depth=2)
    model.blocks[1].mlp = Functional().double()
    found = active_neurons(model, images(2))
    assert found.unseen == ("blocks.1",) and [layer.block for layer in found.layers] == [1]
    assert any("their activations cannot be observed: blocks.1" in told for told in DIAGNOSTIC.read(found.to_dict()))
    model.blocks[0].mlp = Functional().double()
    with pytest.raises(UsageError, match=r"VisionTransformer: `blocks\.0` calls its activation as a function"):
        active_neurons(model, images(2))


def test_a_sigmoid_gate_and_unknown_models_are_refused():
    with pytest.raises(UsageError, match=r"`blocks\.0` has no module of ReLU, GELU, SiLU"):
        active_neurons(tiny_vit(mlp_layer=GluMlp, act_layer=nn.Sigmoid), images(1))
    with pytest.raises(UsageError, match="Sequential has no recognised blocks"):
        active_neurons(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double(), images(1))
    with pytest.raises(DataError, match="no images"):
        active_neurons(tiny_vit(), [])


def test_a_module_that_is_called_twice_gives_two_layers():
    model = tiny_vit()
    mlp = model.blocks[0].mlp
    mlp.forward = lambda x: mlp.fc2(mlp.act(-mlp.act(mlp.fc1(x)) + 0.1))
    names = [layer.name for layer in active_neurons(model, images(4, sizes=(2, 2))).layers]
    assert names == ["blocks.0.mlp.act", "blocks.0.mlp.act (2)"]


def test_the_model_is_left_alone_and_gives_the_same_outputs_while_watched():
    model = tiny_vit(depth=2, proj_drop_rate=0.5).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert active_neurons(model, images(2)) == active_neurons(model, images(2))
    assert model.training and all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    x = images(2)[0][0]
    seen = []
    with torch.no_grad(), watch_activations(model.eval(), lambda hidden, output: seen.append(hidden.name)):
        watched = model(x)
    assert torch.equal(watched, model(x)) and len(seen) == 2
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_readings_name_dead_blocks_and_random_weights():
    model = tiny_vit(depth=4)
    push_down(model.blocks[2].mlp.fc1, rows=4)
    found = active_neurons(model, images(40))
    dead = [layer.block for layer in found.layers if layer.never]
    assert found.layers[2].never >= 4 and dead == [3, 4]  # the fourth by its random weights
    told = " ".join(DIAGNOSTIC.read(found.to_dict()))
    total = sum(layer.never for layer in found.layers)
    assert (
        f"{total} of 64 neurons" in told
        and "never active on these 40 images (at least 1 % of those in blocks 3, 4): they contribute only" in told
    )
    fresh = timm_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48)
    told = " ".join(DIAGNOSTIC.read(active_neurons(fresh, [(x.float(), y) for x, y in images(4, side=32)]).to_dict()))
    assert "what random weights give" in told


def test_shares_by_block_weigh_layers_by_their_neurons():
    layers = [
        {"block": 1, "kind": "MLP", "neurons": 3, "active": 0.5, "never": 1},
        {"block": 1, "kind": "MLP", "neurons": 1, "active": 0.1, "never": 1},
        {"block": 2, "kind": "conv", "neurons": 2, "active": 0.3, "never": 0},
    ]
    assert by_block({"layers": layers}, "MLP", "active") == pytest.approx({1: 0.4})
    assert by_block({"layers": layers}, None, "never") == {1: 0.5, 2: 0.0}


def test_plots_show_each_kind_of_each_model_in_percent():
    layer = {"name": "a", "block": 1, "kind": "MLP", "function": "GELU", "neurons": 4, "active": 0.25, "never": 1}
    mixer = {"layers": [layer, {**layer, "kind": "token MLP", "active": 0.5}]}
    active, never = DIAGNOSTIC.draw([Run("a", {"layers": [layer]}), Run("b", mixer)])
    lines = active.figure.axes[0].get_lines()
    assert [(line.get_label(), list(line.get_ydata())) for line in lines] == [
        ("a", [25.0]), ("b: MLP", [25.0]), ("b: token MLP", [50.0])]  # fmt: skip
    assert [list(line.get_ydata()) for line in never.figure.axes[0].get_lines()] == [[25.0]] * 3
    assert (active.name, never.name) == ("neurons", "neurons-never")
