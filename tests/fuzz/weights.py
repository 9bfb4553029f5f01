"""Weights in files of torch, safetensors and JAX."""

import shutil
from pathlib import Path

import numpy as np
import torch

from tests.fuzz.mutators import flip, zipped
from tests.fuzz.reader import KWARGS, NAME, TENSORS, V0_1, Reader
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
    "npz": Reader(600, _make_npz, _read_npz, {".npz": (flip, zipped(flip))}),
}
