import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vtk.errors import DataError, UnavailableError, UsageError, VerificationError
from vtk.profiling import measure
from vtk.profiling import session as session_module
from vtk.profiling.config import ProfileCommand, ProfileConfig
from vtk.profiling.profile import default_backends, profile, run
from vtk.profiling.report import print_result
from vtk.profiling.rows import heading, values


def sleeping(batch: int, logits: Tensor, call: int) -> Tensor:
    time.sleep(0.02)
    return logits


def from_batch(limit: int, error: Exception):
    def fault(batch: int, logits: Tensor, call: int) -> Tensor:
        if batch >= limit:
            raise error
        return logits

    return fault


@pytest.mark.parametrize("where", ["in run", "in synchronize"])
def test_a_sleep_of_20_ms_shows_as_at_least_20_ms(fakes, where: str) -> None:
    slow = fakes.Backend("eager", sleeping) if where == "in run" else fakes.Backend("eager", sync_s=0.02)
    result = fakes.run({"eager": slow}, batch_sizes=(2,), duration=0.7)
    (cell,) = result.backends[0].cells
    assert cell.status == "ok" and 20 <= cell.runs <= 38
    assert 20 <= cell.min_ms <= cell.p50_ms < 40
    assert cell.images_per_second <= 2 / 0.02
    assert result.exit_code == 0


@pytest.mark.parametrize(
    "fault",
    [
        lambda batch, logits, call: logits + 0.01,
        lambda batch, logits, call: logits.flip(0),
        lambda batch, logits, call: logits * float("nan"),
        lambda batch, logits, call: logits[:, :3],
        lambda batch, logits, call: logits if call < 5 else logits * 1.5,
    ],
    ids=["off by 0.01", "rows swapped", "nan", "classes missing", "right at first only"],
)
def test_wrong_outputs_get_a_row_and_no_number(fakes, fault, capsys: pytest.CaptureFixture[str]) -> None:
    backends = {"compile": fakes.Backend("compile", fault), "eager": fakes.Backend("eager")}
    result = fakes.run(backends, batch_sizes=(2,))
    wrong, right = (backend.cells[0] for backend in result.backends)
    assert wrong.status == "mismatch" and "wrong output, not timed" in wrong.reason
    numbers = (wrong.p50_ms, wrong.p90_ms, wrong.p99_ms, wrong.mean_ms, wrong.min_ms, wrong.images_per_second)
    assert numbers == (None,) * 6 and wrong.runs == 0
    assert right.status == "ok"
    assert result.exit_code == 4
    print_result(result)
    line = next(line for line in capsys.readouterr().out.splitlines() if "wrong output" in line)
    assert line.split()[0] == "2" and " ms" not in line


def test_a_wrong_output_is_not_even_timed(fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time_calls", lambda *_, **__: pytest.fail("timed before it was compared"))
    fakes.run({"eager": fakes.Backend("eager", lambda batch, logits, call: logits + 1)})


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("no memory"),
    ],
    ids=["torch cpu", "torch cuda", "python"],
)
def test_out_of_memory_is_a_row_and_larger_batches_are_skipped(fakes, error: Exception) -> None:
    full = fakes.Backend("eager", from_batch(4, error))
    result = fakes.run({"eager": full, "compile": fakes.Backend("compile")}, batch_sizes=(16, 1, 4, 8))
    cells = result.backends[0].cells
    assert [(c.batch, c.status) for c in cells] == [(1, "ok"), (4, "oom"), (8, "skipped"), (16, "skipped")]
    assert str(error) in cells[1].reason and cells[1].mean_ms is None
    assert "batch 4 already ran out of memory" in cells[3].reason
    assert [c.status for c in result.backends[1].cells] == ["ok"] * 4  # the next back-end is not affected
    assert result.exit_code == 0


def test_images_that_cannot_fit_are_refused_before_linux_kills_the_process(fakes) -> None:
    result = fakes.run({"eager": fakes.Backend("eager")}, batch_sizes=(1, 10**12))
    assert [c.status for c in result.backends[0].cells] == ["ok", "oom"]
    assert "images alone" in result.backends[0].cells[1].reason


def test_out_of_memory_while_loading_is_a_row(fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module.Session, "_export", lambda self, kind: VerificationError("not exported here"))
    error = RuntimeError("can't allocate memory: you tried to allocate 1 byte")
    result = fakes.run({"eager": error, "compile": fakes.Backend("compile")}, names=())
    assert result.backends[0].status == "oom" and "loading" in heading(result.backends[0])
    assert result.backends[1].cells[0].status == "ok"


def test_any_other_failure_costs_its_cell_only(fakes) -> None:
    broken = fakes.Backend("eager", from_batch(2, ValueError("bad kernel")))
    result = fakes.run({"eager": broken})
    assert [c.status for c in result.backends[0].cells] == ["ok", "failed"]
    assert result.backends[0].cells[1].reason == "ValueError: bad kernel"
    assert result.exit_code == 1


def test_p99_is_a_dash_below_1000_runs_and_a_number_at_1000(fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    few = fakes.run({"eager": fakes.Backend("eager")}, batch_sizes=(1,), duration=0.02).backends[0]
    assert few.cells[0].runs < 1000 and few.cells[0].p99_ms is None
    assert values(few, few.cells[0])[4] == "–"
    many = fakes.run({"eager": fakes.Backend("eager")}, batch_sizes=(1,), duration=2.0, stability=500.0)
    (cell,) = many.backends[0].cells
    assert cell.runs >= 1000 and cell.p50_ms <= cell.p90_ms <= cell.p99_ms


def test_absent_backends_of_the_default_set_are_rows(fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module.Session, "_export", lambda self, kind: VerificationError("gate: max error 3"))
    result = fakes.run({"eager": fakes.Backend("eager"), "compile": UnavailableError("no C++ compiler")}, names=())
    by_name = {backend.name: backend for backend in result.backends}
    assert list(by_name) == ["eager", "compile", "fused", "ort-cpu"]
    assert by_name["compile"].status == "unavailable" and by_name["compile"].reason == "no C++ compiler"
    assert by_name["ort-cpu"].status == "mismatch"  # it was made and is wrong: not the same as absent
    assert result.exit_code == 4


def test_an_absent_backend_asked_for_by_name_ends_the_run_before_anything_is_measured(fakes) -> None:
    eager = fakes.Backend("eager")
    with pytest.raises(UnavailableError, match="no C\\+\\+ compiler"):
        fakes.run({"eager": eager, "compile": UnavailableError("no C++ compiler")})
    assert eager.calls == 0


def test_onnxruntime_gets_the_exported_file_and_its_cost_is_a_number_of_its_own(
    fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported = replace(fakes.source(), kind="onnx", name="exported")
    inside = []

    @contextmanager
    def export(source, *, dtype):
        assert dtype == "fp32"
        time.sleep(0.05)
        inside.append(True)
        yield exported
        inside.clear()

    monkeypatch.setattr("vtk_export.onnx.export.temporary_onnx", export)
    seen = []

    def load(name: str, source, **options):
        seen.append((name, source.name, bool(inside)))
        return fakes.Backend(name)

    config = ProfileConfig(backends=("ort-cpu", "eager"), batch_sizes=(1,), duration=0.02, device="cpu")
    result = run(config, fakes.source(), load, show_progress=False)
    assert set(seen) == {("ort-cpu", "exported", True), ("eager", "tiny", True)}
    assert not inside  # the temporary file is gone
    assert result.backends[0].prepare_s >= 0.05 and result.backends[1].prepare_s is None


def test_a_precision_is_exported_for_onnxruntime_and_its_absence_is_a_row(
    fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @contextmanager
    def export(source, *, dtype):
        asked.append(dtype)
        raise UnavailableError("onnxruntime cannot run bf16 here")
        yield

    monkeypatch.setattr("vtk_export.onnx.export.temporary_onnx", export)
    with pytest.raises(UnavailableError, match="cannot run bf16"):
        fakes.run({"ort-cpu": fakes.Backend("ort-cpu")}, precision="bf16")
    result = fakes.run({"eager": fakes.Backend("eager"), "compile": fakes.Backend("compile")}, (), precision="bf16")
    assert [b.status for b in result.backends] == ["measured", "measured", "unavailable", "unavailable"]
    assert asked == ["bf16", "bf16"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_an_absent_device_is_exit_5() -> None:
    with pytest.raises(UnavailableError, match="cuda") as caught:
        profile("test_vit", ProfileConfig(device="cuda"), pretrained=False)
    assert caught.value.exit_code == 5


def test_a_fixed_batch_skips_the_others(fakes) -> None:
    result = fakes.run({"eager": fakes.Backend("eager", batch=2)}, batch_sizes=(1, 2, 4))
    assert [c.status for c in result.backends[0].cells] == ["skipped", "ok", "skipped"]
    assert "exactly 2" in result.backends[0].cells[0].reason


def test_compile_is_reset_between_batch_sizes(fakes) -> None:
    backend = fakes.Compiling("compile")
    result = fakes.run({"compile": backend}, batch_sizes=(1, 2, 4))
    backend.log.remove("close compile")  # of the look whether it is there
    assert backend.log == ["load compile", "reset", "reset", "close compile"]
    assert result.backends[0].compiles
    assert all(cell.first_s is not None for cell in result.backends[0].cells)


def test_first_call_is_not_among_the_timed_ones(fakes) -> None:
    def compiling(batch: int, logits: Tensor, call: int) -> Tensor:
        time.sleep(0.2 if call == 1 else 0)
        return logits

    (cell,) = fakes.run({"eager": fakes.Backend("eager", compiling)}, batch_sizes=(1,)).backends[0].cells
    assert cell.first_s >= 0.2 and cell.mean_ms < 50


def test_threads_are_put_back_and_named(fakes) -> None:
    torch.set_num_threads(1)
    result = fakes.run({"eager": fakes.Backend("eager")}, threads=2)
    assert torch.get_num_threads() == 1 and result.threads == 2


def test_bf16_is_judged_by_its_own_tolerance(fakes) -> None:
    backend = fakes.Backend("eager", lambda batch, logits, call: logits.bfloat16(), dtype=torch.bfloat16)
    result = fakes.run({"eager": backend}, precision="bf16")
    assert [c.status for c in result.backends[0].cells] == ["ok", "ok"]
    assert "cosine" in result.backends[0].cells[0].tolerance


def test_output_folder_is_looked_at_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(DataError, match="not empty"):
        profile("test_vit", ProfileConfig(out=tmp_path))


@pytest.mark.parametrize(
    "options,said",
    [
        ({"batch_sizes": ()}, "batch-sizes"),
        ({"batch_sizes": (1, 0)}, "has 0"),
        ({"batch_sizes": (2, 2)}, "twice"),
        ({"backends": ("eager", "eager")}, "twice"),
        ({"duration": 0.0}, "duration"),
        ({"duration": float("nan")}, "duration"),
        ({"budget_ms": -1.0}, "budget-ms"),
        ({"threads": 0}, "threads"),
        ({"device": "gpu"}, "cuda:N"),
        ({"device": "cpu:1"}, "cuda:N"),
        ({"num_classes": 0}, "num-classes"),
    ],
)
def test_bad_options_are_refused(options: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ProfileCommand(source="test_vit", **options)


def test_empty_source_is_refused() -> None:
    with pytest.raises(UsageError, match="source"):
        ProfileCommand(source=" ")


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("spoil,status", [
    (lambda p: p, "ok"), (lambda p: p.flip(1), "mismatch"), (lambda p: p.flip(0), "mismatch"),
    (lambda p: (1.5 * p.log()).softmax(1), "mismatch"), (lambda p: p * float("nan"), "mismatch"),
])  # fmt: skip
def test_probabilities_are_held_against_the_softmax_of_the_references_logits(fakes, half, spoil, status) -> None:
    kind = torch.float16 if half else torch.float32

    def softmax(batch: int, logits: Tensor, call: int) -> Tensor:  # as the ONNX Runtime back-ends give them
        return spoil(logits.softmax(1)).to(kind).float().clamp_min(1e-38).log().to(kind)

    backend = fakes.Backend("eager", softmax, dtype=kind)
    backend.outputs = ["probabilities"]
    options = {"precision": "fp16"} if half else {}
    (cell,) = fakes.run({"eager": backend}, batch_sizes=(2,), **options).backends[0].cells
    assert cell.status == status
    backend.outputs = ["probabilities", "logits"]  # these are then taken for logits, which they are not
    assert fakes.run({"eager": backend}, batch_sizes=(2,), **options).exit_code == 4


@pytest.mark.parametrize("kind,device,names", [
    ("onnx", "cpu", ("ort-cpu",)), ("onnx", "cuda", ("ort-cuda",)), ("aoti", "cpu", ("aoti",)),
    ("tensorrt", "cuda", ("tensorrt",)), ("pack", "cpu", ("eager", "compile", "fused", "ort-cpu")),
    ("timm", "cuda", ("eager", "compile", "fused", "ort-cuda")),
])  # fmt: skip
def test_the_default_set_is_what_fits_the_source(kind: str, device: str, names: tuple[str, ...]) -> None:
    assert default_backends(torch.device(device), kind) == names


def test_a_backend_that_does_not_run_the_model_is_no_row_unless_it_was_named(
    fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module.Session, "_export", lambda self, kind: UnavailableError("no onnx here"))
    unfit = UsageError("`fused` folds Vision Transformers, not this model")
    backends = {"eager": fakes.Backend("eager"), "compile": UnavailableError("no C++ compiler"), "fused": unfit}
    found = fakes.run(backends, names=())
    assert [b.name for b in found.backends] == ["eager", "compile", "ort-cpu"] and found.exit_code == 0
    with pytest.raises(UsageError, match="not this model"):
        fakes.run(backends, names=("eager", "fused"))
    monkeypatch.setattr("vtk.profiling.profile.default_backends", lambda *_: ("fused",))
    with pytest.raises(UsageError, match="not this model"):  # nothing runs it: one line, not an empty table
        fakes.run(backends, names=())
