"""The work of the commands as functions, on sources in memory, against the commands and the modules themselves."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import vtk
from vtk.__main__ import main
from vtk.errors import DataError, UsageError

TINY: dict[str, Any] = {"depth": 4, "embed_dim": 32, "num_heads": 2}
CLASSES = ("blue", "green", "red")
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part in ("train", "val"):
        for name, channel in zip(CLASSES, (2, 1, 0), strict=True):
            folder = root / part / name
            folder.mkdir(parents=True)
            for i in range(4):
                pixels = rng.integers(0, 100, (20, 30, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.fixture
def mean_colour() -> nn.Module:
    """Logits: how blue, green and red an image is."""
    module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3, bias=False))
    with torch.no_grad():
        module[2].weight.copy_(10 * torch.eye(3).flip(0))
    return module


def vit() -> Any:
    torch.manual_seed(1)
    return vtk.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False, kwargs=TINY)


def test_evaluate_takes_a_source_or_a_function(mean_colour: nn.Module, photos: Path) -> None:
    found = vtk.evaluate(mean_colour, vtk.EvalConfig(data=photos), img_size=16, classes=CLASSES)
    assert (found.metrics.top1, found.metrics.count) == (1.0, 12)
    batches = [(torch.eye(3), torch.tensor([0, 1, 0]))]
    old = vtk.evaluate(lambda images: images, batches, CLASSES, show_progress=False)
    assert old.top1 == pytest.approx(2 / 3) and type(old).__name__ == "Metrics"
    named = vtk.evaluate(predict=lambda images: images, loader=batches, classes=CLASSES, show_progress=False)
    assert named.top1 == old.top1
    again = vtk.evaluate(lambda images: images, batches, classes=CLASSES, show_progress=False, device="cpu")
    assert again.top1 == old.top1
    config = vtk.EvalConfig(data=photos)
    for wrong in ((mean_colour, "pets"), ("pets", photos, CLASSES), (mean_colour, config, CLASSES)):
        with pytest.raises(UsageError, match="`evaluate`"):
            vtk.evaluate(*wrong)  # type: ignore[call-overload]


@pytest.mark.parametrize("backend", ["ort-cpu", "openvino"])
def test_evaluate_through_a_file_compares_with_the_module(mean_colour: nn.Module, photos: Path, backend: str) -> None:
    core = str(min(os.sched_getaffinity(0)))
    one = None if backend == "openvino" else core  # OpenVINO keeps to the cores that it was started on
    config = vtk.EvalConfig(data=photos, backend=backend, precision="fp32", cpus=one)
    found = vtk.evaluate(mean_colour, config, img_size=16, classes=CLASSES)
    assert (found.metrics.top1, found.agreement, found.backend) == (1.0, 1.0, backend)
    assert found.reference == "Sequential (eager, fp32, cpu)"


def test_predict_writes_a_table_only_where_it_is_asked_to(
    mean_colour: nn.Module, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = vtk.PredictConfig(images=photos / "val", top_k=1)
    found = vtk.predict(mean_colour, config, img_size=16, classes=CLASSES)
    assert [p.labels[0] for p in found.predictions] == [p.path.parent.name for p in found.predictions if p.path]
    assert found.out is None and not list(tmp_path.iterdir())
    assert found.to_dict()["out"] is None


def test_audit_is_what_the_command_says(photos: Path, tmp_path: Path, capsys: Output) -> None:
    found = vtk.audit(photos, vtk.AuditConfig(out=tmp_path / "page.html"))
    assert (found.classes, len(found.train), len(found.val)) == (CLASSES, 12, 12)
    capsys.readouterr()
    assert main(["data", "audit", str(photos), "--out", str(tmp_path / "other.html"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    own = {"seconds", "cached", "page"}
    assert {k: v for k, v in said.items() if k not in own} == {k: v for k, v in found.to_dict().items() if k not in own}
    assert (tmp_path / "page.html").read_text() == (tmp_path / "other.html").read_text()


def test_audit_without_a_page_writes_nothing(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "bad" / "a"
    bad.mkdir(parents=True)
    (bad / "x.png").write_bytes(b"no image")
    (tmp_path / "bad" / "b").mkdir()
    for path in (bad / "0.png", bad / "1.png", tmp_path / "bad" / "b" / "2.png", tmp_path / "bad" / "b" / "3.png"):
        Image.new("RGB", (8, 8)).save(path)
    assert len(vtk.audit(tmp_path / "bad").bad) == 1
    with pytest.raises(DataError, match=r"cannot be read.*x\.png"):
        vtk.audit(str(tmp_path / "bad"), vtk.AuditConfig(on_bad_image="fail"))
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    with pytest.raises(DataError, match=r"cannot read labels\.csv as a table"):
        vtk.audit("labels.csv")


def test_parallelize_a_created_model(tmp_path: Path) -> None:
    model = vit()
    before = copy.deepcopy(model.state_dict())
    result = vtk.parallelize(model, vtk.ParallelizeConfig(out=tmp_path / "p", images=4, device="cpu"))
    made = vtk.load_checkpoint(result.model)
    blocks: Any = made.model.blocks
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():  # the paper's eq. 1 and 2, written out
        x = model.eval().patch_embed(images)
        x = model._pos_embed(x)
        for a, b in zip(model.blocks[::2], model.blocks[1::2], strict=True):
            x = x + a.attn(a.norm1(x)) + b.attn(b.norm1(x))
            x = x + a.mlp(a.norm2(x)) + b.mlp(b.norm2(x))
        want = model.forward_head(model.norm(x))
        torch.testing.assert_close(made.model(images), want, rtol=1e-4, atol=1e-5)
    assert len(blocks) == 2 and result.drift.count == 4
    assert json.loads((tmp_path / "p" / "drift.json").read_text()) == json.loads(json.dumps(result.to_dict()))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_parallelize_refuses_a_module_that_timm_cannot_build_again(mean_colour: nn.Module, tmp_path: Path) -> None:
    config = vtk.ParallelizeConfig(out=tmp_path / "p", images=2, device="cpu")
    unknown = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, **TINY)
    with pytest.raises(UsageError, match=r"weights from timm's `vit_tiny_patch16_2x2_224`.*vtk\.create_model"):
        vtk.parallelize(unknown, config)
    with pytest.raises(UsageError, match="no model `Sequential`"):
        vtk.parallelize(mean_colour, config, img_size=16)
    assert not (tmp_path / "p").exists()


def test_analyze_a_module_and_set_two_side_by_side(mean_colour: nn.Module, photos: Path, tmp_path: Path) -> None:
    config = vtk.AnalyzeConfig(data=photos, what=("entropy", "calibration"), max_images=6, device="cpu", workers=0,
                               out=tmp_path / "one")  # fmt: skip
    model = vtk.open_source(vit(), classes=CLASSES)
    alone = vtk.analyze(model, config)
    (found,) = alone.analyses
    assert set(found.results) == {"entropy", "calibration"} and found.label == "VisionTransformer"
    assert alone.report.is_file() and not alone.missing
    (tmp_path / "one" / "analysis.json").is_file()
    both = vtk.AnalyzeConfig(data=photos, what=("calibration",), max_images=6, device="cpu", workers=0,
                             out=tmp_path / "two")  # fmt: skip
    pair = vtk.analyze(tmp_path / "one", both, against=mean_colour, img_size=16, classes=CLASSES)
    assert [one.label for one in pair.analyses] == ["VisionTransformer", "Sequential"]
    refused = vtk.analyze(mean_colour, vtk.AnalyzeConfig(data=photos, what=("entropy",), max_images=4, device="cpu",
                          workers=0, out=tmp_path / "three"), img_size=16, classes=CLASSES)  # fmt: skip
    assert refused.missing == ("entropy",)


def test_triton_repository_of_a_module(mean_colour: nn.Module, tmp_path: Path) -> None:
    config = vtk.TritonConfig(out=tmp_path / "models")
    result = vtk.export_triton({"colour": mean_colour}, config, show=False, img_size=16, classes=CLASSES)
    (made,) = result.models
    assert made.name == "colour" and result.backend == "onnxruntime"
    session = onnxruntime.InferenceSession(made.path / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    images = torch.randn(2, 3, 16, 16)
    got = session.run(["logits"], {"pixel_values": images.numpy()})[0]
    np.testing.assert_allclose(got, mean_colour(images).detach(), atol=1e-5)
    with pytest.raises(UsageError, match="takes packs from their files"):
        vtk.export_triton(mean_colour, vtk.TritonConfig(out=tmp_path / "m", backend="vtk"), img_size=16)


def test_profile_takes_a_module_and_a_source(mean_colour: nn.Module) -> None:
    config = vtk.ProfileConfig(batch_sizes=(1,), backends=("eager",), duration=0.01, device="cpu", stability=100.0)
    for source, options in ((mean_colour, {"img_size": 16}), (vtk.open_source(mean_colour, img_size=16), {})):
        result = vtk.profile(source, config, show_progress=False, **options)  # type: ignore[arg-type]
        assert result.source == "Sequential" and result.backends[0].cells[0].status == "ok"
    with pytest.raises(UsageError, match="`img_size`"):
        vtk.profile(vtk.open_source(mean_colour, img_size=16), config, img_size=32)
    with pytest.raises(TypeError, match="image_size"):
        vtk.profile(mean_colour, config, image_size=16)  # type: ignore[call-arg]


def test_profiles_are_compared_from_files_or_results(mean_colour: nn.Module, tmp_path: Path) -> None:
    config = vtk.ProfileConfig(batch_sizes=(1,), backends=("eager",), duration=0.01, device="cpu", stability=100.0,
                               out=tmp_path / "p")  # fmt: skip
    result = vtk.profile(mean_colour, config, show_progress=False, img_size=16)
    found = vtk.compare_profiles(result, tmp_path / "p" / "profile.json")
    (change,) = found.changes
    assert change.backend == "eager" and change.old_ms == pytest.approx(change.new_ms) and not found.missing
    assert isinstance(mean_colour(torch.zeros(1, 3, 16, 16)), Tensor)
