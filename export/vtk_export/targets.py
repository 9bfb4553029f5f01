"""Parses ``--target``, and finds the runtimes and servers that take a file (`vtk_export.runtime_versions`)."""

import re
from dataclasses import dataclass

from vtk.errors import UsageError
from vtk_export.runtime_versions import FP8, FP8_CAPS, ORT, RELEASES, TESTED, TRT, Caps, Release

__all__ = ["FP8_CAPS", "IR_VERSIONS", "KNOWN", "OLD", "OPSETS", "Target", "check_caps", "check_fp8_target",
           "describe_oldest", "oldest", "parse_target", "same_version", "server_for", "takes", "takes_fp8",
           "tensorrt_of"]  # fmt: skip

IR_VERSIONS = range(8, 11)
"""IR versions that a file can be stamped with; torch's exporter writes 10 and uses nothing that 8 lacks."""

OPSETS = range(18, 23)
"""Opsets of the standard ONNX domain that torch's exporter writes and that are tested here."""

KNOWN: dict[str, dict[str, Caps]] = {
    "tritonserver": {month: release.ort_caps for month, release in RELEASES.items()},
    "trt": {version: caps for version, caps in TRT.items() if caps[0] >= OPSETS.start},
    "ort": ORT,
}
"""Kind of runtime to its versions, oldest first, to the highest opset (of ours) and IR version that each takes."""

_NAMES = {"tritonserver": "tritonserver", "trt": "TensorRT", "ort": "onnxruntime"}
_ALIASES = {"triton": "tritonserver", "tensorrt": "trt", "onnxruntime": "ort"}


@dataclass(frozen=True)
class Target:
    """A runtime.

    Attributes:
        kind: ``tritonserver``, ``trt`` or ``ort``.
        version: as it was given.
        opset: highest one it takes.
        ir_version: highest one it takes.
    """

    kind: str
    version: str
    opset: int
    ir_version: int

    @property
    def text(self) -> str:
        """The target in the form of ``--target``."""
        return f"{self.kind}:{self.version}"

    @property
    def release(self) -> Release | None:
        """The server's release, None of other kinds."""
        return RELEASES.get(".".join(self.version.split(".")[:2])) if self.kind == "tritonserver" else None


OLD = Target("trt", "8.6", *TRT["8.6"])
"""TensorRT 8.6, whose opset is below those that torch's exporter writes: a graph is lowered to it."""


def parse_target(text: str, flag: str = "--target") -> Target:
    """Read ``tritonserver:YY.MM``, ``trt:X.Y`` or ``ort:X.Y``; a patch version is ignored.

    ``trt:10.x`` and ``trt:10`` stand for every 10. ``triton``, ``tensorrt`` and ``onnxruntime`` are aliases.

    Raises:
        UsageError: not of this form, or a version whose needs are not known; the known ones are listed.
    """
    kind, _, version = text.partition(":")
    kind = _ALIASES.get(kind, kind)
    if kind == "trt" and (any_minor := re.fullmatch(r"(\d+)(\.x)?", version)):
        version = f"{any_minor[1]}.0"
    if kind not in KNOWN or not re.fullmatch(r"\d+\.\d+(\.\d+)*", version):
        raise UsageError(f"`{flag}` {text!r} is not a runtime; give tritonserver:YY.MM, trt:X.Y or ort:X.Y")
    short = ".".join(version.split(".")[:2])
    if (kind, short) == (OLD.kind, OLD.version):
        return OLD
    if short not in KNOWN[kind]:
        raise UsageError(f"`{flag}` {text}: what {_NAMES[kind]} {short} takes is not known; known are: "
                         f"{_ranges(list(KNOWN[kind]))}")  # fmt: skip
    return Target(kind, version, *KNOWN[kind][short])


def tensorrt_of(target: Target) -> Target:
    """Return the TensorRT of a target.

    Raises:
        UsageError: it has none, or its version is not known.
    """
    if target.kind == "trt":
        return target
    if target.release is None:
        raise UsageError(f"`--target` {target.text}: TensorRT runs this; give trt:X.Y or tritonserver:YY.MM")
    if not target.release.tensorrt:
        raise UsageError(f"`--target` {target.text}: its TensorRT version is not known here; look it up in NVIDIA's "
                         "Frameworks Support Matrix and give trt:X.Y")  # fmt: skip
    return parse_target(f"trt:{target.release.tensorrt}")


def _ranges(versions: list[str]) -> str:
    """Return ``10.0 to 10.15, 11.0 to 11.2``."""
    parts: dict[str, list[str]] = {}
    for version in versions:
        parts.setdefault(version.partition(".")[0], []).append(version)
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else p[0] for p in parts.values())


def check_caps(target: Target, opset: int, ir_version: int | None) -> None:
    """Refuse a requested opset or IR version that is too new; the lowest opset can be lowered.

    Raises:
        UsageError: names both numbers.
    """
    most = max(target.opset, OPSETS.start)
    for flag, given, highest in (("opset", opset, most), ("ir-version", ir_version or 0, target.ir_version)):
        if given > highest:
            raise UsageError(f"`--{flag}` {given} is more than {target.text} takes; give at most {highest}")


def takes_fp8(target: Target) -> bool:
    """Return whether a runtime has Q/DQ in e4m3; a server's is its ONNX Runtime."""
    kind, version = ("ort", target.release.ort) if target.release is not None else (target.kind, target.version)
    table = list({"ort": ORT, "trt": TRT}[kind])
    return table.index(".".join(version.split(".")[:2])) >= table.index(FP8[kind])


def check_fp8_target(target: Target) -> None:
    """Refuse a runtime that has no fp8.

    Raises:
        UsageError: names the first versions that have it.
    """
    if not takes_fp8(target):
        first = ", ".join(f"{_NAMES[kind]} {version}" for kind, version in FP8.items())
        raise UsageError(f"`--target` {target.text} has no fp8, which came with {first}; use --dtype fp16")


def oldest(opset: int, ir_version: int, *, tensorrt: bool = True) -> dict[str, str]:
    """Return, per kind of runtime, the oldest known version that takes a file of this opset and IR version.

    Args:
        opset: of the file.
        ir_version: of the file.
        tensorrt: False for a file with operators that it lacks.
    """
    found = {}
    for kind, versions in {**KNOWN, "trt": TRT if tensorrt else {}}.items():
        for version, (highest, ir) in versions.items():
            if opset <= highest and ir_version <= ir:
                found[kind] = version
                break
    return found


def describe_oldest(opset: int, ir_version: int, *, tensorrt: bool = True) -> str:
    """Return one line with the oldest runtimes for a file."""
    found = oldest(opset, ir_version, tensorrt=tensorrt)
    parts = [f"{_NAMES[kind]} {version}" for kind, version in found.items()]
    return f"opset {opset} and IR {ir_version} need at least {', '.join(parts)}"


def same_version(one: str, other: str) -> bool:
    """Return whether two versions agree in their common leading numbers, three at most."""
    a, b = (re.findall(r"\d+", version)[:3] for version in (one, other))
    return bool(a and b) and a[: len(b)] == b[: len(a)]


def server_for(
    *, opset: int = 0, ir_version: int = 0, tensorrt: str | None = None, runs_tensorrt: bool = False,
    python: tuple[int, int] = (0, 0),
) -> Release | None:  # fmt: skip
    """Return the release to serve a model with: `TESTED` if it can, else the next that can, else an older one.

    Args:
        opset: of a file that its ONNX Runtime opens.
        ir_version: of that file.
        tensorrt: version that an engine was built with.
        runs_tensorrt: its TensorRT gets the file.
        python: least version of its Python.

    Returns:
        None where no server of the table is known to.
    """
    found = [
        release
        for release in RELEASES.values()
        if takes(release, opset=opset, ir_version=ir_version, tensorrt=tensorrt, runs_tensorrt=runs_tensorrt,
                 python=python)
    ]  # fmt: skip
    later = [release for release in found if release.month >= TESTED.month]
    return later[0] if later else found[-1] if found else None


def takes(
    release: Release, *, opset: int = 0, ir_version: int = 0, tensorrt: str | None = None, runs_tensorrt: bool = False,
    python: tuple[int, int] = (0, 0),
) -> bool:  # fmt: skip
    """Return whether a release is known to meet the needs of `server_for`."""
    caps = [release.ort_caps]
    if runs_tensorrt:
        caps.append(release.trt_caps or (0, 0))
    if tensorrt is not None and not same_version(release.tensorrt, tensorrt):
        return False
    return all(opset <= most and ir_version <= ir for most, ir in caps) and release.python >= python
