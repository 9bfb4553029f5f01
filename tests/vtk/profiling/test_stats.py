import numpy as np
import pytest

from vtk.profiling.stats import percentile, runs_needed, summarise


@pytest.mark.parametrize("q,needed", [(50, 20), (90, 100), (99, 1000)])
def test_a_percentile_needs_ten_samples_beyond_it(q: int, needed: int) -> None:
    samples = np.random.default_rng(q).exponential(size=needed)
    assert runs_needed(q) == needed
    assert percentile(samples[:-1].tolist(), q) is None
    assert percentile(samples.tolist(), q) == pytest.approx(np.percentile(samples, q), rel=1e-12)
    assert (samples > np.percentile(samples, q)).sum() == 10  # what the rule promises


@pytest.mark.parametrize("count", [20, 21, 100, 333, 1000, 1001])
@pytest.mark.parametrize("q", [50, 90, 99])
def test_percentiles_are_numpys(q: int, count: int) -> None:
    samples = np.random.default_rng(count).lognormal(size=count)
    value = percentile(samples.tolist(), q)
    if count >= runs_needed(q):
        assert value == pytest.approx(np.percentile(samples, q), rel=1e-12)
    else:
        assert value is None


def test_throughput_counts_every_run() -> None:
    seconds = [0.010] * 19 + [0.110]  # one slow run in twenty
    latency = summarise(seconds, batch=4)
    assert latency.images_per_second == pytest.approx(4 * 20 / 0.3)
    assert (latency.p50_ms, latency.min_ms) == (pytest.approx(10), pytest.approx(10))
    assert latency.mean_ms == pytest.approx(15)
    assert latency.p90_ms is None and latency.p99_ms is None
