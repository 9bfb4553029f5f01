"""Times of OpenVINO in bf16 as ratios to ONNX Runtime in fp32, of one file in one run."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vtk.runtime import openvino_runtime as runtime
from vtk.runtime.backends.base import Backend, load_backend
from vtk.runtime.opening import open_source
from vtk.runtime.source import Source
from vtk_export.onnx.export import temporary_onnx

pytestmark = [pytest.mark.slow, pytest.mark.timing]


@pytest.fixture(scope="module")
def file() -> Iterator[Source]:
    torch.manual_seed(0)
    with temporary_onnx(open_source("vit_small_patch16_224", pretrained=False)) as source:
        yield source


def median_ratio(mine: Backend, other: Backend, batch: int, calls: int = 40, block: int = 8) -> float:
    """Return the ratio of the medians of ``calls`` calls each, in alternating blocks with one untimed call first."""
    images = torch.randn(batch, 3, 224, 224)
    times: tuple[list[float], list[float]] = [], []
    for _ in range(calls // block):
        for backend, kept in zip((mine, other), times, strict=True):
            backend.run({"pixel_values": images})
            for _ in range(block):
                start = time.perf_counter()
                backend.run({"pixel_values": images})
                kept.append(time.perf_counter() - start)
    return statistics.median(times[0]) / statistics.median(times[1])


@pytest.mark.skipif("runtime.default_precision() != 'bf16'", reason="this processor has no bf16")
@pytest.mark.parametrize("batch,most", [(1, 0.65), (8, 0.52)])
def test_bf16_of_openvino_takes_at_most_this_share_of_onnxruntimes_fp32(file: Source, batch: int, most: float) -> None:
    mine, other = load_backend("openvino", file, dtype="bf16", threads=2), load_backend("ort-cpu", file, threads=2)
    try:
        assert median_ratio(mine, other, batch) <= most
    finally:
        mine.close()
        other.close()


def test_a_kept_model_is_read_in_less_time_than_it_is_compiled(file: Source, vtk_home: Path) -> None:
    assert file.path is not None

    def seconds(cache: bool) -> float:
        start = time.perf_counter()
        runtime.compile_file(file.path, precision="fp32", threads=2, cache=cache)
        return time.perf_counter() - start

    seconds(True)
    assert statistics.median(seconds(True) / seconds(False) for _ in range(5)) < 0.9
