"""Checks of ``vtk doctor``: each reports its result and, if something is wrong, how to fix it.

The module imports neither torch nor onnxruntime itself; a broken package is a result, not a crash.
"""

import contextlib
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vtk import console
from vtk.files import home
from vtk.packages import ORT, PACKAGES, find

if TYPE_CHECKING:
    from packaging.requirements import Requirement

Status = Literal["ok", "note", "problem", "fatal"]

PYTHONS = ((3, 11), (3, 13))
"""Oldest and newest Python that the toolkit declares."""

REQUIRED = (
    "torch", "torchvision", "numpy", "psutil", "timm", "huggingface-hub", "safetensors", "pillow", "rich",
    "pyyaml", "natsort", "packaging",
)  # fmt: skip
"""Packages that every job needs, for a checkout that was never installed; `vtk.packages` has the others."""

MIN_FREE = 2_000_000_000
"""Bytes below which a run of a small model and its packs may not fit."""


@dataclass(frozen=True)
class Check:
    """One result.

    Attributes:
        group: heading it is printed under.
        name: of the check.
        status: ``ok``; ``note``: works, but something is absent; ``problem``: should be fixed; ``fatal``: fine-tuning,
            exporting or evaluating cannot work.
        detail: the result, one line.
        fix: what to do, one line; empty if there is nothing to do.
    """

    group: str
    name: str
    status: Status
    detail: str
    fix: str = ""


def distributions() -> dict[str, str]:
    """Return every installed distribution, by normalised name, with its version."""
    found: dict[str, str] = {}
    for dist in importlib.metadata.distributions():
        name = dist.metadata["Name"] if dist.metadata else None
        if name:  # a half-removed package has none
            found.setdefault(normalise(name), dist.version)
    return found


def normalise(name: str) -> str:
    """Return a package name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_python() -> Iterator[Check]:
    """Check the interpreter."""
    version, (oldest, newest) = sys.version_info[:2], PYTHONS
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    declared = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    if version < oldest:
        yield Check("versions", "python", "fatal", detail, f"use Python {declared}")
    elif version > newest:
        yield Check("versions", "python", "note", f"{detail}; declared for {declared}", f"use {declared} if it fails")
    else:
        yield Check("versions", "python", "ok", detail)


def requirements(name: str) -> "list[Requirement]":
    """Return what distribution ``name`` declares to need here, extras left out; empty when it is not installed."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    try:
        declared = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        declared = []
    for text in declared:
        with contextlib.suppress(InvalidRequirement):  # of a package much older than the standard
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                found.append(requirement)
    return found


def check_packages(installed: dict[str, str]) -> Iterator[Check]:
    """Compare what is installed with what the toolkit declares, and what those packages declare themselves.

    The second part is `pip check` for the packages that matter: torchvision names the one torch it was built for.
    """
    from packaging.requirements import Requirement

    yield Check("versions", "vit-toolkit", "ok", installed.get("vit-toolkit", "runs from a checkout, not installed"))
    needed = requirements("vit-toolkit") or [Requirement(name) for name in REQUIRED]
    wheel = next((name for name in ORT if name in installed), None)  # either ONNX Runtime serves
    done = set()
    for requirement in needed:
        name = normalise(requirement.name)
        if name in ORT:
            name = wheel or name
        done.add(name)
        wanted, version = f"{name}{requirement.specifier}", installed.get(name)
        if version is None and name in ORT and any(map(is_onnxruntime, installed)):
            continue  # another wheel of it is there; the check of the wheels speaks about that
        if version is None:
            yield check_absent(name, wanted)
        elif not requirement.specifier.contains(version, prereleases=True):
            detail = f"{version}, needs {requirement.specifier}"
            yield Check("versions", name, "problem", detail, f"pip install '{wanted}'")
        else:
            yield from check_fit(name, installed)
    for package in PACKAGES.values():
        name = normalise(package.distribution)
        if name in done or (name in ORT and done & set(ORT)):
            continue
        if found := installed.get(wheel if name in ORT and wheel else name):
            yield Check("versions", name, "ok", found)
        elif name not in ("triton", "nvidia-ml-py") or nvidia_driver():  # which are of use with NVIDIA's GPUs only
            yield check_absent(name, name)


def check_absent(name: str, wanted: str) -> Check:
    """Report what does not work without a distribution; ``wanted`` is its name with versions, for pip."""
    package = find(name)
    if package is None:
        detail = "not installed; nothing works without it"
        return Check("versions", name, "fatal", detail, f"pip install '{wanted}'")
    return Check("versions", name, "note", f"not installed; needed for {package.jobs}", package.install)


def check_fit(name: str, installed: dict[str, str]) -> Iterator[Check]:
    """Compare the declared requirements of distribution ``name`` with what is installed."""
    for inner in requirements(name):
        other = normalise(inner.name)
        version = installed.get(other)
        if version is None or not inner.specifier.contains(version, prereleases=True):
            detail = f"{installed[name]} needs {other}{inner.specifier}, here is {version or 'none'}"
            fix = f"pip install --upgrade {name} {other} (in one command, so that they fit)"
            yield Check("versions", name, "problem", detail, fix)
            return
    yield Check("versions", name, "ok", installed[name])


def check_torch() -> Iterator[Check]:
    """Import torch, whose libraries most often do not fit the system."""
    try:
        importlib.import_module("torch")
    except Exception as error:  # whatever it raises, torch does not work
        fix = "pip install --force-reinstall torch torchvision (in one command, so that they fit)"
        yield Check("versions", "import torch", "fatal", f"fails: {one_line(error)}", fix)


def check_devices() -> Iterator[Check]:
    """Check the CPU and CUDA devices."""
    import psutil
    import torch

    from vtk.profiling.machine import cpu_name

    memory = psutil.virtual_memory()
    cores, threads = psutil.cpu_count(logical=False) or "?", torch.get_num_threads()
    yield Check(
        "devices", "cpu", "ok",
        f"{cpu_name()}, {cores} cores ({os.cpu_count()} logical), torch uses {threads} thread{'s' * (threads != 1)}, "
        f"{console.size(memory.available)} of {console.size(memory.total)} memory free",
    )  # fmt: skip
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            free, total = torch.cuda.mem_get_info(index)
            detail = f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}"
            detail += f", {console.size(free)} of {console.size(total)} free, torch for CUDA {torch.version.cuda}"
            yield Check("devices", f"cuda:{index}", "ok", detail)
        detail = "used by `fused` models and banks; fused+nograph and bank+nograph launch kernel by kernel"
        yield Check("devices", "CUDA graphs", "ok", detail)
    elif nvidia_driver():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        fix = "update the NVIDIA driver, and let the container see the GPU (--gpus all)"
        if not torch.version.cuda:
            fix = "install torch with CUDA: https://pytorch.org/get-started/locally"
        detail = f"an NVIDIA driver is installed, but torch ({built}) sees no device"
        yield Check("devices", "cuda", "problem", detail, fix)
    else:
        yield Check("devices", "cuda", "note", "no NVIDIA driver; everything runs on the CPU")
    if any(shutil.which(name) for name in ("g++", "c++", "clang++", "cl")):
        yield Check("devices", "C++ compiler", "ok", "for the `compile` back-end on the CPU")
    else:
        yield Check("devices", "C++ compiler", "note", "none on PATH: no `compile` back-end on the CPU", "install g++")


def nvidia_driver() -> bool:
    """Return whether the system has an NVIDIA driver, whatever torch reports."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def check_triton() -> Iterator[Check]:
    """Check whether Triton can run, and which tables of measured choices are loaded."""
    from vtk_kernels import triton_status

    status = triton_status()
    detail = status.reason if status.version is None else f"{status.version}; {status.reason}"
    yield Check("devices", "triton", "ok" if status.usable else "note", detail)
    from vtk_kernels.choices import ChoiceTableError, layers

    load_tuned()
    try:
        tables = ", ".join(f"{len(table.entries)} of {table.name}" for table in layers())
        yield Check("devices", "measured choices", "ok", tables)
    except ChoiceTableError as error:
        yield Check("devices", "measured choices", "problem", str(error))


def load_tuned() -> None:
    """Load the choices tuned on the first card, so that they are counted."""
    with contextlib.suppress(Exception):  # torch or its devices are broken, which other checks report
        import torch

        from vtk.fused.tuning_store import load_for

        load_for(torch.device("cuda", 0))


def is_onnxruntime(name: str) -> bool:
    """Return whether a distribution (normalised name) installs the module ``onnxruntime``."""
    if name.startswith(("onnxruntime-extensions", "onnxruntime-genai", "onnxruntime-tools")):
        return False
    return name == "onnxruntime" or name.startswith(("onnxruntime-", "ort-nightly"))


def check_conflicts(installed: dict[str, str]) -> Iterator[Check]:
    """Check for distributions that overwrite each other's files."""
    wheels = sorted(filter(is_onnxruntime, installed))
    if len(wheels) > 1:
        keep = "onnxruntime-gpu" if "onnxruntime-gpu" in wheels else wheels[0]
        fix = f"pip uninstall -y {' '.join(wheels)} && pip install {keep}"
        detail = f"{' and '.join(wheels)} write into the same folder; the last one overwrites the others"
        yield Check("conflicts", "onnxruntime wheels", "problem", detail, fix)
    elif not wheels:
        yield Check("conflicts", "onnxruntime wheels", "ok", "none")
    else:
        yield Check("conflicts", "onnxruntime wheels", "ok", f"one: {wheels[0]} {installed[wheels[0]]}")
    if "vtk" in installed:
        detail = (
            f"Kitware's VTK {installed['vtk']} is installed too, and both are imported as `vtk`: one hides the other"
        )
        fix = "give each an environment of its own, or pip uninstall vtk"
        yield Check("conflicts", "Kitware VTK", "problem", detail, fix)
    else:
        yield Check("conflicts", "Kitware VTK", "ok", "not in this environment")


def check_storage() -> Iterator[Check]:
    """Check the toolkit's folder, the bases in it, and free space."""
    folder = home()
    exists = next(p for p in (folder, *folder.parents) if p.exists())
    name = f"{folder}{' ($VTK_HOME)' if os.environ.get('VTK_HOME') else ''}"
    fix = "set VTK_HOME to a folder that you can write"
    try:
        with tempfile.TemporaryFile(dir=exists):
            pass
    except OSError as error:
        detail = f"{name} cannot be written ({error.strerror or error}): no base can be kept"
        yield Check("storage", "home", "fatal", detail, fix)
    else:
        files = sorted((folder / "bases").glob("*.safetensors"))
        total = console.size(sum(f.stat().st_size for f in files))
        held = f"{len(files)} bases, {total}" if files else "no base yet"
        yield Check("storage", "home", "ok", f"{name}: {held}")
    for label, place in (("disk of home", exists), ("disk of this folder", Path.cwd())):
        free = shutil.disk_usage(place).free
        status: Status = "ok" if free >= MIN_FREE else "problem"
        fix = "" if status == "ok" else f"free some space, {console.size(MIN_FREE)} at least"
        yield Check("storage", label, status, f"{console.size(free)} free", fix)


def one_line(error: BaseException | str, limit: int = 200) -> str:
    """Return an error's text on one line, cut to ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
