"""Likeness of tokens against the formula written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from timm.models.mlp_mixer import MlpMixer

from tests.vtk.analysis._models import images, timm_model, tiny_vit
from vtk.analysis import figures, token_similarity
from vtk.analysis.diagnostics.base import Run
from vtk.analysis.diagnostics.similarity import DIAGNOSTIC, place_points
from vtk.analysis.measures.similarity import cosine_similarity
from vtk.analysis.probes.depth_points import block_modules
from vtk.errors import UsageError


def written_out(tokens):
    """Wang et al. 2022, eq. 5: the matrix of all pairs, without its diagonal."""
    n = tokens.shape[0]
    pairs = F.cosine_similarity(tokens[:, None], tokens[None], dim=-1)
    return float(pairs[~torch.eye(n, dtype=torch.bool)].sum()) / (n * (n - 1))


def test_the_sum_is_that_of_all_pairs():
    tokens = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    assert cosine_similarity(tokens).tolist() == pytest.approx([written_out(one) for one in tokens], abs=1e-12)


def test_equal_tokens_have_one_orthogonal_ones_nothing_and_a_single_one_no_number():
    assert cosine_similarity(torch.ones(1, 4, 3)).item() == pytest.approx(1.0)
    assert cosine_similarity(torch.eye(4)[None]).item() == pytest.approx(0.0)
    assert math.isnan(cosine_similarity(torch.ones(1, 1, 3)).item())


def test_a_vit_of_twelve_blocks_has_the_papers_fourteen_points_in_order():
    model = tiny_vit(depth=12, img_size=16)
    batches = images(5, side=16, sizes=(3, 2))
    found = token_similarity(model, batches)
    assert list(found.values) == ["stem", "pos_embed", *(f"blocks.{i}" for i in range(12))] and found.images == 5
    x = torch.cat([x for x, _ in batches])
    with torch.no_grad():  # timm's own steps
        stem = model.patch_embed(x)
        tokens = model._pos_embed(stem)
        expected = [stem, tokens]
        for block in model.blocks:
            expected.append(block(expected[-1]))
    for value, points in zip(found.values.values(), expected, strict=True):
        assert value == pytest.approx(sum(map(written_out, points)) / 5, abs=1e-9)


@pytest.mark.parametrize(
    "name, options, side, blocks",
    [
        ("swin_tiny_patch4_window7_224",
         {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)}, 32, 2),
        ("mixer", {"img_size": 64, "patch_size": 16, "num_blocks": 2, "embed_dim": 16}, 64, 2),
        ("test_resnet", {}, 32, 4),
        ("resnetv2_18", {"channels": (8, 8, 8, 8), "stem_chs": 8}, 32, 8),
        ("pit_ti_224", {"img_size": 64, "depth": (1, 2, 1), "base_dims": (8, 8, 8)}, 64, 4),
    ],
)  # fmt: skip
def test_positions_of_maps_are_tokens(name, options, side, blocks):
    model = MlpMixer(**options).eval() if name == "mixer" else timm_model(name, **options)
    batches = [(x.float(), y) for x, y in images(2, side=side)]
    kept = {}
    for block_name, block in block_modules(model).items():
        block.register_forward_hook(lambda m, i, o, n=block_name: kept.__setitem__(n, o))
    found = token_similarity(model, batches)
    assert len(block_modules(model)) == blocks and len(kept) == blocks
    for point, output in kept.items():
        if output.ndim == 4:
            channels = 3 if getattr(model, "output_fmt", None) == "NHWC" else 1
            output = output.movedim(channels, -1).flatten(1, 2)
        if output.shape[1] > 1:
            expected = sum(written_out(one.double()) for one in output) / 2
            assert found.values[point] == pytest.approx(expected, abs=1e-5)
        else:
            assert math.isnan(found.values[point])


def test_a_model_without_known_blocks_is_refused():
    with pytest.raises(UsageError, match="Sequential has no recognised blocks"):
        token_similarity(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)).double(), images(1))


def result(stem, table, *blocks):
    names = {"stem": stem, "pos_embed": table, **{f"blocks.{i}": value for i, value in enumerate(blocks)}}
    return {"values": {name: value for name, value in names.items() if value != "none"}, "images": 2}


@pytest.mark.parametrize(
    "found, expected, absent",
    [
        (result(0.8, 0.5, 0.6, 0.7, 0.92, 0.95), ["0.80 after the stem", "from 0.80 to 0.50",
                                                   "After blocks 3, 4 it is"], ["--stem conv"]),
        (result(0.95, 0.94, 0.93, 0.6, 0.5, 0.4), ["After block 1 it is", "`vtk train … --stem conv`"],
         ["position embedding"]),
        (result("none", "none", 0.3, None), ["after block 1", "most similar after block 1 (0.30)",
                                             "After block 2 an image has a single position"], ["stem"]),
    ],
    ids=["late", "early", "map"],
)  # fmt: skip
def test_readings_name_the_blocks_where_tokens_are_alike(found, expected, absent):
    told = " ".join(DIAGNOSTIC.read(found))
    assert all(part in told for part in expected) and not any(part in told for part in absent)


def test_block_k_of_both_models_is_at_k_and_undefined_points_are_gaps():
    _, (axes,) = figures.new()
    assert place_points(axes, [["stem", "pos_embed", "blocks.0"], ["stem", "a", "b"]]) == [[-1, 0, 1], [-1, 1, 2]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["stem", "pos", "1", "2"]
    runs = [Run("$a_b", result(0.1, 0.2, 0.3)), Run("b", result("none", "none", 0.3, None))]
    (picture,) = DIAGNOSTIC.draw(runs)
    first, second = picture.figure.axes[0].get_lines()
    assert list(first.get_xdata()) == [-1, 0, 1] and list(first.get_ydata()) == [0.1, 0.2, 0.3]
    assert list(second.get_xdata()) == [1, 2] and math.isnan(second.get_ydata()[1])
    assert len(figures.png(picture.figure)) > 1000
