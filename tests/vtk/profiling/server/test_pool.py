"""Requests that are never equal, and a sample of answers that favours none."""

import numpy as np
import pytest

from vtk.profiling.server.answers import ALL, Sample, sample_size
from vtk.profiling.server.pool import Pool, pool_size


@pytest.mark.parametrize("kind", ["float32", "float16", "float64", "uint8", "int16", "uint16"])
def test_no_two_requests_are_equal_and_none_differs_by_more_than_the_lowest_bit(kind: str) -> None:
    images = (np.random.default_rng(0).normal(size=(8, 3, 5, 7)) * 50 + 100).astype(kind)
    pool, seen = Pool(images), set()
    whole = f"u{images.dtype.itemsize}"
    for number in [*range(3000), (1 << 32) - 1, 1 << 31]:
        made = b"".join(pool.parts(number, 3))
        seen.add(made)
        same = np.frombuffer(made, kind).reshape(3, 3, 5, 7)
        assert (same == pool.batch(number, 3)).all()
        assert (same.view(whole) ^ images[pool.rows(number, 3)].view(whole)).max() <= 1
    assert len(seen) == 3002


def test_neighbouring_requests_share_no_row_in_its_place() -> None:
    pool = Pool(np.zeros((32, 3, 8, 8), np.float32))
    for number in range(200):
        one, next_one = pool.rows(number, 32), pool.rows(number + 1, 32)
        assert sorted(one) == list(range(32))
        if number % 32 != 31:
            assert (one != next_one).all()


def test_a_small_pool_still_has_right_rows() -> None:
    pool = Pool(np.arange(32, dtype=np.float32).reshape(32, 1, 1, 1))
    assert pool.marked == 0 and (pool.batch(5, 3)[:, 0, 0, 0] == pool.rows(5, 3)).all()
    pool.keep(8)
    assert len(pool) == 8 and pool.rows(1_000_003, 64).max() == 7


@pytest.mark.parametrize("each,count", [(600_000, 32), (12 << 20, 16), (1 << 30, 4)])
def test_large_images_are_fewer(each: int, count: int) -> None:
    assert pool_size(each) == count


def test_a_sample_is_fair_whatever_the_rhythm() -> None:
    """Every second answer is wrong: one kept at an even distance would never be."""
    wrong = late = 0
    for seed in range(40):
        sample = Sample(2 * ALL, seed)
        for number in range(5000):
            sample.offer(number, number % 2)
        assert sample.seen == 5000 and len(sample.kept) == 2 * ALL
        assert [number for number, _ in sample.kept[:ALL]] == list(range(ALL))
        wrong += sum(answer for _, answer in sample.kept[ALL:])
        late += sum(number >= 2500 for number, _ in sample.kept[ALL:])
    assert wrong / (40 * ALL) == pytest.approx(0.5, abs=0.05) and late / (40 * ALL) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seen,kept,about", [(5, 5, 0), (64, 64, 0), (1064, 314, 60), (50_000, 2048, 0)])
def test_a_quarter_of_many_answers_is_kept(seen: int, kept: int, about: int) -> None:
    sample = Sample(2048)
    for number in range(seen):
        sample.offer(number, None)
    assert len({number for number, _ in sample.kept}) == pytest.approx(kept, abs=about)
    assert len(sample.kept) <= 2048
    few = Sample(sample_size(90_000_000))  # of 21,841 classes and 1,024 images
    for number in range(seen):
        few.offer(number, None)
    assert len(few.kept) <= 4


def test_rows_of_many_requests_are_those_of_each() -> None:
    pool = Pool(np.zeros((16, 3, 8, 8), np.float32))
    numbers = np.array([0, 5, 77, (1 << 32) + 3])
    assert (pool.rows(numbers, 6) == np.stack([pool.rows(int(n), 6) for n in numbers])).all()
