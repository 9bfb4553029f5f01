"""Tables of runtimes: opsets and IR versions of ONNX Runtime and TensorRT, and their versions in server images.

Defaults, checks and printed lines follow from them. A newer version takes what an older one takes, so where a source
is silent the last known number holds.

Sources of opsets and IR versions: onnxruntime's page "Compatibility" (1.14 to 1.20; an IR above that is refused on
loading), the documentation of the `ort` crate (opset 22 of 1.22), and 1.16.3, 1.17.3, 1.18.1 and 1.22.1 themselves;
onnx/onnx-tensorrt, docs/operators.md of 8.5 (opset 17), 10.0 (20), 10.15 and 11.2 (24), and docs/Changelog.md (ONNX
1.13 since 8.6, 1.14 since 9.0, 1.17 since 10.6).

Sources of the server's images: the tables of docs/introduction/compatibility.md of triton-inference-server/server
(ONNX Runtime, Python) and NVIDIA's Frameworks Support Matrix (TensorRT to 25.10; 26.02 by pull request 1112 of
NVIDIA/Model-Optimizer, 26.07 by its examples/onnx_ptq). "-" stands for a TensorRT that is not known.
"""

from dataclasses import dataclass

Caps = tuple[int, int]
"""Highest opset (of those that are written here) and IR version."""

ORT: dict[str, Caps] = {
    "1.14": (18, 8),
    "1.15": (19, 8),
    "1.16": (19, 9),
    "1.17": (20, 9),
    **{f"1.{minor}": (21, 10) for minor in range(18, 22)},
    **{f"1.{minor}": (22, 10) for minor in range(22, 32)},
}
"""ONNX Runtime."""

TRT: dict[str, Caps] = {
    "8.6": (17, 8),
    **{f"10.{minor}": (20, 9) for minor in range(6)},
    **{f"10.{minor}": (20, 10) for minor in range(6, 15)},
    "10.15": (22, 10),
    "10.16": (22, 10),
    **{f"11.{minor}": (22, 10) for minor in range(3)},
}
"""TensorRT."""

FP8_CAPS: Caps = (19, 9)
"""Opset and IR version that brought e4m3, and Q/DQ of it."""

FP8 = {"ort": "1.16", "trt": "10.0"}
"""First versions that take Q/DQ in e4m3. Of ONNX Runtime the first that takes both numbers of `FP8_CAPS`; of TensorRT
the first of the table with FLOAT8E4M3FN in docs/operators.md of onnx/onnx-tensorrt."""


@dataclass(frozen=True)
class Release:
    """A monthly image of Triton Inference Server.

    Attributes:
        month: ``YY.MM``.
        ort: ONNX Runtime in it.
        tensorrt: TensorRT in it, "" where that is not known.
        python: of its Python back-end; the older one where the sources differ (24.11).
    """

    month: str
    ort: str
    tensorrt: str
    python: tuple[int, int]

    @property
    def image(self) -> str:
        """Name in NVIDIA's registry."""
        return f"nvcr.io/nvidia/tritonserver:{self.month}-py3"

    @property
    def ort_caps(self) -> Caps:
        """Caps of its ONNX Runtime."""
        return ORT[self.ort]

    @property
    def trt_caps(self) -> Caps | None:
        """Caps of its TensorRT, None if not known."""
        return TRT.get(".".join(self.tensorrt.split(".")[:2]))


_RELEASES = """
24.04 1.17 8.6.3.1    3.10
24.05 1.18 10.0.1.6   3.10
24.06 1.18 10.1.0.27  3.10
24.07 1.18 10.2.0.19  3.10
24.08 1.18 10.3.0.26  3.10
24.09 1.19 10.4.0.26  3.10
24.10 1.19 10.5.0.18  3.10
24.11 1.19 10.6.0.26  3.10
24.12 1.20 10.7.0.23  3.12
25.01 1.20 10.8.0.43  3.12
25.02 1.20 10.8.0.43  3.12
25.03 1.21 10.9.0.34  3.12
25.04 1.21 10.9.0.34  3.12
25.05 1.22 10.10.0.31 3.12
25.06 1.22 10.11.0.33 3.12
25.07 1.22 10.11.0.33 3.12
25.08 1.23 10.13.2.6  3.12
25.09 1.23 10.13.3.9  3.12
25.10 1.23 10.13.3.9  3.12
25.11 1.23 -          3.12
25.12 1.23 -          3.12
26.01 1.23 -          3.12
26.02 1.24 10.15.1    3.12
26.03 1.24 -          3.12
26.04 1.24 -          3.12
26.05 1.24 -          3.12
26.06 1.24 -          3.12
26.07 1.27 11.1       3.12
26.08 1.28 -          3.12
"""


def _release(line: str) -> Release:
    month, ort, tensorrt, python = line.split()
    major, minor = map(int, python.split("."))
    return Release(month, ort, tensorrt.strip("-"), (major, minor))


RELEASES: dict[str, Release] = {line[:5]: _release(line) for line in _RELEASES.strip().splitlines()}
"""Month to release, oldest first."""

TESTED = RELEASES["24.10"]
"""Of the release whose server the tests run: printed wherever it can run what was made."""
