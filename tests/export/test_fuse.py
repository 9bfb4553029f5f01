"""``vtk export onnx --fuse``: the merged graph, against timm's own model and against the unmerged graph."""

import functools
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from timm.models.vision_transformer import ParallelThingsBlock
from torch import nn

from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.runtime.source import Source
from vtk_export.graph.convert import choose_form, convert, export_form
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx

SIZE = {"img_size": 32, "embed_dim": 32, "num_heads": 2, "num_classes": 5}


def parallel(branches: int = 2, **kwargs: Any) -> nn.Module:
    """Return a model of two blocks whose norms and scales are not 1."""
    torch.manual_seed(3)
    block = partial(ParallelThingsBlock, num_parallel=branches)
    model = timm.create_model(
        "vit_small_patch16_224", depth=2, block_fn=block, **{**SIZE, "init_values": 0.5, **kwargs}
    )
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model.eval()


class _Given(Source):
    """A model that no name gives."""

    def model(self) -> nn.Module:
        return parallel(self._options["branches"])


def given(branches: int) -> Source:
    card = Card(ModelSpec("given"), InputSpec(32, 32), tuple("abcde"))
    return _Given("timm", "given", None, card, described=False, _options={"branches": branches})


@functools.cache
def graph(divide_scores: bool = True, **kwargs: Any) -> onnx.ModelProto:
    """Return `parallel(**kwargs)` in its fused form as the exporter wrote it; not to be changed."""
    return convert(export_form(parallel(**kwargs), divide_scores=divide_scores), InputSpec(32, 32), opset=18)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("merged") / "onnx"
    return export_onnx(given(2), OnnxConfig(out=out), show=False)


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_merged_file_gives_timms_logits(merged: Any, batch: int) -> None:
    assert merged.fused
    images = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))
    with torch.no_grad():
        expected = parallel()(images)
    session = onnxruntime.InferenceSession(merged.path, providers=["CPUExecutionProvider"])
    got = session.run(["logits"], {"pixel_values": images.numpy()})[0]
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-5 * float(expected.abs().max()), rtol=0)


def test_only_standard_operators_in_the_form_that_fusions_look_for(merged: Any) -> None:
    nodes = onnx.load(merged.path).graph.node
    assert merged.nodes == len(nodes) <= 80  # of the whole file; those of the blocks alone are counted slowly
    assert {node.domain for node in nodes} <= {"", "ai.onnx"}
    kinds = Counter(node.op_type for node in nodes)
    # one node a norm; q, k, v, output, two layers and two of attention as products: 8 a block; one softmax
    assert kinds["LayerNormalization"] == 5
    assert kinds["MatMul"] + kinds["Gemm"] == 2 * 8 + 1
    assert kinds["Softmax"] == 2


@pytest.mark.parametrize(
    ("kind", "pool", "heads", "width"),
    [
        ("vit", "token", 2, 32),
        ("vit", "avg", 3, 48),
        ("clip", "avg", 3, 48),
        pytest.param("clip", "avg", 2, 32, marks=pytest.mark.slow),
        pytest.param("bert", "avg", 2, 32, marks=pytest.mark.slow),
        pytest.param("vit", "avg", 4, 32, marks=pytest.mark.slow),
        pytest.param("clip", "token", 3, 48, marks=pytest.mark.slow),
    ],
)
def test_onnxruntimes_optimizer_finds_every_attention_and_changes_no_number(
    tmp_path: Path, kind: str, pool: str, heads: int, width: int
) -> None:
    """Its Attention supplies 1/√D itself, whatever the graph says: a scale elsewhere would be applied twice."""
    from onnxruntime.transformers import optimizer

    options = {} if (pool, width, heads) == ("token", 32, 2) else {
        "global_pool": pool, "embed_dim": width, "num_heads": heads, "fc_norm": False
    }  # fmt: skip
    model, path = parallel(**options), tmp_path / "model.onnx"
    onnx.save(graph(**options), path)
    fused = optimizer.optimize_model(str(path), model_type=kind, num_heads=0, hidden_size=0, opt_level=0)
    found = Counter(node.op_type for node in fused.model.graph.node)
    if kind != "clip":  # its fusion is for another form of the scale, and must find nothing rather than half
        assert found["Attention"] == (1 if pool == "token" else 2)  # the last block of a class token asks one query
        assert found["Softmax"] == 2 - found["Attention"]
    fused.save_model_to_file(str(tmp_path / "fused.onnx"))
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(tmp_path / "fused.onnx", providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = model(images)
    got = session.run(None, {"pixel_values": images.numpy()})[0]
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-5 * float(expected.abs().max()), rtol=0)


def test_the_scale_can_stand_on_q_or_on_the_scores() -> None:
    on_scores, on_q = (Counter(n.op_type for n in graph(*divides).graph.node) for divides in ((), (False,)))
    on_q["Div"] += 2
    assert on_scores == on_q


@pytest.mark.parametrize("head_dim", [8, 16, 20])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_no_number_depends_on_where_the_scale_stands(head_dim: int, qk_norm: bool) -> None:
    model = parallel(embed_dim=2 * head_dim, qk_norm=qk_norm).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(images)
        for divides in (True, False):
            got = export_form(model, divide_scores=divides)(images)
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("options", "divides"),
    [({}, True), ({"dtype": "fp16"}, False), ({"dtype": "bf16"}, False), ({"target": "trt:10.15"}, False),
     ({"target": "ort:1.24"}, True), ({"int8": "dynamic"}, True)],
    ids=["fp32", "fp16", "bf16", "trt", "ort", "int8"],
)  # fmt: skip
def test_the_scale_stands_where_the_files_run_time_looks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], divides: bool
) -> None:
    seen = []

    def form(model: nn.Module, fuse: bool | None, *, vits: bool, divide_scores: bool, fixed_size: bool) -> nn.Module:
        assert fixed_size  # without --dynamic-size rotary tables are constants
        seen.append(divide_scores)
        raise DataError("far enough")

    monkeypatch.setattr("vtk_export.onnx.build.choose_form", form)
    with pytest.raises(DataError, match="far enough"):
        export_onnx(given(2), OnnxConfig(out=tmp_path / "onnx", **options), show=False)
    assert seen == [divides]


@pytest.mark.slow
def test_two_merged_blocks_have_at_most_80_nodes_and_unmerged_more_than_twice_as_many() -> None:
    """The issue's bound, on the blocks alone; of whole models the fused one is smaller by as much."""
    model, spec = parallel(global_pool="avg", fc_norm=False), InputSpec(32, 32)
    ends = len(_ends(model, spec))
    plain = len(convert(model, spec, opset=20).graph.node)
    fused = len(convert(export_form(model), spec, opset=20).graph.node)
    assert plain - ends >= 164
    assert fused - ends <= 80


def _ends(model: nn.Module, spec: InputSpec) -> list[Any]:
    """Return the nodes of the model without blocks: stem, table, last norm, pooling and classifier."""
    import copy

    bare = copy.deepcopy(model)
    bare.blocks = nn.Sequential()
    return list(convert(bare, spec, opset=20).graph.node)


@pytest.mark.slow
def test_sequential_models_are_fused_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["export", "onnx", "test_vit", "--no-pretrained", "--json", "--out", str(tmp_path / "fused"), "--fuse"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fused"] is True
    assert ", fused, " in err.splitlines()[-1]


def test_unasked_every_known_vit_is_fused_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    import timm

    vit, other = timm.create_model("test_vit"), timm.create_model("test_resnet")
    assert choose_form(vit, None) is vit
    assert type(choose_form(vit, None, vits=True)).__name__ == "FusedViT"
    assert choose_form(vit, False, vits=True) is vit
    assert choose_form(other, None, vits=True) is other
    assert capsys.readouterr().out == ""
    odd = timm.create_model("test_vit", mlp_layer=timm.layers.GatedMlp)
    assert choose_form(odd, None, vits=True) is odd
    assert "exported unfused: cannot fuse `blocks.0.mlp" in capsys.readouterr().out


@pytest.mark.parametrize(("flag", "expected"), [([], None), (["--fuse"], True), (["--no-fuse"], False)])
def test_the_flag_has_three_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: list[str], expected: bool | None
) -> None:
    seen = []

    def export(source: Source, config: OnnxConfig) -> None:
        seen.append(config.fuse)
        raise DataError("far enough")

    monkeypatch.setattr("vtk_export.onnx.export.export_onnx", export)
    assert main(["export", "onnx", *flag, "test_vit", "--no-pretrained", "--out", str(tmp_path)]) == 3
    assert seen == [expected]


def test_a_parallel_model_that_cannot_be_fused_is_exported_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    model = parallel(act_layer=partial(nn.Softmax, dim=-1))
    assert choose_form(model, None) is model
    assert "exported unfused: cannot fuse `blocks.0.ffns.0.mlp.act` (Softmax)" in capsys.readouterr().out
    assert choose_form(model, False) is model
    with pytest.raises(UsageError, match="Softmax"):
        choose_form(model, True)


def test_a_model_that_cannot_be_fused_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "onnx"
    argv = ["export", "onnx", "test_resnet", "--no-pretrained", "--fuse", "--out", str(out)]
    assert main(argv) == 2
    assert "cannot fuse ResNet" in capsys.readouterr().err
    assert not out.exists()
