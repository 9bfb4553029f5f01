import contextlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.cells import cell_len

from tests.vtk.fused._cpu_subject import CARD, Clock, CpuSubject, timer
from vtk.__main__ import main
from vtk.commands import _doctor_checks as _checks
from vtk.commands import _doctor_providers as _providers
from vtk.commands import doctor
from vtk.commands._doctor_checks import Check
from vtk.commands._doctor_providers import Tried
from vtk.fused import tuning_card
from vtk.fused import tuning_store as tuned
from vtk_kernels import choices


def pretend_installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, str]:
    """Let importlib.metadata see exactly these distributions, given as ``name==version``, one of them half removed."""
    found = [SimpleNamespace(metadata=None, version="0"), SimpleNamespace(metadata={"Name": None}, version="0")]
    for text in names:
        name, _, version = text.partition("==")
        found.append(SimpleNamespace(metadata={"Name": name}, version=version or "1.0"))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: iter(found))
    return _checks.distributions()


def only(checks, name: str) -> Check:
    (check,) = (check for check in checks if check.name == name)
    return check


def test_two_onnxruntime_wheels_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = pretend_installed(monkeypatch, "onnxruntime==1.22", "ONNXRuntime_GPU==1.31", "onnxruntime-genai==0.8")
    check = only(_checks.check_conflicts(installed), "onnxruntime wheels")
    assert check.status == "problem" and "onnxruntime and onnxruntime-gpu" in check.detail
    assert check.fix == "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"


def test_one_wheel_is_fine_and_so_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _checks.check_conflicts(pretend_installed(monkeypatch, "onnxruntime==1.22", "onnxruntime-extensions"))
    assert only(one, "onnxruntime wheels").status == "ok"
    none = _checks.check_conflicts(pretend_installed(monkeypatch, "onnx"))
    assert only(none, "onnxruntime wheels").status == "ok"


@pytest.mark.parametrize("wheel", ["onnxruntime", "onnxruntime-gpu"])
def test_either_onnxruntime_serves_and_is_named(wheel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", {"vit-toolkit": ["onnxruntime-gpu>=1.22"]}.get)

    def found(version: str) -> Check:
        checks = list(_checks.check_packages(pretend_installed(monkeypatch, f"{wheel}=={version}")))
        assert [check.name for check in checks if "runtime" in check.name] == [wheel]
        return only(checks, wheel)

    assert (found("1.31.1").status, found("1.31.1").detail) == ("ok", "1.31.1")
    assert (found("1.20").status, found("1.20").fix) == ("problem", f"pip install '{wheel}>=1.22'")


def test_a_package_that_some_jobs_need_is_a_note_that_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["onnxruntime-gpu>=1.22", "onnx>=1.18", "scikit-learn", "tritonclient[grpc]>=2.40", "timm"]
    monkeypatch.setattr(importlib.metadata, "requires", {"vit-toolkit": declared}.get)
    checks = list(_checks.check_packages(pretend_installed(monkeypatch, "timm")))
    for name, jobs, how in (
        ("onnx", "read an .onnx file", "pip install onnx"),
        ("scikit-learn", "training, evaluation", "pip install scikit-learn"),
        ("tritonclient", "vtk export triton", "pip install 'tritonclient[grpc]'"),
        ("onnxruntime-gpu", "ort-cpu", "pip install onnxruntime-gpu"),
        ("tensorboard", "--track tensorboard", "pip install tensorboard"),
    ):
        check = only(checks, name)
        assert check.status == "note" and jobs in check.detail and check.fix.startswith(how), check
        assert "\n" not in check.detail + check.fix
    assert [check.name for check in checks if "runtime" in check.name] == ["onnxruntime-gpu"], "one line, not two"
    assert doctor.exit_code(tuple(checks)) == 0


def test_kitwares_vtk_is_a_problem_and_we_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    check = only(_checks.check_conflicts(pretend_installed(monkeypatch, "VTK==9.5.2", "vit-toolkit")), "Kitware VTK")
    assert check.status == "problem" and "9.5.2" in check.detail and "pip uninstall vtk" in check.fix
    check = only(_checks.check_conflicts(pretend_installed(monkeypatch, "vit-toolkit")), "Kitware VTK")
    assert check.status == "ok"


def test_missing_and_old_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["torch>=2.10", "timm>=1.0.20", "onnxruntime-gpu>=1.22", "ruff; extra == 'dev'", "Pillow>=11"]
    monkeypatch.setattr(importlib.metadata, "requires", {"vit-toolkit": declared}.get)
    installed = pretend_installed(monkeypatch, "torch==2.14.1+cu130", "timm==1.0.9", "onnxruntime==1.22.0")
    checks = list(_checks.check_packages(installed))
    assert only(checks, "torch").status == "ok"
    assert (only(checks, "timm").status, only(checks, "timm").fix) == ("problem", "pip install 'timm>=1.0.20'")
    assert (only(checks, "pillow").status, only(checks, "pillow").fix) == ("fatal", "pip install 'pillow>=11'")
    names = [check.name for check in checks]
    assert "ruff" not in names and "onnxruntime-gpu" not in names  # an extra; and the other wheel is there


def test_a_checkout_that_was_never_installed_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    checks = list(_checks.check_packages(pretend_installed(monkeypatch, "torch")))
    assert "checkout" in only(checks, "vit-toolkit").detail
    assert {c.name for c in checks if c.status == "fatal"} == set(_checks.REQUIRED) - {"torch"}


@pytest.mark.parametrize("version,status", [((3, 10, 1), "fatal"), ((3, 11, 7), "ok"), ((3, 14, 0), "note")])
def test_python_versions(version: tuple[int, ...], status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    (check,) = _checks.check_python()
    assert check.status == status


def test_packages_that_do_not_fit_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    vision = ["torch==2.14.1", "gdown; extra == 'x'"]
    declared = {"vit-toolkit": ["torch", "torchvision", "timm"], "torchvision": vision}
    monkeypatch.setattr(importlib.metadata, "requires", {**declared, "timm": ["huggingface_hub"]}.get)
    fits = pretend_installed(monkeypatch, "torch==2.14.1+cu130", "torchvision==0.29.1", "timm", "huggingface-hub")
    assert {c.status for c in _checks.check_packages(fits) if c.name in ("torch", "torchvision", "timm")} == {"ok"}
    checks = list(_checks.check_packages(pretend_installed(monkeypatch, "torch==2.13", "torchvision==0.29.1", "timm")))
    assert "0.29.1 needs torch==2.14.1, here is 2.13" in only(checks, "torchvision").detail
    assert "needs huggingface-hub, here is none" in only(checks, "timm").detail
    assert only(checks, "timm").status == only(checks, "torchvision").status == "problem"


def test_a_torch_that_does_not_import_is_fatal_and_the_rest_is_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libtorch_cuda.so: cannot open shared object file")

    monkeypatch.setattr(_checks, "importlib", SimpleNamespace(import_module=broken, metadata=importlib.metadata))
    checks = list(doctor.examine())
    check = only(checks, "import torch")
    assert check.status == "fatal" and "libtorch_cuda.so" in check.detail and "one command" in check.fix
    assert only(checks, "CPU").status == "ok" and only(checks, "home").status == "ok"
    assert doctor.exit_code(tuple(checks)) == 1


@pytest.mark.parametrize("built,driver,status,said", [
    ("13.0", True, "problem", "update the NVIDIA driver"),
    (None, True, "problem", "install torch with CUDA"),
    (None, False, "note", ""),
])  # fmt: skip
def test_a_gpu_that_torch_does_not_see(
    built: str | None, driver: bool, status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(_checks, "nvidia_driver", lambda: driver)
    check = only(_checks.check_devices(), "cuda")
    assert check.status == status and said in check.fix


@pytest.mark.parametrize("built,torch_cuda,device,status", [
    ("13.0", "13.0", True, "ok"), ("13.0", "13.2", True, "ok"),
    ("12.8", "13.0", True, "problem"), ("12.8", "13.0", False, "note"),
    ("13.0", None, False, "note"), (None, "13.0", True, "ok"),
])  # fmt: skip
def test_cuda_major_of_onnxruntime_against_torchs(
    built: str | None, torch_cuda: str | None, device: bool, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_providers, "build_cuda", lambda: built)
    (check,) = _providers.check_cuda_major("1.31", device, torch_cuda)
    assert check.status == status and bool(check.fix) is (built == "12.8")


def test_cuda_version_is_read_from_the_wheel_without_importing_it() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    expected = getattr(__import__("onnxruntime.capi.build_and_package_info", fromlist=["x"]), "cuda_version", None)
    assert _providers.build_cuda() == (expected or None)
    assert onnxruntime.__version__


LOG = "\x1b[1;31m2026 [E:onnxruntime] Failed to load library libx.so with error: libcublas.so.13: cannot open\x1b[m\n"


@pytest.mark.parametrize("tried,device,status,said", [
    (Tried("CPUExecutionProvider", "CPUExecutionProvider", True, ""), False, "ok", "ort-cpu"),
    (Tried("CPUExecutionProvider", "CPUExecutionProvider", False, ""), False, "fatal", "does not load"),
    (Tried("CUDAExecutionProvider", "CUDAExecutionProvider", True, ""), True, "ok", "ort-cuda"),
    (Tried("CUDAExecutionProvider", "CPUExecutionProvider", False, LOG), True, "problem", "libcublas.so.13"),
    (Tried("CUDAExecutionProvider", "CPUExecutionProvider", False, ""), True, "problem", "fell back to CPUExec"),
    (Tried("CUDAExecutionProvider", "CPUExecutionProvider", False, LOG), False, "note", "no CUDA device"),
    (Tried("TensorrtExecutionProvider", "ended by signal 11", False, ""), True, "note", "signal 11"),
    (Tried("TensorrtExecutionProvider", "", False, ""), True, "note", "only the back-end ort-trt needs it"),
    (Tried("OtherExecutionProvider", "", False, ""), True, "note", "no back-end of this version needs it"),
])  # fmt: skip
def test_what_a_trial_means(tried: Tried, device: bool, status: str, said: str) -> None:
    check = _providers.judge(tried, device)
    assert check.status == status and said in check.detail
    assert bool(check.fix) is (status in ("problem", "fatal"))


FAKE_RUNTIME = """
import json, os, sys
if sys.argv[1] != "0":
    sys.exit(9)
names = ["AExecutionProvider", "CrashExecutionProvider", "CPUExecutionProvider"]
print(json.dumps(["9.9", names]), flush=True)
for name in names:
    if name in sys.argv[2:]:
        continue
    print("trying", name, file=sys.stderr, flush=True)
    print("noise of", name, file=sys.stderr, flush=True)
    if name.startswith("Crash"):
        os.abort()
    print(json.dumps([name, name, 36.0]), flush=True)
"""


def test_a_provider_that_ends_its_process_is_blamed_and_the_others_are_still_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_providers, "_TRY", FAKE_RUNTIME)
    version, tried = _providers.Trial(with_torch=False).result()
    assert version == "9.9"
    assert [t.right for t in tried] == [True, False, True]
    assert tried[1].got == "the process was ended by signal 6"
    assert tried[2].stderr.strip().endswith("noise of CPUExecutionProvider")


def test_a_provider_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_providers, "_TRY", FAKE_RUNTIME.replace("os.abort()", "__import__('time').sleep(60)"))
    version, tried = _providers.Trial(with_torch=False, deadline_s=1.5).result()
    assert version == "9.9" and [t.right for t in tried] == [True, False, False]
    assert tried[1].got == tried[2].got == "no answer in time"


def test_an_onnxruntime_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_providers, "_TRY", "import onnxruntime_that_is_absent")
    monkeypatch.setattr(_providers.importlib.util, "find_spec", lambda name: None)
    (check,) = _providers.check_providers(_providers.Trial(with_torch=False), False, None)
    assert check.status == "note" and "ort-cpu" in check.detail and check.fix.startswith("pip install onnxruntime")


def test_an_onnxruntime_that_does_not_import_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_providers, "_TRY", "import no_such_runtime")
    (check,) = _providers.check_providers(_providers.Trial(with_torch=False), False, None)
    assert check.status == "fatal" and "No module named 'no_such_runtime'" in check.detail and check.fix


def test_home_that_cannot_be_written_is_fatal(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VTK_HOME", str(tmp_path / "file"))
    check = only(_checks.check_storage(), "home")
    assert check.status == "fatal" and "VTK_HOME" in check.fix


def test_bases_are_counted_and_nothing_is_written(vtk_home) -> None:
    check = only(_checks.check_storage(), "home")
    assert "no base yet" in check.detail and list(vtk_home.iterdir()) == []
    (vtk_home / "bases").mkdir()
    (vtk_home / "bases" / "abc.safetensors").write_bytes(b"x" * 1500)
    assert "1 bases, 1.5 kB" in only(_checks.check_storage(), "home").detail


def test_little_disk_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    check = only(_checks.check_storage(), "disk of home")
    assert check.status == "problem" and "10.0 MB" in check.detail and check.fix


def test_exit_code_is_1_only_when_the_main_job_cannot_work() -> None:
    assert doctor.exit_code((Check("a", "b", "problem", "c", "d"), Check("a", "b", "note", "c"))) == 0
    assert doctor.exit_code((Check("a", "b", "ok", "c"), Check("a", "b", "fatal", "c", "d"))) == 1


def test_doctor_on_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code = main(["doctor", "--json"])
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert code == found["exit_code"] == 0
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["torch"]["detail"] == importlib.metadata.version("torch")
    assert checks["CPU"]["status"] == "ok" and "ort-cpu" in checks["CPU"]["detail"]
    assert all(check["mend"] for check in found["checks"] if check["status"] in ("problem", "fatal"))
    lines = captured.err.splitlines()
    assert max(map(cell_len, lines)) <= 80
    assert {"versions", "devices", "onnxruntime", "conflicts", "storage"} <= set(lines)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """A card whose passes take as long as a made-up table says: models stay on the CPU."""
    clock = Clock()
    monkeypatch.delenv("VTK_CHOICES", raising=False)
    monkeypatch.setattr(tuned, "_loaded", {})
    monkeypatch.setattr(tuning_card, "ModelSubject", CpuSubject)
    monkeypatch.setattr(tuning_card, "EventTimer", lambda: timer(clock))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("vtk.models.devices.resolve_device", lambda _: torch.device("cpu"))
    choices.use(None)
    yield clock
    monkeypatch.undo()
    choices.use(None)


def test_tuning_prints_what_it_gained_and_finds_it_again(card: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    call = ["doctor", "--tune", "test_vit", "--batch-sizes", "1,2"]
    assert main(call) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith(f"test_vit, batch 1 at 160 × 160 px in bfloat16 on {CARD}: ")
    assert re.search(r"; \d changed: [\d.]+ → [\d.]+ µs a pass, -\d+\.\d % \(", lines[0]), lines
    assert "those that held stay" in lines[1]  # batch 1 had spoken for it
    assert main([*call, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("all tuned before") == 2
    found = json.loads(captured.out)["tuned"]
    assert [t["measured"] for t in found] == [0, 0] and all(t["asked"] > 0 for t in found)
    checks = {check.name: check for check in _checks.check_triton()}
    assert "of tuned, " in checks["measured choices"].detail


def test_a_model_of_ones_own_is_tuned_and_a_wrong_name_ends_it_first(
    card: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    own = str(Path(__file__).parents[2] / "fixtures" / "v0_1" / "digits.safetensors")
    assert main(["doctor", "--tune", "test_vit", own, "nonsense"]) == 2
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith(
        "vtk doctor: error: `nonsense` is neither a file nor a folder here"
    )
    assert main(["doctor", "--tune", own, "--batch-sizes", "1"]) == 0
    assert f"batch 1 at 32 × 32 px in bfloat16 on {CARD}: " in capsys.readouterr().out


def test_a_stopped_tuning_says_what_is_kept(
    card: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [60]

    def stopping() -> Any:
        real = timer(card)

        def time(passes: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return real(passes)

        return time

    monkeypatch.setattr(tuning_card, "EventTimer", stopping)
    assert main(["doctor", "--tune", "test_vit"]) == 130
    error = capsys.readouterr().err
    assert re.fullmatch(r"vtk doctor: stopped; [12] measured choices are kept in .*\.json\n", error), error


def test_tuning_needs_a_card_and_models_need_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code, said in (
        (["--tune"], 5, "`--tune` needs a CUDA device, and torch sees none"),
        (["test_vit"], 2, "names models, which only --tune uses; add --tune"),
        (["--batch-sizes", "1"], 2, "`--batch-sizes` is for --tune; add that, or leave it out"),
        (["--tune", "--seconds", "61"], 2, "`--seconds` is 61"),
        (["--tune", "--device", "cpu"], 2, "allowed is cuda or cuda:N"),
    ):
        if code == 5 and torch.cuda.is_available():
            continue
        assert main(["doctor", *words]) == code
        assert said in capsys.readouterr().err
