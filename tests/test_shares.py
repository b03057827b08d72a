"""Exact shares: after every number of samples each source has its share, to less than one sample."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.data import mixture
from maxbatch.data.mixture import ExactShares, whole_weights

EXAMPLES = [
  (1,),
  (7, 3),
  (1, 1, 1),
  (1000, 1, 1, 1, 1, 1, 1),
  (1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89),
  # Rounding the share of the first, then that of the second of what is left, … misses by more.
  (12_586_269_025, 7_778_742_049, 4_807_526_976, 2_971_215_073, 1_836_311_903, 1_134_903_170),
  # So does the method of Webster, by 3.8 samples.
  (99_991, 4001, 3001, 2003, 1009, 997, 991, 983, 977, 971, 967, 953),
  # Many jobs are released at the same sample.
  (2, 1492, 2052, 557),
  (2**39 - 1, 2**25 + 1, 2**24 - 3, 2**24 + 5, 2**38 + 7),
]


def check(weights: tuple[int, ...], first: int, count: int) -> None:
  """Brute force over every prefix that ends among the samples first … first + count."""
  order, total = ExactShares(weights), sum(weights)
  given_before = order.counts(first)
  assert sum(given_before) == first
  sources, indices = order(np.arange(first, first + count))
  given = list(given_before)
  for place, (source, index) in enumerate(zip(sources.tolist(), indices.tolist(), strict=True)):
    for each, weight in enumerate(weights):
      assert abs(given[each] * total - (first + place) * weight) < total, (place, each)
    assert index == given[source], "a sample of the source is repeated or left out"
    given[source] += 1
  assert order.counts(first + count) == given


@pytest.mark.parametrize("weights", EXAMPLES)
def test_every_source_is_within_one_sample_after_every_sample(weights):
  for first in (0, 4096 - 200, 2 * 4096 - 200, 10**10 - 200, 2**50 + 12345):
    check(weights, first, 1000)


whole = st.one_of(
  st.lists(st.integers(1, 12), min_size=1, max_size=9),
  st.lists(st.integers(1, 10**9), min_size=1, max_size=9).filter(
    lambda weights: Fraction(min(weights), sum(weights)) > Fraction(1, 5000)
  ),
)


@given(whole, st.integers(0, 2**50))
def test_so_it_is_with_any_weights_and_from_any_sample_on(weights, first):
  check(tuple(weights), first, 50)


@given(whole, st.integers(0, 2**40))
def test_blocks_join(weights, first):
  """At a block's end the state is computed, not carried: here every few samples."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(mixture, "_BLOCK", 1)
    check(tuple(weights), first, 150)


@given(whole, st.lists(st.integers(0, 2**40), max_size=6))
def test_a_pure_function_of_the_sample(weights, samples):
  together = ExactShares(weights)(np.array(samples, np.int64))
  for sample, source, index in zip(samples, *together, strict=True):
    assert [one.item() for one in ExactShares(weights)(np.array([sample]))] == [source, index]


def test_a_rare_source_has_its_samples_where_they_belong():
  order = ExactShares((2**20 - 1, 1))
  sources, indices = order(np.arange(2**20 * 5, 2**20 * 6))
  assert indices[sources == 1].tolist() == [5]


def test_the_order_is_pinned():
  # Another order must come with another VERSION in mixture.py.
  assert ExactShares((3, 2, 1))(np.arange(12))[0].tolist() == [0, 1, 0, 1, 0, 2] * 2


@pytest.mark.parametrize("weights", [(), (0,), (1, 0), (2**40, 1), (2**20, 1)])
def test_weights_that_cannot_be_kept_exactly_are_refused(weights):
  with pytest.raises(ValueError, match="weight"):
    ExactShares(weights)


@given(st.lists(st.fractions(0, 10), min_size=1, max_size=6).filter(any))
def test_whole_weights_are_the_smallest_in_the_same_proportions(weights):
  result = whole_weights(weights)
  for (a, x), (b, y) in itertools.combinations(zip(weights, result, strict=True), 2):
    assert a * y == b * x
  assert math.gcd(*result) == 1
