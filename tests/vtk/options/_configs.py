"""Every config of the toolkit, by class name, with values for what has no default."""

import dataclasses
import importlib
from typing import Any

from vtk.options import Config

MODULES = (
    "vtk.training.finetune_config", "vtk.training.train_config", "vtk.training.pretrain.config",
    "vtk.evaluation.config",
    "vtk.analysis.config", "vtk.branches.config", "vtk.packs.config", "vtk.data.config", "vtk.bank.config",
    "vtk.profiling.config", "vtk.profiling.server.config", "vtk_export.onnx.config", "vtk_export.aoti.config",
    "vtk_export.tasks.config",
    "vtk_export.tensorrt.config", "vtk_export.triton.config", "vtk.commands.demo", "vtk.commands.doctor",
)  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    "ProfileCommand": {"source": "m"}, "AnalyzeCommand": {"model": "m"}, "BenchConfig": {"tasks": 2},
    "CompressConfig": {"rank": 8},
    "TritonCommand": {"sources": ("m",)}, "TensorrtConfig": {"out": "o"}, "TensorrtCommand": {"out": "o"},
}  # fmt: skip
"""What a config refuses to be without, beside the fields that have no default."""


def configs() -> dict[str, type[Config]]:
    found: dict[str, type[Config]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Config) and kind.__module__ == name:
                if kind.__name__.endswith(("Config", "Command")):
                    found[kind.__name__] = kind
    return found


def make(kind: type[Config], **values: Any) -> Config:
    needed = dict(NEEDED.get(kind.__name__, {}))
    for f in dataclasses.fields(kind):
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            needed.setdefault(f.name, "fp32" if f.name == "pack_dtype" else "given")
    return kind(**{**needed, **values})
