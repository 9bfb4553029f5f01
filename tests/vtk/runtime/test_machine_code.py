"""Machine code runs only where its own path or a word of trust asks for it: a library that says when it is loaded."""

import json
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from PIL import Image

import vtk
from vtk.__main__ import main
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import DataError, UsageError
from vtk.runtime.aoti_file import CARD, CPU, DEVICE, DTYPE, TORCH, cpu_level, torch_release
from vtk.runtime.backends.base import load_backend
from vtk.runtime.opening import open_source
from vtk.runtime.source import ENGINES, Source

CLASSES = ("cat", "dog")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``model.pt2`` whose constructor writes ``ran`` beside it, and an image."""
    folder = tmp_path_factory.mktemp("export")
    source = folder / "model.c"
    source.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        f'__attribute__((constructor)) static void run(void) {{ close(creat("{folder / "ran"}", 0600)); }}\n'
    )
    library = folder / "model.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    card = Card(ModelSpec("test_vit"), InputSpec(8, 8), CLASSES)
    meta = {CARD: card.to_json(), DTYPE: "fp32", TORCH: torch_release(), DEVICE: "cpu", CPU: cpu_level()}
    with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
        archive.writestr("model/archive_format", "pt2")
        archive.writestr("model/data/aotinductor/model/model.wrapper_metadata.json", json.dumps(meta))
        archive.write(library, "model/data/aotinductor/model/model.wrapper.so")
    library.unlink()
    Image.new("RGB", (8, 8)).save(folder / "a.png")
    return folder


@pytest.fixture(autouse=True)
def not_run(folder: Path) -> None:
    (folder / "ran").unlink(missing_ok=True)


@pytest.mark.parametrize("command", ["predict", pytest.param("eval", marks=pytest.mark.slow), "profile"])
def test_a_folder_that_holds_machine_code_does_not_run_it(
    folder: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    for name in CLASSES:
        (images / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(images / name / f"{i}.png")
    words = {
        "predict": [str(folder), str(folder / "a.png")], "eval": [str(folder), str(images), "--split", "all"],
        "profile": [str(folder), "--batch-sizes", "1"],
    }[command]  # fmt: skip
    assert main([command, *words]) == 2
    said = capsys.readouterr().err
    assert str(folder / "model.pt2") in said and "--trust" in said
    assert not (folder / "ran").exists()


def test_the_path_of_the_file_or_a_word_of_trust_runs_it(folder: Path) -> None:
    """The library is no model, so loading it fails; its constructor ran before that."""
    for source in (open_source(folder / "model.pt2"), open_source(folder, trust=True)):
        (folder / "ran").unlink(missing_ok=True)
        with pytest.raises(DataError, match="cannot be loaded"):
            load_backend("aoti", source)
        assert (folder / "ran").exists()


def test_python_is_asked_for_a_word_of_trust_as_well(folder: Path) -> None:
    config = vtk.PredictConfig(images=folder / "a.png")
    with pytest.raises(UsageError, match="trust=True"):
        vtk.predict(folder, config)
    assert not (folder / "ran").exists()
    with pytest.raises(DataError, match="cannot be loaded"):
        vtk.predict(folder, config, trust=True)
    assert (folder / "ran").exists()


def test_the_flag_is_that_word(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(folder), str(folder / "a.png"), "--trust"]) == 3
    assert "cannot be loaded" in capsys.readouterr().err and (folder / "ran").exists()


@pytest.mark.parametrize("suffix", ENGINES)
def test_an_engine_beside_the_file_that_was_named_is_not_loaded(tmp_path: Path, suffix: str) -> None:
    """The refusal comes before TensorRT or a GPU is asked for."""
    model = tmp_path / "model.onnx"
    model.touch()
    engine = model.with_suffix(suffix)
    engine.write_bytes(b"machine code")
    card = Card(ModelSpec("test_vit"), InputSpec(8, 8), CLASSES)
    source = Source("onnx", "model", model, card)
    with pytest.raises(UsageError, match="machine code") as told:
        load_backend_class(source)
    assert str(engine) in str(told.value)
    with pytest.raises(UsageError, match="runs on CUDA"):
        load_backend_class(Source("onnx", "model", model, card, trusted=True))


def test_an_onnx_file_with_an_engine_in_it_is_refused(tmp_path: Path) -> None:
    from onnx import TensorProto, helper, save

    images = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])
    node = helper.make_node(
        "EPContext", ["pixel_values"], ["logits"], domain="com.microsoft", ep_cache_context="a.engine"
    )
    save(helper.make_model(helper.make_graph([node], "g", [images], [logits])), tmp_path / "model.onnx")
    with pytest.raises(DataError, match="EPContext"):
        open_source(tmp_path / "model.onnx", trust=True)


def load_backend_class(source: Source) -> None:
    from vtk.runtime.backends.tensorrt_backend import TensorrtBackend

    TensorrtBackend.load(source, device=torch.device("cpu"), dtype=torch.float16, threads=None)
