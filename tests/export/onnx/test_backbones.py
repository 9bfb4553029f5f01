"""Models with rotary embedding, SwiGLU, RMSNorm and sub-norms: values, optimised graphs, half precision, tasks."""

import copy
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from vtk.card import InputSpec, Transform
from vtk.errors import UsageError, VerificationError
from vtk.models.create import build_model
from vtk_export.graph.biased_products import bias_products, split_products
from vtk_export.graph.convert import convert, export_form
from vtk_export.graph.rms_norms import divide_rms_norms
from vtk_export.lint.linter import lint
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx
from vtk_export.targets import parse_target
from vtk_export.tasks.gathered_vit import GatheredViT

SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5, "img_size": (32, 48)}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov3": ("vit_small_patch16_dinov3", SMALL),
    "eva02": ("eva02_small_patch14_224", {**SMALL, "img_size": (28, 42), "embed_dim": 48}),
    "eva02-sub-norms": ("eva02_base_patch16_clip_224", SMALL),
    "pe": ("vit_pe_core_tiny_patch16_384", {**SMALL, "attn_pool_num_heads": 2}),
    "rope-mixed": ("vit_small_patch16_rope_mixed_224", {**SMALL, "depth": 2}),
    "sapiens2": ("vit_base_patch16_sapiens2", {**SMALL, "num_heads": 4, "num_kv_heads": (2,)}),
}


def small(kind: str, **more: Any) -> Any:
    """Return a model of a kind whose every part matters, with random weights."""
    torch.manual_seed(0)
    name, options = SHAPES[kind]
    model = timm.create_model(name, **{**options, **more})
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.ndim == 2:
                parameter.normal_(std=1.2 / parameter.shape[1] ** 0.5)
            assert key != "rope.freqs" or parameter.ndim > 2
    return model.eval()


def spec_of(model: Any) -> InputSpec:
    return InputSpec(*model.patch_embed.img_size)


def session_of(proto: onnx.ModelProto, optimized: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def operators(proto: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in proto.graph.node)


def file_of(model: Any) -> onnx.ModelProto:
    proto = convert(export_form(model), spec_of(model), opset=18)
    split_products(proto)
    bias_products(proto)
    onnx.checker.check_model(proto)
    return proto


@pytest.mark.parametrize(
    "kind", ["sapiens2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SHAPES if kind != "sapiens2")]
)
def test_file_gives_timms_logits_at_any_batch_and_the_runtime_fuses_it(kind: str, tmp_path: Path) -> None:
    model = small(kind)
    proto = file_of(model)
    session = session_of(proto, tmp_path / "optimized.onnx")
    wide = copy.deepcopy(model).double()
    for batch in (1, 2, 3, 7, 16):
        images = torch.randn(batch, 3, *model.patch_embed.img_size)
        with torch.no_grad():
            expected = wide(images.double()).numpy()
        (found,) = session.run(None, {"pixel_values": images.numpy()})
        assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    written, optimized = operators(proto), operators(onnx.load(tmp_path / "optimized.onnx"))
    blocks = len(model.blocks)
    assert not {"Neg", "Sin", "Cos", "Range", "Resize"} & set(written), "tables are not constants"
    assert optimized["FusedMatMul"] >= blocks  # the scores, with k as it is
    assert written["MatMul"] <= 2 * blocks + 3  # all others have their bias inside
    gated = kind in ("eva02", "eva02-sub-norms", "sapiens2")
    assert optimized["QuickGelu"] == gated * blocks  # SiLU
    assert written["Split"] == 0 or kind == "pe"  # nothing is cut and put together again
    if kind == "sapiens2":
        assert optimized["SimplifiedLayerNormalization"] == written["Sqrt"] == 4 * blocks + 1
        assert not {"Reciprocal", "Sqrt"} & set(optimized)


def product_graph(parts: int) -> onnx.ModelProto:
    """Return x (batch, 5, 4) · W + b, W (4, 6), cut into parts."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="fc"),
        helper.make_node("Add", ["b", "p"], ["s"], name="add"),
        helper.make_node("Split", ["s"], [f"y{i}" for i in range(parts)], name="cut", axis=-1, num_outputs=parts),
    ]
    values = {"w": rng.standard_normal((4, 6)), "b": rng.standard_normal(6)}
    stored = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 5, 4])]
    outputs = [
        helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, ["batch", 5, 6 // parts]) for i in range(parts)
    ]
    return helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, stored),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=10,
    )


@pytest.mark.parametrize("parts", [2, 3])
def test_a_packed_product_becomes_one_product_with_bias_for_each_part(parts: int) -> None:
    proto = product_graph(parts)
    x = np.random.default_rng(1).standard_normal((3, 5, 4)).astype(np.float32)
    expected = session_of(proto).run(None, {"x": x})
    assert split_products(proto) == 1
    assert bias_products(proto) == parts
    onnx.checker.check_model(proto, full_check=True)
    assert operators(proto) == {"Reshape": 1 + parts, "Gemm": parts}
    for found, right in zip(session_of(proto).run(None, {"x": x}), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-6)


def test_names_of_nodes_stay_different_where_the_first_product_of_a_file_is_cut() -> None:
    """torch numbers its nodes: node_linear, node_linear_1, … The qkv of uniform heads is such a product."""
    change = [Transform("uniform_heads", {"variant": "b"})]
    made = build_model("vit_tiny_patch16_224", num_classes=5, img_size=32, pretrained=False, transforms=change,
                       kwargs={"depth": 2, "embed_dim": 32, "num_heads": 2})  # fmt: skip
    with torch.no_grad():
        for p in made.model.parameters():  # equal biases would be one constant
            p.add_(torch.randn_like(p), alpha=0.1)
    proto = convert(made.model.eval(), made.input, opset=18)
    assert split_products(proto) == 2  # two heads, one of them learned twice as wide: three equal parts
    names = [node.name for node in proto.graph.node]
    assert len(set(names)) == len(names)
    images = torch.randn(3, 3, 32, 32)
    (found,) = session_of(proto).run(None, {"pixel_values": images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, made.model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", ["a sum that is read twice", "a bias for each token", "tokens of any number"])
def test_other_products_stay_as_they_are(fault: str) -> None:
    proto = product_graph(2)
    if fault == "a sum that is read twice":
        proto.graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, ["batch", 5, 6]))
    elif fault == "a bias for each token":
        proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.ones((5, 6), np.float32), "b"))
    else:
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.shape.dim[1].dim_param = "tokens"
    before = onnx.ModelProto.FromString(proto.SerializeToString())
    assert split_products(proto) == bias_products(proto) == 0
    assert proto == before


@pytest.mark.parametrize("weighted", [False, True])
def test_an_rms_norm_is_found_with_and_without_a_weight(weighted: bool, tmp_path: Path) -> None:
    norm = nn.RMSNorm(8, eps=1e-5, elementwise_affine=weighted)
    if weighted:
        nn.init.normal_(norm.weight)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(2), norm, nn.Flatten(1))
    proto = convert(model, InputSpec(3, 5), opset=18)
    operators_before = operators(proto)
    assert operators_before["Div"] == 1 and operators_before["Reciprocal"] == 0
    images = torch.randn(2, 3, 3, 5)
    (found,) = session_of(proto, tmp_path / "o.onnx").run(None, {"pixel_values": images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, model(images), rtol=1e-5, atol=1e-6)
    assert operators(onnx.load(tmp_path / "o.onnx"))["SimplifiedLayerNormalization"] == 1
    assert divide_rms_norms(proto) == 0  # what is done is left alone


def enlarged(model: Any, factor: float) -> Any:
    """Return a model of the same function whose values are larger: of attention, or of SwiGLU."""
    model = copy.deepcopy(model)
    block = model.blocks[0]
    with torch.no_grad():
        if hasattr(block.mlp, "gate_last"):
            half = block.mlp.fc2.in_features
            block.mlp.fc1.weight[half:] *= factor
            block.mlp.fc1.bias[half:] *= factor
            block.mlp.fc2.weight /= factor
        else:
            third = block.attn.proj.in_features
            block.attn.qkv.weight[-third:] *= factor
            block.attn.proj.weight /= factor
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "where"), [("dinov3", "MatMul"), ("eva02", "M")])
def test_the_gate_finds_an_overflow_of_large_activations_and_passes_the_repaired_model(
    kind: str, where: str, tmp_path: Path
) -> None:
    model = small(kind)
    model.head.weight.data.normal_()
    large = enlarged(model, 2.0**17)
    images = torch.randn(2, 3, *model.patch_embed.img_size)
    with torch.no_grad():  # in fp32 they are one function
        torch.testing.assert_close(large(images), model(images), rtol=1e-4, atol=1e-4)
    config = OnnxConfig(out=tmp_path / "onnx", dtype="fp16")
    with pytest.raises(
        VerificationError, match=rf"\({where}.*\) reaches .* fp16 ends at 65504; use --dtype bf16 or fp32"
    ):
        export_onnx(large, config, show=False)
    assert not config.out.exists()
    assert export_onnx(model, config, show=False).rows
    bf16 = dataclasses.replace(config, out=tmp_path / "bf16", dtype="bf16", opset=22, unverified=True)
    assert export_onnx(large, bf16, show=False).facts.precision == "bf16"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dinov3", "eva02-sub-norms", "sapiens2"])
@pytest.mark.parametrize("target", ["trt:8.6", "trt:10.0"])
def test_tensorrts_linter_finds_nothing_in_them(kind: str, target: str, tmp_path: Path) -> None:
    config = OnnxConfig(out=tmp_path / "onnx", target=target, dtype="fp32" if target == "trt:8.6" else "fp16")
    assert export_onnx(small(kind, embed_dim=64), config, show=False).fused  # heads of 16 channels at least
    proto = onnx.load(config.out / "model.onnx")
    assert proto.opset_import[0].version == (17 if target == "trt:8.6" else 18)
    assert lint(proto, parse_target(target)) == []


@pytest.mark.slow
def test_an_open_size_and_a_fused_graph_are_not_both_to_be_had(tmp_path: Path) -> None:
    config = OnnxConfig(out=tmp_path / "onnx", dynamic_size=True, fuse=True)
    with pytest.raises(UsageError, match="rotary tables as constants of one size; leave out --fuse or --dynamic-size"):
        export_onnx(small("dinov3"), config, show=False)


@pytest.mark.parametrize("kind", ["eva02", "dinov3", "sapiens2"])
def test_many_tasks_of_one_base_are_one_model(kind: str) -> None:
    models = [small(kind)]
    for _ in range(2):
        other = copy.deepcopy(models[0])
        with torch.no_grad():
            for key, parameter in other.named_parameters():
                if ".attn." in key or key.startswith("head."):
                    parameter.add_(0.2 * torch.randn_like(parameter))
        models.append(other)
    images, task = torch.randn(4, 3, *models[0].patch_embed.img_size), [2, 0, 1, 2]
    with torch.no_grad():
        expected = torch.cat([models[t](image[None]) for t, image in zip(task, images, strict=True)])
        found, counts = GatheredViT(models)(images, torch.tensor(task, dtype=torch.int32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert counts.tolist() == [5] * 4


def test_rotary_frequencies_of_a_tasks_own_are_refused_by_name() -> None:
    models = [small("rope-mixed"), small("rope-mixed")]
    models[1].rope.freqs.data.add_(1)
    with pytest.raises(UsageError, match=r"`rope` differs between the tasks and cannot be stacked.*--form files"):
        GatheredViT(models)
