"""Which sample goes where: against counting by hand, for any sizes; without jax."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.batch.row_plan import (
  RowPlan,
  StepRows,
  Steps,
  StepTable,
  columns_of_blocks,
  steps_in_order,
)
from maxbatch.errors import UserError

small = st.integers(1, 5)


def steps_of(microbatches: list[int], micro_batch: int, first: int) -> list[StepRows]:
  steps = []
  for count in microbatches:
    steps.append(StepRows(first, count))
    first += count * micro_batch
  return steps


@given(small, small, small)
def test_rows_of_the_groups_are_the_canonical_order(microbatches, groups, slots):
  plan = RowPlan(microbatches, groups * slots, microbatches * groups * slots)
  offset = 0
  parts = [plan.rows_at(columns_of_blocks([group], slots)) for group in range(groups)]
  for microbatch in range(microbatches):
    for group in range(groups):
      for slot in range(slots):
        assert parts[group][microbatch, slot] == offset
        offset += 1
  assert plan.num_samples == offset


@given(small, small, small)
def test_dividing_the_array_gives_each_group_its_rows(microbatches, groups, slots):
  plan = RowPlan(microbatches, groups * slots, microbatches * groups * slots)
  array = np.arange(plan.num_samples).reshape(microbatches, groups * slots)
  for group, part in enumerate(np.split(array, groups, axis=1)):
    rows = plan.rows_at(columns_of_blocks([group], slots))
    np.testing.assert_array_equal(part, rows)


@given(st.lists(small, min_size=1, max_size=8), small, st.integers(0, 99), st.data())
def test_samples_between_equals_counting(microbatches, micro_batch, first, data):
  table = StepTable(steps_of(microbatches, micro_batch, first), micro_batch)
  columns = np.array(sorted(data.draw(st.sets(st.integers(0, micro_batch - 1), min_size=1))))
  begin = data.draw(st.integers(first, table.end - 1))
  end = data.draw(st.integers(begin + 1, table.end))
  # Steps begin at multiples of the microbatch after `first`, so the column repeats evenly.
  expected = [s for s in range(begin, end) if (s - first) % micro_batch in columns]
  assert table.samples_between(begin, end, columns).tolist() == expected


@given(small, st.integers(1, 9), st.integers(1, 99), st.integers(0, 99))
def test_padding_is_the_end_of_a_step(num_steps, micro_batch, batch, first):
  """Every sample is in one row of one step, and rows without one are the last."""
  k = -(-batch // micro_batch)
  table = StepTable(Steps([(range(first, first + num_steps * batch, batch), k)]), micro_batch)
  assert table.end == first + num_steps * batch
  columns = [np.arange(micro_batch)[part::2] for part in range(2)]
  for step in range(num_steps):
    begin = first + step * batch
    ids = table.sample_ids(step, k + 1)
    assert ids.shape == (k + 1, micro_batch)
    assert ids.reshape(-1).tolist() == [*range(begin, begin + batch)] + [-1] * (ids.size - batch)
    read = np.concatenate([table.samples(step, each) for each in columns])
    assert sorted(read.tolist()) == list(range(begin, begin + batch))
  between = [table.samples_between(first + 1, table.end, each) for each in columns]
  assert sorted(np.concatenate(between).tolist()) == list(range(first + 1, table.end))


@given(
  st.lists(small, min_size=1, max_size=8),
  st.integers(0, 99),
  st.sampled_from([Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(3, 2), Fraction(3)]),
)
def test_loads_cover_all_samples_once_in_the_right_size(microbatches, first, factor):
  table = StepTable(steps_of(microbatches, 4, first), 4)
  bounds = list(table.load_bounds(factor))
  assert bounds[0] == first
  assert bounds[-1] == table.end
  for begin, end in itertools.pairwise(bounds[:-1]):
    step = max(i for i in range(len(table)) if table.first_samples[i] <= begin)
    assert end - begin == factor * microbatches[step] * 4
  if factor != 1:
    assert bounds[-2] < bounds[-1]


@given(st.lists(st.tuples(small, small), min_size=1, max_size=5), small, st.integers(0, 99))
def test_runs_of_equal_steps_are_the_steps_one_by_one(runs, micro_batch, first):
  steps = steps_of([count for count, length in runs for _ in range(length)], micro_batch, first)
  ranges, begin = [], first
  for count, length in runs:
    end = begin + length * count * micro_batch
    ranges.append((range(begin, end, count * micro_batch), count))
    begin = end
  joined = Steps(ranges)
  assert list(joined) == steps
  assert [joined[-1], *joined[1:3]] == [steps[-1], *steps[1:3]]
  with pytest.raises(IndexError):
    joined[len(steps)]
  one, other = StepTable(joined, micro_batch), StepTable(steps, micro_batch)
  assert (list(one.first_samples), one.end) == (list(other.first_samples), other.end)
  for factor in (Fraction(1), Fraction(2), Fraction(1, micro_batch)):
    assert list(one.load_bounds(factor)) == list(other.load_bounds(factor))


@pytest.mark.parametrize("factor", [Fraction(1), Fraction(3, 2)])
def test_a_thousand_billion_steps_take_no_time(factor):
  count = 10**12
  table = StepTable(Steps([(range(0, 2 * count, 2), 1)]), 2)
  bounds = table.load_bounds(factor)
  assert len(table) == count
  assert (bounds[0], bounds[1], bounds[-1]) == (0, 2 * factor, 2 * count)
  assert table.samples(count - 1, np.array([1])).tolist() == [2 * count - 1]


def test_a_load_that_is_not_whole_is_refused():
  table = StepTable([StepRows(0, 3)], 2)
  with pytest.raises(UserError) as caught:
    table.load_bounds(Fraction(1, 4))
  message = str(caught.value)
  assert "expansion_factor_real_data=1/4 × global_batch_to_train=6 is 3/2 samples" in message
  assert "for example expansion_factor_real_data=1/6 or 2" in message


def test_a_gap_between_steps_is_refused():
  with pytest.raises(ValueError, match="step 0 ends at 8"):
    StepTable([StepRows(0, 2), StepRows(9, 2)], 4)


def test_no_steps():
  table = StepTable([], 4)
  assert len(table.load_bounds(Fraction(1))) == 1
  assert len(table.load_bounds(Fraction(2))) == 1


def test_steps_in_order_cover_the_rows():
  assert steps_in_order(10, 4) == [StepRows(0, 1), StepRows(4, 1), StepRows(8, 1)]
  assert steps_in_order(8, 4) == [StepRows(0, 1), StepRows(4, 1)]
