"""Position tables at other sizes, against an interpolation written here in numpy."""

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from vtk.errors import DataError, UsageError
from vtk.models.create import build_model
from vtk.models.meta_model import shapes_only
from vtk.models.positions import fit_position, stored_grid


def weights(old: int, new: int) -> np.ndarray:
    """The matrix (new, old) of Keys' cubic kernel with a = -0.5, widened when it shrinks: Pillow's BICUBIC."""
    scale = max(old / new, 1.0)
    rows = np.zeros((new, old))
    for i in range(new):
        centre = (i + 0.5) * old / new
        for j in range(old):
            x = abs((j + 0.5 - centre) / scale)
            if x < 1:
                rows[i, j] = 1.5 * x**3 - 2.5 * x**2 + 1
            elif x < 2:
                rows[i, j] = -0.5 * (x**3 - 5 * x**2 + 8 * x - 4)
        rows[i] /= rows[i].sum()
    return rows


def resized(grid: np.ndarray, new: tuple[int, int]) -> np.ndarray:
    """Resample (H, W, C), rows and columns apart."""
    tall, wide = weights(grid.shape[0], new[0]), weights(grid.shape[1], new[1])
    return np.einsum("ih,jw,hwc->ijc", tall, wide, grid.astype(np.float64))


def base_file(path, name, size, seed=0, **kwargs):
    """Save a model's random weights with a table of noise, as a base of that size."""
    torch.manual_seed(seed)
    made = build_model(name, num_classes=3, img_size=size, pretrained=False, kwargs=kwargs)
    with torch.no_grad():
        for key, value in made.model.named_parameters():
            if "pos" in key:
                value.copy_(torch.randn(value.shape))
    state = {k: v.clone() for k, v in made.model.state_dict().items()}
    save_file(state, path, metadata={"vtk_size": f"{size[0]}x{size[1]}"})
    return state


SMALL = {"depth": 1, "embed_dim": 16, "num_heads": 2}
SIZES = [((256, 192), (224, 224)), ((64, 256), (224, 224)), ((448, 112), (224, 224)), ((224, 224), (256, 192))]


@pytest.mark.parametrize(("old", "new"), SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize(
    ("name", "prefix"),
    [("vit_tiny_patch16_224", 1), ("deit3_small_patch16_224", 0), ("vit_medium_patch16_reg4_gap_256", 0),
     ("deit_tiny_distilled_patch16_224", 2), ("vit_small_patch16_18x2_224", 1), ("vit_small_patch16_rope_ape_224", 0),
     ("vit_small_patch16_rope_mixed_ape_224", 0), ("eva02_base_patch16_clip_224", 1)],
)  # fmt: skip
def test_tables_of_tokens(name, prefix, old, new, tmp_path):
    state = base_file(tmp_path / "base.safetensors", name, old, **SMALL)
    made = build_model(name, num_classes=3, img_size=new, weights=tmp_path / "base.safetensors", kwargs=SMALL)
    before, after = state["pos_embed"].numpy()[0], made.model.pos_embed.detach().numpy()[0]
    assert np.array_equal(after[:prefix], before[:prefix])
    height, width = old[0] // 16, old[1] // 16
    expected = resized(before[prefix:].reshape(height, width, -1), (new[0] // 16, new[1] // 16))
    np.testing.assert_allclose(after[prefix:], expected.reshape(-1, 16), atol=2e-5)
    assert any("position table resampled" in note for note in made.notes)


def test_registers_have_no_rows(tmp_path):
    name = "vit_small_patch14_reg4_dinov2"  # nor has its class token
    state = base_file(tmp_path / "b.safetensors", name, (56, 28), **SMALL)
    made = build_model(name, num_classes=3, img_size=(42, 70), weights=tmp_path / "b.safetensors", kwargs=SMALL)
    before, after = state["pos_embed"].numpy()[0], made.model.pos_embed.detach().numpy()[0]
    np.testing.assert_allclose(after, resized(before.reshape(4, 2, -1), (3, 5)).reshape(15, -1), atol=2e-5)


@pytest.mark.parametrize("name", ["vit_small_patch16_rope_mixed_ape_224", "eva02_base_patch16_clip_224"])
def test_rotary_models_at_another_size_turn_by_the_new_grid(name, tmp_path):
    base_file(tmp_path / "base.safetensors", name, (64, 32), **SMALL)
    made = build_model(
        name, num_classes=3, img_size=(48, 80), weights=tmp_path / "base.safetensors", kwargs=SMALL
    ).model
    plain = timm.create_model(name, num_classes=3, img_size=(48, 80), **SMALL)
    plain.load_state_dict(made.state_dict())
    images = torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        torch.testing.assert_close(made.eval()(images), plain.eval()(images), rtol=0, atol=0)


def test_the_same_grid_is_not_touched(tmp_path):
    state = base_file(tmp_path / "b.safetensors", "vit_tiny_patch16_224", (64, 32), **SMALL)
    made = build_model(
        "vit_tiny_patch16_224", num_classes=3, img_size=(64, 32), weights=tmp_path / "b.safetensors", kwargs=SMALL
    )
    assert torch.equal(made.model.pos_embed, state["pos_embed"])


@pytest.mark.parametrize(
    ("name", "kwargs", "key", "step"),
    [
        ("pit_ti_224", {"depth": [1, 1], "base_dims": [8, 8], "heads": [1, 2], "patch_size": 8, "stride": 4},
         "pos_embed", None),
        ("visformer_tiny", {"depth": [1, 1, 1], "embed_dim": 48, "num_heads": 2, "init_channels": 8},
         "pos_embed2", None),
        ("tnt_s_patch16_224", {"depth": 1, "embed_dim": 16, "inner_dim": 8, "num_heads_outer": 2, "num_heads_inner": 2},
         "patch_pos", 16),
        ("crossvit_9_240", {"embed_dim": [8, 16], "num_heads": [2, 2], "depth": [[1, 1, 0]], "img_scale": [1.0, 1.0]},
         "pos_embed_1", 16),
    ],
)  # fmt: skip
def test_tables_of_other_families(name, kwargs, key, step, tmp_path):
    old, new = ((96, 48), (96, 96)) if name == "crossvit_9_240" else ((64, 128), (96, 64))
    state = base_file(tmp_path / "b.safetensors", name, old, **kwargs)
    made = build_model(name, num_classes=3, img_size=new, weights=tmp_path / "b.safetensors", kwargs=kwargs)
    before, after = state[key].numpy()[0], made.model.get_parameter(key).detach().numpy()[0]
    if step is None:  # (C, H, W)
        expected = resized(before.transpose(1, 2, 0), after.shape[1:]).transpose(2, 0, 1)
        np.testing.assert_allclose(after, expected, atol=2e-5)
    else:
        assert np.array_equal(after[0], before[0])
        grid = before[1:].reshape(old[0] // step, old[1] // step, -1)
        expected = resized(grid, (new[0] // step, new[1] // step))
        np.testing.assert_allclose(after[1:], expected.reshape(len(after) - 1, -1), atol=2e-5)


def test_channels_last_and_blocks():
    with shapes_only():
        volo = timm.create_model("volo_d1_224", img_size=64)
        nest = timm.create_model("nest_tiny", img_size=128)
    table = torch.randn(1, 14, 14, 384)
    found = fit_position("pos_embed", table, volo).numpy()[0]
    np.testing.assert_allclose(found, resized(table.numpy()[0], (4, 4)), atol=2e-5)
    blocks = torch.randn(1, 16, 196, 96)  # 4 × 4 blocks of 14 × 14
    image = blocks.numpy()[0].reshape(4, 4, 14, 14, 96).transpose(0, 2, 1, 3, 4).reshape(56, 56, 96)
    found = fit_position("levels.0.pos_embed", blocks, nest).numpy()[0]
    expected = resized(image, (32, 32)).reshape(4, 8, 4, 8, 96).transpose(0, 2, 1, 3, 4)
    np.testing.assert_allclose(found, expected.reshape(16, 64, 96), atol=2e-5)


def test_tables_of_relative_positions_follow_the_grid(tmp_path):
    name = "beit_base_patch16_224"
    state = base_file(tmp_path / "b.safetensors", name, (64, 64), **SMALL)
    made = build_model(name, num_classes=3, img_size=(96, 64), weights=tmp_path / "b.safetensors", kwargs=SMALL)
    key = "blocks.0.attn.relative_position_bias_table"
    before, after = state[key], made.model.get_parameter(key).detach()
    assert before.shape == (7 * 7 + 3, 2) and after.shape == (11 * 7 + 3, 2)
    assert torch.equal(after[-3:], before[-3:])  # the class token's own
    centre = after[:-3].reshape(11, 7, 2)[5, 3]
    torch.testing.assert_close(centre, before[:-3].reshape(7, 7, 2)[3, 3], atol=1e-4, rtol=0)


def test_what_cannot_be_resampled_is_refused_with_the_size_that_fits(tmp_path):
    kwargs = {"embed_dim": [16, 32, 32], "key_dim": 8, "num_heads": [1, 2, 2], "depth": [1, 1, 1]}
    base_file(tmp_path / "b.safetensors", "levit_128s", (64, 64), **kwargs)
    with pytest.raises(
        UsageError, match=r"`--img-size` 96 96: .*attention_biases.* for 64×64 px; use --img-size 64 64"
    ):
        build_model("levit_128s", num_classes=3, img_size=96, weights=tmp_path / "b.safetensors", kwargs=kwargs)


def test_grids_of_stored_tables():
    assert stored_grid(196, None, (448, 112)) == (28, 7)
    assert stored_grid(196, (7, 28), None) == (7, 28)
    assert stored_grid(196, None, None) == (14, 14)
    with pytest.raises(DataError, match="192 patches, which is not a square"):
        stored_grid(192, None, None)
