"""Norms of weights and tokens against numpy."""

import numpy as np
import pytest
import torch
from timm.models.mlp_mixer import MlpMixer

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.diagnostics.norms import DIAGNOSTIC, hidden_by_block
from vtk.analysis.measures.norms import OUTLIER, model_norms, weight_norms
from vtk.analysis.probes.depth_points import depth_points
from vtk.errors import DataError, UsageError


def root(model, wanted):
    """(norm, norm of the matrices, count) of the parameters that a rule on their names takes, by numpy."""
    taken = [p.detach().numpy() for name, p in model.named_parameters() if wanted(name)]
    every, matrices = (np.concatenate([p.ravel() for p in taken if p.ndim >= least]) for least in (1, 2))
    return np.linalg.norm(every), np.linalg.norm(matrices), every.size


def as_tuple(found):
    return found.norm, found.matrices, found.parameters


def test_weights_by_block_and_part_are_numpys():
    model = tiny_vit(depth=2)
    found = weight_norms(model)
    rules = {
        "whole": lambda n: True,
        "embedding": lambda n: n.startswith(("patch_embed", "pos_embed", "cls_token")),
        "msa": lambda n: ".attn." in n or ".norm1." in n,
        "mlp": lambda n: ".mlp." in n or ".norm2." in n,
        "block 2": lambda n: n.startswith("blocks.1."),
        "block 2: msa": lambda n: n.startswith(("blocks.1.attn.", "blocks.1.norm1.")),
        "block 2: mlp": lambda n: n.startswith(("blocks.1.mlp.", "blocks.1.norm2.")),
        "head": lambda n: n.startswith("head."),
    }
    for name, rule in rules.items():
        assert as_tuple(found[name]) == pytest.approx(root(model, rule), rel=1e-12), name
    assert "token mlp" not in found and "block 3" not in found


def test_parts_of_a_mixer_and_none_of_a_resnet():
    mixer = MlpMixer(num_classes=3, img_size=32, patch_size=8, num_blocks=1, embed_dim=16)
    found = weight_norms(mixer)
    expected = root(mixer, lambda n: n.startswith(("blocks.0.mlp_tokens", "blocks.0.norm1")))
    assert as_tuple(found["block 1: token mlp"]) == pytest.approx(expected, rel=1e-6)
    assert not any(":" in name for name in weight_norms(timm_model("test_resnet")))


def test_tokens_of_a_vit_are_numpys_its_class_and_register_tokens_apart():
    model = tiny_vit(depth=2, img_size=16, reg_tokens=2)
    with torch.no_grad():
        model.reg_token.mul_(100)  # must not count as a position
    batches = images(5, side=16, sizes=(2, 3))
    found = model_norms(model, batches)
    x = torch.cat([x for x, _ in batches])
    with torch.no_grad():
        stem = model.patch_embed(x)
        points = [stem, model._pos_embed(stem)]
        for block in model.blocks:
            points.append(block(points[-1]))
    assert found.prefix == 3 and [t.name for t in found.tokens] == ["stem", "pos_embed", "blocks.0", "blocks.1"]
    for token, point in zip(found.tokens, points, strict=True):
        every = np.sqrt((point.numpy() ** 2).sum(-1))
        patches = every if token.name == "stem" else every[:, 3:]
        assert token.mean == pytest.approx(patches.mean(), rel=1e-12)
        assert token.maximum == pytest.approx(patches.max(), rel=1e-12)
        assert token.cls == (None if token.name == "stem" else pytest.approx(every[:, 0].mean(), rel=1e-12))
        middle = np.sort(patches, axis=1)[:, (patches.shape[1] - 1) // 2]
        assert token.outliers == pytest.approx((patches > OUTLIER * middle[:, None]).mean(), abs=1e-12)


def test_hidden_layers_are_numpys_over_all_tokens_and_neurons():
    model = tiny_vit()
    batches = images(3, sizes=(2, 1))
    found = model_norms(model, batches)
    block, x = model.blocks[0], torch.cat([x for x, _ in batches])
    with torch.no_grad():
        tokens = model._pos_embed(model.patch_embed(x))
        y = tokens + block.attn(block.norm1(tokens))
        hidden = torch.nn.functional.gelu(block.mlp.fc1(block.norm2(y))).numpy()
    (layer,) = found.hidden
    assert (layer.name, layer.block, layer.kind) == ("blocks.0.mlp.act", 1, "MLP")
    assert layer.norm == pytest.approx(np.sqrt((hidden**2).sum(axis=(1, 2)).mean()), rel=1e-12)


def test_one_token_far_above_the_others_is_an_outlier_of_its_share():
    model = tiny_vit(img_size=16, class_token=False, global_pool="avg")
    with torch.no_grad():
        model.pos_embed[0, 5] = 1e4
    stem, table, block = model_norms(model, images(4, side=16)).tokens
    assert stem.outliers == 0.0 and table.outliers == pytest.approx(1 / 16) and table.cls is None
    assert table.maximum == pytest.approx(1e4 * 8**0.5, rel=0.01) and block.outliers == pytest.approx(1 / 16)


FAMILIES = {
    "swin": ("swin_tiny_patch4_window7_224", 32, 0,
             {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)}),
    "pit": ("pit_ti_224", 64, 1, {"img_size": 64, "depth": (1, 1, 1), "base_dims": (8, 8, 8)}),
    "cait": ("cait_xxs24_224", 32, 1, {"img_size": 32, "depth": 1, "embed_dim": 48, "num_heads": 2}),
    "resnet": ("test_resnet", 32, 0, {}),
    "distilled": ("deit_tiny_distilled_patch16_224", 32, 2, {"img_size": 32, "depth": 1, "embed_dim": 48}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_other_families(family):
    name, side, prefix, options = FAMILIES[family]
    model = timm_model(name, **options)
    kept = {}
    for point in depth_points(model):
        hook = lambda m, i, o, point=point: kept.__setitem__(point.name, point.tokens(o))  # noqa: E731
        point.module.register_forward_hook(hook)
    found = model_norms(model, [(x.float(), y) for x, y in images(2, side=side)])
    assert found.prefix == prefix and len(found.tokens) == len(kept)
    for token in found.tokens:
        every = np.linalg.norm(kept[token.name].detach().double().numpy(), axis=-1)
        apart = 0 if token.cls is None else prefix
        assert token.mean == pytest.approx(every[:, apart:].mean(), rel=1e-6)
        assert token.cls is None or token.cls == pytest.approx(every[:, 0].mean(), rel=1e-6)
        without = {"pit": ("stem", "pos_embed"), "distilled": ("stem",)}.get(family, kept)  # a CaiT's blocks have none
        assert (token.cls is None) == (token.name in without), token.name


def test_the_model_is_left_alone_and_what_cannot_be_looked_at_is_refused():
    model = tiny_vit(proj_drop_rate=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert model_norms(model, images(3), max_images=2) == model_norms(model, images(2))
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(DataError, match="no images"):
        model_norms(model, [])
    with pytest.raises(DataError, match="after `stem` are not all finite"):
        model_norms(model, [(x * torch.nan, y) for x, y in images(1)])
    with pytest.raises(UsageError, match="no recognised blocks"):
        model_norms(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)).double(), images(1))


def test_readings_tell_registers_from_positions_and_hidden_norms_add_up_in_squares():
    plain = DIAGNOSTIC.read(model_norms(tiny_vit(img_size=16), images(3, side=16)).to_dict())
    assert any("fewer than one token in a thousand" in told for told in plain)
    model = tiny_vit(img_size=16)
    with torch.no_grad():
        model.pos_embed[0, 5] = 1e4
    told = " ".join(DIAGNOSTIC.read(model_norms(model, images(3, side=16)).to_dict()))
    assert "After block 1 up to 6.2 % of the tokens exceed 4 times" in told and "register tokens" in told
    hidden = [{"block": 1, "kind": "conv", "norm": 3.0}, {"block": 1, "kind": "conv", "norm": 4.0}]
    assert hidden_by_block({"hidden": hidden}, "conv") == {1: 5.0}


def test_plots_show_the_parts_of_a_model_and_all_of_one_without_parts():
    vit = Run("vit", model_norms(tiny_vit(depth=2), images(1)).to_dict())
    resnet = Run(
        "resnet", model_norms(timm_model("test_resnet"), [(images(1, side=32)[0][0].float(), torch.zeros(1))]).to_dict()
    )
    tokens, weights, hidden = DIAGNOSTIC.draw([vit, resnet])
    labels = [[line.get_label() for line in one.figure.axes[0].get_lines()] for one in (tokens, weights, hidden)]
    assert labels[0] == ["vit: mean", "vit: class token", "vit: largest", "resnet: mean", "resnet: largest"]
    assert labels[1] == ["vit: MSA", "vit: MLP", "resnet: all matrices"] and labels[2] == ["vit: MLP", "resnet: conv"]
    drawn = list(weights.figure.axes[0].get_lines()[0].get_ydata())
    assert drawn == [vit.result["weights"][f"block {k}: msa"]["matrices"] for k in (1, 2)]
