"""OpenVINO against arithmetic: products in fp32 and bf16, what is refused, and compiled models by content."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from vtk.errors import DataError, UnavailableError, UsageError
from vtk.runtime import openvino_runtime as runtime
from vtk.runtime.backends.base import load_backend, precision_of, predictor
from vtk.runtime.opening import open_source
from vtk.runtime.run_conditions import choose_conditions

Write = Callable[..., Path]


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(5, 3, 4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def exact(images: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
    return images.flatten(1).double() @ torch.from_numpy(weight).double()


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "capabilities", lambda: frozenset({"FP32", "INT8"}))


def load(path: Path, dtype: str = "fp32", **options: Any) -> Any:
    return load_backend("openvino", open_source(path), dtype=dtype, threads=1, **options)


def logits(backend: Any, images: torch.Tensor) -> torch.Tensor:
    return backend.run({"pixel_values": images})["logits"]


def test_fp32_is_the_product_and_outputs_stay_when_it_runs_again(
    write_onnx: Write, images: torch.Tensor, exact: torch.Tensor
) -> None:
    backend = load(write_onnx())
    first = logits(backend, images)
    assert (backend.name, precision_of(backend), backend.batch, first.dtype) == (
        "openvino",
        "fp32",
        None,
        torch.float32,
    )
    assert "OpenVINO" in backend.provider and backend.load_s > 0
    torch.testing.assert_close(first.double(), exact, rtol=1e-5, atol=1e-5)
    kept = first.clone()
    logits(backend, -images)
    assert torch.equal(first, kept)
    for size in (1, 2, 0):
        torch.testing.assert_close(logits(backend, images[:size]).double(), exact[:size], rtol=1e-5, atol=1e-5)
    halves = images.to(torch.float16).transpose(2, 3).contiguous().transpose(2, 3)  # no memory order of its own
    torch.testing.assert_close(logits(backend, halves).double(), exact, rtol=0, atol=2e-2)
    backend.close()
    with pytest.raises(UsageError, match="closed"):
        logits(backend, images)


def test_bf16_rounds_products_and_an_fp32_load_of_the_same_file_does_not(
    write_onnx: Write, images: torch.Tensor, exact: torch.Tensor
) -> None:
    if runtime.default_precision() != "bf16":
        pytest.skip("this processor has no bf16")
    path = write_onnx()
    rounded, plain = load(path, "bf16"), load(path)
    assert (precision_of(rounded), rounded.dtype, precision_of(plain)) == ("bf16", torch.float32, "fp32")
    error = (logits(rounded, images).double() - exact).abs().max()
    assert 1e-4 < error < 72 * 2**-8  # 72 products of standard normal numbers, of 8 bits each
    assert (logits(plain, images).double() - exact).abs().max() < 1e-5


def test_bf16_is_refused_by_a_processor_that_lacks_it_and_is_not_its_default(write_onnx: Write, no_bf16: None) -> None:
    source = open_source(write_onnx())
    with pytest.raises(UnavailableError, match=r"AVX512_BF16 or AMX.*--precision fp32"):
        load_backend("openvino", source, dtype="bf16")
    found = choose_conditions(source, backend="openvino")
    assert (found.precision, found.notes) == ("fp32", ())


def test_the_default_precision_is_said_and_a_chosen_one_is_not(
    write_onnx: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "capabilities", lambda: frozenset({"FP32", "BF16"}))
    source = open_source(write_onnx())
    found = choose_conditions(source, backend="openvino")
    assert (found.backend, found.precision, found.device) == ("openvino", "bf16", "cpu")
    assert "bf16" in found.notes[0] and "--precision fp32" in found.notes[0]
    chosen = choose_conditions(source, backend="openvino", precision="fp32")
    assert (chosen.precision, chosen.notes) == ("fp32", ())
    assert choose_conditions(source).backend == "ort-cpu"


def test_settings_are_those_of_the_compiled_model(write_onnx: Write) -> None:
    import openvino

    path = write_onnx()
    for precision, kind in (("fp32", openvino.Type.f32), ("bf16", openvino.Type.bf16)):
        if precision == "bf16" and runtime.default_precision() != "bf16":
            continue
        compiled = runtime.compile_file(path, precision=precision, threads=1)
        assert compiled.get_property("INFERENCE_PRECISION_HINT") == kind
        assert (compiled.get_property("INFERENCE_NUM_THREADS"), compiled.get_property("NUM_STREAMS")) == (1, 1)
        assert compiled.get_property("ENABLE_CPU_PINNING") is False
        assert compiled.get_property("DYNAMIC_QUANTIZATION_GROUP_SIZE") == 0
    with pytest.raises(UsageError, match="2 streams on 1 threads"):
        runtime.compile_file(path, precision="fp32", threads=1, streams=2)


def test_a_fixed_batch_is_filled_up_and_probabilities_become_logarithms(
    write_onnx: Write, images: torch.Tensor, exact: torch.Tensor
) -> None:
    backend = load(write_onnx(batch=2))
    assert backend.batch == 2
    torch.testing.assert_close(predictor(backend)(images).double(), exact, rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match=r"does not run images \(3, 3, 4, 6\)"):
        logits(backend, images[:3])
    given = load(write_onnx("p.onnx", output="probabilities")).run({"pixel_values": images[:1].abs()})
    least = torch.finfo(torch.float32).tiny
    torch.testing.assert_close(given["logits"], given["probabilities"].clamp_min(least).log())


@pytest.mark.parametrize("change,options,message", [
    ({"path": None, "kind": "timm"}, {}, "runs .onnx files and IR"),
    ({}, {"channels_last": True}, "has no option `channels_last`"),
    ({}, {"dtype": "fp16"}, "in fp32 or bf16, not in fp16"),
    ({"facts": "fp16"}, {}, "is fp16: export it without --dtype"),
    ({"facts": "fp8"}, {}, "is fp8: export it without --dtype"),
    ({"facts": "preprocessing"}, {}, "takes raw images"),
])  # fmt: skip
def test_what_openvino_does_not_run_is_refused_in_one_line(
    write_onnx: Write, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    import dataclasses

    from vtk.runtime.export_facts import Facts

    kinds = {"fp16": Facts("fp16"), "fp8": Facts(fp8=True), "preprocessing": Facts(preprocessing=True)}
    change = {**change, **({"facts": kinds[change["facts"]]} if "facts" in change else {})}
    source = dataclasses.replace(open_source(write_onnx()), **change)
    with pytest.raises(UsageError) as error:
        load_backend("openvino", source, **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_openvino_cannot_compile_is_one_line_with_its_reason(write_onnx: Write) -> None:
    path = write_onnx()
    proto = onnx.load(path)
    proto.graph.node[1].op_type = "NoSuchOperator"
    onnx.save(proto, path)
    with pytest.raises(DataError, match=r"OpenVINO .* cannot compile .*model.onnx") as error:
        runtime.compile_file(path, precision="fp32", threads=1)
    assert "NoSuchOperator" in str(error.value) and "\n" not in str(error.value)


def kept(home: Path) -> list[Path]:
    return sorted((home / "openvino").glob("*"))


def test_compiled_models_are_read_again_by_content_not_by_name(
    write_onnx: Write, vtk_home: Path, weight: np.ndarray, images: torch.Tensor, exact: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = write_onnx()
    load(path)
    assert len(kept(vtk_home)) == 1
    moved = path.rename(path.with_name("moved.onnx"))
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_store", lambda *_: pytest.fail("compiled again"))
        torch.testing.assert_close(logits(load(moved), images).double(), exact, rtol=1e-5, atol=1e-5)
    proto = onnx.load(moved)
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(2 * weight, "w"))
    onnx.save(proto, moved)
    torch.testing.assert_close(logits(load(moved), images).double(), 2 * exact, rtol=1e-5, atol=1e-5)
    assert len(kept(vtk_home)) == 2
    load(moved, cache=False)
    runtime.compile_file(moved, precision="fp32", threads=2)  # other settings are another model
    assert len(kept(vtk_home)) == 3


def test_weights_beside_a_graph_are_part_of_its_content(
    write_onnx: Write, weight: np.ndarray, images: torch.Tensor, exact: torch.Tensor, tmp_path: Path
) -> None:
    proto, out = onnx.load(write_onnx()), tmp_path / "outside" / "model.onnx"
    out.parent.mkdir()
    onnx.save(proto, out, save_as_external_data=True, location="w.data", size_threshold=0)
    first = runtime.content_digest(out)
    torch.testing.assert_close(logits(load(out), images).double(), exact, rtol=1e-5, atol=1e-5)
    (out.parent / "w.data").write_bytes((3 * weight).tobytes())
    assert runtime.content_digest(out) != first
    torch.testing.assert_close(logits(load(out), images).double(), 3 * exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no head"])
def test_a_damaged_compiled_model_is_made_again(
    damage: str, write_onnx: Write, vtk_home: Path, images: torch.Tensor, exact: torch.Tensor
) -> None:
    path = write_onnx()
    load(path)
    (file,) = kept(vtk_home)
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes({
        "cut": good[:-9], "empty": b"", "no head": good[65:],
        "changed": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
    }[damage])  # fmt: skip
    torch.testing.assert_close(logits(load(path), images).double(), exact, rtol=1e-5, atol=1e-5)
    assert file.read_bytes()[:64] != good[:64] or file.read_bytes() == good
    assert len(kept(vtk_home)) == 1 and runtime._load(file, runtime.settings("fp32", 1)) is not None


def test_a_file_that_is_replaced_while_it_is_read_is_not_kept(
    write_onnx: Write, vtk_home: Path, images: torch.Tensor, exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_onnx()
    proto = onnx.load(path)
    (weight,) = [t for t in proto.graph.initializer if len(t.dims) == 2]
    weight.CopyFrom(onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(weight), weight.name))
    with monkeypatch.context() as patch:  # between the digest and OpenVINO's own reading
        old = path.read_bytes()
        patch.setattr(runtime, "_load", lambda *_: path.write_bytes(proto.SerializeToString()) and None)
        torch.testing.assert_close(logits(load(path), images).double(), 2 * exact, rtol=1e-5, atol=1e-5)
    assert not kept(vtk_home)
    path.write_bytes(old)
    torch.testing.assert_close(logits(load(path), images).double(), exact, rtol=1e-5, atol=1e-5)


def test_writers_at_once_leave_one_whole_file_and_the_oldest_go(
    write_onnx: Write, vtk_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_onnx()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            runtime.compile_file(path, precision="fp32", threads=1)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors and len(kept(vtk_home)) == 1
    monkeypatch.setattr(runtime, "MOST_KEPT", 2)
    for batch in (1, 2, 3):
        runtime.compile_file(write_onnx(batch=batch), precision="fp32", threads=1)
    assert len(kept(vtk_home)) == 2


def test_a_home_that_cannot_be_written_costs_only_the_time(
    write_onnx: Write, tmp_path: Path, images: torch.Tensor, exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("VTK_HOME", str(tmp_path / "file"))
    torch.testing.assert_close(logits(load(write_onnx()), images).double(), exact, rtol=1e-5, atol=1e-5)


def test_a_process_that_moved_to_other_cores_is_told_so(write_onnx: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_onnx()
    runtime.core()
    monkeypatch.setattr(runtime, "_usable", lambda: {4095})
    with pytest.raises(UsageError, match=r"started in this process on cores .* a process of its own"):
        runtime.compile_file(path, precision="fp32", threads=1)
