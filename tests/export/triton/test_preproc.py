"""Images that a server prepares: against the toolkit's own preprocessing, in ensembles, and in the graph."""

import dataclasses
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from PIL import Image, ImageCms
from tritonclient.grpc import model_config_pb2

from vtk.__main__ import main
from vtk.card import InputSpec
from vtk.data.decoding.images import load_image
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.errors import VerificationError
from vtk_export.triton import preproc_drift as drift
from vtk_export.triton.served import vtk_images

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIDES = ((40, 60), (61, 41), (20, 25), (100, 37), (3, 90), (33, 33), (1, 1))


def noise(height: int, width: int, channels: int = 3, kind: Any = np.uint8) -> np.ndarray:
    rng = np.random.default_rng(height * width)
    high = np.iinfo(kind).max if np.issubdtype(kind, np.integer) else 1
    values = rng.random((height, width, channels) if channels > 1 else (height, width)) * high
    return values.astype(kind)


@pytest.mark.parametrize("mode", ["crop", "squash", "pad"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "nearest"])
@pytest.mark.parametrize(
    ("size", "crop", "grey"),
    [((32, 32), 0.875, False), ((33, 33), 0.95, False), ((32, 48), 1.0, False), ((48, 32), 0.9, True)],
)
def test_the_server_prepares_images_bit_for_bit_as_the_toolkit_does(
    size: tuple[int, int], crop: float, grey: bool, interpolation: str, mode: Any
) -> None:
    mean, std = ((0.4,), (0.3,)) if grey else (MEAN, STD)
    spec = InputSpec(*size, len(mean), mean, std, interpolation=interpolation, crop_pct=crop, resize_mode=mode)
    transform = eval_transform(spec)
    for height, width in SIDES:
        image = Image.fromarray(noise(height, width))
        np.testing.assert_array_equal(
            vtk_images.prepare(image, json.loads(json.dumps(dataclasses.asdict(spec)))), transform(image).numpy()
        )


def _oriented(value: int) -> dict[str, Any]:
    exif = Image.Exif()
    exif[0x0112] = value
    return {"format": "JPEG", "exif": exif}


FILES: dict[str, tuple[Image.Image, dict[str, Any]]] = {
    "jpeg": (Image.fromarray(noise(20, 30)), {"format": "JPEG"}),
    "png": (Image.fromarray(noise(20, 30)), {"format": "PNG"}),
    **{f"turned-{n}": (Image.fromarray(noise(20, 30)), _oriented(n)) for n in range(2, 9)},
    "unknown-turn": (Image.fromarray(noise(20, 30)), _oriented(9)),
    "webp": (Image.fromarray(noise(20, 30)), {"format": "WEBP"}),
    "ppm": (Image.fromarray(noise(20, 30)), {"format": "PPM"}),
    "gif": (Image.fromarray(noise(20, 30)).quantize(8), {"format": "GIF"}),
    "cmyk": (Image.fromarray(noise(20, 30)).convert("CMYK"), {"format": "JPEG"}),
    "grey": (Image.fromarray(noise(20, 30, 1)), {"format": "PNG"}),
    "alpha": (Image.fromarray(noise(20, 30, 4), "RGBA"), {"format": "PNG"}),
    "grey-alpha": (Image.fromarray(noise(20, 30, 2), "LA"), {"format": "PNG"}),
    "palette": (Image.fromarray(noise(20, 30)).quantize(8), {"format": "PNG", "transparency": 0}),
    "16-bit": (Image.fromarray(noise(20, 30, 1, np.uint16)), {"format": "PNG"}),
    "tiff-16": (Image.fromarray(noise(20, 30, 1, np.uint16)), {"format": "TIFF"}),
    "tiff-float": (Image.fromarray(noise(20, 30, 1, np.float32)), {"format": "TIFF"}),
    "tiff-wide": (Image.fromarray(1e6 * noise(20, 30, 1, np.float32) - 3), {"format": "TIFF"}),
    "tiff-flat": (Image.fromarray(np.full((4, 5), -2, np.float32)), {"format": "TIFF"}),
    "lab": (
        ImageCms.profileToProfile(
            Image.fromarray(noise(20, 30)), ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"),
            outputMode="LAB",
        ),
        {"format": "TIFF"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_server_decodes_files_as_the_toolkit_does(name: str, tmp_path: Path) -> None:
    image, options = FILES[name]
    image.save(tmp_path / "file", **options)
    want, have = load_image(tmp_path / "file"), vtk_images.decode((tmp_path / "file").read_bytes())
    assert have.mode == "RGB" and have.size == want.size
    np.testing.assert_array_equal(np.asarray(have), np.asarray(want))


def encoded(height: int, width: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(height, width)).save(file, kind)
    return file.getvalue()


def test_what_is_no_image_is_said_so() -> None:
    whole = encoded(40, 40, "JPEG")
    large, huge = (f"P6 {side} {side} 255\n".encode() for side in (9_000, 60_000))
    for data, said in (
        (b"", "no bytes"),
        (b"GIF89", "."),
        (b"hello", "not an image"),
        (whole[: len(whole) // 2], "truncated"),
        (large, "64,000,000"),
        (huge, "64,000,000"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    ):
        with pytest.raises(vtk_images.Unreadable, match=said):
            vtk_images.decode(data)


def test_a_thin_image_does_not_fill_the_memory() -> None:
    spec = dataclasses.asdict(InputSpec(224, 224))
    with pytest.raises(vtk_images.Unreadable, match="thin"):
        vtk_images.prepare(Image.new("RGB", (20_000, 1)), spec)


def parse(path: Path) -> Any:
    return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())


def run(*argv: object) -> int:
    return main(["export", "triton", *map(str, argv)])


@pytest.fixture(scope="module")
def whole(packed: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with an ensemble on a bank."""
    repo = tmp_path_factory.mktemp("whole") / "models"
    assert run(f"p={packed.path}", "--backend", "vtk", "--name", "v", "--with-preproc", "--data", packed.photos,
               "--out", repo) == 0  # fmt: skip
    return repo


@pytest.fixture
def own(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, for a test that changes it."""
    return Path(shutil.copytree(whole, tmp_path / "own" / "models"))


def check_fit(repo: Path, name: str) -> tuple[Any, Any, Any]:
    """Return the configs of an ensemble and its steps, every tensor of which is given as it is wanted."""
    ensemble, first, second = (
        parse(repo / model / "config.pbtxt") for model in (name, f"{name}_preprocess", f"{name}_classifier")
    )
    steps = [(step.model_name, step.model_version) for step in ensemble.ensemble_scheduling.step]
    assert steps == [(f"{name}_preprocess", -1), (f"{name}_classifier", -1)]
    known = {entry.name: (entry.data_type, list(entry.dims)) for entry in ensemble.input}
    for model, step in zip((first, second), ensemble.ensemble_scheduling.step, strict=True):
        for entry in model.input:
            assert known[step.input_map[entry.name]] == (entry.data_type, list(entry.dims)), entry.name
        known |= {step.output_map[e.name]: (e.data_type, list(e.dims)) for e in model.output}
    for entry in ensemble.output:
        assert known[entry.name] == (entry.data_type, list(entry.dims)), entry.name
    return ensemble, first, second


def test_an_ensemble_is_three_models_whose_tensors_fit(whole: Path) -> None:
    assert sorted(os.listdir(whole)) == ["v", "v_classifier", "v_preprocess"]
    ensemble, first, second = check_fit(whole, "v")
    assert (ensemble.platform, ensemble.backend, first.backend) == ("ensemble", "", "python")
    kinds = {"encoded": ("TYPE_STRING", [1]), "images": ("TYPE_UINT8", [-1, -1, 3]), "task": ("TYPE_STRING", [1])}
    told = {e.name: (model_config_pb2.DataType.Name(e.data_type), list(e.dims)) for e in ensemble.input}
    assert told == kinds
    assert {entry.name: entry.optional for entry in ensemble.input} == {"encoded": True, "images": True, "task": False}
    assert {e.name: e.allow_ragged_batch for e in first.input if e.name != "task"} == {"encoded": True, "images": True}
    assert ensemble.max_batch_size == first.max_batch_size == second.max_batch_size == 32
    steps_told = json.loads((whole / "v" / "1" / "steps.json").read_text())
    assert steps_told["steps"] == {"v_preprocess": 1, "v_classifier": 1}
    assert steps_told["drift"]["error"] == 0 and steps_told["drift"]["count"] == 6
    about = json.loads((whole / "v" / "client.json").read_text())
    assert (about["input"], about["datatype"], about["has_task"]) == ("encoded", "BYTES", True)


def versions(repo: Path) -> dict[str, list[str]]:
    return {p.name: sorted(v.name for v in p.iterdir() if v.name.isdecimal()) for p in repo.iterdir()}


def test_steps_that_do_not_change_stay(packed: Any, own: Path, capsys: Any, tmp_path: Path) -> None:
    before = (own / "v_preprocess").stat().st_ino
    argv = ("--backend", "vtk", "--name", "v", "--with-preproc", "--out", own, "--json")
    assert run(f"p={packed.path}", *argv) == 0
    told = json.loads(capsys.readouterr().out)["models"][0]
    assert (told["model"], told["updated"], told["version"]) == ("v", True, 1)
    assert told["steps"] == {"v_preprocess": 1, "v_classifier": 1} and told["preprocessing_drift"]["error"] == 0
    assert (own / "v_preprocess").stat().st_ino == before
    assert run(f"p={packed.path}", f"q={packed.path}", *argv) == 0
    index = json.loads((own / "v_preprocess" / "1" / "tasks.json").read_text())
    assert list(index["tasks"]) == ["p", "q"] and (own / "v_preprocess").stat().st_ino != before
    assert versions(own) == {"v": ["1"], "v_preprocess": ["1"], "v_classifier": ["1"]}
    assert os.listdir(own.parent) == ["models"]


def test_images_are_not_prepared_in_another_way_under_the_same_name(packed: Any, own: Path, capsys: Any) -> None:
    index = own / "v_preprocess" / "1" / "tasks.json"
    text = index.read_text()
    changed = json.loads(text)
    changed["tasks"]["p"]["interpolation"] = "nearest"
    index.write_text(json.dumps(changed))
    before = {p: p.stat().st_ino for p in own.iterdir()}
    assert run(f"p={packed.path}", "--backend", "vtk", "--name", "v", "--with-preproc", "--out", own) == 2
    assert "`p` would be preprocessed differently than before" in capsys.readouterr().err
    assert {p: p.stat().st_ino for p in own.iterdir()} == before
    index.write_text(text)


def test_a_step_is_no_model_of_its_own(packed: Any, whole: Path, capsys: Any) -> None:
    argv = ("--backend", "vtk", "--out", whole)
    assert run(f"p={packed.path}", "--name", "v_classifier", *argv) == 3
    assert "is a step of the ensemble `v`" in capsys.readouterr().err
    assert run(f"p={packed.path}", "--name", "v" * 60, "--with-preproc", *argv) == 2


def test_a_server_that_prepared_images_wrongly_would_be_found_out(
    packed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(drift, "prepare", lambda image, spec: vtk_images.prepare(image, spec)[::-1].copy())
    argv = (f"p={packed.path}", "--backend", "vtk", "--with-preproc", "--data", packed.photos)
    assert run(*argv, "--out", tmp_path / "models") == VerificationError.exit_code
    assert "cosine" in capsys.readouterr().err and os.listdir(tmp_path) == []


def test_images_may_be_prepared_in_the_graph(packed: Any, fake_exporter: Any, tmp_path: Path) -> None:
    import onnxruntime

    fake_exporter()
    repo = tmp_path / "models"
    assert run(f"pets={packed.path}", "--with-preproc", "--warmup", "--out", repo) == 0
    found = parse(repo / "pets" / "config.pbtxt")
    (image,) = found.input
    assert (image.name, list(image.dims), image.data_type) == ("images", [-1, -1, 3], model_config_pb2.TYPE_UINT8)
    assert [list(w.inputs["images"].dims) for w in found.model_warmup] == [[32, 48, 3]] * 2
    assert json.loads((repo / "pets" / "client.json").read_text())["input"] == "images"
    session = onnxruntime.InferenceSession(repo / "pets" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    image = load_image(packed.photos / "a" / "0.png")
    (logits,) = session.run(None, {"images": np.asarray(image)[None]})
    with torch.no_grad():
        wanted = packed.model()(eval_transform(packed.card.input)(image)[None])
    assert torch.nn.functional.cosine_similarity(torch.from_numpy(logits), wanted).item() > 0.999


def test_what_the_graph_cannot_resize_is_done_by_an_ensemble(
    packed: Any, fake_exporter: Any, tmp_path: Path, capsys: Any
) -> None:
    fake_exporter()
    card = json.loads((packed.path / "task.json").read_text())
    card["input"]["interpolation"] = "nearest"
    other = tmp_path / "other"
    other.mkdir()
    for file in packed.path.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "task.json").write_text(json.dumps(card))
    base = packed.path.parent / "base.safetensors"
    repo = tmp_path / "models"
    assert run(f"p={other}", "--with-preproc", "--base", base, "--out", repo) == 0
    assert "preprocessing runs in an ensemble: `--with-preproc` cannot resize by `nearest`" in capsys.readouterr().out
    assert sorted(os.listdir(repo)) == ["p", "p_classifier", "p_preprocess"]
    assert [e.name for e in parse(repo / "p" / "config.pbtxt").input] == ["encoded", "images"]
    check_fit(repo, "p")
    assert parse(repo / "p_classifier" / "config.pbtxt").backend == "onnxruntime"
    assert run(f"q={other}", "--with-preproc", "--base", base, "--out", repo, "--static-batch", "2") == 2
    assert "--static-batch" in capsys.readouterr().err


def test_raw_arrays_of_every_layout_and_number_are_one_image_or_are_refused_in_one_line() -> None:
    spec = json.loads(json.dumps(dataclasses.asdict(InputSpec(32, 32, 3, MEAN, STD, crop_pct=0.9))))
    image = noise(40, 50)
    right = vtk_images.prepare(Image.fromarray(image), spec)
    alike = {
        "Fortran": np.asfortranarray(image), "view": image[::-1][::-1], "step": np.repeat(image, 2, 0)[::2],
        **{kind: image.astype(kind) for kind in ("f4", ">f4", "f2", ">f8", "i8", ">u2", "u4")},
    }  # fmt: skip
    for name, array in alike.items():
        np.testing.assert_array_equal(vtk_images.prepare(vtk_images.from_array(array, spec), spec), right, name)
    refused = [
        image[..., 0], image[..., :1], image[..., :2], np.dstack([image, image]), image[:0], image[:, :0],
        image.transpose(2, 0, 1), image[None], image > 3, image.astype("c8"), image[:0].astype(np.float32),
        np.full((4, 4, 3), np.nan), np.full((4, 4, 3), 300.0), np.full((4, 4, 3), -1),
    ]  # fmt: skip
    for array in refused:
        with pytest.raises(vtk_images.Unreadable) as caught:
            vtk_images.from_array(array, spec)
        assert "\n" not in str(caught.value)
    deep = {**spec, "decoding": "srgb", "value_range": [[0, 4095]], "value_type": "uint16"}
    values = noise(40, 50, 3, np.uint16) >> 4
    right = vtk_images.prepare(vtk_images.from_array(values, deep), deep)
    for array in (values.astype(">u2"), np.asfortranarray(values), values.astype(np.float32)):
        np.testing.assert_array_equal(vtk_images.prepare(vtk_images.from_array(array, deep), deep), right)
    for array in (values[..., :1], np.dstack([values, values]), values[:0]):
        with pytest.raises(vtk_images.Unreadable):
            vtk_images.from_array(array, deep)
