"""What is due every so often is due exactly once per period, whatever the batch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxbatch.batch.from_config import plan_batches
from maxbatch.config.load import load_config
from maxbatch.core.keys import Unit
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.topology import Topology

LENGTH = 4
units: st.SearchStrategy[Unit] = st.sampled_from(["steps", "samples", "tokens"])


def plan_of(batch: int) -> BatchPlan:
  config = load_config(
    ["config=base", f"per_device_batch_size={batch}", f"max_target_length={LENGTH}"]
  )
  return plan_batches(config.batch, config.run, Topology.of())


PLAN = plan_of(3)


def due_after(batches: list[int], period: int, unit: Unit) -> list[bool]:
  samples = list(itertools.accumulate(batches, initial=0))
  at = [Position(step, total) for step, total in enumerate(samples)]
  return [PLAN.is_due(before, after, period, unit) for before, after in itertools.pairwise(at)]


@pytest.mark.parametrize(
  ("period", "unit", "due_at"),
  [
    (2, "steps", [2, 4, 6]),
    (9, "samples", [3, 6]),
    (5, "samples", [2, 4, 5]),
    (24, "tokens", [2, 4, 6]),
  ],
)
def test_due_in_each_unit(period, unit, due_at):
  due = due_after([3] * 6, period, unit)
  assert [step for step, is_due_then in enumerate(due, start=1) if is_due_then] == due_at


@given(st.lists(st.integers(1, 50), max_size=30), units)
def test_minus_one_is_never(batches, unit):
  assert not any(due_after(batches, -1, unit))


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 300), units)
def test_no_multiple_of_the_period_is_skipped_or_met_twice(batches, period, unit):
  per_step = {
    "steps": [1] * len(batches),
    "samples": batches,
    "tokens": [b * LENGTH for b in batches],
  }
  begin = 0
  for size, due in zip(per_step[unit], due_after(batches, period, unit), strict=True):
    end = begin + size
    assert due == any(count % period == 0 for count in range(begin + 1, end + 1))
    begin = end
