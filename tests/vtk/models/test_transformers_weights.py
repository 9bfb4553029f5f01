"""Files of transformers' models, made from timm's own by tables of names written from the printed state dicts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from vtk.errors import DataError
from vtk.models.create import build_model
from vtk.models.weights.sources import read_base

SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2}
OUTSIDE = {"cls_token": "embeddings.cls_token", "reg_token": "embeddings.register_tokens",
           "pos_embed": "embeddings.position_embeddings", "patch_embed.proj": "embeddings.patch_embeddings.projection",
           "norm": "layernorm"}  # fmt: skip
SCALES = {"ls1.gamma": "layer_scale1.lambda1", "ls2.gamma": "layer_scale2.lambda1"}
OLD = {"qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
       "attn.proj": "attention.output.dense", **SCALES}  # fmt: skip
NEW = {"qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attn.proj": "attention.o_proj", **SCALES}
VIT = {**OLD, "norm1": "layernorm_before", "norm2": "layernorm_after", "mlp.fc1": "intermediate.dense",
       "mlp.fc2": "output.dense"}  # fmt: skip
DINOV3 = {**NEW, "gamma_1": "layer_scale1.lambda1", "gamma_2": "layer_scale2.lambda1", "mlp.fc1_g": "mlp.gate_proj",
          "mlp.fc1_x": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}  # fmt: skip
OUTSIDE_DINOV3 = {**OUTSIDE, "patch_embed.proj": "embeddings.patch_embeddings", "norm": "norm"}
PLAIN_DINOV3 = {**DINOV3, "mlp.fc1": "mlp.up_proj"}


def theirs(state: dict[str, Tensor], block: str, outside: dict[str, str], inside: dict[str, Any]) -> dict[str, Tensor]:
    """Return timm's tensors under transformers' names; ``block`` is the prefix of a block's names."""
    result = {"embeddings.mask_token": torch.ones(1, 32)}
    for key, value in state.items():
        if match := re.fullmatch(r"blocks\.(\d+)\.attn\.([qv])_bias", key):
            result[f"{block}{match[1]}.attention.{match[2]}_proj.bias"] = value
        elif match := re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(\w+)", key):
            for name, part in zip(inside["qkv"], value.chunk(3), strict=True):
                result[f"{block}{match[1]}.{name}.{match[2]}"] = part
        elif match := re.fullmatch(r"blocks\.(\d+)\.(.*)", key):
            old = next((k for k in inside if match[2] == k or match[2].startswith(f"{k}.")), None)
            result[f"{block}{match[1]}.{match[2].replace(old, inside[old], 1) if old else match[2]}"] = value
        else:
            old = next(k for k in outside if key == k or key.startswith(f"{k}."))
            result[key.replace(old, outside[old], 1)] = value
    return {key: value.clone() for key, value in result.items()}


def make(name: str, **kwargs: Any) -> dict[str, Tensor]:
    """Random tensors of a small timm model without a classifier."""
    torch.manual_seed(2)
    model = timm.create_model(name, num_classes=0, **{"img_size": 32, **SMALL, **kwargs})
    return {k: torch.randn_like(v) * 0.2 for k, v in model.state_dict().items()}


def write(folder: Path, tensors: dict[str, Tensor], parts: int = 1, **config: Any) -> Path:
    """Write a folder as transformers does, in one file or several."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 2, **config}))
    if parts == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    names, where = sorted(tensors), {}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        save_file({k: tensors[k] for k in names[i::parts]}, folder / file)
        where |= dict.fromkeys(names[i::parts], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


QKVB, GATED = "vit_small_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3_qkvb"
CASES = {
    "DINOv3": (QKVB, {}, ("layer.", OUTSIDE_DINOV3, PLAIN_DINOV3), 1),
    "DINOv3 in two files": (QKVB, {}, ("layer.", OUTSIDE_DINOV3, PLAIN_DINOV3), 2),
    "DINOv3 by modules": (QKVB, {}, ("model.layer.", OUTSIDE_DINOV3, PLAIN_DINOV3), 1),
    "gated DINOv3": (GATED, {}, ("layer.", OUTSIDE_DINOV3, DINOV3), 1),
    "DINOv3 without biases": ("vit_base_patch16_dinov3", {}, ("layer.", OUTSIDE_DINOV3, PLAIN_DINOV3), 1),
    "DINOv2": ("vit_small_patch16_224", {"init_values": 1.0}, ("encoder.layer.", OUTSIDE, OLD), 1),
    "DINOv2 by modules": ("vit_small_patch16_224", {"init_values": 1.0}, ("encoder.layer.", OUTSIDE, NEW), 1),
    "ViT": ("vit_small_patch16_224", {}, ("encoder.layer.", OUTSIDE, VIT), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_transformers_is_the_base_of_timms_own_file(tmp_path: Path, case: str) -> None:
    name, kwargs, (block, outside, inside), parts = CASES[case]
    state, kwargs = make(name, **kwargs), {**SMALL, **kwargs}
    save_file(state, tmp_path / "timm.safetensors")
    wanted, _ = read_base(name, kwargs, tmp_path / "timm.safetensors")
    found, notes = read_base(name, kwargs, write(tmp_path / "hf", theirs(state, block, outside, inside), parts))
    assert found.tensors.keys() == wanted.tensors.keys() and found.ref.id == wanted.ref.id
    assert all(torch.equal(found.tensors[key], value) for key, value in wanted.tensors.items())
    assert len(notes) == 1 and notes[0].startswith("ignored 1 tensor of ") and notes[0].endswith(": mask_token")


def test_a_packed_swiglu_of_dinov2_is_read_in_both_forms(tmp_path: Path) -> None:
    name, kwargs = "vit_giant_patch14_dinov2", {**SMALL, "mlp_ratio": 4.0, "img_size": 28}
    torch.manual_seed(2)
    state = {k: torch.randn_like(v) for k, v in timm.create_model(name, num_classes=0, **kwargs).state_dict().items()}
    one = theirs(state, "encoder.layer.", OUTSIDE, {**OLD, "mlp.fc1": "mlp.weights_in", "mlp.fc2": "mlp.weights_out"})
    two = theirs(state, "encoder.layer.", OUTSIDE, {**NEW, "mlp.fc1": "GATE", "mlp.fc2": "mlp.down_proj"})
    for key in [k for k in two if "GATE" in k]:
        gate, value = two.pop(key).chunk(2)  # timm's GluMlp of SwiGLU: gate rows first
        two |= {key.replace("GATE", "mlp.gate_proj"): gate.clone(), key.replace("GATE", "mlp.up_proj"): value.clone()}
    for i, tensors in enumerate((one, two)):
        found, _ = read_base(name, kwargs, write(tmp_path / str(i), tensors))
        assert all(torch.equal(found.tensors[key], value) for key, value in state.items())


def test_registers_of_dinov2_leave_the_class_tokens_position_in_the_token(tmp_path: Path) -> None:
    name = "vit_small_patch14_reg4_dinov2"
    state = make(name, img_size=28)
    tensors = theirs(state, "encoder.layer.", OUTSIDE, OLD)
    place = torch.randn(1, 1, 32)
    tensors["embeddings.position_embeddings"] = torch.cat((place, tensors["embeddings.position_embeddings"]), 1)
    created = build_model(name, num_classes=0, img_size=28, kwargs=SMALL, weights=write(tmp_path / "hf", tensors))
    found = created.model.state_dict()
    assert torch.equal(found["pos_embed"], state["pos_embed"]) and torch.equal(found["reg_token"], state["reg_token"])
    assert torch.equal(found["cls_token"], state["cls_token"] + place)


def test_classifiers_are_read_where_timms_reads_the_same_tokens(tmp_path: Path) -> None:
    state = make("vit_small_patch16_224")
    tensors = {f"vit.{k}": v for k, v in theirs(state, "encoder.layer.", OUTSIDE, VIT).items()}
    names = {"id2label": {"0": "ant", "1": "bee", "2": "cow"}}
    for width, kept in ((32, True), (64, False)):  # DINOv2's also reads the mean of the patches
        head = {"classifier.weight": torch.randn(3, width), "classifier.bias": torch.randn(3)}
        folder = write(tmp_path / str(width), tensors | head, **names)
        created = build_model("vit_small_patch16_224", num_classes=2, classes=("cow", "ant"), img_size=32, kwargs=SMALL,
                              weights=folder)  # fmt: skip
        assert torch.equal(created.model.head.weight, head["classifier.weight"][[2, 0], :32]) is kept
        assert any("classifier.weight" in note for note in created.notes) is not kept


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        ({}, {"num_attention_heads": 4}, "has `num_attention_heads` 4, and .* has 2"),
        ({}, {"rope_theta": 10.0}, "--model-kwargs rope_temperature=10.0$"),
        ({"layer.1.attention.k_proj.weight": None}, {}, r"2 of 3 parts of `blocks\.1\.attn\.qkv\.weight`"),
        ({"layer.0.attention.k_proj.bias": torch.ones(32)}, {}, "biases of the keys"),
        ({"layer.0.mlp.gate_proj.weight": torch.ones(128, 32)}, {}, "is --model right"),
    ],
    ids=["heads", "rotary base", "no keys", "bias of the keys", "gated"],
)
def test_what_would_compute_something_else_is_refused(tmp_path: Path, change: dict, config: dict, message: str) -> None:
    tensors = {**theirs(make(QKVB), "layer.", OUTSIDE_DINOV3, PLAIN_DINOV3), **change}
    folder = write(tmp_path / "hf", {k: v for k, v in tensors.items() if v is not None}, **config)
    with pytest.raises(DataError, match=message) as caught:
        read_base(QKVB, SMALL, folder)
    assert "\n" not in str(caught.value)


def test_an_index_names_files_beside_it_that_have_its_tensors(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", theirs(make(QKVB), "layer.", OUTSIDE_DINOV3, PLAIN_DINOV3), parts=2)
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    for change, message in (
        ({"norm.weight": "../model.safetensors"}, "no safetensors file beside it"),
        ({"absent": "model-00001-of-00002.safetensors"}, "`absent` is not in model-00001"),
        ({"norm.weight": "model-00003-of-00002.safetensors"}, "there is no file"),
    ):
        index.write_text(json.dumps({"weight_map": names["weight_map"] | change}))
        with pytest.raises(DataError, match=message):
            read_base(QKVB, SMALL, folder)
    index.write_text("[]")
    with pytest.raises(DataError, match="has no `weight_map`"):
        read_base(QKVB, SMALL, folder)
