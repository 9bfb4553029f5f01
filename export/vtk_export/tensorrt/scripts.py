"""Writes the files beside ``model.onnx``: scripts for trtexec and polygraphy, ``profile.json`` and the README.md.

Flags are those of trtexec 10 and 11 ("Command-Line Programs" and the pages on migration in NVIDIA's documentation): 11
has no precision flags and is always strongly typed, 10 is with ``--stronglyTyped``. Names come from the parsed file.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from vtk.card import Card
from vtk.errors import UsageError
from vtk.markdown import span
from vtk.marks import begins, beside, json_with, says
from vtk.packs.readme import NO_NAMES, card_sections
from vtk_export.readme import TENSORRT, input_facts, onnx_code, use_of
from vtk_export.targets import Target

MODEL, ENGINE, CACHE = "model.onnx", "model.engine", "timing.cache"
PROFILE, BUILD, COMPARE, PYTHON = "profile.json", "build.sh", "compare.sh", "build_engine.py"
STAMP = f"{ENGINE}.json"
CARD = "model.json"
_INPUTS, _OUTPUTS = "compare-inputs.json", "compare-onnxruntime.json"

SIDE_FILES = (PROFILE, BUILD, COMPARE, PYTHON)
"""Files that an export writes beside the model."""

BUILT = (ENGINE, STAMP)
"""Built of one model.onnx: a new one removes them."""

LEFT = (*BUILT, CACHE, _INPUTS, _OUTPUTS, "__pycache__")
"""Files that the scripts write."""

_PROFILE = json_with("tensorrt", "precision", "inputs", "outputs")
_BUILDER = begins('"""Builds model.engine from model.onnx')
MARKS = {
    PROFILE: _PROFILE,
    BUILD: says(f"# Builds {ENGINE} with TensorRT"),
    COMPARE: says(f"# Compares {ENGINE} with ONNX Runtime"),
    PYTHON: _BUILDER,
    **dict.fromkeys((ENGINE, CACHE, _INPUTS, _OUTPUTS), beside(PYTHON, _BUILDER)),
    STAMP: json_with("tensorrt"),
}
"""Files of both kinds, and how they are recognised: what the scripts leave by the script beside it."""

TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 2e-2, "bf16": 1e-1, "fp8": 1e-1}
"""Absolute and relative, of logits of order 1, by what products are computed in."""

_HEAD = '#!/usr/bin/env bash\n{comment}\nset -euo pipefail\ncd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"\n\n'


def profile(
    proto: onnx.ModelProto,
    target: Target,
    shapes: Sequence[int],
    *,
    precision: str,
    tf32: bool,
    workspace: int,
    fp8: bool = False,
    names: Mapping[str, str] = NO_NAMES,
) -> dict[str, Any]:
    """Return the content of ``profile.json``, which the scripts read.

    Args:
        proto: the file's graph.
        target: version of TensorRT.
        shapes: fewest, usual and most images of one call.
        precision: of the file.
        tf32: whether fp32 products may be rounded.
        workspace: MiB.
        fp8: its wide products read e4m3.
        names: of inputs and outputs that differ from this toolkit's.
    """
    inputs = {value.name: _ranges(value, shapes) for value in proto.graph.input}
    return {
        "tensorrt": target.version, "precision": precision, "strongly_typed": not target.version.startswith("8"),
        "tf32": tf32, "workspace_mib": workspace, "inputs": inputs, **({"fp8": True} if fp8 else {}),
        "outputs": {value.name: _dims(value) for value in proto.graph.output}, **({"names": names} if names else {}),
    }  # fmt: skip


def trtexec(found: Mapping[str, Any]) -> list[str]:
    """Return the arguments of ``trtexec`` for a profile."""
    words = ["trtexec", f"--onnx={MODEL}", f"--saveEngine={ENGINE}"]
    for which in ("min", "opt", "max"):
        ranges = [
            f"{_name(name)}:{'x'.join(map(str, entry[which]))}"
            for name, entry in found["inputs"].items()
            if entry["dynamic"]
        ]
        # for a graph of one size trtexec refuses shapes
        words += [f"--{which}Shapes={','.join(ranges)}"] if ranges else []
    if found["strongly_typed"] and found["tensorrt"].startswith("10"):
        words.append("--stronglyTyped")
    if not found["tf32"]:
        words.append("--noTF32")
    return [*words, f"--memPoolSize=workspace:{found['workspace_mib']}", f"--timingCacheFile={CACHE}",
            "--profilingVerbosity=detailed", "--skipInference"]  # fmt: skip


def polygraphy(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the arguments of two runs: ONNX Runtime on random images, and the engine on the same ones, compared."""
    shapes = [f"{_name(name)}:[{','.join(map(str, entry['opt']))}]" for name, entry in found["inputs"].items()]
    kind = "tf32" if found["precision"] == "fp32" and found["tf32"] else found["precision"]
    kind = "fp8" if found.get("fp8") else kind
    bound = f"{TOLERANCE[kind]:g}"
    # ONNX Runtime has no bf16 arithmetic on the CPU
    where = ["--providers", "cuda"] if found["precision"] == "bf16" else []
    return [
        ["polygraphy", "run", MODEL, "--onnxrt", *where, "--input-shapes", *shapes, "--val-range", "[-2,2]",
         "--save-inputs", _INPUTS, "--save-outputs", _OUTPUTS],
        ["polygraphy", "run", ENGINE, "--model-type", "engine", "--trt", "--load-inputs", _INPUTS,
         "--load-outputs", _OUTPUTS, "--atol", bound, "--rtol", bound],
    ]  # fmt: skip


def build_script(found: Mapping[str, Any]) -> str:
    """Return ``build.sh``."""
    comment = (
        f"# Builds {ENGINE} with TensorRT {found['tensorrt']} or newer; an engine is for this GPU and this version."
    )
    return _HEAD.format(comment=comment) + _shell(trtexec(found))


def compare_script(found: Mapping[str, Any]) -> str:
    """Return ``compare.sh``."""
    comment = f"# Compares {ENGINE} with ONNX Runtime on random images (polygraphy, from NVIDIA's package index)."
    return _HEAD.format(comment=comment) + "\n".join(_shell(line) for line in polygraphy(found))


def tensorrt_page(
    card: Card, *, half: str, batch: int | None, version: str, called: Mapping[str, str] = NO_NAMES
) -> str:
    """Return the page of a TensorRT folder: how to build the engine, and the same graph in ONNX Runtime.

    Args:
        card: of the model.
        half: ``fp16`` or ``bf16`` where inputs and outputs have that type, else "".
        batch: fixed batch size, None for the range in ``profile.json``.
        version: of TensorRT.
        called: names of inputs and outputs that differ from this toolkit's.
    """
    return (
        f"{TENSORRT}{span(card.model.name)}\n\n"
        f"`bash build.sh` or `python build_engine.py` builds `model.engine` from `model.onnx` with TensorRT {version} "
        "or newer. Run it on the target GPU: an engine is specific to one GPU and one TensorRT version. From Python, "
        "`build_engine.load_engine()` checks the engine's stamp and returns it. `profile.json` has the range of batch "
        "sizes; TensorRT refuses others. `bash compare.sh` compares the engine with ONNX Runtime.\n\n"
        f"{input_facts(card, False, half or 'fp32', batch, None, called=called)}\n\n"
        "Without TensorRT, with onnxruntime and Pillow installed, run these lines in this folder to load the same "
        f"graph; {use_of('logits')}:\n\n"
        f"{onnx_code(card, names=('logits',), half=half, batch=batch, called=called)}\n"
        f"{card_sections(card, called=called)}"
    )


def _shell(words: Sequence[str]) -> str:
    """Return quoted arguments, one line per flag with its values."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return " \\\n  ".join(" ".join(line) for line in lines) + "\n"


def _ranges(value: onnx.ValueInfoProto, shapes: Sequence[int]) -> dict[str, Any]:
    dims = _dims(value)["shape"]
    if -1 in dims[1:]:
        raise UsageError(f"`{value.name}` has open axes besides the batch, {dims}; fix them")
    dynamic = dims[0] == -1
    ranges = {w: [n if dynamic else dims[0], *dims[1:]] for w, n in zip(("min", "opt", "max"), shapes, strict=True)}
    return {"dtype": onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type), "dynamic": dynamic, **ranges}


def _dims(value: onnx.ValueInfoProto) -> dict[str, Any]:
    kind = value.type.tensor_type
    return {"dtype": onnx.TensorProto.DataType.Name(kind.elem_type),
            "shape": [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]}  # fmt: skip


def _name(name: str) -> str:
    """Return a tensor's name as trtexec and polygraphy read it in a list of shapes."""
    if re.fullmatch(r"[\w./-]+", name, re.ASCII):
        return name
    if set(name) & set("',[]\"") or not name.isprintable():
        raise UsageError(f"trtexec cannot be given shapes of an input called {name!r}; rename it")
    return f"'{name}'"
