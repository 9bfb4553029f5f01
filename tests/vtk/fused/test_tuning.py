"""Tuning without a card: a fused model on the CPU whose passes take as long as a made-up table says."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.vtk.fused._cpu_subject import CARD, QUICK, Clock, CpuSubject, timer
from vtk.errors import DataError
from vtk.fused import FusedViT, fuse, tuning
from vtk.fused import tuning_store as tuned
from vtk.fused.tuning import tune
from vtk.fused.tuning_card import ModelSubject
from vtk.fused.tuning_result import Tuning
from vtk_kernels import choices
from vtk_kernels.choices import Question


@pytest.fixture(autouse=True)
def _choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("VTK_CHOICES", raising=False)
    monkeypatch.setattr(tuned, "_loaded", {})
    choices.use(None)
    yield
    monkeypatch.undo()
    choices.use(None)


@pytest.fixture
def fused(vit: Callable[..., nn.Module]) -> FusedViT:
    return fuse(vit(branches=2).float(), torch.bfloat16)


def run(subject: ModelSubject, *, seconds: float = 60.0, noise: float = 0.01, clock: Clock | None = None) -> Tuning:
    clock = clock or Clock()
    return tune(subject, timer(clock, noise), seconds=seconds, clock=clock)


def test_the_quicker_choices_are_found_kept_and_in_force(fused: FusedViT) -> None:
    subject = CpuSubject(fused, 2)
    found = run(subject)
    held = {q.op: choices.choose(*q, CARD) for q in subject.questions()}
    assert held["ln_folded"] == "folded"
    assert all(QUICK.get(op, choices.DEFAULT[op]) == choice for op, choice in held.items())
    assert found.before_us is not None and found.after_us is not None and found.after_us < 0.95 * found.before_us
    assert f"{found.before_us:.1f} → {found.after_us:.1f} µs a pass" in str(found) and found.path in str(found)
    entries = choices.read(Path(found.path))
    assert len(entries) == found.measured and all(set(e["us"]) >= {e["choice"]} for e in entries)
    choices.use(None)
    tuned._loaded.clear()
    tuned.load(CARD)  # as another process does
    assert {q.op: choices.choose(*q, CARD) for q in subject.questions()} == held
    choices.use(found.path)  # it is a table like any other


def test_a_second_call_finds_what_the_first_has_measured(fused: FusedViT) -> None:
    run(CpuSubject(fused, 2))
    choices.use(None)
    subject = CpuSubject(fused, 2)
    again = run(subject)
    assert again.cached and again.measured == 0 and subject.runs == 0
    assert str(again).startswith(f"batch 2 at 16 × 16 px in bfloat16 on {CARD}: ") and "all tuned before" in str(again)
    assert run(CpuSubject(fused, 64)).measured > 0  # another batch size is another matter


def test_what_is_no_quicker_than_noise_is_not_taken(fused: FusedViT) -> None:
    subject = CpuSubject(fused, 2)
    subject.quick = {}
    found = run(subject, noise=0.02)
    assert not found.changed and found.measured > 0 and "those that held stay" in str(found)
    assert {e["choice"] for e in choices.read(Path(found.path))} <= set(choices.DEFAULT.values())


def test_a_wrong_answer_is_not_timed(fused: FusedViT) -> None:
    subject = CpuSubject(fused, 2)
    subject.quick, subject.breaks = {"linear_gelu": "aten"}, ("linear_gelu", "aten")
    found = run(subject)
    assert any("linear_gelu aten: it differs from fp32 by" in text for text in found.left_out)
    assert "aten" not in {e["choice"] for e in choices.read(Path(found.path)) if e["op"] == "linear_gelu"}
    everything = CpuSubject(fused, 3)
    everything.breaks = ("ln_folded", "separate")  # what holds is wrong already
    assert "nothing is timed" in str(run(everything)) and everything.runs == 0


def test_a_capture_that_fails_leaves_what_held(fused: FusedViT, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = CpuSubject(fused, 2)
    ready = subject.prepare

    def full() -> Any:
        made = ready()
        if made.us < 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made

    monkeypatch.setattr(subject, "prepare", full)
    found = run(subject)
    assert not found.changed and any("OutOfMemoryError: CUDA out of memory" in text for text in found.left_out)


def test_gains_that_vanish_together_are_taken_back(fused: FusedViT, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    real = timer(clock)
    monkeypatch.setattr(tuning._Work, "confirm", _with(tuning._Work.confirm, lambda: flip.append(1)))
    flip: list[int] = []

    def time(passes: Sequence[Any]) -> list[float]:
        return [1 / us for us in real(passes)] if flip else list(real(passes))

    found = tune(CpuSubject(fused, 2), time, clock=clock)
    assert not found.changed
    assert {e["choice"] for e in choices.read(Path(found.path))} <= set(choices.DEFAULT.values())


def _with(function: Any, before: Callable[[], object]) -> Any:
    def both(*args: Any, **options: Any) -> Any:
        before()
        return function(*args, **options)

    return both


def test_time_that_runs_out_keeps_what_was_decided(fused: FusedViT) -> None:
    whole = run(CpuSubject(fused, 2)).measured
    clock = Clock()
    found = run(CpuSubject(fused, 3), seconds=0.02, clock=clock)
    assert found.cut and 0 < found.measured < whole and clock.now < 0.2
    assert len(choices.read(Path(found.path))) == whole + found.measured
    assert ", cut after" in str(found)
    rest = run(CpuSubject(fused, 3))
    assert rest.measured > 0 and not rest.cut and run(CpuSubject(fused, 3)).cached
    late = CpuSubject(fused, 5)
    nothing = run(late, seconds=0.0)
    assert nothing.cut and nothing.measured == 0 and late.made == 1  # no alternative is begun


@pytest.mark.parametrize("at", [1, 8, 30, 60])
def test_a_stop_keeps_what_was_measured_and_leaves_no_half_choice(
    fused: FusedViT, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, calls = Clock(), [0]
    real = timer(clock)

    def time(passes: Sequence[Any]) -> list[float]:
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return list(real(passes))

    subject = CpuSubject(fused, 2)
    found = tune(subject, time, clock=clock)
    kept = choices.read(Path(found.path)) if Path(found.path).exists() else []
    assert found.stopped and ", stopped" in str(found) and len(kept) == found.measured
    for q in subject.questions():  # no alternative that was on trial is left in force
        exact = [e for e in kept if (e["op"], e["rows"], e["n"], e["k"]) == q[:4]]
        assert choices.choose(*q, CARD) == (exact[0]["choice"] if exact else choices.choose(*q, CARD))
    assert not list(Path(found.path).parent.glob("*.tmp-*"))
    again = run(CpuSubject(fused, 2))
    assert again.measured > 0 and again.asked >= again.measured


def test_what_the_environment_names_is_not_tuned(
    fused: FusedViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = CpuSubject(fused, 2)
    (gelu,) = {q for q in subject.questions() if q.op == "linear_gelu" and q.rows > 2}
    entry = {
        "device": CARD, "torch": subject.torch, "triton": subject.triton, "op": gelu.op, "dtype": "bfloat16",
        "rows": gelu.rows, "n": gelu.n, "k": gelu.k, "choice": "triton",
    }  # fmt: skip
    table = tmp_path / "mine.json"
    table.write_text(choices.text([entry]))
    monkeypatch.setenv("VTK_CHOICES", str(table))
    found = run(subject)
    assert gelu not in found.changed and choices.choose(*gelu, CARD) == "triton"
    assert tuned.key(entry) not in tuned.read(CARD)


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": 7, "measured": []}', b"\x00\xff" * 50, b"[[[["])
def test_a_damaged_file_is_told_of_in_one_line_and_written_anew(fused: FusedViT, content: bytes) -> None:
    file = tuned.path(CARD)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="is no choice table.*; it is ignored, and written anew") as seen:
        tuned.load(CARD)
    assert "\n" not in str(seen[0].message) and len(seen) == 1
    with pytest.warns(RuntimeWarning):
        found = run(CpuSubject(fused, 2))
    assert found.measured == len(choices.read(file))


def test_another_card_version_or_kernel_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {tuned.path(CARD), tuned.path("NVIDIA L40S"), tuned.path("NVIDIA/../L40S")}
    monkeypatch.setattr(torch, "__version__", "9.9.1")
    names.add(tuned.path(CARD))
    monkeypatch.setattr(tuned, "_triton", lambda: "9.9.2")
    names.add(tuned.path(CARD))
    monkeypatch.setattr(tuned, "kernels_digest", lambda: "other")
    names.add(tuned.path(CARD))
    assert len(names) == 6 and {path.parent for path in names} == {tuned.home() / "tuned"}


def entry(rows: int, choice: str = "aten") -> dict[str, Any]:
    versions = {name: str(choices._minor(name)) for name in ("torch", "triton")}
    return {"device": CARD, **versions, "op": "linear_gelu", "dtype": "bfloat16", "rows": rows, "n": 8, "k": 8,
            "choice": choice}  # fmt: skip


def write_many(first: int) -> None:
    for i in range(8):
        tuned.write(CARD, [entry(first + i)])


def test_writers_at_once_lose_nothing(vtk_home: Path) -> None:
    starting = multiprocessing.get_context("fork")
    processes = [starting.Process(target=write_many, args=(first,)) for first in (100, 200)]
    threads = [threading.Thread(target=write_many, args=(first,)) for first in (300, 400)]
    for worker in (*processes, *threads):
        worker.start()
    for worker in (*processes, *threads):
        worker.join(60)
    wanted = {first + i for first in (100, 200, 300, 400) for i in range(8)}
    assert {e["rows"] for e in choices.read(tuned.path(CARD))} == wanted
    assert [p.name for p in tuned.path(CARD).parent.iterdir()] == [tuned.path(CARD).name]


def test_a_folder_that_cannot_be_written_is_said(fused: FusedViT, vtk_home: Path) -> None:
    (vtk_home / "tuned").write_text("a file in its place")
    with pytest.raises(DataError):
        run(CpuSubject(fused, 2))
    assert not {choices.explain(*q, CARD).table for q in CpuSubject(fused, 2).questions()} & {"tuned"}


def test_two_cards_have_their_tables_side_by_side() -> None:
    for card, choice in ((CARD, "aten"), ("NVIDIA L40S", "triton")):
        tuned.write(card, [{**entry(64, choice), "device": card}])
        tuned.load(card)
    for card, choice in ((CARD, "aten"), ("NVIDIA L40S", "triton")):
        assert choices.choose("linear_gelu", 64, 8, 8, torch.bfloat16, card) == choice
    tuned.write(CARD, [entry(64, "triton")])
    tuned.load(CARD)
    assert choices.choose("linear_gelu", 64, 8, 8, torch.bfloat16, CARD) == "triton"


def test_questions_are_noted_only_while_somebody_asks_for_them() -> None:
    question = Question("linear_gelu", 64, 8, 8, torch.bfloat16)
    with choices.record_questions() as found:
        choices.choose(*question, None)
    choices.choose(*question, None)
    assert found == [question]
