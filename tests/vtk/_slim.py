"""Do a slim environment's jobs with every package blocked that its requirements do not bring.

`python _slim.py requirements/NAME.txt`, run in a copy of tests/fixtures/v0_1. In a whole environment the absent
packages are those of distributions that no line of the file needs, directly or through others; in a real slim
environment nothing is left to block, so the same jobs prove that one.
"""

import contextlib
import importlib.abc
import importlib.metadata
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(lines: Sequence[str]) -> set[str]:
    """Return what pip would install for some requirements, as far as it is installed here."""
    found: set[str] = set()
    # what comes later is read here through what is installed: where one needs `onnxruntime`, the GPU's may stand
    other = {"onnxruntime": "onnxruntime-gpu"}
    queue = [Requirement(line) for line in lines]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while queue:
        entry = queue.pop()
        name = normalise(entry.name)
        key = (name, tuple(sorted(entry.extras)))
        if key in seen:
            continue
        seen.add(key)
        for known in (name, other.get(name, name)):
            found.add(known)
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                for text in importlib.metadata.requires(known) or []:
                    inner = Requirement(text)
                    extras = ("", *entry.extras)
                    if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                        queue.append(inner)
    return found


class Without(importlib.abc.MetaPathFinder):
    """A finder that knows only some modules and distributions, as if the others were not installed."""

    def __init__(self, finder: Any, blocked: set[str], kept: set[str]) -> None:
        self.finder, self.blocked, self.kept = finder, blocked, kept

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in self.blocked else self.finder.find_spec(name, path, target)

    def find_distributions(self, *args: Any, **kwargs: Any) -> Any:
        find = getattr(self.finder, "find_distributions", lambda *args, **kwargs: ())
        return (found for found in find(*args, **kwargs) if normalise(found.metadata["Name"] or "") in self.kept)


def block(lines: Sequence[str]) -> set[str]:
    """Block what the requirements do not bring; return the names."""
    kept = closure(lines) | {"vit-toolkit", "pip", "setuptools"}
    names = {
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if not kept & set(map(normalise, distributions)) and module not in ("vtk", "vtk_kernels", "vtk_export")
    }
    sys.meta_path[:] = [Without(finder, names, kept) for finder in sys.meta_path]
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    return names


def run(*argv: str, code: int = 0) -> dict[str, Any]:
    """Run a command with --json; its exit code must be ``code``."""
    from vtk.__main__ import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        found = main([*argv, "--json"])
    assert found == code, (argv, found, out.getvalue())
    value: dict[str, Any] = json.loads(out.getvalue())
    return value


def logits(name: str) -> Any:
    import numpy as np

    return np.array(json.loads(Path("logits.json").read_text())["logits"][name], np.float32)


def pixels(card: Any) -> Any:
    import torch

    from vtk.data.decoding.images import load_image
    from vtk.data.loading.eval_pipeline import eval_transform

    images = json.loads(Path("logits.json").read_text())["images"]
    return torch.stack([eval_transform(card.input)(load_image(path)) for path in images])


def bank() -> None:
    """Two packs answer in one bank; commands of packs work, and those of ONNX say what they lack."""
    import numpy as np

    import vtk
    from vtk.bank import TaskBank

    both = TaskBank("base.safetensors")
    names = ("digits", "parity")
    for name in names:
        both.add(name, f"runs/{name}/task")
    found = both({name: pixels(vtk.open_source(f"runs/{name}").card) for name in names})
    for name in names:
        np.testing.assert_allclose(found[name].numpy(), logits(f"runs/{name}"), atol=1e-5)
    base = ("--base", "base.safetensors")
    assert run("predict", "runs/digits", "data/digits/val", *base)["count"] == 6
    run("tasks", "list", ".")
    run("tasks", "merge", "runs/digits", "--out", "merged.safetensors", *base)
    run("profile", "runs/digits", "--backends", "eager,fused", "--batch-sizes", "1", "--duration", "0.05", *base)
    lacks(("export", "onnx", "runs/digits", "--out", "x"), "onnx")
    lacks(("predict", "exports/onnx/model.onnx", "data/digits/val"), "onnx")
    lacks(("predict", "runs/digits", "data/digits/val", "--backend", "ort-cpu", *base), "onnx")
    lacks(("finetune", "data/digits", "--config", "finetune.yaml", "--out", "runs/new"), "scikit-learn", "matplotlib")
    lacks(("tasks", "to-peft", "runs/digits", "--out", "adapter", *base), "PEFT")


def train() -> None:
    """A run trains, is evaluated and resumed; what needs ONNX or PEFT says so."""
    run("finetune", "data/digits", "--config", "finetune.yaml", "--epochs", "1", "--out", "runs/new")
    assert run("eval", "runs/new", "data/digits", "--out", "evaluated")["same_conditions"]
    run("finetune", "data/digits", "--config", "finetune.yaml", "--out", "runs/digits", "--resume")
    run("train", "data/digits", "--recipe", "recipe.yaml", "--model", "vit_tiny_patch16_224", "--img-size", "32",
        "--model-kwargs", "depth=1,embed_dim=16,num_heads=2,patch_size=8", "--out", "runs/scratch")  # fmt: skip
    run("predict", "runs/new", "data/digits/val")
    bank_only = ("--base", "base.safetensors")
    run("tasks", "list", ".")
    lacks(("finetune", "data/digits", "--config", "lora.yaml", "--out", "runs/new-lora"), "PEFT")
    lacks(("export", "triton", "runs/digits", "--out", "models", *bank_only), "tritonclient", "onnx")


def cpu_server() -> None:
    """A pack is exported, and the file runs; a repository is written."""
    base = ("--base", "base.safetensors")
    run("export", "onnx", "runs/digits", "--out", "exported", *base)
    assert run("predict", "exported/model.onnx", "data/digits/val")["count"] == 6
    argv = ("--backends", "ort-cpu", "--batch-sizes", "2", "--duration", "0.05")
    measured = run("profile", "exported/model.onnx", *argv)
    assert [cell["status"] for cell in measured["backends"][0]["cells"]] == ["ok"]
    run("export", "triton", "runs/digits", "--backend", "vtk", "--out", "models", *base)
    lacks(("tasks", "to-peft", "runs/digits", "--out", "adapter", *base), "PEFT")


def lacks(argv: Sequence[str], *packages: str) -> None:
    """A command must end with one line that names one of the packages, and with exit code 5."""
    said = run(*argv, code=5)["error"]
    assert any(package in said for package in packages) and "pip install" in said and "\n" not in said, said


JOBS: dict[str, Callable[[], None]] = {"bank": bank, "train": train, "cpu-server": cpu_server}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    asked = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    blocked = block([line for line in asked if line])
    run("doctor")
    JOBS[file.stem]()
    told = sorted(blocked & {"onnx", "peft", "sklearn"})
    print(f"{file.stem}: done without {len(blocked)} modules, {', '.join(told)}")
