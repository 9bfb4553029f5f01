"""``vtk export openvino``: what it writes runs in plain OpenVINO as torch does, and nothing else is kept."""

import contextlib
import csv
import dataclasses
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch

from tests.export.conftest import TIMM, Packed, Run
from vtk.__main__ import main
from vtk.data.loading.eval_pipeline import eval_transform, read_input
from vtk.errors import UnavailableError, VerificationError
from vtk.runtime.opening import open_source

openvino = pytest.importorskip("openvino")

ALONE = Path(__file__).resolve().parents[1] / "_alone.py"
BF16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def export(*argv: object) -> Run:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["export", "openvino", *map(str, argv), "--threads", "2", "--json"])
    assert code == 0, err.getvalue()
    return Run(Path(str(argv[argv.index("--out") + 1])), json.loads(out.getvalue()), out.getvalue(), err.getvalue())


@contextlib.contextmanager
def converted_before(run: Run) -> Iterator[None]:
    """torch's exporter takes seconds; the graph of an earlier export is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vtk_export.onnx.build.convert", lambda *_, **__: run.proto)
        yield


@pytest.fixture(scope="module")
def written(calm: Packed, exported_calm: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Any batch size, preprocessing inside, in fp32 and (where the processor has it) bf16."""
    with converted_before(exported_calm):
        return export(
            calm.path, "--out", tmp_path_factory.mktemp("openvino") / "o", "--data", calm.photos, "--with-preproc",
            "--no-fuse", "--dtype", "fp16", "--softmax", "--output-name", "shares",
        )  # fmt: skip


def expected(pack: Packed, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return pack.model()(images)


def test_a_model_is_verified_in_each_precision_that_it_is_meant_for(written: Run, calm: Packed) -> None:
    names = [each["precision"] for each in written.result["verified"]]
    assert names == (["fp32", "bf16"] if BF16 else ["fp32"]) and written.result["precision"] == names[-1]
    for each in written.result["verified"]:
        assert [row["batch"] for row in each["rows"]] == [1, 2, 3, 7, 16] and all(r["passed"] for r in each["rows"])
        assert each["judgement"]["count"] and each["drift"]["count"]
    source = open_source(written.out)
    assert source.card.to_json() == dataclasses.replace(calm.card, base=None, pack={}).to_json()
    facts = source.facts
    assert (facts.preprocessing, facts.stored, facts.names) == (True, "fp16", {"probabilities": "shares"})


def test_the_page_of_a_model_is_followed_without_this_toolkit(written: Run, calm: Packed, tmp_path: Path) -> None:
    photo = sorted((calm.photos / "a").iterdir())[0]
    case = {"page": str(written.out / "README.md"), "folder": str(written.out), "images": [str(photo)]}
    (tmp_path / "cases.json").write_text(json.dumps({"a": case}))
    subprocess.run([sys.executable, "-I", str(ALONE), "cases.json", "answers.json"], cwd=tmp_path, check=True)
    ((answer,),) = json.loads((tmp_path / "answers.json").read_text()).values()
    shares = expected(calm, read_input(photo, eval_transform(calm.card.input), 1 << 20)[None]).softmax(1)[0]
    found = dict(answer)
    assert found.keys() == set(calm.card.classes)
    for name, share in zip(calm.card.classes, shares.tolist(), strict=True):
        assert found[name] == pytest.approx(share, abs=0.02)


def test_weights_of_half_precision_take_half_the_bytes(written: Run, exported_calm: Run) -> None:
    weights = sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in exported_calm.proto.graph.initializer)
    assert (written.out / "model.bin").stat().st_size < 0.6 * weights


def test_files_of_others_are_left_alone(calm: Packed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.bin").write_bytes(b"mine")
    assert main(["export", "openvino", str(calm.path), "--out", str(tmp_path), "--overwrite"]) == 3
    assert "model.bin, a file that `vtk export openvino` did not write" in capsys.readouterr().err
    assert (tmp_path / "model.bin").read_bytes() == b"mine"


def swap_rows(proto: onnx.ModelProto) -> None:
    """The classifier's first two classes, exchanged."""
    head = next(tensor for tensor in proto.graph.initializer if tensor.name == "head.bias")
    values = onnx.numpy_helper.to_array(head).copy()
    values[:2] = values[1::-1] + 1
    head.CopyFrom(onnx.numpy_helper.from_array(values, "head.bias"))


def test_a_model_with_other_values_is_not_kept(
    calm: Packed, exported_calm: Run, written: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(written.out, tmp_path / "o")
    before = {file.name: file.read_bytes() for file in (tmp_path / "o").iterdir()}
    wrong = exported_calm.proto
    swap_rows(wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vtk_export.onnx.build.convert", lambda *_, **__: wrong)
        assert (
            main(
                ["export", "openvino", str(calm.path), "--out", str(tmp_path / "o"), "--no-fuse", "--precision", "fp32"]
            )
            == 4
        )
    assert "above the bound" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in (tmp_path / "o").iterdir()} == before


@pytest.mark.slow
def test_a_model_whose_rows_depend_on_each_other_is_not_kept(calm: Packed, exported_calm: Run, tmp_path: Path) -> None:
    """Its logits are right for random images alone: the mean over the batch is added and taken away again."""
    from vtk_export import OpenvinoConfig, export_openvino

    wrong = exported_calm.proto
    for node in wrong.graph.node:
        node.output[:] = ["raw" if name == "logits" else name for name in node.output]
    make = onnx.helper.make_node
    wrong.graph.node.extend([
        make("ReduceSum", ["raw"], ["all"], keepdims=1), make("Mul", ["all", "small"], ["tiny"]),
        make("Add", ["raw", "tiny"], ["logits"]),
    ])  # fmt: skip
    wrong.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1e-7, np.float32), "small"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vtk_export.onnx.build.convert", lambda *_, **__: wrong)
        with pytest.raises(VerificationError, match="of an image in the same call"):
            export_openvino(calm.path, OpenvinoConfig(out=tmp_path / "o", fuse=False, threads=2), show=False)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--int8", "static"), "--data FOLDER"),
        (("--int8", "static", "--dtype", "fp16", "--data", "x"), "leave one out"),
        (("--dynamic-size", "--with-preproc"), "leave one out"), (("--softmax", "--output", "features"), "--softmax"),
        (("--output-name", "features=x"), "no `features`"), (("--static-batch", "2", "--profile", "1"), "--profile 2"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(words: tuple[str, ...], says: str, capsys: Any) -> None:
    assert main(["export", "openvino", "pack", "--out", "o", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_package_or_a_precision_that_is_missing_is_one_line(
    calm: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vtk.runtime.openvino_runtime.default_precision", lambda: "fp32")
    words = ["export", "openvino", str(calm.path), "--out", str(tmp_path / "o")]
    assert main([*words, "--precision", "bf16"]) == UnavailableError.exit_code
    assert "AVX512_BF16" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert main(words) == UnavailableError.exit_code
    assert "pip install" in capsys.readouterr().err and not (tmp_path / "o").exists()


def test_an_exported_file_is_no_source(written: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "openvino", str(written.out), "--out", str(tmp_path / "o")]) == 2
    assert "already an exported file" in capsys.readouterr().err


CASES = {
    "plain": (), "fused": ("--fuse",), "batch of two": ("--static-batch", "2", "--softmax"),
    "features": ("--output", "features"), "both": ("--output", "both", "--dtype", "fp16", "--output-name", "a/b"),
    "raw images": ("--with-preproc", "--static-batch", "3", "--input-name", "photo"),
    "int8": ("--int8", "static"), "int8, raw": ("--int8", "static", "--with-preproc"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_form_gives_torchs_outputs_in_plain_openvino(case: str, calm: Packed, tmp_path: Path) -> None:
    run = export(calm.path, "--out", tmp_path / "o", "--data", calm.photos, *CASES[case])
    model = openvino.Core().compile_model(run.out / "model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    photos = sorted((calm.photos / "a").iterdir())[: 3 if "3" in CASES[case] else 2]
    images = torch.stack([read_input(photo, eval_transform(calm.card.input), 1 << 20) for photo in photos])
    raw = np.stack([np.asarray(_open(photo)) for photo in photos])
    outputs = model(raw if "--with-preproc" in CASES[case] else images.numpy())
    want, name = expected(calm, images), {"both": "a/b", "features": "features"}.get(case, "logits")
    want = want.softmax(1) if "--softmax" in CASES[case] else want
    name = "probabilities" if "--softmax" in CASES[case] else name
    if case in ("both", "features"):
        with torch.inference_mode():
            net = calm.model()
            pooled = net.forward_head(net.forward_features(images), pre_logits=True)
        np.testing.assert_allclose(outputs["features"], pooled, atol=0.02 if case == "both" else 1e-4)
    if case != "features":
        # fractions of the largest output: rounding, a level of some pixels or weights of 11 bits, and int8
        tolerance = 0.1 if "int8" in case else 0.02 if case in ("raw images", "both") else 1e-4
        np.testing.assert_allclose(outputs[name], want, atol=tolerance * float(want.abs().max()))


def _open(photo: Path) -> Any:
    from PIL import Image

    return Image.open(photo).convert("RGB")


def small(**kwargs: Any) -> torch.nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **TIMM, **kwargs).eval()


@pytest.mark.slow
def test_a_dynamic_size_takes_what_the_model_takes(tmp_path: Path) -> None:
    from vtk_export import OpenvinoConfig, export_openvino

    net = small(img_size=64, dynamic_img_size=True)

    result = export_openvino(net, OpenvinoConfig(out=tmp_path / "o", dynamic_size=True, threads=2), img_size=64)
    assert {row.size for row in result.verified[0].rows} >= {None, (80, 64)}
    model = openvino.Core().compile_model(result.path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    images = torch.rand(2, 3, 96, 48)
    with torch.inference_mode():
        want = net(images)
    np.testing.assert_allclose(model(images.numpy())[0], want, atol=1e-4 * float(want.abs().max()))
    with pytest.raises(RuntimeError):
        model(np.zeros((1, 3, 65, 64), np.float32))


@pytest.mark.slow
def test_a_classifier_of_zeros_is_verified_by_another(tmp_path: Path) -> None:
    from vtk_export import OpenvinoConfig, export_openvino

    net = small(img_size=32)
    torch.nn.init.zeros_(net.head.weight)
    torch.nn.init.zeros_(net.head.bias)
    result = export_openvino(net, OpenvinoConfig(out=tmp_path / "o", threads=2, precision="fp32"))
    model = openvino.Core().compile_model(result.path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert not model(np.random.default_rng(0).random((2, 3, 32, 32), np.float32))[0].any()
    assert all(row.error > 0 for row in result.verified[0].rows)
    assert sorted(file.name for file in (tmp_path / "o").iterdir()) == [
        "README.md",
        "model.bin",
        "model.json",
        "model.xml",
    ]


@pytest.mark.slow
def test_the_commands_take_a_model(calm: Packed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = export(calm.path, "--out", tmp_path / "o", "--profile", "1,2", "--precision", "fp32")
    assert run.result["profile"] and (tmp_path / "o" / "latency.json").is_file()
    classes = []
    for source in (run.out / "model.xml", calm.path):
        table = tmp_path / f"{source.stem}.csv"
        assert main(["predict", str(source), str(calm.photos), "--out", str(table), "--precision", "fp32"]) == 0
        rows = list(csv.reader(io.StringIO(table.read_text("utf-8"))))
        classes.append([row[:2] for row in rows])
    assert classes[0] == classes[1] and len(classes[0]) == 7
