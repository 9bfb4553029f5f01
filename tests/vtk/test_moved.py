"""Names of version 0.1 import the modules that they became, and warn once where the user's line stands."""

import importlib
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vtk import _moved
from vtk.packs.load import Task

PUBLIC = {
    "vtk.tasks": "Task load_checkpoint load_task merge_task read_card save_task store_base",
    "vtk.serving": "Memory TaskBank TaskInfo TaskMemory launches",
}
"""Names that the packages of version 0.1 export."""

MODULES = {
    "vtk.tasks": "adapters base bundle diff from_peft hub hub_card hub_errors int8 load lora merge pack peft "
    "peft_readme plain",
    "vtk.serving": "bank bench bench_result calls config counting ends entry folded fused fused_calls graphs layout "
    "memory residency shared stacks state stores",
}
"""Their modules."""

OTHERS = {
    "vtk.data.transforms": "train_transform",
    "vtk.models.files": "read_safetensors",
    "vtk.models.parts": "head_names",
    "vtk.training.config": "FinetuneConfig",
    "vtk.training.distill": "Distillation",
    "vtk.training.objective": "Batch",
    "vtk.training.parallel": "Ranks",
    "vtk.training.precision": "make_precision",
    "vtk.training.sam": "Ascent",
    "vtk.training.streams": "ImageStream",
    "vtk_export.tensorrt_config": "parse_version",
}
"""Modules whose import lines stand in documents and examples of version 0.1, and what these import."""


LINES = (
    "from vtk.analysis import attention_entropy, hessian_max",
    "from vtk.card import Card",
    "from vtk.card import Card, Transform",
    "from vtk.data.audit import Sample",
    "from vtk.data.loader import EpochSampler, mix",
    "from vtk.data.loader import make_loader",
    "from vtk.data.loader import mix",
    "from vtk.data.transforms import eval_transform, train_transform",
    "from vtk.files import prepare_output",
    "from vtk.formats import save_tensors",
    "from vtk.models import create_model",
    "from vtk.models.files import read_safetensors",
    "from vtk.models.parts import head_names",
    "from vtk.serving import TaskBank",
    "from vtk.tasks.load import load_task",
    "from vtk.tasks.merge import merge_task",
    "from vtk.tasks.pack import save_task",
    "from vtk.training import FinetuneConfig",
    "from vtk.training import TrainConfig, from_recipe",
    "from vtk.training import apply_memory_mode, policy",
    "from vtk.training import policy",
    "from vtk.training.config import FinetuneConfig",
    "from vtk.training.engine import fit",
    "from vtk.training.finetune import finetune",
    "from vtk.training.frozen_ffn import remove_memory_mode",
    "from vtk.training.objective import Batch",
    "from vtk.training.parallel import Ranks",
    "from vtk.training.precision import make_precision",
    "from vtk.training.streams import ImageStream",
    "from vtk_export.tensorrt.lint import lint, load",
    "from vtk_export.tensorrt_config import parse_version",
)
"""Import lines of the documents and examples of version 0.1."""


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Import old names anew in each test."""

    def drop() -> None:
        for name in [name for name in sys.modules if _moved.new_name(name)]:
            del sys.modules[name]
            package, _, attribute = name.rpartition(".")
            if package in sys.modules:
                vars(sys.modules[package]).pop(attribute, None)

    drop()
    yield
    drop()


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("old", PUBLIC)
def test_every_public_name_of_version_0_1_is_there(old: str) -> None:
    with pytest.warns(FutureWarning):
        package = importlib.import_module(old)
    assert all(hasattr(package, name) for name in PUBLIC[old].split())


@pytest.mark.parametrize(("package", "names"), MODULES.items())
def test_every_module_of_the_two_packages_is_the_new_module_itself(package: str, names: str) -> None:
    for name in names.split():
        with pytest.warns(FutureWarning) as caught:
            module = importlib.import_module(f"{package}.{name}")
        assert module is sys.modules[module.__name__] and module.__name__ in str(caught[-1].message)
        assert module.__name__.startswith(("vtk.packs.", "vtk.bank."))


@pytest.mark.parametrize("old", [*PUBLIC, "vtk.tasks.load", "vtk.serving.state"])
def test_a_thread_that_holds_the_module_of_an_unfinished_import_has_its_names(old: str) -> None:
    held = sys.modules[old] = ModuleType(old)
    with pytest.warns(FutureWarning):
        _moved.alias(old)
    new = sys.modules[old]
    assert held is not new and not hasattr(held, "nonsense")
    assert all(getattr(held, name) is value for name, value in vars(new).items() if not name.startswith("__"))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_import_lines_of_version_0_1_give_functions_and_classes(line: str) -> None:
    names: dict[str, Any] = {}
    exec(line, names)
    for name in map(str.strip, line.partition(" import ")[2].split(",")):
        assert isinstance(names[name], ModuleType) is (name == "policy"), name  # which was a module then, too


@pytest.mark.parametrize(("name", "attribute"), OTHERS.items())
def test_modules_that_documents_of_version_0_1_import_are_there(name: str, attribute: str) -> None:
    with pytest.warns(FutureWarning):
        assert hasattr(importlib.import_module(name), attribute)


@pytest.mark.parametrize("name", _moved.MODULES)
def test_no_module_stands_where_an_alias_would_hide_it(name: str) -> None:
    folder, leaf = name.rpartition(".")[::2]
    path = Path(importlib.import_module(folder).__path__[0])
    assert not (path / f"{leaf}.py").exists() and not (path / leaf).is_dir()


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        ("import vtk.tasks", "vtk.tasks", "vtk.packs"),
        ("from vtk.serving import TaskBank, launches", "vtk.serving", "vtk.bank"),
        ("from vtk.tasks.load import Task, load_task", "vtk.tasks.load", "vtk.packs.load"),
        ("import vtk.tasks.base", "vtk.tasks.base", "vtk.packs.base_files"),
        (
            "from vtk.runtime.source import open_source",
            "vtk.runtime.source.open_source",
            "vtk.runtime.opening.open_source",
        ),
        ("from vtk.training import policy", "vtk.training.policy", "vtk.training.policies.policy"),
        ("import importlib; importlib.import_module('vtk.tasks.load')", "vtk.tasks.load", "vtk.packs.load"),
    ],
)
def test_one_line_gives_one_warning_that_points_at_it(line: str, old: str, new: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(f"\n\n{line}\n", str(tmp_path / "user.py"), "exec"), {"__name__": "user"})
    (warning,) = caught
    assert warning.category is FutureWarning and warning.filename.endswith("user.py") and warning.lineno == 3
    assert str(warning.message).startswith(f"{old} is now {new};")


def test_a_class_pickled_under_its_old_name_is_the_same_class() -> None:
    old = pickle.dumps(Task, protocol=0).replace(b"vtk.packs.load", b"vtk.tasks.load")
    assert b"vtk.tasks.load" in old
    with pytest.warns(FutureWarning):
        assert pickle.loads(old) is Task


def test_importing_vtk_alone_says_nothing_and_brings_no_torch() -> None:
    run = python("-W", "error", "-c", "import sys, vtk; print('torch' in sys.modules, 'vtk.packs' in sys.modules)")
    assert (run.stdout, run.stderr) == ("False False\n", "")


def test_the_warning_is_visible_by_default_and_an_error_where_warnings_are(tmp_path: Path) -> None:
    script = tmp_path / "user.py"
    script.write_text("import vtk\nimport vtk.tasks.hub_errors\n")
    run = python(str(script))
    assert run.returncode == 0 and run.stderr.count("FutureWarning") == 1
    assert "user.py:2: FutureWarning: vtk.tasks.hub_errors is now vtk.packs.hub_errors" in run.stderr
    run = python("-W", "error", str(script))
    assert run.returncode == 1 and run.stderr.endswith("version 1 will not have the old name\n")


def test_a_module_that_never_was_is_not_found_by_its_own_name() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"vtk\.tasks\.nonsense"):
        importlib.import_module("vtk.tasks.nonsense")


def test_a_module_with_a_moved_name_has_no_others() -> None:
    with pytest.raises(ImportError, match="cannot import name 'open_nothing'"):
        exec("from vtk.runtime.source import open_nothing")
