"""``--target``: which opset and IR version a run time of a given version takes, and the oldest ones for a file.

A newer version takes what an older one takes, so where a source is silent about a version the last number that is
known holds. Sources: onnxruntime's page "Compatibility" (opset and IR of 1.14 to 1.20; an IR above that is refused on
loading), the documentation of the `ort` crate (opset 22 of 1.22); the table "ONNX Runtime Versions" of
triton-inference-server/server, docs/introduction/compatibility.md; onnx/onnx-tensorrt, docs/operators.md of 10.0
(opset 20), 10.15 and 11.2 (opset 24), and docs/Changelog.md (ONNX 1.14 since 9.0, 1.17 since 10.6).
"""

import re
from dataclasses import dataclass

from vtk.errors import UsageError

IR_VERSIONS = range(8, 11)
"""IR versions that a file can be stamped with; torch's exporter writes 10 and uses nothing that 8 lacks."""

_Caps = tuple[int, int]

_ORT: dict[str, _Caps] = {
    "1.14": (18, 8),
    "1.15": (19, 8),
    "1.16": (19, 9),
    "1.17": (20, 9),
    **{f"1.{minor}": (21, 10) for minor in range(18, 22)},
    **{f"1.{minor}": (22, 10) for minor in range(22, 32)},
}
_TRT: dict[str, _Caps] = {
    **{f"10.{minor}": (20, 9) for minor in range(6)},
    **{f"10.{minor}": (20, 10) for minor in range(6, 15)},
    "10.15": (22, 10),
    **{f"11.{minor}": (22, 10) for minor in range(3)},
}
# release of the server: onnxruntime in it, by ranges of months that ship the same minor version
_SERVER_ORT: tuple[tuple[str, str, str], ...] = (
    ("24.04", "24.04", "1.17"),
    ("24.05", "24.08", "1.18"),
    ("24.09", "24.11", "1.19"),
    ("24.12", "25.02", "1.20"),
    ("25.03", "25.04", "1.21"),
    ("25.05", "25.07", "1.22"),
    ("25.08", "26.01", "1.23"),
    ("26.02", "26.06", "1.24"),
    ("26.07", "26.07", "1.27"),
    ("26.08", "26.08", "1.28"),
)


def _server() -> dict[str, _Caps]:
    months = [f"{year}.{month:02}" for year in (24, 25, 26) for month in range(1, 13)]
    return {m: _ORT[ort] for first, last, ort in _SERVER_ORT for m in months if first <= m <= last}


KNOWN: dict[str, dict[str, _Caps]] = {"tritonserver": _server(), "trt": _TRT, "ort": _ORT}
"""Kind of run time to its versions, oldest first, to the highest opset (of ours) and IR version that each takes."""

_NAMES = {"tritonserver": "tritonserver", "trt": "TensorRT", "ort": "onnxruntime"}


@dataclass(frozen=True)
class Target:
    """A run time.

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
        """What ``--target`` was."""
        return f"{self.kind}:{self.version}"


def parse_target(text: str) -> Target:
    """Read ``tritonserver:YY.MM``, ``trt:X.Y`` or ``ort:X.Y``; a patch version behind them is not looked at.

    Raises:
        UsageError: not of this form, or a version whose needs are not known; the known ones are listed.
    """
    kind, _, version = text.partition(":")
    if kind not in KNOWN or not re.fullmatch(r"\d+\.\d+(\.\d+)*", version):
        raise UsageError(f"`--target` {text!r} is no run time; give tritonserver:YY.MM, trt:X.Y or ort:X.Y")
    known = KNOWN[kind]
    short = ".".join(version.split(".")[:2])
    if short not in known:
        raise UsageError(f"`--target` {text}: what {_NAMES[kind]} {short} takes is not known; known: "
                         f"{_ranges(list(known))}")  # fmt: skip
    return Target(kind, version, *known[short])


def _ranges(versions: list[str]) -> str:
    """Return ``10.0 to 10.15, 11.0 to 11.2``."""
    parts: dict[str, list[str]] = {}
    for version in versions:
        parts.setdefault(version.partition(".")[0], []).append(version)
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else p[0] for p in parts.values())


def oldest(opset: int, ir_version: int) -> dict[str, str]:
    """Return, per kind of run time, the oldest known version that takes a file of this opset and IR version."""
    found = {}
    for kind, versions in KNOWN.items():
        for version, (highest, ir) in versions.items():
            if opset <= highest and ir_version <= ir:
                found[kind] = version
                break
    return found


def describe_oldest(opset: int, ir_version: int) -> str:
    """Return one line with the oldest run times for a file."""
    parts = [f"{_NAMES[kind]} {version}" for kind, version in oldest(opset, ir_version).items()]
    return f"opset {opset} and IR {ir_version} need at least {', '.join(parts)}"
