"""Images of several clients in one call: plain ONNX Runtime on concatenated rows, the gate's measure, and refusals."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from vtk.__main__ import main
from vtk.errors import UsageError, VerificationError
from vtk.runtime.backends.base import load_backend, predictor
from vtk.runtime.onnx_file import open_onnx
from vtk_export.gate.limits import LIMITS
from vtk_export.gate.neighbours import check_dependence, measure, rounding
from vtk_export.onnx.config import OnnxConfig
from vtk_export.onnx.export import export_onnx
from vtk_export.triton.config import TritonCommand

HONEST = 5
BAD: dict[str, Callable[[np.ndarray], None]] = {
    "NaN": lambda x: x.fill(np.nan),
    "infinite": lambda x: x.fill(np.inf),
    "one NaN pixel": lambda x: x.__setitem__((1, 5, 7), np.nan),
    "one infinite pixel": lambda x: x.__setitem__((0, 0, 0), -np.inf),
}


@pytest.fixture
def export(calm: Any, fake_calm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    fake_calm()

    def run(*argv: object) -> tuple[Path, dict[str, Any], str]:
        argv = ("export", "onnx", calm.path, "--out", tmp_path / "out", "--threads", 1, "--json", "--images", 2, *argv)
        argv = (*argv, "--data", calm.photos) if "static" in argv else argv
        assert main(list(map(str, argv))) == 0
        printed = capsys.readouterr()
        return tmp_path / "out" / "model.onnx", json.loads(printed.out), printed.err

    return run


def in_onnxruntime(path: Path, *, optimize: bool = True) -> Callable[[np.ndarray], list[np.ndarray]]:
    """Return what runs a file as a server does, with nothing of ours."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    half = session.get_inputs()[0].type == "tensor(float16)"

    def run(rows: np.ndarray) -> list[np.ndarray]:
        found: list[np.ndarray] = session.run(None, {"pixel_values": rows.astype(np.float16 if half else np.float32)})
        return found

    return run


def pixels(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3, 32, 48)).astype(np.float32)


@pytest.mark.parametrize(
    "flags",
    [(), ("--softmax",), ("--dtype", "fp16"), ("--int8", "static"), ("--int8", "dynamic"),
     ("--int8", "static", "--softmax")],
    ids=lambda flags: " ".join(flags) or "fp32",
)  # fmt: skip
def test_an_image_of_nan_gets_a_row_of_nan_and_touches_no_other_clients_row(export: Any, flags: tuple[str]) -> None:
    path, told, said = export(*flags)
    dynamic = "dynamic" in flags
    honest = pixels(HONEST)
    for optimize in (True, False):
        run = in_onnxruntime(path, optimize=optimize)
        alone = [np.concatenate(each) for each in zip(*(run(image[None]) for image in honest), strict=True)]
        for spoil in BAD.values():
            for at in (0, 2, HONEST):
                rows = np.insert(honest, at, pixels(1, 9), 0)
                spoil(rows[at])
                for found, wanted in zip(run(rows), alone, strict=True):
                    assert np.isnan(found[at]).all(), "a label of this row would be of no image"
                    others = np.delete(found, at, 0)
                    assert np.isfinite(others).all()
                    if not dynamic:
                        assert np.abs(others - wanted).max() <= 1e-4 * np.abs(wanted).max()
    depends = told["batch_dependence"]
    assert (depends["relative"] > 1e-4) == dynamic == ("an image's outputs depend on its neighbours" in said)
    assert depends["unmarked"] == [] and depends["images"] == 3
    assert told["facts"]["batch_dependence"] == (depends["relative"] if dynamic else 0)


def test_the_measured_dependence_of_a_dynamic_file_is_that_of_plain_onnxruntime(export: Any, calm: Any) -> None:
    path, told, said = export("--int8", "dynamic")
    run, images = in_onnxruntime(path), pixels(3, seed=4)
    alone = np.concatenate([run(image[None])[0] for image in images])
    far = max(np.abs(run(np.concatenate([images, x]))[0][:3] - alone).max() for x in (np.zeros_like(images[:1]),
                                                                                      1e4 * pixels(1)))  # fmt: skip
    assert told["batch_dependence"]["error"] == pytest.approx(far, rel=2)
    assert "--int8 static" in said and "one image per call" in said
    assert "run one image a call" in open_onnx(path).facts.notes()[0]
    # so eval and predict, whatever their batch size, give what the file gives for each image alone
    predict = predictor(load_backend("ort-cpu", open_onnx(path), threads=1))
    assert torch.equal(predict(torch.from_numpy(images)), torch.from_numpy(alone))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_file_of_a_fixed_batch_is_measured_in_calls_of_that_size(
    size: int, packed: Any, fake_exporter: Any, tmp_path: Path, capsys: Any
) -> None:
    def fix(proto: onnx.ModelProto) -> None:
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = size

    fake_exporter(fix)
    argv = ["export", "onnx", packed.path, "--out", tmp_path / "o", "--threads", 1, "--static-batch", size, "--json"]
    assert main(list(map(str, argv))) == 0
    told = json.loads(capsys.readouterr().out)["batch_dependence"]
    assert (told["images"], told["batch"]) == (min(3, size - 1), size)
    assert told["relative"] <= 1e-4 and told["unmarked"] == []


class Hides(nn.Module):
    """Answers NaN as if it were 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(x == x, x, torch.zeros_like(x)).clamp(-9, 9)
        return self.head(x.mean((2, 3)))


def test_a_graph_that_would_answer_nan_with_numbers_is_given_nodes_that_do_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = OnnxConfig(out=tmp_path / "o", threads=1)
    result = export_onnx(Hides(), config, img_size=8, classes=tuple("abcd"), show=False)
    rows = np.random.default_rng(0).standard_normal((3, 3, 8, 8)).astype(np.float32)
    clean = in_onnxruntime(result.path)(rows)[0]
    rows[1, 2, 3, 4] = np.nan
    found = in_onnxruntime(result.path)(rows)[0]
    assert np.isnan(found[1]).all() and np.array_equal(found[[0, 2]], clean[[0, 2]])
    assert result.dependence is not None and result.dependence.unmarked == ()


def mixing(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Ranges of a whole call, as of dynamic quantisation."""
    flat = rows.flatten(1)[:, :4]
    step = flat.nan_to_num(0, 0, 0).abs().max() / 127
    return {"logits": (flat / step).round() * step}


def running_sums(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """A difference of running sums is exact for honest neighbours, and NaN behind a NaN."""
    sums = rows.double().flatten(1)[:, :4].cumsum(0)
    return {"logits": torch.cat((sums[:1], sums[1:] - sums[:-1])).float()}


@pytest.mark.parametrize(
    ("run", "said"), [(mixing, "change by"), (running_sums, "NaN neighbours .* become NaN"),
                      (lambda x: {"logits": x.nan_to_num(0, 0, 0).flatten(1)[:, :4]}, "are numbers, expected NaN")]
)  # fmt: skip
def test_a_file_that_mixes_images_is_refused(run: Any, said: str) -> None:
    images = torch.from_numpy(pixels(4))
    found = measure(run, images, static_batch=None, black=torch.zeros_like(images[0]), names=("logits",))
    with pytest.raises(VerificationError, match=said):
        check_dependence(found, rounding(LIMITS["int8"]))
    if math.isinf(found.error):
        with pytest.raises(VerificationError, match=said):
            check_dependence(found, 1.0, dynamic=True)


@pytest.mark.parametrize(
    "options",
    [{"backend": "onnxruntime"}, {"backend": "python"}, {"max_batch_size": 2}, {"static_batch": 3},
     {"with_preproc": True, "ensemble": True}, {"with_preproc": True, "ensemble": False},
     {"sources": ("a", "b"), "backend": "onnxruntime"}, {"max_batch_size": 1, "static_batch": 4},
     {"softmax": True, "data": (Path("d"),)}],
    ids=str,
)  # fmt: skip
def test_a_server_that_joins_clients_refuses_ranges_of_a_whole_call(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="another's answers; give --int8 static --data FOLDER, or --max-batch-size 1"):
        TritonCommand(out=Path("m"), **{"sources": ("p",), "int8": "dynamic", **options})


@pytest.mark.parametrize("options", [{"backend": "onnxruntime"}, {"backend": "python"}, {"static_batch": 1}], ids=str)
def test_one_image_a_call_may_find_its_own_ranges(options: dict[str, Any]) -> None:
    TritonCommand(out=Path("m"), sources=("p",), int8="dynamic", **{"max_batch_size": 1, **options})


def test_a_given_onnx_file_is_no_way_round_the_gate(export: Any, tmp_path: Path, capsys: Any) -> None:
    path, _, _ = export("--int8", "dynamic")
    for name in (path, path.parent):
        assert main(["export", "triton", f"p={name}", "--out", str(tmp_path / "models")]) == 2
        assert "is already an ONNX file; give the pack" in capsys.readouterr().err
    assert not (tmp_path / "models" / "p").exists()
