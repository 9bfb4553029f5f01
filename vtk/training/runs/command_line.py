"""A run's command line, its ``config.yaml``, and the versions it ran with."""

import dataclasses
import platform
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from vtk.options import option_of
from vtk.options.config import flag_of
from vtk.training.recipes import is_file
from vtk.training.run_config import RunConfig


def config_text(config: RunConfig) -> str:
    """Return the effective config as YAML that ``--config`` reads back; what belongs to one call is left out."""
    data = "" if config.tasks else " DATA"
    head = f"# {command_line(config)}\n# vtk {config.command} --config THIS-FILE{data} repeats the run\n"
    return head + yaml.safe_dump(config_values(config), sort_keys=False, allow_unicode=True)


def config_values(config: RunConfig) -> dict[str, Any]:
    """Return the effective config as plain YAML values; what belongs to one call is left out."""
    values = dataclasses.asdict(config)
    for name in ("resume", "overwrite", "stop_after", "data", "out", "attn_only", "dry_run"):
        values.pop(name, None)
    if is_file(values.get("recipe")):  # its values are all here, and the file may be gone by then
        values["recipe"] = None
    return {k: list(v) if isinstance(v, tuple) else str(v) if isinstance(v, Path) else v for k, v in values.items()}


def command_line(config: RunConfig) -> str:
    """Return the command of this run: data, and each flag whose value is not the default; ``--out`` is left out."""
    words = ["vtk", config.command, *([] if config.data is None else [str(config.data)])]
    defaults = config.defaults()
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if (
            f.name in ("data", "out", "resume", "overwrite", "stop_after", "workers", "dry_run", "track", "save_every")
            or value == defaults[f.name]
        ):
            continue
        if f.name == "memory" and value != "act8":  # the other modes change no result
            continue
        flag = flag_of(type(config), f.name).removeprefix("--")
        if option_of(type(config), f.name).flag and isinstance(value, tuple):  # once for each
            words += [word for each in value for word in (f"--{flag}", str(each))]
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def versions() -> dict[str, str]:
    """Return the versions that a card records."""
    versions_by_name = {"python": platform.python_version()}
    for key, name in (("torch", "torch"), ("timm", "timm"), ("vtk", "vit-toolkit")):
        try:
            versions_by_name[key] = version(name)
        except PackageNotFoundError:  # run from a checkout
            from vtk import __version__

            versions_by_name[key] = __version__ if key == "vtk" else "unknown"
    return versions_by_name
