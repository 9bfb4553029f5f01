"""Weights in Google's .npz layout, written here from timm's own models."""

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file

from vtk.errors import DataError, UsageError
from vtk.models.create import build_model
from vtk.models.weights.sources import read_base

NAME = "vit_tiny_patch16_224"
KWARGS = {"depth": 2, "embed_dim": 32, "num_heads": 2}


def vit(**changes):
    torch.manual_seed(0)
    return timm.create_model(NAME, **{**KWARGS, "img_size": 48, "num_classes": 7, **changes}).requires_grad_(False)


def arrays(model, big_vision=False, prefix=""):
    """Name a model's tensors as the original code does (``big_vision``: blocks stacked, as its newer form)."""
    state = {k: v.numpy() for k, v in model.state_dict().items()}
    heads, dim = 2, 32
    out = {
        "cls": state["cls_token"], "embedding/bias": state["patch_embed.proj.bias"],
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "Transformer/encoder_norm/scale": state["norm.weight"], "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T, "head/bias": state["head.bias"],
    }  # fmt: skip
    out["pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"] = state["pos_embed"]
    attn, mlp, norm2 = ("0", "0", "1") if big_vision else ("1", "3", "2")
    blocks = []
    for i in range(2):
        b, block = f"blocks.{i}.", {}
        for leaf, number in (("norm1", "0"), ("norm2", norm2)):
            block |= {f"LayerNorm_{number}/scale": state[f"{b}{leaf}.weight"]}
            block |= {f"LayerNorm_{number}/bias": state[f"{b}{leaf}.bias"]}
        mha = f"MultiHeadDotProductAttention_{attn}/"
        weights = state[f"{b}attn.qkv.weight"].reshape(3, heads, dim // heads, dim)
        biases = state[f"{b}attn.qkv.bias"].reshape(3, heads, dim // heads)
        for n, part in enumerate(("query", "key", "value")):
            block |= {f"{mha}{part}/kernel": weights[n].transpose(2, 0, 1), f"{mha}{part}/bias": biases[n]}
        block[f"{mha}out/kernel"] = state[f"{b}attn.proj.weight"].T.reshape(heads, dim // heads, dim)
        block[f"{mha}out/bias"] = state[f"{b}attn.proj.bias"]
        for n in range(2):
            block[f"MlpBlock_{mlp}/Dense_{n}/kernel"] = state[f"{b}mlp.fc{n + 1}.weight"].T
            block[f"MlpBlock_{mlp}/Dense_{n}/bias"] = state[f"{b}mlp.fc{n + 1}.bias"]
        blocks.append(block)
    if big_vision:
        out |= {f"Transformer/encoderblock/{k}": np.stack([b[k] for b in blocks]) for k in blocks[0]}
    else:
        out |= {f"Transformer/encoderblock_{i}/{k}": v for i, block in enumerate(blocks) for k, v in block.items()}
    return {prefix + k: v for k, v in out.items()}


@pytest.mark.parametrize(("big_vision", "prefix"), [(False, ""), (False, "opt/target/"), (True, "params/")])
def test_it_is_the_base_that_the_same_weights_are_in_another_file(tmp_path, big_vision, prefix):
    model = vit()
    np.savez(tmp_path / "w.npz", **arrays(model, big_vision, prefix))
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "w.safetensors")
    found, notes = read_base(NAME, KWARGS, tmp_path / "w.npz")
    wanted, _ = read_base(NAME, KWARGS, tmp_path / "w.safetensors")
    assert found.ref.id == wanted.ref.id and found.hashes == wanted.hashes and not notes
    assert found.size == wanted.size == (48, 48)
    state = model.state_dict()
    assert found.tensors.keys() == state.keys() - {"head.weight", "head.bias"}  # its 7 classes are not timm's 1000
    assert all(torch.equal(tensor, state[key]) for key, tensor in found.tensors.items())


def test_the_models_logits_are_those_of_the_weights_also_at_another_size(tmp_path):
    np.savez(tmp_path / "w.npz", **arrays(vit()))
    save_file({k: v.contiguous() for k, v in vit().state_dict().items()}, tmp_path / "w.safetensors")
    made = [
        build_model(NAME, num_classes=0, img_size=64, weights=tmp_path / f"w.{kind}", kwargs=KWARGS).model.eval()
        for kind in ("npz", "safetensors")
    ]
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(made[0](images), made[1](images))


def test_what_is_no_such_file_is_refused(tmp_path):
    whole = arrays(vit())
    np.savez(tmp_path / "w.npz", **whole)
    data = (tmp_path / "w.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(data[: len(data) // 2])
    np.savez(tmp_path / "objects.npz", **{**whole, "x": np.array([{}], dtype=object)})
    np.savez(tmp_path / "other.npz", weight=np.zeros(3))
    np.savez(tmp_path / "lacks.npz", **{k: v for k, v in whole.items() if "encoder_norm" not in k})
    for name, text in (
        ("none", "no such file"), ("cut", "not a whole .npz"), ("objects", "Python objects"), ("other", "0 blocks"),
        ("lacks", "it lacks '.*encoder_norm/scale"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=text) as caught:
            read_base(NAME, KWARGS, tmp_path / f"{name}.npz")
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"has 2 blocks, .* has 3"):
        read_base(NAME, {**KWARGS, "depth": 3}, tmp_path / "w.npz")
    with pytest.raises(DataError, match=r"does not look like weights for .*is --model right"):
        read_base(NAME, {**KWARGS, "embed_dim": 48}, tmp_path / "w.npz")
    with pytest.raises(UsageError, match=r"timm cannot read \.npz files for"):
        read_base("swin_tiny_patch4_window7_224", {}, tmp_path / "w.npz")
