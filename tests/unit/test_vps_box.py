"""Boxes: intersection, subtraction, flat intervals; the array forms say the same as the plain ones."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynarl.vps.box import collect, flat_boxes, intersect, interval_boxes, joined, subtract, volume


@st.composite
def boxes(draw, axes: int = 2, size: int = 6):
    edges = [sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True))) for _ in range(axes)]
    return tuple((lo, hi) for lo, hi in edges)


def cells(box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(lo, hi) for lo, hi in box)))


@settings(deadline=None)
@given(st.integers(1, 3).flatmap(lambda axes: st.tuples(boxes(axes), boxes(axes))))
def test_intersection_and_difference_split_a_box(pair):
    a, b = pair
    both, rest = intersect(a, b), subtract(a, b)
    assert (cells(both) if both else set()) == cells(a) & cells(b)
    assert sum(map(volume, rest)) == len(cells(a) - cells(b))
    assert set().union(*map(cells, rest)) == cells(a) - cells(b)
    assert len(rest) <= 2 * len(a)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_flat_interval_is_at_most_2n_minus_1_boxes_in_row_major_order(shape, data):
    size = int(np.prod(shape))
    lo, hi = sorted(data.draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
    parts = flat_boxes(lo, hi, shape)
    address = np.arange(size).reshape(shape)
    values = [address[tuple(slice(*side) for side in box)].ravel() for box in parts]
    assert np.concatenate([np.zeros(0, int), *values]).tolist() == list(range(lo, hi))
    assert len(parts) <= 2 * len(shape) - 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(0, 40), st.integers(0, 40)), max_size=8))
def test_many_intervals_at_once_are_as_one_by_one(cases):
    shapes = [(rows, columns) for rows, columns, _, _ in cases]
    lo = np.array([min(a, rows * columns) for rows, columns, a, _ in cases], np.int64)
    hi = np.array([min(b, rows * columns) for rows, columns, _, b in cases], np.int64)
    index, box_lo, box_hi = interval_boxes(lo, hi, np.array([columns for _, columns in shapes], np.int64))
    found = [[] for _ in cases]
    for i, low, high in zip(index.tolist(), box_lo.tolist(), box_hi.tolist()):
        found[i].append(tuple(zip(low, high)))
    assert found == [flat_boxes(int(a), int(b), shape) for a, b, shape in zip(lo, hi, shapes)]


def test_boxes_that_continue_each_other_along_the_rows_become_one():
    tensor = np.array([3, 1, 1, 1, 1, 3])
    lo = np.array([[4, 0], [2, 0], [0, 0], [4, 1], [6, 1], [7, 0]])
    hi = np.array([[6, 5], [4, 5], [2, 5], [6, 5], [7, 5], [8, 5]])
    tensor, lo, hi = joined(tensor, lo, hi)
    assert tensor.tolist() == [1, 1, 3, 3]
    assert lo.tolist() == [[0, 0], [4, 1], [4, 0], [7, 0]]
    assert hi.tolist() == [[4, 5], [7, 5], [6, 5], [8, 5]]


def test_pieces_are_sorted_by_tensor_then_rank_and_know_their_boxes():
    one = (np.array([0, 2]), np.array([[0, 0], [1, 0]]), np.array([[3, 1], [2, 4]]))
    pieces = collect([(7, *one), (2, *one)])
    assert pieces.tensor.tolist() == [0, 0, 2, 2]
    assert pieces.rank.tolist() == [2, 7, 2, 7]
    assert pieces.box(0, axes=1) == ((0, 3),)
    assert pieces.box(3, axes=2) == ((1, 2), (0, 4))
    assert pieces.volume.tolist() == [3, 3, 4, 4]
    assert len(pieces.of_rank(7)) == 2
    assert len(collect([])) == 0
