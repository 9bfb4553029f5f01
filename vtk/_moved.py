"""Imports modules under their names of version 0.1, with a warning that gives the new name.

An old name is an alias: the module that it gives is the new one itself, so that classes are the same and pickles load.
The aliases go with version 1.
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any

PACKAGES = {"vtk.serving": "vtk.bank", "vtk.tasks": "vtk.packs"}
"""Packages of version 0.1; their modules are under the new package by the same name, or by one of `MODULES`."""

MODULES = {
    "vtk.bank.counting": "vtk.bank.kernel_count",
    "vtk.bank.ends": "vtk.bank.task_heads",
    "vtk.bank.entry": "vtk.bank.task_entry",
    "vtk.bank.fused": "vtk.bank.forward",
    "vtk.bank.graphs": "vtk.bank.bank_graphs",
    "vtk.bank.memory": "vtk.bank.memory_report",
    "vtk.bank.shared": "vtk.bank.shared_weights",
    "vtk.bank.state": "vtk.bank.snapshot",
    "vtk.data.loader": "vtk.data.loading",
    "vtk.data.transforms": "vtk.data.loading",
    "vtk.models.files": "vtk.models.weights.files",
    "vtk.models.parallel": "vtk.models.parallel_models",
    "vtk.models.parts": "vtk.models.task_parameters",
    "vtk.packs.base": "vtk.packs.base_files",
    "vtk.packs.lora": "vtk.packs.lora_adapter",
    "vtk.packs.peft": "vtk.packs.to_peft",
    "vtk.training.config": "vtk.training.finetune_config",
    "vtk.training.distill": "vtk.training.objectives.distillation",
    "vtk.training.objective": "vtk.training.objectives.base",
    "vtk.training.parallel": "vtk.training.engine.processes",
    "vtk.training.policy": "vtk.training.policies.policy",
    "vtk.training.precision": "vtk.training.engine.precision",
    "vtk.training.sam": "vtk.training.step_rules.sam",
    "vtk.training.streams": "vtk.training.engine.streams",
    "vtk_export.config": "vtk_export",
    "vtk_export.tensorrt.lint": "vtk_export.lint",
    "vtk_export.tensorrt_config": "vtk_export.tensorrt.config",
}
"""Modules that the documents and examples of version 0.1 import, and all of its two packages that have new names."""


def new_name(name: str) -> str | None:
    """Return what a module of version 0.1 is called now; None for a name that is not an old one."""
    for old, new in PACKAGES.items():
        if name == old or name.startswith(f"{old}."):
            name = new + name.removeprefix(old)
            return MODULES.get(name, name)
    return MODULES.get(name)


def alias(name: str) -> None:
    """Put the new module in the place of the one that is being imported under its old name, and warn."""
    new = new_name(name)
    assert new is not None
    module = importlib.import_module(new)
    if (empty := sys.modules.get(name)) is not None:  # another thread may hold what this import began with
        vars(empty)["__getattr__"] = functools.partial(getattr, module)
    sys.modules[name] = module
    statement, level = _import_statement(name)
    if statement == name:  # else the package of what is imported, which will warn itself
        warnings.warn(
            f"{name} is now {new}; import that: version 1 will not have the old name", FutureWarning, stacklevel=level
        )


def moved_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module some of whose names of version 0.1 are in another module now.

    Args:
        module: ``__name__`` of it.
        names: name to the module that defines it.
    """

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module}.{name} is now {names[name]}.{name}; import that: version 1 will not have the old name"
        warnings.warn(text, FutureWarning, stacklevel=2)
        return getattr(importlib.import_module(names[name]), name)

    return getattr_


def install() -> None:
    """Let the import system find old names, before the finder of files, which would load their modules twice."""
    sys.meta_path.insert(0, _OldNames())


class _OldNames:
    """Finds and loads modules of old names, but for the two packages, which are files."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of an alias; None for other names."""
        if name in PACKAGES or (new := new_name(name)) is None or not _exists(new):
            return None
        return ModuleSpec(name, self, origin=new)  # type: ignore[arg-type]  # it has what the import system calls

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system to make an empty module, which `alias` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the module by the new one."""
        alias(module.__name__)


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _import_statement(name: str) -> tuple[str, int]:
    """Return the module that the running import statement names, and the ``stacklevel`` of its line for `alias`.

    The import system imports the packages of a module first: ``import vtk.tasks.load`` imports ``vtk.tasks``.
    """
    frame: FrameType | None = sys._getframe(2)
    level = 2
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:  # these are no levels to `warnings`
            found = frame.f_locals.get("name")
            name = found if isinstance(found, str) and found.startswith(name) else name
        elif frame.f_globals.get("__name__") in (name, __name__, "importlib"):
            level += 1
        else:
            break
        frame = frame.f_back
    return name, level
