"""`gpu.sh all` where things go wrong: processes that die or hang, rows that raise, a full disk, two calls at once."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import _attempts
import _choices
import _plan
import _rows
import one_run
import pytest
import torch
from _attempts import POISONED, Attempts, note_of
from _plan import Step
from _store import read

BENCHMARKS = Path(one_run.__file__).parent
TOY = f"""
import json, os, sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import _attempts
from pathlib import Path
from _store import Deadline, Store, finish
out, deaths = Path(sys.argv[1]), json.loads(sys.argv[2])
store = Store(out / "gpu_toy.csv", ("name",), lambda: {{"device": "d", "torch": "t", "triton": "3", "git": "g"}})
attempts = _attempts.Attempts(out, "toy", store.git)
_attempts.device_lives = lambda: False
failed = list(attempts.given_up.values())
for name in "abcd":
    if store.has(name=name) or name in attempts.given_up:
        continue
    try:
        with attempts.row(name, 0.4):
            match deaths.get(name):
                case "crash": os._exit(139)
                case "hang": time.sleep(60)
                case "illegal access": raise RuntimeError("CUDA error: an illegal memory access was encountered")
    except Exception as error:
        failed.append(name)
        continue
    store.add({{"name": name, "choices": os.environ.get("VTK_CHOICES", "")}})
sys.exit(finish("toy", Deadline(100), failed))
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Returns what runs a stage whose rows a, b, c, d do as told, and then the rows that were measured."""
    script = tmp_path / "toy.py"
    script.write_text(TOY)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(_plan, "START", 0.5)
    monkeypatch.setattr(one_run, "GRACE", 0.5)

    def run(call="1", **deaths):
        command = [sys.executable, str(script), str(out), json.dumps(deaths)]
        monkeypatch.setattr(one_run, "command_of", lambda *args: command)
        monkeypatch.setenv(_attempts.RUN, call)
        launch = one_run.launcher(out, False, one_run.Progress(out, False))
        code = launch(Step("toys", "toy", 60), 20.0)
        return code, [row["name"] for row in read(out / "gpu_toy.csv")]

    run.out = out
    return run


def _listen():
    """Listen to signals again, which `nohup` and jobs in the background have ignored for all that they start."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("death", ["crash", "hang", "illegal access"])
def test_a_row_that_ends_its_process_is_left_out_and_the_others_are_measured(toy, death, capfd):
    assert toy(b=death) == (1, ["a", "c", "d"])
    assert [(r["stage"], r["row"], r["git"]) for r in read(toy.out / "died.csv")] == [("toy", "b", "g")]
    assert "FAILED b: its process died or hung, once; left out" in capfd.readouterr().out
    assert not note_of(toy.out, "toy").exists()


def test_a_later_call_tries_such_a_row_once_more_and_then_no_more(toy):
    assert toy("1", b="crash") == (1, ["a", "c", "d"])
    assert toy("2", b="crash") == (1, ["a", "c", "d"]) and len(read(toy.out / "died.csv")) == 2
    assert toy("3") == (1, ["a", "c", "d"]) and len(read(toy.out / "died.csv")) == 2


@pytest.mark.slow
def test_a_row_that_went_well_at_the_second_call_is_measured(toy):
    assert toy("1", b="crash", d="hang") == (1, ["a", "c"])
    assert toy("2") == (0, ["a", "c", "b", "d"])
    assert one_run.Progress(toy.out, False).complete == []  # of no step of the plan


def test_rows_of_other_code_are_tried_again(tmp_path):
    for _ in range(3):
        _rows.append(tmp_path / "died.csv", {"stage": "e2e", "row": "a", "run": "1", "git": "old"})
    assert Attempts(tmp_path, "e2e", "old").given_up and not Attempts(tmp_path, "e2e", "new").given_up
    assert not Attempts(tmp_path, "kernels", "old").given_up


@pytest.mark.parametrize("left", ["", "{", "[]", '{"row": 1}', "\x00"])
def test_half_a_note_is_nobodys_death(tmp_path, left):
    note_of(tmp_path, "e2e").write_text(left)
    assert not Attempts(tmp_path, "e2e", "g").given_up and not note_of(tmp_path, "e2e").exists()


def test_an_error_is_no_death_where_the_device_still_works(tmp_path, monkeypatch, capsys):
    attempts = Attempts(tmp_path, "e2e", "g")
    with pytest.raises(ValueError, match="wrong shape"), attempts.row("a", 10):
        assert _attempts.limit_of(attempts.note)[1] == 10
        raise ValueError("wrong shape")
    assert not attempts.note.exists()
    monkeypatch.setattr(_attempts, "device_lives", lambda: False)
    with pytest.raises(SystemExit) as ended, attempts.row("a", 10):
        raise ValueError("an illegal memory access")
    assert (
        ended.value.code == POISONED and attempts.note.exists() and "CUDA context is broken" in capsys.readouterr().out
    )


def test_a_broken_context_is_told_by_using_it(monkeypatch):
    said = []

    def synchronize():
        said.append("asked")
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    assert _attempts.device_lives()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not _attempts.device_lives() and len(said) == 2
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    assert _attempts.device_lives()


def test_what_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(one_run, "PATIENCE", 0.2)
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"trap '' TERM; sleep 60 & echo $! > {pid}; wait; wait"]
    began = time.monotonic()
    assert one_run.supervise(command, dict(os.environ), tmp_path / "none", 0.3) == 124
    assert time.monotonic() - began < 8
    time.sleep(0.1)
    status = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_steps_run_with_the_choices_that_those_before_measured(toy):
    assert toy()[0] == 0 and {row["choices"] for row in read(toy.out / "gpu_toy.csv")} == {""}
    (toy.out / "gpu_toy.csv").unlink()
    (toy.out / "choices.json").write_text("{}")
    assert toy()[0] == 0
    assert {row["choices"] for row in read(toy.out / "gpu_toy.csv")} == {str((toy.out / "choices.json").resolve())}


def test_a_stage_is_told_to_stop_before_its_time_is_over(tmp_path):
    command = one_run.command_of(_plan.STEPS[0], tmp_path, 150, False)
    told = float(command[command.index("--seconds") + 1])
    assert told == 150 - _plan.START - one_run.GRACE and command[-1] == "--deciding"
    assert one_run.command_of(_plan.STEPS[1], tmp_path, 5, True)[-5:] == ["--smoke", *_plan.STEPS[1].smoke]


def test_complete_steps_are_remembered_for_this_code_and_while_their_rows_are_there(tmp_path, monkeypatch):
    progress = one_run.Progress(tmp_path, False)
    (tmp_path / "gpu_kernels.csv").write_text("op\n")
    progress.add(_plan.STEPS[0])
    assert one_run.Progress(tmp_path, False).complete == ["choices"] and not one_run.Progress(tmp_path, True).complete
    (tmp_path / "gpu_kernels.csv").unlink()
    assert not one_run.Progress(tmp_path, False).complete
    (tmp_path / "gpu_kernels.csv").write_text("op\n")
    monkeypatch.setattr(_rows, "code_version", lambda: "another")
    assert not one_run.Progress(tmp_path, False).complete
    (tmp_path / "progress.json").write_text("{")
    assert not one_run.Progress(tmp_path, False).complete


@pytest.mark.parametrize("left", [b"op,git\na,b\nc", b"op,git\na\n", b"op,git\na,b,c\n", b"op,git\n\xff\xfe\n", b""])
def test_a_step_whose_rows_were_cut_is_done_again(tmp_path, left):
    file = tmp_path / "gpu_kernels.csv"
    file.write_text("op,git\na,b\nc,d\n")
    one_run.Progress(tmp_path, False).add(_plan.STEPS[0])
    assert one_run.Progress(tmp_path, False).complete == ["choices"]
    file.write_bytes(left)
    assert not one_run.Progress(tmp_path, False).complete


@pytest.mark.parametrize("left", [b"", b'{"schema": 1, "meas', b"\xff", b"[" * 100_000, b"[]", b'{"measured": 1}'])
def test_damaged_choices_are_put_aside_and_made_again(tmp_path, left, capsys):
    path = tmp_path / "choices.json"
    path.write_text('{"schema": 1, "measured": []}')
    (tmp_path / "progress.json").write_text("{}")
    one_run.put_aside(tmp_path)
    assert path.exists() and (tmp_path / "progress.json").exists() and not capsys.readouterr().out
    path.write_bytes(left)
    one_run.put_aside(tmp_path)
    assert "VTK_CHOICES" not in one_run.environment(tmp_path) and (tmp_path / "choices.json.old").read_bytes() == left
    assert not (tmp_path / "progress.json").exists() and len(capsys.readouterr().out.splitlines()) == 1


def full(after):
    """A disk that is full after so many bytes."""
    left = [after]
    real = os.fsync

    def write(file, data):
        part = data[: left[0]]
        left[0] -= len(part)
        file.write(part)
        if len(part) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file.fileno())

    return write


@pytest.mark.parametrize("room", [0, 3, 20])
def test_a_disk_that_fills_up_leaves_whole_rows_and_old_files(tmp_path, monkeypatch, room):
    path, whole = tmp_path / "rows.csv", tmp_path / "choices.json"
    _rows.append(path, {"a": 1, "b": "x" * 30})
    _rows.replace(whole, "old")
    before = path.read_bytes()
    monkeypatch.setattr(_rows, "_write", full(room))
    with pytest.raises(SystemExit, match="No space left on device"):
        _rows.append(path, {"a": 2, "b": "y" * 30})
    with pytest.raises(OSError, match="No space"):
        _rows.replace(whole, "new" * 100)
    assert path.read_bytes() == before and whole.read_text() == "old" and len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    _rows.append(path, {"a": 3, "b": "z"})
    assert [row["a"] for row in read(path)] == ["1", "3"]


def decided(path):
    return [e for e in json.loads(path.read_text())["measured"] if e["device"] == "card"] if path.exists() else []


def test_one_exception_ends_no_stage_and_choices_are_written_as_shapes_are_decided(
    tmp_path, monkeypatch, kernels_stage, code
):
    found = kernels_stage.deciding(kernels_stage.correct.benches())
    plan = [row for row in found if len(row[0].answers) == 2][:40]
    monkeypatch.setattr(kernels_stage, "deciding", lambda benches: plan)
    seen = []

    def measure(bench, case, provider, *args, **kwargs):
        seen.append((bench.op, case, provider, len(decided(tmp_path / "choices.json"))))
        if len(seen) == 6:
            raise RuntimeError("a compiler's")
        if len(seen) == 12:
            raise KeyboardInterrupt
        return {"op": bench.op, "mode": case.mode, "provider": provider, "shape": case.label, "dtype": case.dtype,
                "p50_us": 5.0, "timer": "graph", "percent": None, "passed": True}  # fmt: skip

    monkeypatch.setattr(kernels_stage, "measure", measure)
    monkeypatch.setattr(kernels_stage, "ceilings_of", lambda *args: None)
    monkeypatch.setattr(kernels_stage._stage, "device", lambda smoke: torch.device("cpu"))
    monkeypatch.setattr(_rows, "kernel_context", lambda device: code)
    argv = ["--out", str(tmp_path), "--deciding"]
    with pytest.raises(KeyboardInterrupt):
        kernels_stage.main(argv)
    assert [count for *_, count in seen[:12:2]] == [0, 1, 2, 2, 3, 4]  # the third shape lacks an answer
    assert len(read(tmp_path / "gpu_kernels.csv")) == 10
    monkeypatch.setattr(kernels_stage, "measure", lambda *a, **k: {**measure(*a, **k), "p50_us": 4.0})
    seen.extend([None] * 3)
    assert kernels_stage.main(argv) == 0
    rows = read(tmp_path / "gpu_kernels.csv")
    assert len(rows) == len(plan) == len({(r["op"], r["shape"], r["provider"]) for r in rows})
    assert len(decided(tmp_path / "choices.json")) == len({(bench.op, bench.choice(c)) for bench, c, _ in plan})


def test_an_operation_whose_comparisons_fail_decides_nothing(tmp_path, monkeypatch, kernels_stage, code):
    monkeypatch.setattr(_rows, "kernel_context", lambda device: code)
    correct = kernels_stage.correct
    store = correct.Store(tmp_path / "gpu_correct.csv", correct.KEY, lambda: code)
    store.add(correct.failure(("op splitk_linear", "vtk", "bf16"), "wrong"))
    store.add(correct.failure(("op norm", "vtk", "bf16"), "") | {"passed": True})
    assert correct.red_ops(tmp_path, torch.device("cpu")) == {"splitk_linear"}
    entry = {"device": "card", "torch": "2.11", "triton": "3.6", "dtype": "bfloat16", "rows": 1, "n": 2, "k": 3}
    made = [entry | {"op": "splitk_linear", "choice": "triton"}, entry | {"op": "linear_gelu", "choice": "aten"}]
    correct._choices.write(tmp_path / "choices.json", made)
    correct._choices.drop(tmp_path / "choices.json", {"splitk_linear"})
    assert [e["op"] for e in decided(tmp_path / "choices.json")] == ["linear_gelu"]


def test_a_choice_table_that_cannot_be_written_ends_nothing():
    failed = []
    for _ in range(2):
        _choices.keep(failed, lambda: (_ for _ in ()).throw(OSError("No space left")))
    assert failed == ["choices.json: OSError: No space left"]


SCRIPT = BENCHMARKS / "gpu.sh"


def gpu_sh(*args, **env):
    environment = {k: v for k, v in os.environ.items() if k not in ("VTK_GIT", "VTK_RUN")} | env
    command = ["bash", str(SCRIPT), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_a_second_call_on_the_same_folder_is_refused(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for stages in (("all",), ("e2e", "bank")):
            found = gpu_sh(*stages, "--out", tmp_path, PYTHON="false")
            assert found.returncode == 1 and "another call writes to" in found.stderr
            assert len(found.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())
    finally:
        os.close(descriptor)
    assert "another call" not in gpu_sh("e2e", "--out", tmp_path, PYTHON="false").stderr


def test_the_lock_is_held_by_whatever_still_writes(tmp_path):
    out, python = tmp_path / "out", tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 60\n")
    python.chmod(0o755)
    env = dict(os.environ) | {"PYTHON": str(python)}
    first = subprocess.Popen(["bash", str(SCRIPT), "all", "--out", str(out)], env=env, stdout=subprocess.DEVNULL,
                             start_new_session=True)  # fmt: skip
    try:
        for _ in range(100):
            if (tmp_path / "begun").exists():
                break
            time.sleep(0.05)
        first.kill()  # bash alone: what it started goes on
        first.wait()
        assert gpu_sh("all", "--out", out, PYTHON="false").returncode == 1
    finally:
        os.killpg(first.pid, 9)


@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
@pytest.mark.parametrize("stage", ["all", "e2e"])
def test_an_interrupted_script_ends_what_runs_and_lets_the_folder_go(tmp_path, stage, sign, code):
    out, python = tmp_path / "out", tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/begun\nexec sleep 60\n")
    python.chmod(0o755)
    env = dict(os.environ) | {"PYTHON": str(python)}
    script = subprocess.Popen(["bash", str(SCRIPT), stage, "--out", str(out)], env=env, stdout=subprocess.DEVNULL,
                              start_new_session=True, preexec_fn=_listen)  # fmt: skip
    try:
        for _ in range(100):
            if (tmp_path / "begun").exists():
                break
            time.sleep(0.05)
        script.send_signal(sign)  # to bash alone, as `kill` does
        assert script.wait(20) == code
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "begun").read_text()), 0)
        assert "another call" not in gpu_sh(stage, "--out", out, PYTHON="false").stderr
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, 9)


def test_a_single_stage_is_started_again_without_the_row_it_died_of(tmp_path):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(
        f'#!/bin/sh\necho "$1 $VTK_RUN" >> {tmp_path}/calls\n'
        f"if [ -e {out}/.e2e.row ]; then rm {out}/.e2e.row; exit 3; fi\ntouch {out}/.e2e.row; exit 4\n"
    )
    python.chmod(0o755)
    found = gpu_sh("e2e=100", "--out", out, PYTHON=str(python))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert found.returncode == 3 and len(calls) == 2 and len({c.split()[1] for c in calls}) == 1
    assert "its process ended with 4; again without that row" in found.stdout


def test_all_is_one_call_with_its_own_time(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$(basename $1) $*" >> {tmp_path}/calls\nexit 3\n')
    python.chmod(0o755)
    out = tmp_path / "out"
    assert gpu_sh("all", "--out", out, PYTHON=str(python)).returncode == 3
    assert gpu_sh("all", "--out", out, "--seconds", 90, "--smoke", PYTHON=str(python)).returncode == 3
    first, second = (line.split() for line in (tmp_path / "calls").read_text().splitlines())
    assert first[0] == "one_run.py" and first[-2:] == ["--seconds", "540"]
    assert second[-3:] == ["--seconds", "90", "--smoke"]
    found = gpu_sh("all", "e2e", "--out", out, PYTHON=str(python))
    assert found.returncode == 2 and "`all` is every stage; give it alone" in found.stderr
    (out / "choices.json").write_text("{}")
    (out / "gpu_e2e.csv").write_text("old\n")
    gpu_sh("all", "--fresh", "--out", out, PYTHON=str(python))
    assert (out / "choices.json.old").exists() and (out / "gpu_e2e.csv.old").exists()
    assert not (out / "choices.json").exists()


def test_the_supervisor_and_the_summary_need_no_package():
    program = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
for name in ("torch", "numpy", "timm", "triton", "vtk", "vtk_kernels", "scipy"):
    sys.modules[name] = None
import one_run, summary
assert "choices" in [step.name for step in one_run.STEPS]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]


def test_without_a_card_nothing_is_run_or_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(one_run, "_card", lambda: "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert one_run.main(["--out", str(tmp_path / "out")]) == 1
    assert "none is here; --smoke tries it on the CPU" in capsys.readouterr().err and not (tmp_path / "out").exists()
