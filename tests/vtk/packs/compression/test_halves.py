"""The two halves of held-out images."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vtk.packs.compression.halves import halve, label_sets


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 3))
def test_every_class_is_divided_as_evenly_as_it_can_be(labels: list[int], seed: int) -> None:
    first, second = halve(label_sets(labels), list(range(len(labels))), seed)
    assert sorted(first + second) == list(range(len(labels)))
    assert abs(len(first) - len(second)) <= 1
    for label in set(labels):
        assert abs(sum(labels[i] == label for i in first) - sum(labels[i] == label for i in second)) <= 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 5), max_size=4), min_size=2, max_size=60))
def test_images_of_several_labels_are_divided_label_by_label(labels: list[frozenset[int]]) -> None:
    first, second = halve(labels, list(range(len(labels))), 0)
    assert sorted(first + second) == list(range(len(labels)))
    for label in frozenset().union(*labels):
        sizes = [sum(label in labels[i] for i in half) for half in (first, second)]
        assert abs(sizes[0] - sizes[1]) <= max(3, sum(sizes) // 4)


def test_copies_of_one_image_stay_in_one_half() -> None:
    keys = ["a", "b", "a", "c", "b", "d", "a"]
    for seed in range(5):
        halves = halve([frozenset({0})] * 7, keys, seed)
        assert {keys[i] for i in halves[0]}.isdisjoint(keys[i] for i in halves[1]) and all(halves)


def test_halves_follow_from_the_seed_and_differ_between_seeds() -> None:
    labels = [frozenset({i % 3}) for i in range(60)]
    again = [halve(labels, list(range(60)), seed) for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_rows_of_zeros_and_ones_are_sets_of_labels() -> None:
    assert label_sets([np.float32([0, 1, 1]), 2]) == [frozenset({1, 2}), frozenset({2})]
