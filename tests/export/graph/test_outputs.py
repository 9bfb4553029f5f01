"""``--output`` and ``--softmax``: what the file gives, against timm, also folded, in fp16 and in eval."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from onnx import helper
from torch import nn

from vtk.__main__ import main
from vtk.errors import UsageError
from vtk_export.graph.outputs import append_softmax, output_names, split_classifier


def export(packed: Any, out: Path, *argv: object) -> int:
    return main(["export", "onnx", str(packed.path), "--out", str(out), "--threads", "1", *map(str, argv)])


def run(folder: Path, images: torch.Tensor) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    kind = np.float16 if "16" in session.get_inputs()[0].type else np.float32
    return dict(zip(names, session.run(names, {"pixel_values": images.numpy().astype(kind)}), strict=True))


def expected(model: nn.Module, images: torch.Tensor) -> dict[str, np.ndarray]:
    with torch.no_grad():
        features = model.forward_head(model.forward_features(images), pre_logits=True)
        logits = model.head(features)
    return {"features": features.numpy(), "logits": logits.numpy(), "probabilities": logits.softmax(1).numpy()}


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        pytest.param(("--output", "both"), ["logits", "features"], marks=pytest.mark.slow),
        pytest.param(("--output", "features", "--fuse"), ["features"], marks=pytest.mark.slow),
        (("--output", "both", "--softmax", "--dtype", "fp16"), ["probabilities", "features"]),
    ],
    ids=["both", "features-fused", "both-softmax-fp16"],
)
def test_outputs_are_timms(
    calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], names: list[str]
) -> None:
    assert export(calm, tmp_path, *argv, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["outputs"] == names
    assert {row["output"] for row in result["verified"]} == set(names)
    images = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(7))
    got, want = run(tmp_path, images), expected(calm.model(), images)
    assert list(got) == names
    relative = 2e-2 if "fp16" in argv else 1e-4
    for name, values in got.items():
        np.testing.assert_allclose(values, want[name], atol=relative * np.abs(want[name]).max(), rtol=0)


def test_softmax_is_in_fp32_and_eval_takes_it(
    calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_calm()
    assert export(calm, tmp_path, "--softmax") == 0
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(7))
    got = run(tmp_path, images)
    np.testing.assert_allclose(got["probabilities"], expected(calm.model(), images)["probabilities"], atol=1e-4)
    capsys.readouterr()
    losses = []
    for source in (tmp_path, calm.path):
        argv = ["eval", str(source), str(calm.photos), "--split", "all", "--workers", "0", "--json"]
        assert main(argv) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)  # the softmax of its logarithms is what the file gives


def test_a_file_without_logits_is_not_evaluated(
    calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], exported_calm: Any
) -> None:
    proto = exported_calm.proto
    for node in proto.graph.node:
        node.output[:] = ["features" if name == "logits" else name for name in node.output]
    proto.graph.output[0].name = "features"
    onnx.save(proto, tmp_path / "model.onnx")
    assert main(["eval", str(tmp_path), str(calm.photos), "--split", "all", "--workers", "0"]) == 3
    assert "outputs ['features']" in capsys.readouterr().err


def _swapped(proto: onnx.ModelProto) -> None:
    """Give the features of the other image of a pair."""
    values = [
        helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value])
        for name, value in (("from", -1), ("to", -(2**31)), ("rows", 0), ("by", -1))
    ]
    proto.graph.initializer.extend(values)
    for node in proto.graph.node:
        node.output[:] = ["right" if name == "features" else name for name in node.output]
        node.input[:] = ["right" if name == "features" else name for name in node.input]
    proto.graph.node.append(helper.make_node("Slice", ["right", "from", "to", "rows", "by"], ["features"]))


def test_wrong_features_fail_the_gate(
    calm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vtk_export.onnx import build

    real = build.convert

    def faulty(*args: Any, **kwargs: Any) -> onnx.ModelProto:
        proto = real(*args, **kwargs)
        _swapped(proto)
        return proto

    monkeypatch.setattr(build, "convert", faulty)
    assert export(calm, tmp_path / "out", "--output", "both") == 4
    assert "`features` at batch 2: max error" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_features_of_other_families_are_what_their_classifier_reads() -> None:
    model = timm.create_model("test_resnet", num_classes=5).eval()
    split = split_classifier(model, logits=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        logits, features = split(images)
        torch.testing.assert_close(logits, model(images))
        torch.testing.assert_close(features, model.forward_head(model.forward_features(images), pre_logits=True))
    assert split.classifier_width == features.shape[1]


@pytest.mark.parametrize(
    ("model", "logits"),
    [(nn.Linear(3, 4), False), (nn.Linear(3, 4), True), (timm.create_model("test_vit", num_classes=0), True)],
)
def test_a_model_without_one_classifier_is_refused(model: nn.Module, logits: bool) -> None:
    with pytest.raises(UsageError, match=f"{type(model).__name__} ends with"):
        split_classifier(model, logits=logits)


def test_a_model_without_a_classifier_gives_its_features() -> None:
    model = timm.create_model("test_vit", num_classes=0).eval()
    split, images = split_classifier(model, logits=False), torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        assert torch.equal(split(images), model(images))
    assert split.classifier_width == 64


def test_names_of_outputs() -> None:
    assert output_names("logits", softmax=True) == ("probabilities",)
    assert output_names("both", softmax=False) == ("logits", "features")


def test_softmax_keeps_its_logits_inside(exported_calm: Any) -> None:
    proto = exported_calm.proto
    append_softmax(proto)
    onnx.checker.check_model(proto, full_check=True)
    assert [value.name for value in proto.graph.output] == ["probabilities"]
