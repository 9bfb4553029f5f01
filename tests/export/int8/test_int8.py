"""The recipe of static int8: exact where it says so, near fp32 where it rounds, and the same in OpenVINO."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from tests.export.int8._graphs import batches, block, card
from vtk.errors import UsageError, VerificationError
from vtk_export.int8 import Recipe, prepare, quantize, recipe_for
from vtk_export.int8.budget import choose_kept
from vtk_export.int8.products import find_groups
from vtk_export.int8.ranges import Scale, choose_scale

IMAGES = torch.cat(batches(64, seed=2))


def _run(proto: onnx.ModelProto, name: str = "logits") -> np.ndarray:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    if name != "logits":
        copy.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = onnxruntime.InferenceSession(copy.SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run([name], {"pixel_values": IMAGES.numpy()})[0]
    return found


def _constants(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}


@pytest.mark.parametrize("gated", [False, True])
def test_equalising_changes_no_output_and_evens_the_channels_out(gated: bool, tmp_path: Path) -> None:
    proto = block(gated=gated)
    plan = prepare(proto, batches(8), card(), Recipe(), folder=tmp_path, threads=1)
    assert np.abs(_run(plan.proto) - _run(proto)).max() < 1e-5 * np.abs(_run(proto)).max()
    before, after = (np.abs(_run(p, "norm")).reshape(-1, 8).max(0) for p in (proto, plan.proto))
    assert after.max() / after.min() < 0.5 * before.max() / before.min()
    # a gate's value comes from a product, whose columns can be divided; what a sum made cannot
    changed = {
        name for name, value in _constants(plan.proto).items() if not np.array_equal(value, _constants(proto)[name])
    }
    assert {"gain", "shift", "up", "side"} <= changed
    assert ({"side_bias", "down"} <= changed) == gated
    assert not list(tmp_path.iterdir())


def test_a_norm_that_something_else_reads_or_shares_is_not_spoilt(tmp_path: Path) -> None:
    shared, read = block(), block()
    shared.graph.node.insert(
        3, onnx.helper.make_node("LayerNormalization", ["token", "gain", "shift"], ["twin"], axis=-1)
    )
    shared.graph.node[-3].input[1] = "down_sum"
    shared.graph.node.insert(
        len(shared.graph.node) - 3, onnx.helper.make_node("Add", ["down_bias", "twin"], ["down_sum"])
    )
    read.graph.node[-3].input[1] = "down_sum"
    read.graph.node.insert(len(read.graph.node) - 3, onnx.helper.make_node("Add", ["down_bias", "norm"], ["down_sum"]))
    for proto in (shared, read):
        plan = prepare(proto, batches(4), card(), Recipe(), folder=tmp_path, threads=1)
        assert np.abs(_run(plan.proto) - _run(proto)).max() < 1e-5 * np.abs(_run(proto)).max()
    assert np.array_equal(_constants(plan.proto)["gain"], _constants(read)["gain"])


def test_a_slice_is_equalised_with_what_it_is_a_slice_of(tmp_path: Path) -> None:
    proto = block()  # as the class token's q of a last block
    constants = {"from": [0], "to": [1], "along": [1]}
    proto.graph.initializer.extend(numpy_helper.from_array(np.array(v, np.int64), k) for k, v in constants.items())
    proto.graph.node.insert(4, onnx.helper.make_node("Slice", ["norm", "from", "to", "along"], ["class"]))
    next(node for node in proto.graph.node if node.output[0] == "side_product").input[0] = "class"
    plan = prepare(proto, batches(8), card(), Recipe(), folder=tmp_path, threads=1)
    assert np.abs(_run(plan.proto) - _run(proto)).max() < 1e-5 * np.abs(_run(proto)).max()
    assert not np.array_equal(_constants(plan.proto)["gain"], _constants(proto)["gain"])
    assert plan.scales["class"].scale == pytest.approx(plan.scales["norm"].scale, rel=0.3)


@pytest.mark.parametrize("signed", [False, True])
def test_products_are_the_formula_of_rounded_numbers(signed: bool, tmp_path: Path) -> None:
    recipe = Recipe(equalize=0, ranges="minmax", symmetric=signed)
    proto = block()
    result = quantize(proto, batches(16), card(), recipe, folder=tmp_path, threads=1)
    x, weight = _run(proto, "norm").astype(np.float64), _constants(proto)["up"].astype(np.float64)
    seen = np.concatenate([_run_one(proto, batch) for batch in batches(16)]).astype(np.float64)
    step = np.abs(weight).max(0) / 127
    if signed:
        scale = np.abs(seen).max() / 127
        rounded = np.clip(np.rint(x / scale), -128, 127) * scale
    else:
        scale = (seen.max() - seen.min()) / 255
        zero = np.rint(-seen.min() / scale)
        rounded = (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale
    expected = rounded @ (np.rint(weight / step) * step)
    assert np.abs(_run(result, "up_product") - expected).max() < 1e-4 * np.abs(expected).max()
    assert sum(node.op_type == "QuantizeLinear" for node in result.graph.node) == 2  # of norm and hidden
    zeros = [_constants(result)[n.input[2]] for n in result.graph.node if n.op_type == "QuantizeLinear"]
    assert {zero.dtype for zero in zeros} == {np.dtype("int8" if signed else "uint8")}
    assert not signed or not any(zeros)


def _run_one(proto: onnx.ModelProto, images: torch.Tensor) -> np.ndarray:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    copy.graph.output.append(onnx.helper.make_empty_tensor_value_info("norm"))
    session = onnxruntime.InferenceSession(copy.SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(["norm"], {"pixel_values": images.numpy()})[0]
    return found


def _error(recipe: Recipe, folder: Path, seed: int = 0) -> float:
    proto = block(seed)
    result = quantize(proto, batches(64), card(), recipe, folder=folder, threads=1)
    exact = _run(proto)
    return float(np.square(_run(result) - exact).mean() / np.square(exact).mean())


def test_equalising_and_ranges_by_error_each_bring_the_outputs_nearer(tmp_path: Path) -> None:
    plain = np.mean([_error(Recipe(equalize=0, ranges="minmax"), tmp_path, seed) for seed in range(4)])
    equal = np.mean([_error(Recipe(ranges="minmax"), tmp_path, seed) for seed in range(4)])
    assert equal < 0.6 * plain


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_range_of_least_error_is_that_of_a_search(symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(0.5, 1, size=(500, 6)).astype(np.float32)
    rows[:, 5] *= 8
    importance = np.array([9.0, 1, 1, 1, 1, 1e-3])

    def error(scale: Scale) -> float:
        codes = np.rint(rows.astype(np.float64) / scale.scale) + scale.zero
        low, high = (-128, 127) if scale.signed else (0, 255)
        return float((importance * ((np.clip(codes, low, high) - scale.zero) * scale.scale - rows) ** 2).sum())

    found = choose_scale(rows, rows.min(0), rows.max(0), importance, Recipe(symmetric=symmetric))
    ends = np.linspace(0.1, 1, 60)
    every = [Scale.of(a * rows.min(), b * rows.max(), signed=symmetric) for a in ends for b in ends]
    widest = Scale.of(float(rows.min()), float(rows.max()), signed=symmetric)
    assert error(found) < 0.8 * error(widest)
    assert error(found) <= 1.05 * min(map(error, every))


@pytest.mark.parametrize(("least", "most"), [(-1.0, 3.0), (0.5, 2.0), (-3.0, -1.0), (0.0, 0.0)])
@pytest.mark.parametrize("signed", [False, True])
def test_zero_stays_zero_and_the_ends_are_within_half_a_step(least: float, most: float, signed: bool) -> None:
    scale = Scale.of(least, most, signed=signed)
    assert scale.round(np.zeros(1))[0] == 0
    for end in (least, most):
        assert abs(scale.round(np.array([end]))[0] - end) <= 0.5001 * scale.scale


def test_the_first_product_and_the_classifier_stay_in_float() -> None:
    groups = find_groups(block().graph)
    assert {g.activation: [p.weight for p in g.products] for g in groups} == {
        "norm": ["up", "side"],
        "hidden": ["down"],
    }


def test_openvino_runs_the_graph_in_int8_with_onnxruntimes_outputs(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    proto = quantize(block(), batches(16), card(), Recipe(), folder=tmp_path, threads=1)
    onnx.save(proto, tmp_path / "x.onnx")
    core = openvino.Core()
    model = core.compile_model(str(tmp_path / "x.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = [
        op.get_rt_info()["runtimePrecision"].astype(str) for op in model.get_runtime_model().get_ops()
        if op.get_rt_info()["layerType"].astype(str) == "FullyConnected"
    ]  # fmt: skip
    assert kinds.count("u8") == 3
    found, expected = model(IMAGES.numpy())["logits"], _run(proto)
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()  # a step of one activation


def test_a_budget_keeps_the_group_that_hurts_most_and_no_more(tmp_path: Path) -> None:
    proto = block(outlier=300.0)
    recipe = Recipe(equalize=0, ranges="minmax")  # one channel takes all steps of the norm's output
    plan = prepare(proto, batches(32), card(), recipe, folder=tmp_path, threads=1)
    exact = _run(proto).argmax(1)
    loose = choose_kept(plan, list(IMAGES.split(16)), 90, card(), folder=tmp_path, threads=1)
    assert loose.kept == frozenset() and loose.changed == loose.first
    assert loose.first == (_run(plan.graph()).argmax(1) != exact).sum() > 2
    tight = choose_kept(plan, list(IMAGES.split(16)), 5, card(), folder=tmp_path, threads=1)
    assert tight.kept == {"norm"}
    assert tight.changed == (_run(plan.graph(tight.kept)).argmax(1) != exact).sum() <= 3
    assert sum(n.op_type == "QuantizeLinear" for n in plan.graph(tight.kept).graph.node) == 1
    assert not list(tmp_path.iterdir())


def test_a_graph_without_products_and_a_wrong_recipe_are_refused(tmp_path: Path) -> None:
    proto = block()
    del proto.graph.node[3:]
    with pytest.raises(VerificationError, match="no product with a constant weight behind its first"):
        quantize(proto, batches(1), card(), Recipe(), folder=tmp_path, threads=1)
    with pytest.raises(UsageError, match="`ranges` is 'max'; choose minmax, percentile, mse"):
        Recipe(ranges="max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`equalize` is 2"):
        Recipe(equalize=2)
    assert recipe_for(tensorrt=True).symmetric and not recipe_for(tensorrt=False).symmetric
