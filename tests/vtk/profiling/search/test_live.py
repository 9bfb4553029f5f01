"""The search on this machine, against two exhaustive runs of the same setups."""

from typing import Any

import pytest

import vtk
from vtk.profiling.search.result import SearchResult

OPENING: dict[str, Any] = {"pretrained": False, "num_classes": 5, "img_size": 96}


def run(**more: Any) -> SearchResult:
    config = vtk.ProfileConfig(
        on="cpu", budget_ms=40.0, batch_sizes=(1, 4, 16), duration=3.0, backends=("openvino", "ort-cpu"), **more
    )
    return vtk.search_setups("test_vit", config, show_progress=False, **OPENING)


def loss(whole: SearchResult, other: SearchResult) -> float:
    """Return which fraction of the best throughput a run's recommendation lacks, by the numbers of ``whole``."""
    assert whole.best is not None and other.best is not None
    mine = next(row for row in whole.setups if row.setup == other.best.setup)  # type: ignore[union-attr]
    return 1 - (mine.images_per_second or 0.0) / (whole.best.images_per_second or 1.0)


@pytest.mark.slow
@pytest.mark.timing
def test_a_search_is_within_the_difference_of_two_exhaustive_runs_in_less_time() -> None:
    first, found, second = run(exhaustive=True), run(), run(exhaustive=True)
    differ = max(loss(first, second), loss(second, first), 0.05)
    assert min(loss(first, found), loss(second, found)) <= differ
    spent = [sum(row.seconds for row in result.setups) for result in (first, found, second)]
    assert spent[1] <= 0.2 * min(spent[0], spent[2])  # warm-ups are counted, which are as long for a short look
