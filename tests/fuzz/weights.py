"""Weights in files of torch, safetensors and JAX, and of DINOv3."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch

from tests.fuzz.mutators import flip, zipped
from tests.fuzz.reader import JSON, KWARGS, NAME, TENSORS, V0_1, Reader
from tests.fuzz.structured import pickled


def _state() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(V0_1 / "base.safetensors")


def _make_torch(folder: Path) -> None:
    state = _state()
    few = {key: state[key] for key in sorted(state)[:4]}
    torch.save(state, folder / "plain.pth")
    torch.save({"state_dict": few, "epoch": 3, "args": {"lr": 0.1, "name": "x"}}, folder / "nested.pth")
    torch.save({k: torch.nn.Parameter(v) for k, v in few.items()}, folder / "parameters.pt")
    torch.save(few, folder / "old.pth", _use_new_zipfile_serialization=False)
    odd = {
        "a": torch.zeros(3, dtype=torch.complex64).conj(),
        "b": torch.ones(2, 3).T,
        "c": torch.tensor(1, dtype=torch.uint8),
        "d": torch.zeros(1).expand(7),
        "e": torch.ones(2, dtype=torch.bool),
        "f": torch.ones(2, dtype=torch.bfloat16),
    }
    torch.save(odd, folder / "odd.bin")
    torch.save(
        {"a": torch.eye(3).to_sparse(), "b": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
        folder / "sparse.pth",
    )


def _read_weights(folder: Path, file: Path) -> None:
    from vtk.models.weights.files import read_weights

    found = read_weights(file).tensors
    assert sum(t.numel() * t.element_size() for t in found.values()) <= 4 * file.stat().st_size + (64 << 20)
    for name, tensor in found.items():
        assert isinstance(name, str) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        assert not tensor.is_quantized and not tensor.requires_grad
        tensor.contiguous().view(-1)[:10].tolist()


def _read_base(folder: Path, file: Path) -> None:
    from vtk.models.weights.sources import read_base

    found, notes = read_base(NAME, KWARGS, file)
    assert all(value.float().isfinite().all() for value in found.tensors.values() if value.is_floating_point())
    assert all(isinstance(note, str) for note in notes) and len(found.ref.id) == 64


def _make_base(folder: Path) -> None:
    torch.save(_state(), folder / "base.pth")
    shutil.copyfile(V0_1 / "base.safetensors", folder / "base.safetensors")
    shutil.copyfile(V0_1 / "digits.safetensors", folder / "digits.safetensors")


def _make_npz(folder: Path) -> None:
    rng = np.random.default_rng(0)
    names = {
        "cls": (1, 1, 32),
        "embedding/bias": (32,),
        "embedding/kernel": (16, 16, 3, 32),
        "head/kernel": (32, 7),
        "head/bias": (7,),
        "Transformer/encoder_norm/scale": (32,),
        "Transformer/encoder_norm/bias": (32,),
        "Transformer/posembed_input/pos_embedding": (1, 10, 32),
    }
    for i in range(2):
        block, mha = f"Transformer/encoderblock_{i}/", "MultiHeadDotProductAttention_1/"
        names |= {f"{block}LayerNorm_{n}/{leaf}": (32,) for n in (0, 2) for leaf in ("scale", "bias")}
        names |= {f"{block}{mha}{part}/kernel": (32, 2, 16) for part in ("query", "key", "value")}
        names |= {f"{block}{mha}{part}/bias": (2, 16) for part in ("query", "key", "value")}
        names |= {f"{block}{mha}out/kernel": (2, 16, 32), f"{block}{mha}out/bias": (32,)}
        names |= {f"{block}MlpBlock_3/Dense_0/kernel": (32, 128), f"{block}MlpBlock_3/Dense_0/bias": (128,)}
        names |= {f"{block}MlpBlock_3/Dense_1/kernel": (128, 32), f"{block}MlpBlock_3/Dense_1/bias": (32,)}
    np.savez(folder / "w.npz", **{k: rng.normal(size=shape).astype(np.float32) for k, shape in names.items()})


def _read_npz(folder: Path, file: Path) -> None:
    from vtk.models.weights.npz import read_npz

    kwargs = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    found = read_npz("vit_tiny_patch16_224", kwargs, file).tensors
    assert found and all(isinstance(value, torch.Tensor) for value in found.values())


_DINOV3 = "vit_small_plus_patch16_dinov3_qkvb"
_DINOV3_SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 1, "mlp_ratio": 1.0}


def _make_dinov3(folder: Path) -> None:
    """Write a folder of transformers in two files, and a file of Meta's code."""
    from safetensors.torch import save_file

    theirs = {"cls_token": (1, 1, 16), "mask_token": (1, 1, 16), "register_tokens": (1, 4, 16),
              "patch_embeddings.weight": (16, 3, 16, 16), "patch_embeddings.bias": (16,)}  # fmt: skip
    first = {f"embeddings.{name}": torch.ones(shape) for name, shape in theirs.items()}
    block = {f"attention.{part}_proj": 16 for part in "qkvo"} | {
        f"mlp.{part}_proj": 16 for part in ("gate", "up", "down")
    }
    second = {f"layer.0.{name}.weight": torch.ones(width, 16) for name, width in block.items()}
    second |= {f"layer.0.{name}.bias": torch.ones(16) for name in block if "k_proj" not in name}
    for norm in ("layer.0.norm1", "layer.0.norm2", "norm"):
        second |= {f"{norm}.weight": torch.ones(16), f"{norm}.bias": torch.ones(16)}
    second |= {f"layer.0.layer_scale{i}.lambda1": torch.ones(16) for i in (1, 2)}
    names = {name: f"model-{i}.safetensors" for i, part in enumerate((first, second)) for name in part}
    save_file(first, folder / "model-0.safetensors")
    save_file(second, folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 1, "rope_theta": 100.0}))
    meta = {"cls_token": first["embeddings.cls_token"], "storage_tokens": torch.ones(1, 4, 16),
            "patch_embed.proj.weight": torch.ones(16, 3, 16, 16), "patch_embed.proj.bias": torch.ones(16),
            "rope_embed.periods": 100.0 ** (torch.arange(4) / 4),
            "norm.weight": torch.ones(16), "norm.bias": torch.ones(16)}  # fmt: skip
    inside = {"attn.qkv": 48, "attn.proj": 16, "mlp.w1": 16, "mlp.w2": 16, "mlp.w3": 16}
    meta |= {f"blocks.0.{name}.weight": torch.ones(width, 16) for name, width in inside.items()}
    meta |= {f"blocks.0.{name}.bias": torch.ones(width) for name, width in inside.items()}
    meta |= {f"blocks.0.{name}": torch.ones(16) for n in (1, 2)
             for name in (f"norm{n}.weight", f"norm{n}.bias", f"ls{n}.gamma")}  # fmt: skip
    meta["blocks.0.attn.qkv.bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(16)
    torch.save(meta, folder / "meta.pth")


def _read_dinov3(folder: Path, file: Path) -> None:
    from vtk.models.weights.sources import read_base

    source = file if file.suffix == ".pth" else folder
    found, notes = read_base(_DINOV3, _DINOV3_SMALL, source)
    assert all(value.float().isfinite().all() for value in found.tensors.values() if value.is_floating_point())
    assert all(isinstance(note, str) for note in notes) and len(found.ref.id) == 64


READERS = {
    "torch": Reader(
        6000,
        _make_torch,
        _read_weights,
        {
            "old.pth": (flip, pickled),
            ".pth": (flip, zipped(pickled)),
            ".pt": (flip, zipped(pickled)),
            ".bin": (flip, zipped(pickled)),
        },
    ),
    "base": Reader(1000, _make_base, _read_base, {".pth": (zipped(pickled), flip), ".safetensors": TENSORS}),
    "dinov3": Reader(
        600,
        _make_dinov3,
        _read_dinov3,
        {".pth": (zipped(pickled), flip), ".safetensors": TENSORS, "index.json": JSON, "config.json": JSON},
    ),
    "npz": Reader(600, _make_npz, _read_npz, {".npz": (flip, zipped(flip))}),
}
