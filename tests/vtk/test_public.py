"""The names of ``vtk``: there whatever was imported, those of 0.1 among them, typed by a stub, shown in a document."""

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vtk
from tests.vtk import _stub
from vtk.options import Config

REPO = Path(__file__).resolve().parents[2]
OF_0_1 = {
    "Card", "create_model", "evaluate", "export_onnx", "export_tasks", "export_triton", "finetune", "finetune_tasks",
    "fuse", "load_backend", "load_task", "merge_task", "open_source", "pretrain", "profile", "save_task", "scan",
    "train",
}  # fmt: skip
WANTED = OF_0_1 | {
    "Callback", "Source", "Task", "TaskBank", "analyze", "audit", "compare_profiles", "export_aoti", "export_openvino",
    "export_tensorrt",
    "parallelize", "predict", "profile_server",
    "AnalyzeConfig", "AotiConfig", "AuditConfig", "EvalConfig", "FinetuneConfig", "OnnxConfig", "OpenvinoConfig",
    "ParallelizeConfig",
    "PredictConfig", "PretrainConfig", "ProfileConfig", "ServerConfig", "TasksConfig", "TensorrtConfig", "TrainConfig",
    "TritonConfig",
}  # fmt: skip

EVERY_MODULE = """
import importlib, pkgutil, sys
import vtk, vtk_export, vtk_kernels
served = "vtk_export.triton.served."  # these files run in a server, whose module they import
tops, failed = [vtk, vtk_export, vtk_kernels], []
for top in tops:
    for found in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
        if found.name.startswith((served, "vtk_export.tensorrt.served.")) or found.name.endswith("__main__"):
            continue
        importlib.import_module(found.name)
packages = [m for n, m in sorted(sys.modules.items()) if n.split(".")[0] in ("vtk", "vtk_export", "vtk_kernels")
            and hasattr(m, "__path__") and hasattr(m, "__all__")]
shadowed = [f"{p.__name__}.{name}" for p in packages for name in p.__all__
            if type(getattr(p, name)).__name__ == "module"]
assert not shadowed, shadowed
assert len(packages) > 5, packages
for name in vtk.__all__:
    assert callable(getattr(vtk, name)), name
    assert getattr(vtk, name).__name__ == name, name
print(len(vtk.__all__))
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_no_package_or_module_shadows_a_name() -> None:
    assert int(run(EVERY_MODULE)) == len(vtk.__all__)


def test_names_of_0_1_and_of_every_command_are_there() -> None:
    assert WANTED <= set(vtk.__all__) and set(vtk.__all__) <= set(dir(vtk))
    assert all(issubclass(getattr(vtk, name), Config) for name in vtk.__all__ if name.endswith("Config"))


def test_the_package_and_its_configs_import_no_torch() -> None:
    names = [name for name in vtk.__all__ if name.endswith("Config")]
    code = f"import sys, vtk; [getattr(vtk, n) for n in {names}]; sys.exit('torch' in sys.modules)"
    run(code)


def test_what_is_opened_comes_first_then_what_is_done() -> None:
    for name in (
        "analyze",
        "export_aoti",
        "export_onnx",
        "export_openvino",
        "export_tensorrt",
        "parallelize",
        "predict",
        "profile",
    ):
        found = inspect.signature(getattr(vtk, name))
        first, second, *rest = found.parameters.values()
        assert (first.name, second.name) == ("source", "config") and "Openable" in str(first.annotation), name
        assert rest[-1].kind is inspect.Parameter.VAR_KEYWORD and "Opening" in str(rest[-1].annotation), name
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in rest[:-1]), name


def test_the_stub_is_that_of_the_table() -> None:
    assert _stub.PATH.read_text("utf-8") == _stub.stub(vtk._where), "python tests/vtk/_stub.py --write"


RIGHT = """
from pathlib import Path

import vtk
from torch import nn, Tensor

reveal_type(vtk.finetune)
result = vtk.finetune(vtk.FinetuneConfig(data=Path("pets"), epochs=3), callbacks=[])
task: vtk.Task = vtk.load_task(result.task)
labels: tuple[str, ...] = task.predict("cat.jpg", top_k=1)[0].labels
module = nn.Sequential(nn.Flatten())
vtk.export_onnx(module, vtk.OnnxConfig(out=Path("o")), img_size=(32, 48), classes=["a"])
vtk.profile(task, vtk.ProfileConfig(batch_sizes=(1, 8)))
score = vtk.evaluate("runs/pets", vtk.EvalConfig(data=Path("pets"))).metrics
def run(images: Tensor) -> Tensor:
    return images
top1: float = vtk.evaluate(run, [], ["a", "b"]).top1
class Mine(vtk.Callback):
    def on_step(self, info: vtk.StepInfo) -> None:
        if info.loss > 9.0:
            info.stop()
vtk.train(vtk.TrainConfig(data=Path("pets")), callbacks=[Mine()])
model = vtk.create_model("vit_tiny_patch16_224", num_classes=3)
model.created.base.ref.id.upper()
"""

WRONG = """
from pathlib import Path

import vtk

vtk.finetune("pets")
vtk.FinetuneConfig(data=Path("pets"), epoch=3)
vtk.FinetuneConfig(data=Path("pets"), pack_dtype="int4")
vtk.export_onnx("runs/pets", vtk.ProfileConfig())
vtk.export_onnx("runs/pets", vtk.OnnxConfig(out=Path("o")), image_size=32)
vtk.profile("runs/pets", vtk.ProfileConfig(), pretrained="no")
vtk.load_task("runs/pets").predict("cat.jpg", topk=1)
vtk.evaluate("runs/pets", "pets")
vtk.train(vtk.TrainConfig(data=Path("pets")), callbacks=[print])
vtk.finetun
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What mypy says, strictly, of a user's two scripts."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    # as a user has it: packages that are installed, without their sources
    (folder / "mypy.ini").write_text("[mypy]\nstrict = true\n")
    paths = {"MYPYPATH": ":".join(str(REPO / p) for p in (".", "kernels", "export"))}

    argv = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "mypy.ini",
        "--follow-imports",
        "silent",
        "right.py",
        "wrong.py",
    ]
    argv += ["--cache-dir", str(REPO / ".mypy_cache" / "user")]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, env=os.environ | paths, check=False).stdout


@pytest.mark.slow  # mypy reads torch: half a minute without its cache
def test_a_users_right_script_is_right_and_the_function_has_a_signature(checked: str) -> None:
    told = [line for line in checked.splitlines() if line.startswith("right.py")]
    assert not [line for line in told if ": error:" in line], told
    (revealed,) = [line for line in told if "Revealed type" in line]
    assert "FinetuneConfig" in revealed and "FinetuneResult" in revealed and "callbacks" in revealed


@pytest.mark.slow
def test_every_wrong_line_is_reported(checked: str) -> None:
    lines = {int(number) for number in re.findall(r"^wrong\.py:(\d+): error:", checked, re.M)}
    wanted = {i for i, line in enumerate(WRONG.splitlines(), 1) if line and "import" not in line}
    assert lines == wanted, (wanted - lines, checked)


def scripts(page: str) -> dict[str, str]:
    """Return the Python blocks of a page by the heading that they stand under."""
    text = (REPO / "docs" / "guides" / page).read_text("utf-8")
    found = {}
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        for block in re.findall(r"^```python\n(.*?)^```", part, re.M | re.S):
            found[part.splitlines()[0]] = block
    return found


@pytest.fixture
def pets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in with ``data/pets``, and a hub that has random numbers."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / "data" / "pets" / part / name
            folder.mkdir(parents=True)
            for i in range(3):
                pixels = rng.integers(0, 150, (40, 50, 3))
                pixels[..., label] += 100
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.jpg")

    def hub(name: str, kwargs: Any) -> Any:
        import timm

        from vtk.models.weights.base import make_base

        state = timm.create_model(name, **kwargs).state_dict()
        return make_base(state, source=f"hub:{name}", task_names=("head.weight", "head.bias", "pos_embed"))

    monkeypatch.setattr("vtk.models.create.hub_base", hub)
    monkeypatch.setattr("vtk.training.runs.prepare.default_workers", lambda *_: 0)  # six images: no processes for them
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("title", ["Export an `nn.Module`", "Measure it"])
def test_scripts_for_a_module_are_true(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = scripts("python.md")[title].replace("duration=1.0", "duration=0.1")
    exec(compile(code, title, "exec"), {})


def test_no_module_has_the_name_of_a_function() -> None:
    # importing one would put it in the place of the function; the slow test imports them all
    here = REPO / "vtk"
    assert not [name for name in vtk.__all__ if (here / name).exists() or (here / f"{name}.py").exists()]


def test_the_page_on_python_is_true(pets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = scripts("python.md")
    assert len(found) >= 4 and all(len(code.strip().splitlines()) <= 12 for code in found.values())
    told = {}
    for title, code in found.items():
        exec(compile(code, title, "exec"), {})
        told[title] = capsys.readouterr().out
    assert (pets / "runs" / "pets" / "task" / "task.json").is_file()
    assert (pets / "exports" / "small" / "model.onnx").is_file()
    joined = "\n".join(told.values())
    assert "top-1 " in joined and "largest error" in joined and "ort-cpu" in joined, textwrap.shorten(joined, 2000)
