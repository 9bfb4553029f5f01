"""Trial of the ONNX Runtime providers in a process of their own.

A provider whose libraries are missing prints to stderr and falls back to the CPU without an error; a wrong driver can
end the process. Neither may affect the calling process.
"""

import contextlib
import importlib.util
import json
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vtk._path import child, environment
from vtk.commands._doctor_checks import Check, distributions, one_line
from vtk.packages import ORT, PACKAGES

DEADLINE_S = 10.0
"""Seconds for all providers together."""

USED = {
    "CPUExecutionProvider": "ort-cpu", "CUDAExecutionProvider": "ort-cuda", "TensorrtExecutionProvider": "ort-trt",
}  # fmt: skip
"""Providers that back-ends of this version run on."""

# One line of JSON for each provider, so that it is known which one ended the process. torch comes first where there is
# a GPU: it brings the CUDA libraries that the provider then finds in the process.
_TRY = """
import json, sys
with_torch, skip = sys.argv[1] == "1", sys.argv[2:]
if with_torch:
    import torch
import numpy as np
import onnxruntime as ort
names = ort.get_available_providers()
print(json.dumps([ort.__version__, names]), flush=True)
model = sys.stdin.buffer.read()
for name in names:
    if name in skip:
        continue
    print("trying", name, file=sys.stderr, flush=True)
    try:
        session = ort.InferenceSession(model, providers=[name])
        result = session.run(None, {"x": np.full((2, 2), 3, np.float32)})[0]
        answer = [name, session.get_providers()[0], float(result.sum())]
    except Exception as error:
        answer = [name, str(error), 0.0]
    print(json.dumps(answer), flush=True)
"""
_RIGHT = 36.0  # four times 3²


@dataclass(frozen=True)
class Tried:
    """One provider: the first provider of its session or an error, whether it computed, and what it wrote to stderr."""

    name: str
    got: str
    right: bool
    stderr: str


class Trial:
    """Tries all providers in the background; made early, asked late.

    Args:
        with_torch: import torch first.
        deadline_s: seconds for all of them together.
    """

    def __init__(self, with_torch: bool, deadline_s: float = DEADLINE_S) -> None:
        self._with_torch, self._end = "1" if with_torch else "0", time.monotonic() + deadline_s
        self._process = start([_TRY, self._with_torch])

    def result(self) -> tuple[str, list[Tried]]:
        """Return onnxruntime's version, empty if it does not import, and what became of each provider it lists.

        Without a version the list holds one entry that says why.
        """
        version, tried = "", dict[str, Tried]()
        while True:
            code, out, err = finish(self._process, self._end)
            lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
            if not lines:
                return version, [*tried.values()] or [Tried("", why(err) or ended(code), False, err)]
            version, names = lines[0]
            notes = dict(part.partition("\n")[::2] for part in f"\n{err}".split("\ntrying ")[1:])
            for name, got, total in lines[1:]:
                tried[name] = Tried(name, got, got == name and total == _RIGHT, notes.get(name, ""))
            left = [name for name in names if name not in tried]
            if not left:
                return version, [tried[name] for name in names]
            # the first one without an answer ended the process, or hangs; the others are tried without it
            for name in left if code is None else left[:1]:
                tried[name] = Tried(name, ended(code), False, notes.get(name, ""))
            self._process = start([_TRY, self._with_torch, *tried])


def check_providers(trial: Trial, cuda_device: bool, torch_cuda: str | None) -> Iterator[Check]:
    """Report for each provider that onnxruntime lists whether it loads.

    Args:
        trial: started earlier.
        cuda_device: torch sees a CUDA device.
        torch_cuda: CUDA version that torch was built for.
    """
    version, tried = trial.result()
    if not version and importlib.util.find_spec("onnxruntime") is None:
        package = PACKAGES["onnxruntime"]
        yield Check("onnxruntime", "import", "note", f"not installed; needed for {package.jobs}", package.install)
        return
    if not version:
        fix = f"pip install --force-reinstall {wheel()}"
        yield Check("onnxruntime", "import", "fatal", f"onnxruntime does not import: {tried[0].got}", fix)
        return
    yield from check_cuda_major(version, cuda_device, torch_cuda)
    for provider in tried:
        yield judge(provider, cuda_device)


def check_cuda_major(version: str, cuda_device: bool, torch_cuda: str | None) -> Iterator[Check]:
    """Compare the CUDA version of onnxruntime's wheel with torch's."""
    built = build_cuda()
    if built is None:
        yield Check("onnxruntime", "version", "ok", f"{version}, built without CUDA")
    elif torch_cuda is None:
        detail = f"{version} for CUDA {built}; torch is built without CUDA, so `ort-cuda` is not used"
        yield Check("onnxruntime", "version", "note", detail)
    elif built.split(".")[0] != torch_cuda.split(".")[0]:
        detail = f"{version} is built for CUDA {built}, torch for CUDA {torch_cuda}: they cannot share one process"
        ours, theirs = built.split(".")[0], torch_cuda.split(".")[0]
        fix = f"install a torch built for CUDA {ours}, or an onnxruntime-gpu release for CUDA {theirs}"
        yield Check("onnxruntime", "version", "problem" if cuda_device else "note", detail, fix)
    else:
        yield Check("onnxruntime", "version", "ok", f"{version} for CUDA {built}, torch for CUDA {torch_cuda}")


def judge(tried: Tried, cuda_device: bool) -> Check:
    """Return the check of one provider from its trial."""
    name = tried.name
    short = name.removesuffix("ExecutionProvider")
    if tried.right:
        backend = f" (back-end {USED[name]})" if name in USED else ""
        return Check("onnxruntime", short, "ok", f"loads and computes{backend}")
    fell_back = f"onnxruntime fell back to {tried.got}" if tried.got.endswith("Provider") else one_line(tried.got)
    detail = f"listed, but does not load: {why(tried.stderr) or fell_back}"
    if name == "CPUExecutionProvider":
        return Check("onnxruntime", short, "fatal", detail, f"pip install --force-reinstall {wheel()}")
    if name == "CUDAExecutionProvider" and cuda_device:
        fix = "install an onnxruntime-gpu for torch's CUDA, and cuDNN 9: pip install 'onnxruntime-gpu[cuda,cudnn]'"
        return Check("onnxruntime", short, "problem", detail, fix)
    if name == "CUDAExecutionProvider":
        return Check("onnxruntime", short, "note", "listed; does not load, as there is no CUDA device")
    needed = f"only the back-end {USED[name]} needs it" if name in USED else "no back-end of this version needs it"
    return Check("onnxruntime", short, "note", f"{detail}; {needed}")


# an ONNX model that squares its input `x` (2, 2), opset 13; of IR version 8, which every onnxruntime reads. In bytes,
# since onnx may not be here
_SQUARE = bytes.fromhex(
    "08083a400a0e0a01780a017812017922034d756c120474696e795a130a0178120e0a0c0801"
    "12080a0208020a02080262130a0179120e0a0c080112080a0208020a02080242040a00100d"
)


def wheel() -> str:
    """Return the distribution that the module onnxruntime is of: another one beside it would overwrite its files."""
    installed = distributions()
    return next((name for name in ORT if name in installed), ORT[-1])


def build_cuda() -> str | None:
    """Return the CUDA version that onnxruntime was built for, read from its files without importing it."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "capi" / "build_and_package_info.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^cuda_version\s*=\s*['\"](\d[\d.]*)['\"]", text, re.MULTILINE)
    return found.group(1) if found else None


def why(stderr: str) -> str:
    """Return the error line in the stderr of a trial."""
    if found := re.search(r"with error: (.+)", stderr):
        return one_line(found.group(1))
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in stderr.splitlines()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception|Fail)\b", line)]
    return one_line(errors[-1]) if errors else ""


def ended(code: int | None) -> str:
    """Describe how a process ended that gave no answer."""
    if code is None:
        return "no answer in time"
    return f"the process was ended by signal {-code}" if code < 0 else f"the process ended with code {code}"


def start(arguments: list[str]) -> "subprocess.Popen[bytes]":
    """Start Python on a script and its arguments; the ONNX model that squares its input comes on stdin."""
    pipe = subprocess.PIPE
    # a folder named onnxruntime in the current directory is not the package
    process = subprocess.Popen(child("-c", *arguments), stdin=pipe, stdout=pipe, stderr=pipe, env=environment())
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended before reading; its exit code says so
        process.stdin.write(_SQUARE)  # a hundred bytes: fits the pipe's buffer
        process.stdin.close()
    process.stdin = None
    return process


def finish(process: "subprocess.Popen[bytes]", end: float) -> tuple[int | None, str, str]:
    """Return exit code, stdout and stderr; the code is None, and the process gone, when ``end`` passed."""
    try:
        out, err = process.communicate(timeout=max(end - time.monotonic(), 0.1))
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        code = None
    return code, out.decode(errors="replace"), err.decode(errors="replace")
