"""``--profile`` of ``vtk export onnx`` and ``tensorrt``: what was written is measured, and compared before that."""

import json
from pathlib import Path

import onnx
import pytest

from vtk.__main__ import main
from vtk.profiling.onnx_work import work_of_onnx
from vtk.profiling.result import ProfileResult
from vtk.profiling.work import work_of


def test_latency_is_left_beside_the_file_and_goes_with_the_next_export(
    packed, fake_exporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_exporter()
    monkeypatch.setattr("vtk.profiling.export_profile.SECONDS", 0.05)
    out = tmp_path / "onnx"
    argv = ["export", "onnx", str(packed.path), "--out", str(out), "--threads", "1", "--json"]
    assert main([*argv, "--profile", "1,3"]) == 0
    found = json.loads(capsys.readouterr().out)["profile"]
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "latency.json",
        "latency.png",
        "model.json",
        "model.onnx",
    ]
    result = ProfileResult.read(out / "latency.json")
    cells = [(b.name, c.batch, c.status) for b, c in result.cells() if b.name == "ort-cpu"]
    assert cells == [("ort-cpu", 1, "ok"), ("ort-cpu", 3, "ok")]
    assert found["backends"][0]["name"] == "ort-cpu" and result.threads == 1
    assert result.reference.startswith("torch fp32 on the CPU of ")  # not the file itself
    assert main(argv) == 0
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "model.json", "model.onnx"]


@pytest.mark.parametrize("flags,said", [
    (["--profile", "0"], "`--profile` is 0"), (["--profile", "2,2"], "give each once"),
    (["--profile", "1,8", "--static-batch", "2"], "batches of 2 only"),
    (["--profile", "1", "--output", "features"], "gives no logits"),
])  # fmt: skip
def test_what_cannot_be_measured_is_said_before_the_export(
    flags: list[str], said: str, packed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "onnx", str(packed.path), "--out", str(tmp_path / "x"), *flags]) == 2
    assert said in capsys.readouterr().err


def test_work_of_the_file_is_that_of_the_model(packed, exported) -> None:
    shape = (3, 32, 48)
    counted, expected = work_of_onnx(exported.out / "model.onnx"), work_of(packed.model(), shape, 5)
    assert counted is not None and expected is not None
    channels, patches, tokens = 32, 6, 7
    # q and proj, the two products of attention, and the FFN, which only the classifier's token needs in the last block
    spared = patches * (2 * 2 * channels**2 + 2 * 2 * tokens * channels + 2 * 2 * 4 * channels**2)
    assert counted.flops == expected.flops - (spared if exported.result["fused"] else 0)
    assert counted.values == expected.values
    # the exporter folds some of the small ones into others, and adds constants
    assert counted.parameters == pytest.approx(expected.parameters, rel=0.01)


def test_work_of_a_fused_operator_is_not_guessed(exported, tmp_path: Path) -> None:
    proto = exported.proto
    proto.graph.node[0].domain = "com.microsoft"
    onnx.save(proto, tmp_path / "m.onnx")
    assert work_of_onnx(tmp_path / "m.onnx") is None


SECONDS = "vtk.profiling.export_profile.SECONDS"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SECONDS, 0.02)


@pytest.mark.parametrize(("flags", "reference", "tolerance"), [
    (("--dtype", "fp16"), "torch fp32", "cosine ≥ 0.9999"),
    (("--int8", "dynamic"), "torch fp32", "cosine ≥ 0.7"),
    pytest.param(("--softmax",), "torch fp32", "≤ 0.0001", marks=pytest.mark.slow),
    pytest.param(("--output", "both"), "torch fp32", "≤ 0.0001", marks=pytest.mark.slow),
], ids=["fp16", "int8", "softmax", "both"])  # fmt: skip
def test_every_kind_of_file_is_measured_against_the_right_thing(
    flags: tuple[str, ...], reference: str, tolerance: str, calm, fake_calm, short, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if "both" not in flags:
        fake_calm()
    argv = ["export", "onnx", str(calm.path), "--out", str(tmp_path / "o"), "--threads", "1", "--profile", "1,3"]
    assert main([*argv, *flags]) == 0, capsys.readouterr().err
    result = ProfileResult.read(tmp_path / "o" / "latency.json")
    (backend,) = [b for b in result.backends if b.name == "ort-cpu"]
    assert [(c.batch, c.status) for c in backend.cells] == [(1, "ok"), (3, "ok")]
    assert reference in result.reference and backend.cells[0].tolerance.startswith(tolerance)


@pytest.mark.slow
def test_weights_outside_the_file_are_found(
    calm, fake_calm, short, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_calm()
    monkeypatch.setattr("vtk_export.output_folder.INLINE_LIMIT", 1000)
    argv = ["export", "onnx", str(calm.path), "--out", str(tmp_path), "--threads", "1", "--profile", "2"]
    assert main(argv) == 0
    assert (tmp_path / "model.onnx.data").is_file()
    assert [c.status for _, c in ProfileResult.read(tmp_path / "latency.json").cells()] == ["ok"]


QUICK = ("--backends", "ort-cpu", "--device", "cpu", "--threads", "1", "--duration", "0.02", "--batch-sizes", "2")


@pytest.fixture(scope="module")
def raw(calm, exported_calm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a file that takes bytes of decoded images."""
    out = tmp_path_factory.mktemp("raw")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vtk_export.onnx.build.convert", lambda *_, **__: exported_calm.proto)
        patch.setattr(SECONDS, 0.02)
        argv = ["export", "onnx", str(calm.path), "--out", str(out), "--threads", "1", "--with-preproc"]
        assert main([*argv, "--profile", "1,3"]) == 0
    return out


def test_a_raw_file_is_measured_on_bytes_against_pillow(raw: Path) -> None:
    result = ProfileResult.read(raw / "latency.json")
    (backend,) = [b for b in result.backends if b.name == "ort-cpu"]
    assert [(c.batch, c.status) for c in backend.cells] == [(1, "ok"), (3, "ok")]
    assert backend.cells[0].tolerance == "cosine ≥ 0.999"
    assert "with Pillow's preprocessing" in result.reference
    assert "64×128 pixels, uint8" in result.inputs  # twice as high as 32, 2⅔ times as wide as 48


def test_a_raw_file_that_prepares_images_wrongly_gets_no_number(calm, raw: Path, tmp_path: Path) -> None:
    proto = onnx.load(raw / "model.onnx")
    (node,) = [n for n in proto.graph.node if "images" in n.input and n.op_type == "Transpose"]
    node.attribute[0].ints[:] = [0, 3, 2, 1]  # height and width swapped
    onnx.save(proto, tmp_path / "model.onnx")
    argv = ["profile", str(tmp_path / "model.onnx"), *QUICK, "--reference"]
    assert main([*argv, str(calm.path)]) == 4
    assert main([*argv, str(tmp_path / "model.onnx")]) == 0  # it agrees with itself: a reference is what finds it


def test_raw_images_are_not_prepared_twice(calm, exported_calm, raw: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    photos = str(calm.photos)
    for argv in (["eval", str(raw), photos, "--split", "all"], ["predict", str(raw), photos]):
        assert main(argv) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if "error" in x]
        assert "takes raw images, which this command has resized and normalised already" in line
    # a normalised file as the reference of a raw one is fed what Pillow makes of the bytes; the other way round is not
    plain = str(exported_calm.out)
    assert main(["profile", str(raw), "--reference", plain, *QUICK]) == 0
    assert main(["profile", plain, "--reference", str(raw), *QUICK]) == 2


def test_work_of_a_raw_file_is_that_of_its_model(exported_calm, raw: Path) -> None:
    counted = work_of_onnx(raw / "model.onnx", (3, 32, 48))
    plain = work_of_onnx(exported_calm.out / "model.onnx", (3, 32, 48))
    assert counted is not None and plain is not None
    assert (counted.flops, counted.values) == (plain.flops, plain.values)
    assert counted.parameters == pytest.approx(plain.parameters, rel=0.001)


@pytest.mark.parametrize("target", ["onnx", "tensorrt"])
def test_a_bf16_file_cannot_be_measured_without_cuda(
    target: str, packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    argv = ["export", target, str(packed.path), "--out", str(tmp_path / "x"), "--dtype", "bf16", "--unverified"]
    assert main([*argv, "--profile", "1"]) == 5
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "bf16 file needs CUDA" in line and not (tmp_path / "x").exists()
