"""``vtk export aoti`` and its back-end. Compiling takes a minute, so most tests run a file without a library."""

import inspect
import json
import py_compile
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from tests.export._aoti_library import Model, loader, write_file
from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import DataError, UnavailableError, UsageError, VerificationError
from vtk.profiling.result import ProfileResult
from vtk.runtime import aoti_load
from vtk.runtime.aoti_file import open_aoti, read_metadata
from vtk.runtime.backends.base import load_backend
from vtk.runtime.opening import open_source
from vtk.runtime.source import Source
from vtk_export.aoti import export as aoti
from vtk_export.aoti import gate as aoti_gate
from vtk_export.aoti.config import AotiConfig
from vtk_export.aoti.files import FILES
from vtk_export.aoti.trial_process import bare, through_loader


@pytest.fixture
def file(packed, tmp_path: Path) -> Path:
    write_file(tmp_path / "model.pt2", packed.card)
    return tmp_path / "model.pt2"


@pytest.fixture
def fake_compiler(packed, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """In place of the compiler: the file has no library, and what is loaded from it is ``model``, in this process."""

    def use(model: Model | None = None, size: tuple[int, ...] = (3, 32, 48), **changed: Any) -> list[Any]:
        compiled: list[Any] = []

        def compile_package(form: Any, example: Tensor, card: Card, precision: str, path: Path) -> None:
            compiled.append((form, tuple(example.shape), example.dtype))
            write_file(path, card, **{"vtk.precision": precision})

        def answers(folder: Path, batches: dict[str, Tensor], device_index: int | None, threads: int | None) -> Any:
            (loaded, answered), (raw, more) = through_loader(folder, batches), bare(folder / "model.pt2", batches)
            return {name: logits.float() for name, logits in (loaded | raw).items()}, answered + more

        plain = packed.model()
        monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "0")
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.setattr(aoti, "compile_package", compile_package)
        monkeypatch.setattr(aoti_gate, "answers", answers)
        monkeypatch.setattr("torch._inductor.package.load_package", loader(model or plain, size, **changed))
        return compiled

    return use


def test_card_and_facts_come_from_the_file(packed, file: Path) -> None:
    source = open_source(file)
    assert source.kind == "aoti" and source.card == packed.card and source.facts.precision == "fp32"
    assert open_source(file.parent).kind == "aoti"  # a folder that holds it
    with pytest.raises(UsageError, match="AOTInductor file, not a torch model"):
        source.model()


@pytest.mark.parametrize("changed,said", [
    ({"vtk.torch": "2.1"}, "made with torch 2.1"),
    ({"AOTI_DEVICE_KEY": "cuda"}, "compiled for cuda, and cpu was requested"),
    ({"vtk.cpu": "AVX512"}, "made for CPUs with AVX512"),
    ({"AOTI_MACHINE": "riscv128"}, "made for riscv128"),
])  # fmt: skip
def test_a_file_for_another_machine_is_refused_before_it_is_loaded(
    changed: dict[str, str], said: str, packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch._inductor.package.load_package", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    write_file(tmp_path / "m.pt2", packed.card, **changed)
    with pytest.raises(UnavailableError, match=said):
        load_backend("aoti", open_aoti(tmp_path / "m.pt2"))


def test_other_precision_source_and_options_are_refused(packed, file: Path) -> None:
    with pytest.raises(UsageError, match="--precision fp32"):
        load_backend("aoti", open_aoti(file), dtype="bf16")
    with pytest.raises(UsageError, match="files, not the pack"):
        load_backend("aoti", open_source(packed.path))
    with pytest.raises(UsageError, match="no option `mode`"):
        load_backend("aoti", open_aoti(file), mode="x")


@pytest.mark.parametrize("content,said", [
    (b"PK not a zip", "not a readable .pt2"), (None, "not a file of AOTInductor"),
])  # fmt: skip
def test_other_files_are_refused(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    if content is None:
        torch.save({"a": 1}, path)  # a zip, and a pickle
    else:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_metadata(path)


def test_a_file_of_another_program_has_no_card(file: Path, packed) -> None:
    write_file(file, packed.card, **{"vtk.precision": "int3"})
    with pytest.raises(DataError, match="carries no vtk card"):
        open_aoti(file)


@pytest.mark.parametrize("shape", [(2, 3, 48, 32), (0, 3, 32, 48), (2, 1, 32, 48), (3, 32, 48)])
def test_images_that_the_library_would_read_beyond_are_refused(file: Path, fake_compiler, shape) -> None:
    fake_compiler()
    backend = load_backend("aoti", open_aoti(file))
    with pytest.raises(UsageError, match="resize or split"):
        backend.run({"pixel_values": torch.zeros(shape)})
    assert backend.run({"pixel_values": torch.zeros(2, 3, 32, 48)})["logits"].shape == (2, 5)
    backend.close()


def test_export_is_verified_and_kept(packed, fake_compiler, tmp_path: Path) -> None:
    compiled = fake_compiler()
    out = tmp_path / "out"
    result = aoti.export_aoti(open_source(packed.path), AotiConfig(out=out, device="cpu", threads=1))
    ((form, shape, dtype),) = compiled
    assert type(form).__name__ == "FusedViT" and shape == (2, 3, 32, 48) and dtype == torch.float32
    assert [row.batch for row in result.rows] == [1, 2, 3, 7, 16] and all(row.passed for row in result.rows)
    assert sorted(p.name for p in out.iterdir()) == sorted(FILES)
    assert open_source(out).card.classes == packed.card.classes and open_source(out).card.base is None


def test_the_file_predicts_like_the_pack(
    packed, file: Path, fake_compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_compiler()
    labels = []
    for source in (file, packed.path):
        options = ["--out", str(tmp_path / "found.csv"), "--json"]
        assert main(["predict", str(source), str(packed.photos / "a" / "0.png"), *options]) == 0
        labels.append(json.loads(capsys.readouterr().out)["predictions"][0]["labels"])
    assert labels[0] == labels[1]


@pytest.mark.parametrize("fault", [
    lambda y: y + 0.1, lambda y: y.flip(0), lambda y: y[:1].expand_as(y), lambda y: y / 0, lambda y: y[:, 1:],
], ids=["off", "rows swapped", "first row repeated", "infinite", "class missing"])  # fmt: skip
def test_a_file_with_other_values_is_not_kept(
    fault: Model, packed, fake_compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = packed.model()
    fake_compiler(lambda x: fault(model(x)))
    argv = ["export", "aoti", str(packed.path), "--out", str(tmp_path / "out"), "--device", "cpu", "--threads", "1"]
    assert main(argv) == 4
    assert capsys.readouterr().err.startswith("vtk export: error: ") and not (tmp_path / "out").exists()


@pytest.mark.parametrize("overlooked", [("dtype",), ("size", "strides"), ("strides",), ("least",), ("most",)])
def test_a_library_that_answers_what_it_was_not_made_for_is_not_kept(
    overlooked: tuple[str, ...], packed, fake_compiler, tmp_path: Path
) -> None:
    fake_compiler(overlooked=overlooked)
    said = r"accepts invalid input \(model.pt2, |does not check its input"
    with pytest.raises((VerificationError, RuntimeError), match=said):  # in its own process the second is the first
        aoti.export_aoti(open_source(packed.path), AotiConfig(out=tmp_path / "out", device="cpu"), show=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["load.py", "README.md", "example.cpp"])
def test_a_file_of_the_same_name_by_somebody_else_stays(
    name: str, packed, fake_compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = fake_compiler()
    (tmp_path / name).write_text("mine")
    argv = ["export", "aoti", str(packed.path), "--out", str(tmp_path), "--device", "cpu", "--overwrite"]
    assert main(argv) == 3 and not compiled
    assert name in capsys.readouterr().err and [p.name for p in tmp_path.iterdir() if p.is_file()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_an_export_of_version_0_1_in_the_folder_is_replaced(packed, fake_compiler, tmp_path: Path) -> None:
    fake_compiler()
    write_file(tmp_path / "model.pt2", packed.card, ("model",))
    (tmp_path / "model.json").write_text(packed.card.to_json())
    aoti.export_aoti(open_source(packed.path), AotiConfig(out=tmp_path, device="cpu", threads=1), show=False)
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == sorted(FILES)
    assert read_metadata(tmp_path / "model.pt2")["vtk.input"] == "3,32,48"


@pytest.mark.parametrize("line,instead", [
    ("images = torch.empty(images.shape, dtype=self.dtype, device=self.device).copy_(images)", "pass"),
    ("images.stride() != strides or images.is_neg()", "images.stride() != strides"),
    ("if images.dtype != self.dtype or images.layout != torch.strided:", "if False:"),
    ("not 1 <= len(images) <= self.max_batch", "False"),
    ("tuple(images.shape[1:]) != self.shape", "False"),
    ("self._models[ONE if len(images) == 1 else MORE]", "self._models[MORE]"),
])  # fmt: skip
def test_a_loader_that_forgets_a_rule_is_not_kept(
    line: str, instead: str, packed, fake_compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler()
    text = inspect.getsource(aoti_load)
    assert text.count(line) == 1
    monkeypatch.setattr("vtk_export.aoti.files.inspect.getsource", lambda _: text.replace(line, instead))
    with pytest.raises((VerificationError, RuntimeError)):
        aoti.export_aoti(open_source(packed.path), AotiConfig(out=tmp_path / "out", device="cpu"), show=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("code,said", [
    ("import os, signal; os.kill(os.getpid(), signal.SIGFPE)", "ended with signal 8"),
    ("raise RuntimeError('batch_n does not check')", "ended with RuntimeError: batch_n does not check"),
])  # fmt: skip
def test_a_library_that_ends_the_process_is_not_kept(
    code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "child.py").write_text(code)
    monkeypatch.setattr(aoti_gate.aoti_child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(VerificationError, match=said):
        aoti_gate.answers(tmp_path, {"1": torch.zeros(1, 3, 8, 8)}, None, 1)


@pytest.mark.parametrize("names,changed,said", [
    (("batch_1",), {}, "holds the models batch_1"),
    (("batch_1", "batch_n", "more"), {}, "holds the models batch_1, batch_n, more"),
    (("batch_1", "batch_n"), {"vtk.max_batch": "8"}, "differ in vtk.max_batch"),
    (("batch_1", "batch_n"), {"vtk": "{}"}, "differ in vtk;"),
])  # fmt: skip
def test_models_that_are_not_of_one_export_are_refused(
    names: tuple[str, ...], changed: dict[str, str], said: str, packed, file: Path
) -> None:
    write_file(file, packed.card, names)
    if changed:
        with zipfile.ZipFile(file) as archive:
            (entry,) = [name for name in archive.namelist() if "batch_1" in name]
            texts = {name: archive.read(name) for name in archive.namelist()}
        texts[entry] = json.dumps(json.loads(texts[entry]) | changed).encode()
        with zipfile.ZipFile(file, "w") as archive:
            for name, text in texts.items():
                archive.writestr(name, text)
    with pytest.raises(DataError, match=said):
        open_aoti(file)


def test_a_file_of_version_0_1_runs_any_batch_whatever_the_environment_says(
    packed, fake_compiler, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler()
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    write_file(file, packed.card, ("model",))
    backend = load_backend("aoti", open_aoti(file))
    images = torch.randn(3, 3, 32, 48)
    for batch in (1, 3):
        laid = images[:batch].to(memory_format=torch.channels_last)
        with torch.no_grad():
            assert torch.allclose(backend.run({"pixel_values": laid})["logits"], packed.model()(images[:batch]))
    with pytest.raises(UsageError, match="resize or split"):
        backend.run({"pixel_values": images[:0]})


def test_what_cannot_be_fused_is_compiled_as_it_is_unless_one_insists(
    fake_compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    resnet = timm.create_model("test_resnet", pretrained=False, num_classes=5).eval()
    torch.nn.init.normal_(resnet.fc.weight)
    compiled = fake_compiler(resnet, (3, 160, 160))
    source = open_source("test_resnet", pretrained=False, num_classes=5)
    monkeypatch.setattr(type(source), "model", lambda self: resnet)
    options = {"device": "cpu"}
    result = aoti.export_aoti(source, AotiConfig(out=tmp_path / "a", **options), show=False)
    assert not result.fused and type(compiled[0][0]).__name__ == "ResNet"
    assert "compiled unfused" in capsys.readouterr().out
    with pytest.raises(UsageError):
        aoti.export_aoti(source, AotiConfig(out=tmp_path / "b", fuse=True, **options), show=False)


def test_a_missing_compiler_is_exit_5_and_other_files_are_exit_3(
    packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    argv = ["export", "aoti", str(packed.path), "--out", str(tmp_path), "--device", "cpu"]
    assert main(argv) == 3
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(argv) == 5
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2 and "mine.txt" in lines[0] and "AOTInductor needs a C++ compiler" in lines[1]


def test_profile_leaves_latency_beside_the_model(
    packed, fake_compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_compiler()
    monkeypatch.setattr("vtk.profiling.export_profile.SECONDS", 0.05)
    out = tmp_path / "out"
    argv = ["export", "aoti", str(packed.path), "--out", str(out), "--device", "cpu", "--threads", "1", "--json"]
    assert main([*argv, "--profile", "1,2"]) == 0
    assert sorted(p.name for p in out.iterdir()) == sorted(["latency.json", "latency.png", *FILES])
    found = ProfileResult.read(out / "latency.json")
    assert found.kind == "aoti" and [c.batch for _, c in found.cells()] == [1, 2]
    assert found.reference == f"torch fp32 on the CPU of {packed.path.parent.name}" and found.remarks == ()
    assert json.loads(capsys.readouterr().out)["profile"]["backends"][0]["name"] == "aoti"
    # again into the same folder: what an export left there is no stranger, and no latency of another file stays
    py_compile.compile(str(out / "load.py"))  # as an import does
    assert main(argv) == 0
    assert sorted(p.name for p in out.rglob("*") if p.is_file()) == sorted(FILES)


class _Half(Source):
    """A block of ordinary weights: those of `packed` are so large that half precision differs visibly."""

    def model(self) -> torch.nn.Module:
        torch.manual_seed(3)
        options = {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
        model = timm.create_model("vit_tiny_patch16_224", pretrained=False, **options).eval()
        torch.nn.init.normal_(model.head.weight)
        return model


@pytest.mark.slow
def test_half_precision_is_compiled_too(tmp_path: Path) -> None:
    card = Card(ModelSpec("half"), InputSpec(32, 32), tuple("abcde"))
    source = _Half("timm", "half", None, card, described=False)
    result = aoti.export_aoti(source, AotiConfig(out=tmp_path, dtype="bf16", device="cpu"), show=False)
    assert min(row.cosine for row in result.rows) < 1 - 1e-7  # it really is another precision
    backend = load_backend("aoti", open_source(tmp_path / "model.pt2"), dtype="bf16")
    assert backend.run({"pixel_values": torch.zeros(5, 3, 32, 32)})["logits"].dtype == torch.bfloat16
    backend.close()


@pytest.mark.slow
def test_profile_compiles_a_pack_for_the_backend(packed, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--batch-sizes", "1,3", "--duration", "0.05", "--threads", "1", "--json"]
    assert main(["profile", str(packed.path), "--backends", "eager,aoti", *options]) == 0
    _, found = json.loads(capsys.readouterr().out)["backends"]
    assert [c["status"] for c in found["cells"]] == ["ok", "ok"] and found["prepare_s"] > 0
