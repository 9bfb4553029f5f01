"""Nothing in the current folder is run: a file for every module that anyone could ask for lies there, and tells."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vtk._path import search_path
from vtk.commands import COMMANDS
from vtk.commands.data import _HELP as DATA
from vtk.commands.export import TARGETS
from vtk.commands.tasks import _HELP as TASKS
from vtk.data.probing.pool import probe_many

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "tests" / "fixtures" / "v0_1"
OPTIONAL = ("tensorrt", "pynvml", "tritonclient", "datasets", "webdataset", "tensorflow_datasets", "org", "cuda")
SITE = ("sitecustomize", "usercustomize")
PLANTED = "import os\nwith open(os.environ['RAN'], 'a') as file:\n    file.write(__name__ + '\\n')\n"

WORDS = {
    "finetune": ("data/digits", "--config", "finetune.yaml", "--out", "new", "--workers", "2"),
    "train": ("data/digits", "--config", "recipe.yaml", "--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=1",
              "embed_dim=16", "num_heads=2", "patch_size=8", "--img-size", "32", "--out", "new"),
    "pretrain": ("data/digits", "--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=1", "embed_dim=16",
                 "num_heads=2", "patch_size=8", "--img-size", "32", "--no-pretrained", "--epochs", "1", "--batch-size",
                 "4", "--codes", "16", "--out", "new"),
    "eval": ("runs/digits", "data/digits", "--base", "base.safetensors", "--out", "new"),
    "predict": ("runs/digits", "data/digits", "--base", "base.safetensors"),
    "embed": ("digits.vtkbundle", "data/digits", "--out", "new.csv"),
    "data audit": ("data/digits", "--workers", "2", "--no-cache", "--out", "page.html"),
    "tasks list": (".",),
    "tasks diff": ("runs/digits", "--base", "base.safetensors"),
    "tasks merge": ("runs/digits", "--base", "base.safetensors", "--out", "merged.safetensors"),
    "tasks bench": ("--pack", "digits.vtkbundle", "--copies", "2", "--batch", "2"),
    "tasks calibrate": ("digits.vtkbundle", "--data", "data/digits"),
    "tasks compress": ("runs/digits", "--base", "base.safetensors", "--rank", "2", "--out", "new"),
    "tasks bundle": ("runs/digits", "--base", "base.safetensors", "--out", "new"),
    "tasks convert": ("runs/digits", "--base", "base.safetensors", "--pack-dtype", "bf16", "--out", "new"),
    "tasks to-peft": ("runs/digits", "--base", "base.safetensors", "--out", "new"),
    "tasks from-peft": ("digits-peft", "--card", "digits.safetensors", "--out", "new"),
    "tasks push": ("digits.vtkbundle", "me/digits"),
    "tasks pull": ("me/digits",),
    "parallelize": ("digits.safetensors", "--branches", "2", "--out", "new"),
    "export onnx": ("digits.vtkbundle", "--out", "new"),
    "export openvino": ("digits.vtkbundle", "--out", "new"),
    "export aoti": ("digits.vtkbundle", "--out", "new"),
    "export tasks": ("digits.vtkbundle", "runs/parity", "--base", "base.safetensors", "--out", "new"),
    "export tensorrt": ("digits.vtkbundle", "--out", "new"),
    "export triton": ("digits.vtkbundle", "--out", "new"),
    "profile": ("digits.vtkbundle", "--backends", "compile", "--batch-sizes", "1", "--duration", "0.1",
                "--out", "new"),
    "analyze": ("digits.vtkbundle", "--data", "data/digits", "--what", "entropy", "--out", "new"),
    "doctor": (),
    "demo": ("--out", "new"),
}  # fmt: skip
"""What each command is run with in a folder that has what version 0.1 wrote."""

OFFLINE = {"tasks push", "tasks pull", "tasks calibrate"}
"""Commands that end with an error here (no hub, few images), after they have imported what they need."""

PATHS = [str(ROOT / part) for part in ("", "kernels", "export")]
AUDIT = ("data", "audit", "data/digits", "--workers", "1", "--no-cache")
LIMITS = {"demo": 25.0}
"""Seconds after which a command has done enough: its stages are other commands."""

GROUPS = {"data": DATA, "tasks": TASKS, "export": TARGETS}


def every_command() -> set[str]:
    """Return all commands, from the tables that they are dispatched by."""
    return {f"{name} {inner}".strip() for name in COMMANDS for inner in GROUPS.get(name, [""])}


def names() -> set[str]:
    """Return every name that a module could be asked for by: of Python, of what is installed, and of what is not."""
    installed = importlib.metadata.packages_distributions()
    return {*sys.stdlib_module_names, *(n for n in installed if n.isidentifier()), *OPTIONAL, *SITE, "vtk"}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user of version 0.1, with a file for every module; any of them that runs says so."""
    here = shutil.copytree(MADE, tmp_path_factory.mktemp("planted") / "user")
    for name in names():
        (here / f"{name}.py").write_text(PLANTED)
    (here / "matplotlibrc").write_text("figure.dpi: 7\nsavefig.dpi: 7\nnonsense: \x1b[2J\n")
    return here


@pytest.fixture
def folder(planted: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(planted, tmp_path / "user", copy_function=os.link)


@pytest.fixture
def later(folder: Path) -> Path:
    """The folder without what Python itself imports before it looks for vtk: nobody could be in time.

    docs/concepts/security.md says so.
    """
    code = "import runpy, importlib.util, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    for name in {*(name.partition(".")[0] for name in done.stdout.split()), *SITE, "nt", "_winapi", "vtk"}:
        (folder / f"{name}.py").unlink(missing_ok=True)
    return folder


def run(
    folder: Path, *words: str, module: bool = False, limit: float | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as the installed script would, or as ``python -m vtk``."""
    script = folder.parent / "bin" / "vtk"
    script.parent.mkdir(exist_ok=True)
    script.write_text("import sys\nfrom vtk.__main__ import entry\nsys.exit(entry())\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "RAN": str(folder.parent / "ran"), "HF_HUB_OFFLINE": "1"}
    env |= {"VTK_HOME": str(folder.parent / "home"), "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor")} | more
    env.pop("PYTHONSAFEPATH", None)
    begin = [sys.executable, "-m", "vtk"] if module else [sys.executable, str(script)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": limit}
    return subprocess.run([*begin, *words], cwd=folder, env=env, **options)


def ran(folder: Path) -> list[str]:
    """Return which of the planted modules ran."""
    file = folder.parent / "ran"
    return file.read_text().split() if file.exists() else []


def test_every_command_is_tried() -> None:
    assert set(WORDS) == every_command()


def test_an_audit_runs_nothing_of_the_current_folder(folder: Path) -> None:
    """Its worker processes are interpreters of their own."""
    done = run(folder, *AUDIT)
    assert done.returncode == 0 and not ran(folder), done.stderr


def test_an_empty_part_of_the_search_path_is_not_the_current_folder(later: Path) -> None:
    done = run(later, *AUDIT, PYTHONPATH=os.pathsep.join(["", *PATHS, ""]))
    assert done.returncode == 0 and not ran(later), done.stderr


def test_run_as_a_module_nothing_of_the_current_folder_is_imported(later: Path) -> None:
    done = run(later, *AUDIT, module=True)
    assert done.returncode == 0 and not ran(later), done.stderr


def test_a_checkout_that_is_not_installed_runs_in_its_own_folder() -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    code = "import vtk, sys; sys.argv = ['vtk', '--version']; from vtk.__main__ import entry; entry()"
    for words in (["-S", "-m", "vtk", "--version"], ["-c", code]):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert "rich" in done.stderr or done.stdout.startswith("vtk "), done.stderr  # of -S nothing else is installed


def test_no_interpreter_is_started_in_any_other_way() -> None:
    """Whoever names the executable says ``-P`` or ``-I`` right behind it, as `vtk._path.child` does."""
    files = [path for part in ("vtk", "kernels", "export") for path in (ROOT / part).rglob("*.py")]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    started = [line for line in lines if "sys.executable" in line and "not sys.executable" not in line]
    assert started and not [line for line in started if '[sys.executable, "-P", ' not in line and '"-I"' not in line]


def test_an_interpreter_of_a_library_does_not_look_into_the_current_folder_either(folder: Path) -> None:
    """Compilers start some, and know nothing of `vtk._path.child`."""
    code = (
        "import subprocess, sys, vtk._path as path\n"
        "subprocess.run(path.child('-c', 'import org'))\n"  # whatever its variables
        "path.leave_current_folder()\n"
        "subprocess.run([sys.executable, '-c', 'import org'])\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "RAN": str(folder.parent / "ran")}
    env.pop("PYTHONSAFEPATH", None)
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=True)
    assert done.stderr.count("No module named 'org'") == 2 and not ran(folder)


def test_a_program_that_imports_vtk_starts_its_children_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own search path has the current folder first, as in a notebook, and stays as it is."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAN", str(folder.parent / "ran"))
    for first in ("", str(folder)):
        monkeypatch.setattr(sys, "path", [first, *PATHS, *sys.path])
        (found,) = probe_many(["data/digits/train/one/0042.png"], 1, workers=1)
        assert not found.bad and sys.path[0] == first
        assert str(folder) not in search_path() and "" not in search_path() and str(ROOT) in search_path()
    monkeypatch.chdir(ROOT)
    assert str(ROOT) in search_path()  # vtk itself lies there
    assert not ran(folder)


def test_settings_of_plots_are_not_taken_from_the_current_folder(folder: Path) -> None:
    code = (
        "from vtk._path import leave_plot_settings as leave; leave()\n"
        "import matplotlib, os; print(matplotlib.rcParams['savefig.dpi'], os.getcwd())"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAN": str(folder.parent / "ran")}
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=folder, env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["figure", str(folder)] and "nonsense" not in done.stderr
    assert not ran(folder)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(every_command()))
def test_a_command_runs_nothing_of_the_current_folder(folder: Path, command: str) -> None:
    try:
        done = run(folder, *command.split(), *WORDS[command], limit=LIMITS.get(command))
    except subprocess.TimeoutExpired:
        assert not ran(folder)
        return
    assert not ran(folder), done.stderr
    assert done.returncode == 0 or command in OFFLINE, done.stderr
    assert "\x1b" not in done.stderr + done.stdout


@pytest.mark.slow
def test_the_planted_files_do_run_where_they_are_imported(folder: Path) -> None:
    """The test itself: Python run in that folder imports them."""
    env = os.environ | {"RAN": str(folder.parent / "ran")}
    subprocess.run([sys.executable, "-c", "import msvcrt, org"], cwd=folder, env=env, check=True)
    assert {"msvcrt", "org"} <= set(ran(folder))
    assert json.loads((folder / "logits.json").read_text())
