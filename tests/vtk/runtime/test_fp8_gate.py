"""``--precision fp8``: which images calibrate and judge it, what it says, and every way in which it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from tests.export.conftest import Packed, make_pack
from vtk.__main__ import main
from vtk.errors import DataError, UsageError, VerificationError
from vtk.evaluation.intervals import wilson
from vtk.fused import Fp8ViT
from vtk.runtime import fp8_gate as fp8
from vtk.runtime.backends.base import load_backend, precision_of
from vtk.runtime.data_option import data_images
from vtk.runtime.fp8_gate import check_agreement
from vtk.runtime.opening import open_source

Command = Callable[..., tuple[int, dict[str, Any], str]]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a CPU does")


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return make_pack(tmp_path_factory.mktemp("fp8"), 0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 10 training and 15 held-out images of the pack's classes."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, count in (("train", 2), ("val", 3)):
        for name in ("a", "b", "c", "d", "é"):
            (root / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (8, 12, 3), dtype=np.uint8)
                image = Image.fromarray(pixels).resize((48, 32), Image.Resampling.BICUBIC)
                image.save(root / part / name / f"{i}.png")
    return root


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*argv: object) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        code = main([*map(str, argv), "--threads", "1", "--json"])
        printed = capsys.readouterr()
        return code, json.loads(printed.out) if printed.out else {}, printed.err

    return call


def test_a_model_without_a_form_in_fp8_is_refused_before_an_image_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fp8, "Photographs", None)
    rotary = Eva(img_size=32, embed_dim=32, depth=1, num_heads=1, num_classes=2, use_rot_pos_emb=True).eval()
    with pytest.raises(UsageError, match=r"`stages\.0` has a rotary embedding, which has no form in fp8"):
        fp8.calibrate(rotary, torch.device("cpu"), None)  # type: ignore[arg-type]
    odd = VisionTransformer(img_size=32, embed_dim=24, depth=1, num_heads=1, num_classes=2).eval()
    with pytest.raises(UsageError, match=r"`stages\.0\.qkv` is a matrix of 72×24"):
        fp8.calibrate(odd, torch.device("cpu"), None)  # type: ignore[arg-type]
    assert "calibrat" not in capsys.readouterr().err


def test_eval_says_what_it_was_calibrated_and_judged_on(pack: Packed, folder: Path, run: Command) -> None:
    code, found, said = run("eval", pack.path, folder, "--precision", "fp8", "--workers", 0, "--device", "cpu")
    assert code == 0, said
    assert "fp8: calibrated on 10 training images of" in said
    assert "simulated on the CPU: the outputs are those of a GPU, the time is not" in said
    assert "in 15 of 15 held-out images of" in said and "100.0 % (95 % interval 79.6 % to 100.0 %)" in said
    assert (found["backend"], found["provider"], found["precision"]) == ("fused", "torch cpu, fp8 simulated", "fp8")
    assert found["agreement"] is not None and found["same_conditions"] is False


def test_predict_gives_labels_and_the_images_that_calibrate_are_named(pack: Packed, folder: Path, run: Command) -> None:
    way = ("--precision", "fp8", "--data", folder)
    code, found, said = run("predict", pack.path, folder / "val" / "a", *way)
    assert code == 0 and found["count"] == 3 and "fp8: calibrated on 10 training images" in said
    _, plain, _ = run("predict", pack.path, folder / "val" / "a")
    assert [p["labels"][0] for p in found["predictions"]] == [p["labels"][0] for p in plain["predictions"]]
    assert [p["scores"] for p in found["predictions"]] != [p["scores"] for p in plain["predictions"]]


def test_profile_compares_the_outputs_and_gives_no_time_on_a_cpu(pack: Packed, folder: Path, run: Command) -> None:
    way = ("--precision", "fp8", "--data", folder, "--batch-sizes", "1,3", "--device", "cpu", "--duration", "0.1")
    code, found, said = run("profile", pack.path, *way)
    assert code == 1, said  # of nothing measured
    (backend,) = found["backends"]
    assert (backend["name"], backend["arithmetic"], found["precision"]) == ("fused", "fp8", "fp8")
    for cell in backend["cells"]:
        assert cell["status"] == "skipped" and "simulation on the CPU has no time" in cell["reason"]
        assert cell["max_diff"] > 0 and cell["p50_ms"] is None and cell["images_per_second"] is None
    assert not any("TF32" in text for text in found["warnings"])


def test_a_model_whose_answers_change_is_refused_with_the_figure(
    pack: Packed, folder: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fp8.to_fp8

    def spoiled(fused: Any, batches: Any = ()) -> Fp8ViT:
        model = real(fused, batches)
        with torch.no_grad():  # one class is answered to every image
            model.head.b_head[2] += 100
        return model

    monkeypatch.setattr(fp8, "to_fp8", spoiled)
    with torch.no_grad():
        source = open_source(pack.path)
        model, given = source.model(), data_images(source.card, folder)
        assert given is not None
        paths = given.judging.paths
        images = next(batch for batch, _ in fp8.Photographs(given.judging, 99).batches(source.card.input, 99))
        same = int((model(images).argmax(1) == 2).sum())
    figure = f"in {same} of {len(paths)} held-out images of"
    for argv in (
        ("eval", pack.path, folder, "--precision", "fp8", "--workers", 0),
        ("predict", pack.path, folder / "val", "--precision", "fp8", "--data", folder),
    ):
        code, found, said = run(*argv)
        assert code == 4 and list(found) == ["error", "exit_code"]
        assert figure in said and "needed is 99 %; use --precision bf16" in said and "Traceback" not in said
    way = ("--precision", "fp8", "--data", folder, "--batch-sizes", "1", "--backends", "fused", "--device", "cpu")
    code, found, said = run("profile", pack.path, *way)
    assert code == 4 and figure in found["backends"][0]["reason"]


def test_a_row_without_numbers_agrees_with_nothing(pack: Packed, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(pack.path)
    model = source.model()

    class Silent(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits = model(images)
            return logits.masked_fill(logits == logits.amax(1, keepdim=True), torch.nan)

    monkeypatch.setattr(fp8, "to_fp8", lambda fused, batches: Silent())
    with pytest.raises(VerificationError, match=r"in 0 of 15 held-out"):
        fp8.calibrate(source.model(), torch.device("cpu"), data_images(source.card, folder))  # type: ignore[arg-type]


@pytest.mark.parametrize(("same", "count"), [(99, 100), (98, 100), (198, 200), (0, 5), (5, 5), (253, 256), (254, 256)])
def test_the_bound_is_99_percent_whatever_the_number(same: int, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    low, high = wilson(same, count)
    expected = binomtest(same, count).proportion_ci(method="wilson")
    assert abs(low - expected.low) < 1e-4 and abs(high - expected.high) < 1e-4
    if same / count >= 0.99:
        check_agreement(same, count, "images")
        assert f"{same} of {count}" in capsys.readouterr().out
    else:
        with pytest.raises(VerificationError, match=f"{same} of {count} images, "):
            check_agreement(same, count, "images")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("predict", "PACK", "DATA", "--precision", "fp8"), "give --data FOLDER"),
        (("profile", "PACK", "--precision", "fp8"), "give --data FOLDER"),
        (("predict", "PACK", "DATA", "--data", "DATA"), "is only for --precision fp8, which was not given"),
        (("profile", "PACK", "--data", "DATA"), "is only for --precision fp8, which was not given"),
        (("eval", "PACK", "DATA", "--precision", "fp8", "--backend", "eager"), "back-end `eager` has no fp8"),
        (("eval", "PACK", "DATA", "--precision", "fp8", "--backend", "compile"), "back-end `compile` has no fp8"),
        (("profile", "PACK", "--precision", "fp8", "--data", "DATA", "--backends", "bank,fused"), "`--backends` bank"),
        (("profile", "PACK", "--precision", "fp8", "--data", "DATA", "--tasks", "PACK", "--backends", "bank"),
         "`--backends` bank has no fp8"),
    ],
)  # fmt: skip
def test_what_has_no_fp8_says_so_in_one_line(
    argv: tuple[str, ...], told: str, pack: Packed, folder: Path, run: Command
) -> None:
    code, _, said = run(*[{"PACK": str(pack.path), "DATA": str(folder)}.get(word, word) for word in argv])
    assert code == 2 and told in said and "Traceback" not in said


def test_the_functions_refuse_the_same(pack: Packed, folder: Path) -> None:
    source = open_source(pack.path)
    with pytest.raises(UsageError, match="give --data FOLDER"):
        load_backend("fused", source, dtype="fp8")
    given = data_images(source.card, folder)
    backend = load_backend("fused", source, dtype="fp8", given=given)
    assert precision_of(backend) == "fp8" and backend.dtype == torch.bfloat16
    assert isinstance(backend.model, Fp8ViT)  # type: ignore[attr-defined]
    backend.close()
    with pytest.raises(UsageError, match="`given`"):
        load_backend("fused", source, dtype="bf16", given=given)
    with pytest.raises(DataError):
        data_images(source.card, folder / "nothing")
