"""The form ``gathered``: one .onnx for mixed batches; and both forms together."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from onnx import numpy_helper
from safetensors.torch import load_file
from timm.models.vision_transformer import ParallelThingsBlock

from vtk.__main__ import main
from vtk.errors import UsageError
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.runtime import load_backend
from vtk.runtime.onnx_file import open_onnx
from vtk_export.tasks.gathered_vit import GatheredViT

LOWEST = np.finfo(np.float32).min


@pytest.fixture(scope="module")
def session(both: Any) -> Any:
    return onnxruntime.InferenceSession(both.out / "gathered.onnx", providers=["CPUExecutionProvider"])


def _run(session: Any, images: torch.Tensor, task: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return session.run(["logits", "num_classes"], {"pixel_values": images.numpy(), "task": np.array(task, np.int32)})


@pytest.mark.parametrize("task", [[0], [1], [1, 0], [0, 0, 1], [1, 0, 1, 1, 0]], ids=str)
def test_mixed_batches_give_each_tasks_logits(session: Any, lab: Any, tools: Any, task: list[int]) -> None:
    models = [lab.timm("pets", 3), lab.timm("cars", 5)]
    images = tools.images(len(task), seed=len(task))
    logits, counts = _run(session, images, task)
    assert logits.shape == (len(task), 5)
    assert counts.tolist() == [(3, 5)[t] for t in task]
    for row, image, t, n in zip(logits, images, task, counts, strict=True):
        with torch.no_grad():
            expected = models[t](image[None])[0]
        np.testing.assert_allclose(row[:n], expected, atol=1e-4 * expected.abs().max())
        assert (row[n:] == LOWEST).all()


def test_files_and_gathered_have_the_names_that_were_given(
    packs: dict[str, Path], lab: Any, tools: Any, tmp_path: Path
) -> None:
    words = ["--input-name", "x", "--input-name", "task=which", "--output-name", "scores", "--output-name",
             "num_classes=count", "--form", "both"]  # fmt: skip
    made = tools.run_export(packs["pets"], packs["cars"], *words, "--out", tmp_path / "out")
    images = tools.images(2, seed=5)
    with torch.no_grad():
        wanted = lab.timm("pets", 3)(images[:1])[0], lab.timm("cars", 5)(images[1:])[0]
    place = {"providers": ["CPUExecutionProvider"]}
    session = onnxruntime.InferenceSession(made.out / "gathered.onnx", **place)
    assert [v.name for v in (*session.get_inputs(), *session.get_outputs())] == ["x", "which", "scores", "count"]
    logits, count = session.run(["scores", "count"], {"x": images.numpy(), "which": np.int32([0, 1])})
    assert count.tolist() == [3, 5]
    for row, expected in zip(logits, wanted, strict=True):
        np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-4 * expected.abs().max())
    alone = onnxruntime.InferenceSession(made.out / "cars.onnx", **place).run(["scores"], {"x": images[1:].numpy()})[0]
    np.testing.assert_allclose(alone[0], wanted[1], atol=1e-4 * wanted[1].abs().max())
    backend = load_backend("ort-cpu", open_onnx(made.out / "gathered.onnx", many=True), threads=1)
    found = backend.run({"pixel_values": images, "task": torch.tensor([0, 1])})
    np.testing.assert_array_equal(found["logits"].numpy(), logits)
    assert made.index["names"] == {"pixel_values": "x", "task": "which", "logits": "scores", "num_classes": "count"}
    page = (made.out / "README.md").read_text(encoding="utf-8")
    assert 'gathered.run(["scores", "count"], inputs)' in page and 'run(["scores"], {"x": prepare[task](path)})' in page


@pytest.mark.parametrize("wrong", [-1, -2, 2, 3, 2**31 - 1, -(2**31)])
def test_a_number_that_no_task_has_gives_nan_and_spoils_no_other_row(session: Any, tools: Any, wrong: int) -> None:
    images = tools.images(3)
    logits, counts = _run(session, images, [1, wrong, 0])
    alone, _ = _run(session, images, [1, 0, 0])
    assert counts.tolist() == [5, 0, 3]
    assert np.isnan(logits[1]).all()
    np.testing.assert_array_equal(logits[[0, 2]], alone[[0, 2]])


@pytest.mark.parametrize("task", [0, 1])
def test_an_image_of_nan_spoils_no_other_row_of_its_task_or_another(session: Any, tools: Any, task: int) -> None:
    images = tools.images(4)
    clean, _ = _run(session, images, [1, task, 0, 1])
    images[1, 0, 3, 5] = np.nan
    logits, counts = _run(session, images, [1, task, 0, 1])
    assert np.isnan(logits[1, : counts[1]]).all()
    np.testing.assert_array_equal(logits[[0, 2, 3]], clean[[0, 2, 3]])


def test_an_empty_batch(session: Any, tools: Any) -> None:
    logits, counts = _run(session, tools.images(0), [])
    assert (logits.shape, counts.shape) == ((0, 5), (0,))


def test_inputs_outputs_and_metadata(both: Any) -> None:
    proto = onnx.load(both.out / "gathered.onnx", load_external_data=False)
    found = {
        v.name: (v.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in (*proto.graph.input, *proto.graph.output)
    }
    kind = onnx.TensorProto
    assert found == {
        "pixel_values": (kind.FLOAT, ["batch", 3, 32, 32]),
        "task": (kind.INT32, ["batch"]),
        "logits": (kind.FLOAT, ["batch", 5]),
        "num_classes": (kind.INT32, ["batch"]),
    }
    assert [p.key for p in proto.metadata_props] == ["vtk.tasks", "vtk.weights"]
    assert both.index["gathered"] == {"file": "gathered.onnx"}
    assert [task["number"] for task in both.index["tasks"].values()] == [0, 1]


def test_the_gathered_file_refers_to_the_same_ffn_as_the_tasks_files(both: Any, lab: Any) -> None:
    base = load_file(lab.base())
    shared = (both.out / both.index["shared"]["file"]).read_bytes()
    gathered, pets = both.external("gathered.onnx"), both.external("pets.onnx")
    assert set(gathered.values()) <= set(pets.values())
    held = {shared[o : o + n] for _, o, n in gathered.values()}
    for key in ("blocks.0.mlp.fc1.weight", "blocks.0.mlp.fc2.weight"):
        assert base[key].t().contiguous().numpy().tobytes() in held
    assert base["patch_embed.proj.weight"].numpy().tobytes() in held
    stacks = {t.name: list(t.dims) for t in onnx.load(both.out / "gathered.onnx").graph.initializer if len(t.dims) == 3}
    assert [2, 32, 96] in stacks.values()  # qkv of two tasks, (in, out)
    assert {r["file"] for r in both.result["verified"]} == {"pets.onnx", "cars.onnx", "gathered.onnx"}
    assert all(r["passed"] for r in both.result["verified"])


@pytest.mark.slow
def test_static_batch_gathered_alone(packs: dict[str, Path], lab: Any, tools: Any, tmp_path: Path) -> None:
    argv = (packs["pets"], packs["cars"], "--form", "gathered", "--static-batch", 2, "--opset", 20)
    done = tools.run_export(*argv, "--out", tmp_path / "out")
    assert sorted(p.name for p in done.out.iterdir()) == ["README.md", "gathered.onnx", "tasks.json"]
    assert done.index["shared"] is None
    assert done.index["tasks"]["cars"]["file"] is None
    assert onnx.load(done.out / "gathered.onnx").opset_import[0].version == 20
    assert {(r["task"], r["batch"], r["images"]) for r in done.result["verified"]} == {("cars", 2, 1), ("pets", 2, 1)}


def test_backend_takes_the_task_and_single_task_commands_do_not_take_the_file(
    both: Any, photos: Path, tools: Any, session: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = open_onnx(both.out / "gathered.onnx", many=True)
    backend = load_backend("ort-cpu", source)
    images, task = tools.images(2), torch.tensor([1, 0])
    found = backend.run({"pixel_values": images.double(), "task": task})
    np.testing.assert_allclose(found["logits"], _run(session, images, [1, 0])[0], rtol=1e-5)
    assert found["num_classes"].tolist() == [5, 3]
    bound = backend._run_bound(backend._feeds({"pixel_values": images, "task": task}))  # as on CUDA
    np.testing.assert_allclose(bound["logits"], found["logits"], rtol=1e-5)
    with pytest.raises(UsageError, match="many tasks and needs `task`"):
        backend.run({"pixel_values": images})
    assert main(["predict", str(both.out / "gathered.onnx"), str(photos)]) == 2
    assert "holds many tasks" in capsys.readouterr().err


def _spoil(where: str, change: Any) -> Any:
    def fault(proto: onnx.ModelProto) -> None:
        tensor = next(t for t in proto.graph.initializer if t.name.endswith(where))
        tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor).copy()), tensor.name))

    return fault


def _tasks_swapped(value: np.ndarray) -> np.ndarray:
    return value[::-1].copy()


def _padded_with_zero(value: np.ndarray) -> np.ndarray:
    return np.maximum(value, -100)


def _one_more(value: np.ndarray) -> np.ndarray:
    return value + 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_spoil("attn.qkv.weight", _tasks_swapped), "task `cars` against torch: batch 1: max error"),
        (_spoil("pos_embed", _tasks_swapped), "against torch: batch 1: max error"),
        (_spoil("head.bias", _padded_with_zero), "behind a task's classes are not"),
        (_spoil("counts", _one_more), "gives num_classes [6]"),
    ],
    ids=["qkv", "positions", "padding", "counts"],
)
def test_a_wrong_gathered_file_is_exit_4_and_not_kept(
    packs: dict[str, Path], tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], fault: Any, message: str,
) -> None:  # fmt: skip
    def convert(model: Any, *args: Any, **kwargs: Any) -> onnx.ModelProto:
        proto = tools.convert(model, *args, **kwargs)
        fault(proto)
        return proto

    monkeypatch.setattr("vtk_export.tasks.build.convert", convert)
    argv = ["export", "tasks", str(packs["pets"]), str(packs["cars"]), "--form", "gathered"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 4
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


KINDS = {
    "plain": {},
    "qk-norm": {"qk_norm": True},
    "registers": {"reg_tokens": 2, "class_token": True},
    "no-embed-class": {"no_embed_class": True, "init_values": 0.1},
    "mean": {"global_pool": "avg", "class_token": False},
    "attention-pool": {"global_pool": "map", "class_token": False},
    "rms": {"norm_layer": "rmsnorm", "qk_norm": True},
    "parallel": {"block_fn": ParallelThingsBlock},
    "context": {},
    "parallel-context": {"block_fn": ParallelThingsBlock, "init_values": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_gathering_equals_single_models(kind: str, tools: Any) -> None:
    options = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32, **KINDS[kind]}
    torch.manual_seed(3)
    first = timm.create_model("vit_tiny_patch16_224", num_classes=2, **options).double().eval()
    models = []
    for classes in (2, 4, 3):
        model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, **options).double().eval()
        shared = {k: v for k, v in first.state_dict().items() if not k.startswith("head.")}
        model.load_state_dict(shared, strict=False)
        with torch.no_grad():
            for key, value in model.named_parameters():
                if key.startswith(("head.", "attn_pool.")) or ".attn." in key or "token" in key or key == "pos_embed":
                    value += 0.3 * torch.randn_like(value)
        if "context" in kind:
            add_context_broadcast(model, on="both")
        models.append(model)
    gathered = GatheredViT([copy.deepcopy(model) for model in models])
    task = [2, 0, 1, 1, 2]
    images = tools.images(len(task)).double()
    with torch.no_grad():
        logits, counts = gathered(images, torch.tensor(task, dtype=torch.int32))
        for row, image, t, n in zip(logits, images, task, counts.tolist(), strict=True):
            expected = models[t](image[None])[0]
            assert n == len(expected)
            torch.testing.assert_close(row[:n], expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
            assert (row[n:] == torch.finfo(torch.float64).min).all()


def test_what_cannot_be_stacked_is_named() -> None:
    options = {"depth": 1, "embed_dim": 32, "num_heads": 2, "img_size": 32}
    models = [timm.create_model("vit_tiny_patch16_224", num_classes=2, **options) for _ in range(2)]
    models[1].load_state_dict({**models[0].state_dict(), "patch_embed.proj.bias": torch.ones(32)})
    with pytest.raises(UsageError, match=r"`patch_embed.proj` differs .* it is a Conv2d; use --form files"):
        GatheredViT(models)
