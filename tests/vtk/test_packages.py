"""What is imported is declared, smaller environments are parts of the whole, and an absent package is one line."""

import ast
import functools
import importlib.metadata
import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import vtk.packages
from vtk.__main__ import main
from vtk.commands._doctor_checks import REQUIRED, normalise
from vtk.errors import UnavailableError
from vtk.packages import CORE, ORT, PACKAGES

REPO = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
SLIM = sorted((REPO / "requirements").glob("*.txt"))
OURS = {"vtk", "vtk_export", "vtk_kernels"}
OPTIONAL = {
    "mlflow-skinny": "`--track mlflow`, by the extra `mlflow`; asked for where it is named",
    "nvidia-ml-py": "clocks and energy of NVIDIA GPUs, by the extra `nvml`; left out where it is absent",
    "openvino": "runs ONNX files and IR on CPUs, by the extra `openvino`; asked for where it is named",
    "pyarrow": "tables of labels in parquet, by the extra `parquet`; asked for when one is read",
    "tensorrt": "runs built engines; belongs to a machine's CUDA, so the user installs the one that fits",
    "wandb": "`--track wandb`, by the extra `wandb`; asked for where it is named",
    "transformers": "looks whether it loads what `tasks merge --format hf` writes; comes with PEFT, left out if absent",
}
SERVED = {
    "triton_python_backend_utils",
    *(path.stem for path in (REPO / "export/vtk_export/triton/served").glob("vtk_*.py")),
}
"""Modules that files of a server's repository find in the server or beside themselves."""


@functools.cache
def imported() -> dict[str, set[str]]:
    """Return the top-level names that our code imports, each with the files that do."""
    found = defaultdict(set)
    for folder in ("vtk", "kernels", "export"):
        for path in (REPO / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
                for name in names:
                    # `google` is a folder of several distributions
                    top = name if name.startswith("google.") else name.partition(".")[0]
                    found[top].add(str(path.relative_to(REPO)))
    return {k: v for k, v in found.items() if k not in sys.stdlib_module_names | OURS | SERVED}


@functools.cache
def installed() -> Mapping[str, list[str]]:
    """Return the distributions of every importable name; asking takes half a second."""
    return importlib.metadata.packages_distributions()


def distribution(name: str) -> str:
    """Return which distribution an import is of."""
    # those that are not installed here, or of which there are several
    known = {"google": "protobuf", "onnxruntime": "onnxruntime-gpu", "pynvml": "nvidia-ml-py", "tensorrt": "tensorrt"}
    if told := known.get(name.partition(".")[0]):
        return told
    (found,) = set(installed()[name])
    return normalise(found)


def declared(lines: list[str]) -> dict[str, Requirement]:
    return {normalise(r.name): r for r in map(Requirement, lines)}


def lines_of(path: Path) -> list[str]:
    stripped = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in stripped if line]


def test_what_is_imported_is_declared() -> None:
    known = declared(PROJECT["dependencies"])
    missing = {d: files for name, files in imported().items() if (d := distribution(name)) not in known}
    assert missing.keys() == OPTIONAL.keys(), missing


def test_what_is_declared_is_imported_or_needed_by_what_is() -> None:
    indirect = {
        "onnxscript",  # torch's ONNX exporter is written in it
        "onnxruntime",  # where there is no onnxruntime-gpu
    }
    assert declared(PROJECT["dependencies"]).keys() - set(map(distribution, imported())) == indirect


def test_every_package_is_either_needed_by_all_jobs_or_known_with_its_jobs() -> None:
    known = {normalise(package.distribution) for package in PACKAGES.values()}
    both = declared(PROJECT["dependencies"]).keys()
    assert both - known - {"onnxruntime-gpu", "scipy"} == set(REQUIRED)
    assert not known & set(REQUIRED)
    assert {*map(normalise, CORE.values()), "rich"} == set(REQUIRED), "rich is imported before anything can be said"


def test_the_extra_of_version_0_1_still_resolves() -> None:
    assert PROJECT["optional-dependencies"]["peft"] == [] and "peft" in declared(PROJECT["dependencies"])


@pytest.mark.parametrize("path", SLIM, ids=[p.stem for p in SLIM])
def test_a_slim_environment_asks_for_what_the_toolkit_does(path: Path) -> None:
    whole, part = declared(PROJECT["dependencies"]), declared(lines_of(path))
    for name, requirement in part.items():
        assert (requirement.specifier, requirement.extras) == (whole[name].specifier, whole[name].extras), name
    assert set(REQUIRED) <= part.keys(), "doctor calls these needed by every job"
    assert not {"onnxruntime", "onnxruntime-gpu"} <= part.keys()


@pytest.mark.parametrize("name", [*PACKAGES, *CORE])
def test_an_absent_package_is_one_line_with_exit_code_5(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(argv: list[str]) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("vtk.commands.predict.main", absent)
    assert main(["predict", "--json"]) == 5
    out, err = capsys.readouterr()
    told = json.loads(out)["error"]
    assert err.count("\n") == 1 and "pip install" in told
    assert f"`{PACKAGES[name].distribution if name in PACKAGES else CORE[name]}` is not installed" in told


def test_a_fault_of_ours_is_not_called_an_absent_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(argv: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'onnx.gone'", name="onnx.gone")

    monkeypatch.setattr("vtk.commands.predict.main", broken)
    with pytest.raises(ModuleNotFoundError):
        main(["predict"])


def test_a_name_of_the_api_says_which_package_it_lacks() -> None:
    code = (
        "import sys; sys.modules['onnx'] = None\n"
        "import vtk\nfrom vtk.errors import UnavailableError\n"
        "try:\n    vtk.export_onnx\nexcept UnavailableError as error:\n    print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.startswith("`onnx` is not installed;") and "pip install onnx" in found.stdout


def test_what_a_job_needs_is_asked_for_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vtk.packages.importlib.util, "find_spec", lambda name: None if name == "onnx" else object())
    vtk.packages.require("matplotlib")
    with pytest.raises(UnavailableError, match=r"`onnx` is not installed; .* pip install onnx$"):
        vtk.packages.require("matplotlib", "onnx")
    assert vtk.packages.find("onnxruntime-gpu") is vtk.packages.find("onnxruntime") is PACKAGES["onnxruntime"]
    assert vtk.packages.find("torch") is None and ORT == ("onnxruntime", "onnxruntime-gpu")
