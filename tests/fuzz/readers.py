"""Every reader of others' files: whole files, how they are damaged, and what reads them.

A reader either raises a `VtkError` or returns what its docstring promises, which is asserted here: shapes, and numbers
that are finite where that is promised.
"""

import json
import math
import os
import random
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from google.protobuf import text_format
from PIL import Image

from tests.fuzz.mutators import Mutator, flip, json_text, pickled, protobuf, safetensors, zipped

V0_1 = Path(__file__).resolve().parents[1] / "fixtures" / "v0_1"
CARD = json.loads((V0_1 / "digits-bf16" / "task.json").read_text())
NAME, KWARGS = CARD["model"]["name"], CARD["model"]["kwargs"]


@dataclass(frozen=True)
class Reader:
    """What reads a kind of file.

    Attributes:
        share: of all damaged files.
        make: writes whole files into a folder.
        read: reads a folder in which one file, its second argument, is damaged.
        damage: by the end of a file's name, how it is damaged; files that are not named here stay whole.
    """

    share: int
    make: Callable[[Path], object]
    read: Callable[[Path, Path], object]
    damage: Mapping[str, tuple[Mutator, ...]]


ONNX = (flip, protobuf(onnx.ModelProto.FromString), protobuf(onnx.ModelProto.FromString))
JSON = (flip, json_text, json_text)
TENSORS = (flip, safetensors, safetensors)


def copy(*names: str) -> Callable[[Path], object]:
    """Return what copies files and folders of version 0.1."""

    def make(folder: Path) -> None:
        for name in names:
            place = V0_1 / name
            if place.is_dir():
                shutil.copytree(place, folder, dirs_exist_ok=True)
            else:
                shutil.copyfile(place, folder / place.name)

    return make


# weights


def _state() -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(V0_1 / "base.safetensors")


def _make_torch(folder: Path) -> None:
    state = _state()
    few = {key: state[key] for key in sorted(state)[:4]}
    torch.save(state, folder / "plain.pth")
    torch.save({"state_dict": few, "epoch": 3, "args": {"lr": 0.1, "name": "x"}}, folder / "nested.pth")
    torch.save({k: torch.nn.Parameter(v) for k, v in few.items()}, folder / "parameters.pt")
    torch.save(few, folder / "old.pth", _use_new_zipfile_serialization=False)
    odd = {"a": torch.zeros(3, dtype=torch.complex64).conj(), "b": torch.ones(2, 3).T, "c": torch.tensor(1, dtype=torch.uint8),
           "d": torch.zeros(1).expand(7), "e": torch.ones(2, dtype=torch.bool), "f": torch.ones(2, dtype=torch.bfloat16)}  # fmt: skip
    torch.save(odd, folder / "odd.bin")
    torch.save({"a": torch.eye(3).to_sparse(), "b": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
               folder / "sparse.pth")  # fmt: skip


def _read_weights(folder: Path, file: Path) -> None:
    from vtk.models.files import read_weights

    found = read_weights(file).tensors
    assert sum(t.numel() * t.element_size() for t in found.values()) <= 4 * file.stat().st_size + (64 << 20)
    for name, tensor in found.items():
        assert isinstance(name, str) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        assert not tensor.is_quantized and not tensor.requires_grad
        tensor.contiguous().view(-1)[:10].tolist()


def _read_base(folder: Path, file: Path) -> None:
    from vtk.models.weights import read_base

    found, notes = read_base(NAME, KWARGS, file)
    assert all(value.float().isfinite().all() for value in found.tensors.values() if value.is_floating_point())
    assert all(isinstance(note, str) for note in notes) and len(found.ref.id) == 64


def _make_base(folder: Path) -> None:
    torch.save(_state(), folder / "base.pth")
    shutil.copyfile(V0_1 / "base.safetensors", folder / "base.safetensors")
    shutil.copyfile(V0_1 / "digits.safetensors", folder / "digits.safetensors")


def _make_npz(folder: Path) -> None:
    rng = np.random.default_rng(0)
    names = {"cls": (1, 1, 32), "embedding/bias": (32,), "embedding/kernel": (16, 16, 3, 32), "head/kernel": (32, 7),
             "head/bias": (7,), "Transformer/encoder_norm/scale": (32,), "Transformer/encoder_norm/bias": (32,),
             "Transformer/posembed_input/pos_embedding": (1, 10, 32)}  # fmt: skip
    for i in range(2):
        block, mha = f"Transformer/encoderblock_{i}/", "MultiHeadDotProductAttention_1/"
        names |= {f"{block}LayerNorm_{n}/{leaf}": (32,) for n in (0, 2) for leaf in ("scale", "bias")}
        names |= {f"{block}{mha}{part}/kernel": (32, 2, 16) for part in ("query", "key", "value")}
        names |= {f"{block}{mha}{part}/bias": (2, 16) for part in ("query", "key", "value")}
        names |= {f"{block}{mha}out/kernel": (2, 16, 32), f"{block}{mha}out/bias": (32,)}
        names |= {f"{block}MlpBlock_3/Dense_0/kernel": (32, 128), f"{block}MlpBlock_3/Dense_0/bias": (128,)}
        names |= {f"{block}MlpBlock_3/Dense_1/kernel": (128, 32), f"{block}MlpBlock_3/Dense_1/bias": (32,)}
    np.savez(folder / "w.npz", **{k: rng.normal(size=shape).astype(np.float32) for k, shape in names.items()})


def _read_npz(folder: Path, file: Path) -> None:
    from vtk.models.npz import read_npz

    kwargs = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    found = read_npz("vit_tiny_patch16_224", kwargs, file).tensors
    assert found and all(isinstance(value, torch.Tensor) for value in found.values())


# packs and checkpoints


def _read_pack(folder: Path, file: Path) -> None:
    from vtk.tasks import load_task

    task = load_task(folder, base=V0_1 / "base.safetensors")
    _check_task(task)


def _check_task(task: Any) -> None:
    assert all(value.isfinite().all() for value in task.model.state_dict().values() if value.is_floating_point())
    spec = task.card.input
    if spec.height * spec.width * spec.in_chans < 1 << 18:
        with torch.inference_mode():
            logits = task.model(torch.zeros(1, spec.in_chans, *spec.size))
        assert logits.shape == (1, len(task.classes))


def _read_checkpoint(folder: Path, file: Path) -> None:
    from vtk.tasks import load_checkpoint

    _check_task(load_checkpoint(file))


def _read_bundle(folder: Path, file: Path) -> None:
    from vtk.tasks.hub import check_pack

    check_pack(folder)


def _read_adapter(folder: Path, file: Path) -> None:
    from vtk.tasks.from_peft import from_peft

    out = folder.parent / "adapted"
    shutil.rmtree(out, ignore_errors=True)
    from_peft(folder, out, overwrite=True)
    _check_task(__import__("vtk").load_task(out))


def _read_state(folder: Path, file: Path) -> None:
    from vtk.training.checkpoint import load_state

    found = load_state(folder)
    assert len(found.fit.rows) == found.fit.epoch


def _read_run(folder: Path, file: Path) -> None:
    """What marks, journals, locks and caches read must never raise at all."""
    from vtk import filesets, locks, marks
    from vtk.training.outputs import _PLOT

    for mark in (marks.json_with("a"), marks.json_lines_with("a"), marks.header_with("a"), marks.safetensors_with("vtk"),
                 marks.png(), marks.says("x"), marks.tail_says(b"x"), _PLOT):  # fmt: skip
        assert marks._ours(file, mark) in (True, False)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        locks._read(descriptor)
    finally:
        os.close(descriptor)
    waiting = folder / filesets._NEXT
    waiting.mkdir(exist_ok=True)
    shutil.copyfile(file, waiting / filesets._JOURNAL)
    whole = sorted(folder.parent.glob("*"))
    filesets.recover(folder)
    shutil.rmtree(waiting, ignore_errors=True)
    assert sorted(folder.parent.glob("*")) == whole


# exports


def _make_onnx(folder: Path) -> None:
    for name in ("onnx/model.onnx", "preproc/model.onnx", "gathered/gathered.onnx", "files/digits.onnx"):
        shutil.copyfile(V0_1 / "exports" / name, folder / name.replace("/", "-"))
    for data in (V0_1 / "exports" / "files").glob("*.data"):
        shutil.copyfile(data, folder / data.name)


def _read_onnx(folder: Path, file: Path) -> None:
    from vtk.profiling.onnx_work import work_of_onnx
    from vtk.runtime.onnx_file import open_onnx
    from vtk_export.tensorrt.lint import lint, load
    from vtk_export.tensorrt_config import parse_version

    for read in (
        lambda: open_onnx(file, many=True),
        lambda: work_of_onnx(file),
        lambda: lint(load(file), parse_version("10.3")),
    ):
        _quietly(read)
    source = open_onnx(file, many=True)
    assert source.card.classes and min(source.card.input.size) > 0


def _quietly(read: Callable[[], object]) -> None:
    from vtk.errors import VtkError

    try:
        read()
    except VtkError as error:
        check_line(error)


def check_line(error: Exception) -> None:
    """Hold an error's text against what a line is: short, and printable but for what the caller's own words hold."""
    text = str(error)
    assert text and "\n" not in text and len(text) < 4000, f"no line: {text[:300]!r}"
    text.encode("utf-8", "backslashreplace")


def _make_aoti(folder: Path) -> None:
    meta = {
        "vtk": json.dumps(CARD),
        "vtk.precision": "fp32",
        "vtk.torch": "2.14",
        "AOTI_DEVICE_KEY": "cpu",
        "vtk.cpu": "AVX2",
    }
    with zipfile.ZipFile(folder / "model.pt2", "w") as archive:
        archive.writestr("model/data/aotinductor/model/x.wrapper_metadata.json", json.dumps(meta))
        archive.writestr("model/version", "1")


def _read_aoti(folder: Path, file: Path) -> None:
    from vtk.runtime.aoti_backend import device_of, is_ours, open_aoti

    assert is_ours(file) in (True, False)
    source = open_aoti(file)
    assert isinstance(device_of(source), str) and source.card.classes


def _make_engine(folder: Path) -> None:
    stamp = {
        "tensorrt": "10.3",
        "gpu": "x",
        "compute_capability": "9.0",
        "engine_sha256": "0" * 64,
        "onnx_sha256": "1" * 64,
    }
    (folder / "model.engine").write_bytes(b"ftrt" * 100)
    (folder / "model.engine.json").write_text(json.dumps(stamp))
    (folder / "profile.json").write_text(json.dumps({"precision": "fp16", "tf32": False, "onnx_sha256": "1" * 64}))
    (folder / "model.json").write_text(json.dumps(CARD))


def _read_engine(folder: Path, file: Path) -> None:
    from vtk.runtime.engine import open_engine

    assert open_engine(folder / "model.engine").card.classes


def _read_repository(folder: Path, file: Path) -> None:
    from vtk_export.many.index import known_files
    from vtk_export.triton.packs import read_base_id
    from vtk_export.triton.publish import find_existing

    known_files(folder / "digits" / "1"), read_base_id(folder / "digits" / "1")
    found = find_existing(folder, "digits")
    assert found is not None and found.versions == (1,)


def _make_repository(folder: Path) -> None:
    shutil.copytree(V0_1 / "repositories" / "onnxruntime" / "digits", folder / "digits", dirs_exist_ok=True)
    shutil.copyfile(
        V0_1 / "repositories" / "python" / "many" / "1" / "tasks.json", folder / "digits" / "1" / "tasks.json"
    )
    for bad in ("digits/vtk_images.py", "digits/client.py"):
        (folder / bad).unlink()


def _pbtxt(data: bytes, others: Any, rng: random.Random) -> bytes:
    from vtk_export.triton.pbtxt import messages

    message = text_format.Parse(data.decode(), messages().ModelConfig())
    edited = protobuf(messages().ModelConfig.FromString)(message.SerializeToString(), others, rng)
    return text_format.MessageToString(messages().ModelConfig.FromString(edited)).encode()


# texts


def _make_yaml(folder: Path) -> None:
    for name in ("finetune.yaml", "lora.yaml"):
        shutil.copyfile(V0_1 / name, folder / name)
    (folder / "more.yaml").write_text(
        "epochs: 3\nlr: 1e-3\nmean: [0.5, 0.5, 0.5]\nimg-size: [32, 48]\ndata: &d x\nout: *d\nmodel: !!str a\n"
    )


def _read_yaml(folder: Path, file: Path) -> None:
    from vtk.options.files import read_values
    from vtk.training.config import FinetuneConfig

    values = read_values(file, FinetuneConfig, "--config")
    FinetuneConfig(**{"data": Path("x"), **values})


def _make_tables(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [("a.png", "x"), ("b.png", "y"), ("sub/c.png", "x")]
    (folder / "t.csv").write_text("path,label,split\n" + "".join(f"{p},{c},train\n" for p, c in rows))
    (folder / "u.tsv").write_text("".join(f'{p}\t"{c}"\n' for p, c in rows))
    (folder / "v.csv").write_text("image;a;b\na.png;0;1\nb.png;1;1\n")
    table = pyarrow.table({"path": [p for p, _ in rows], "label": [1, 2, 3], "n": [[1.0], None, [2.0, 3.0]]})
    parquet.write_table(table, folder / "w.parquet")
    parquet.write_table(table, folder / "x.parquet", compression="gzip", use_dictionary=False)


def _read_table(folder: Path, file: Path) -> None:
    from vtk.data.columns import choose_parts, read_lines

    lines = read_lines(file, None, "path,label")
    assert all(isinstance(line.name, str) and line.name for line in lines.lines)
    choose_parts(lines)


def _read_profile(folder: Path, file: Path) -> None:
    from vtk.profiling.result import ProfileResult

    found = ProfileResult.read(file)
    json.dumps(found.to_dict())


def _read_analysis(folder: Path, file: Path) -> None:
    from vtk.analysis.run import read_analysis

    read_analysis(folder)


def _make_cache(folder: Path) -> None:
    import PIL

    from vtk.data.probe import EMPTY

    entry = [[10, 20, 30], list(EMPTY)]
    (folder / "cache.json").write_text(
        json.dumps({"format": 7, "pillow": PIL.__version__, "root": "x", "files": {"a.png": entry, "b.png": entry}})
    )
    (folder / "config.json").write_text(json.dumps({"label_names": ["a", "b"], "id2label": {"0": "x", "1": "y"}}))


def _read_cache(folder: Path, file: Path) -> None:
    """Caches, and names beside weights, are ignored where they are damaged: nothing is raised."""
    from vtk.data import cache
    from vtk.models.class_names import read_names

    assert all(isinstance(name, str) for name in read_names(folder / "w.pth", None))
    path = cache.cache_path
    try:
        cache.cache_path = lambda *_: folder / "cache.json"
        assert isinstance(cache.load(folder), dict)
    finally:
        cache.cache_path = path


# images


def _make_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((40, 30))
    wide = Image.fromarray(rng.integers(0, 65536, (30, 40), dtype=np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    for name, image, options in (
        ("a.png", coarse, {}), ("b.png", wide, {}), ("c.png", coarse.convert("P"), {}), ("d.png", coarse.convert("RGBA"), {}),
        ("e.jpg", coarse, {"exif": exif.tobytes()}), ("f.jpg", coarse.convert("CMYK"), {}), ("g.gif", coarse, {}),
        ("h.bmp", coarse, {}), ("i.webp", coarse, {}), ("j.tif", coarse, {}), ("k.tif", wide, {"compression": "tiff_lzw"}),
        ("l.tif", coarse.convert("F"), {}), ("m.ppm", coarse, {}), ("n.jp2", coarse, {}), ("o.avif", coarse, {}),
        ("p.tif", coarse, {"compression": "jpeg"}), ("q.tif", coarse, {"save_all": True, "append_images": [coarse] * 3}),
    ):  # fmt: skip
        try:
            image.save(folder / name, **options)
        except (OSError, KeyError):  # a build of Pillow without this format
            continue
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    coarse.save(folder / "r.png", icc_profile=profile)
    coarse.save(folder / "s.jpg", icc_profile=profile)
    for tiff in (V0_1.parent / "tiff").glob("*.tif"):
        shutil.copyfile(tiff, folder / tiff.name)


def _read_image(folder: Path, file: Path) -> None:
    from vtk.card import InputSpec
    from vtk.data.decoding import decode_file, read_raw
    from vtk.data.images import load_image
    from vtk.data.probe import probe
    from vtk.data.rules import V0_1 as OLD
    from vtk.data.rules import Decoding

    wide = Decoding("srgb", ((0.0, 65535.0),), "uint16")
    spec = InputSpec(32, 32, decoding="srgb")
    for read in (lambda: load_image(file, max_pixels=1 << 22), lambda: decode_file(file, 3, 1 << 22, Decoding("srgb")),
                 lambda: decode_file(file, 1, 1 << 22, wide), lambda: decode_file(file, 13, 1 << 22, OLD),
                 lambda: read_raw(file, spec, 1 << 22)):  # fmt: skip
        _quietly(lambda: _check_image(read()))
    assert isinstance(probe(str(file), 3, 1 << 22).bad, str)
    from vtk_export.triton.served import vtk_images

    try:
        plain = json.loads(json.dumps(spec.to_dict()))
        prepared = vtk_images.prepare(vtk_images.decode(file.read_bytes(), plain), plain)
        assert prepared.shape == (3, 32, 32) and np.isfinite(prepared).all()
    except vtk_images.Unreadable as error:
        check_line(error)


def _check_image(image: Any) -> None:
    for band in image if isinstance(image, tuple) else (image,):
        pixels = np.asarray(band)
        assert pixels.dtype == np.uint8 and 0 < pixels.size <= 1 << 24


# servers

_ANSWERS = {
    "v2.json": {"name": "triton", "version": "2.50", "extensions": ["binary_tensor_data", "statistics"]},
    "index.json": [{"name": "m", "version": "1", "state": "READY"}],
    "model.json": {
        "name": "m", "versions": ["1"], "platform": "onnxruntime_onnx",
        "inputs": [{"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, 8, 8]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}],
    },
    "stats.json": {"model_stats": [{"name": "m", "version": "1", "inference_count": "5", "execution_count": 5, "inference_stats": {
        "success": {"count": 5, "ns": 100}, "queue": {"count": 5, "ns": 10}, "compute_infer": {"count": 5, "ns": 1}}}]},
    "infer.json": {"model_name": "m", "outputs": [
        {"name": "logits", "datatype": "FP32", "shape": [2, 3], "data": [1, 2, 3, 4, 5, 6]}]},
}  # fmt: skip


def _make_answers(folder: Path) -> None:
    for name, value in _ANSWERS.items():
        (folder / name).write_text(json.dumps(value))
    head = {
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24}}]
    }
    text = json.dumps(head).encode()
    (folder / "infer.bin").write_bytes(f"{len(text):4}".encode() + text + np.arange(6, dtype=np.float32).tobytes())


def _read_answers(folder: Path, file: Path) -> None:
    from vtk.profiling.server import http_client
    from vtk.profiling.server.client import RequestFailed, choose_model
    from vtk.profiling.server.guard import GuardedClient
    from vtk.readers import reading

    infer = "infer.bin" if file.name == "infer.bin" else "infer.json"

    class Answering(http_client.HttpClient):
        def _send(self, method: str, path: str, *rest: Any, **more: Any) -> tuple[Any, bytes]:
            name = {"/v2": "v2.json", "/v2/repository/index": "index.json"}.get(
                path, "stats.json" if path.endswith("stats") else infer if path.endswith("infer") else "model.json"
            )
            body = (folder / name).read_bytes()
            if name == "infer.bin":
                return {http_client._LENGTH: body[:4].decode("latin-1")}, body[4:]
            return {}, body

    from vtk.errors import UnavailableError

    with reading("the server", "does not answer", "is it one?", UnavailableError):
        client = GuardedClient(Answering("127.0.0.1:1", 1.0), "127.0.0.1:1")
    try:
        info = choose_model(client, "")
        image = info.image()
        counters = client.counters(info)
        assert counters is None or all(isinstance(value, int) for value in vars(counters).values())
        payload = client.payload(info, {image.name: np.zeros((2, 3, 8, 8), np.float32)})
        rows = client.decode(client.infer(payload), info.logits())
        assert rows.ndim >= 1 and np.asarray(rows, np.float32) is not None
        math.prod(rows.shape)
    except RequestFailed as error:
        check_line(error)


READERS: Mapping[str, Reader] = {
    "torch": Reader(6000, _make_torch, _read_weights,
                    {"old.pth": (flip, pickled), ".pth": (flip, zipped(pickled)), ".pt": (flip, zipped(pickled)),
                     ".bin": (flip, zipped(pickled))}),
    "base": Reader(1000, _make_base, _read_base, {".pth": (zipped(pickled), flip), ".safetensors": TENSORS}),
    "npz": Reader(600, _make_npz, _read_npz, {".npz": (flip, zipped(flip))}),
    "pack": Reader(1000, copy("digits-bf16"), _read_pack, {".json": JSON, ".safetensors": TENSORS}),
    "int8": Reader(300, copy("digits-int8"), _read_pack, {".json": JSON, ".safetensors": TENSORS}),
    "checkpoint": Reader(700, copy("digits.safetensors"), _read_checkpoint, {".safetensors": TENSORS}),
    "bundle": Reader(500, copy("digits.vtkbundle"), _read_bundle, {".json": JSON, ".safetensors": TENSORS}),
    "adapter": Reader(200, copy("digits-peft"), _read_adapter, {".json": JSON, "model.safetensors": TENSORS}),
    "state": Reader(900, copy("runs/digits/last"), _read_state,
                    {".json": JSON, ".safetensors": TENSORS, ".pt": (flip, zipped(pickled))}),
    "marks": Reader(500, copy("profile", "digits.safetensors", "runs/digits/last/state.json", "data/digits/val/one"), _read_run,
                    {".json": JSON, ".csv": (flip,), ".safetensors": TENSORS, ".png": (flip,)}),
    "onnx": Reader(1500, _make_onnx, _read_onnx, {".onnx": ONNX}),
    "aoti": Reader(500, _make_aoti, _read_aoti, {".pt2": (flip, zipped(json_text))}),
    "engine": Reader(400, _make_engine, _read_engine, {".json": JSON}),
    "repository": Reader(400, _make_repository, _read_repository, {".pbtxt": (flip, _pbtxt), "tasks.json": JSON}),
    "yaml": Reader(1000, _make_yaml, _read_yaml, {".yaml": (flip,)}),
    "tables": Reader(800, _make_tables, _read_table, {".csv": (flip,), ".tsv": (flip,), ".parquet": (flip,)}),
    "profile": Reader(500, copy("profile"), _read_profile, {".json": JSON}),
    "analysis": Reader(300, copy("analysis/analysis.json"), _read_analysis, {".json": JSON}),
    "caches": Reader(400, _make_cache, _read_cache, {".json": JSON}),
    "images": Reader(2000, _make_images, _read_image,
                     dict.fromkeys((".png", ".jpg", ".gif", ".bmp", ".webp", ".tif", ".ppm", ".jp2", ".avif"), (flip,))),
    "answers": Reader(900, _make_answers, _read_answers, {".json": JSON, ".bin": (flip,)}),
}  # fmt: skip
"""By name; the shares add up to 20,400."""
