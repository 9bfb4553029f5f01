"""What other tools did with our files: rows of tests that passed, for docs/reference/tools.md.

A test calls the fixture ``record``; `make test-peers` names the file that the rows of its tests go to
(VTK_PEER_RECORDS). A test that fails loses the rows it had there.
"""

import dataclasses
import functools
import json
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("records.json")
DISTRIBUTIONS = {
    "ONNX checker": "onnx", "ONNX version converter": "onnx", "ONNX Runtime": "onnxruntime", "LiteRT": "ai-edge-litert",
    "ONNX Runtime's quantiser": "onnxruntime", "ONNX Runtime's transformers optimizer": "onnxruntime",
    "fp16 converter": "onnxconverter-common", "PEFT": "peft", "OpenVINO": "openvino",
    "LiteRT by litert-torch": "litert-torch", "LiteRT by onnx2tf": "onnx2tf", "Core ML by coremltools": "coremltools",
    "transformers' wrapper of timm": "transformers", "transformers' own classes": "transformers",
}  # fmt: skip
"""What pip or npm calls a tool, where that is not its name."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What a tool did with a file.

    Attributes:
        tool: its name.
        version: that ran.
        file: of ours, in the words of the table.
        outcome: ``run``, ``converted`` or ``checked``.
        difference: largest one of the outputs from PyTorch's, as a share of the largest output; None if not compared.
    """

    tool: str
    version: str
    file: str
    outcome: str
    difference: float | None


def keep_report(report: pytest.TestReport, path: Path) -> None:
    """Put the rows of a test that ended in place of its earlier ones; one that failed has none."""
    if report.when != "call" and not report.failed:
        return
    records = json.loads(path.read_text("utf-8")) if path.exists() else {}
    rows = [dataclasses.asdict(value) for name, value in report.user_properties if name == "peer"]  # type: ignore[call-overload]
    records.pop(report.nodeid, None)
    if report.passed and rows:
        records[report.nodeid] = rows
    path.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n", "utf-8")


def version_of(tool: str, place: str) -> str:
    """Return the version of a tool in an interpreter, or in a folder of npm's packages."""
    name = DISTRIBUTIONS.get(tool, tool)
    package = Path(place) / "node_modules" / name / "package.json"
    return str(json.loads(package.read_text("utf-8"))["version"]) if package.exists() else _installed(name, place)


@functools.cache
def _installed(name: str, python: str) -> str:
    code = f"import importlib.metadata; print(importlib.metadata.version({name!r}))"
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()
