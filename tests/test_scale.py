"""What grows with a run: nothing with its steps, and nothing faster than its hosts and phases.

Counted in calls of functions, which are the same on every machine, and not in seconds.
"""

import dataclasses
import importlib.util
import pickle
import sys
from types import ModuleType

import pytest
from processes import REPOSITORY

from maxbatch.batch.row_plan import dispatches
from maxbatch.core.plan import Position


def load() -> ModuleType:
  path = REPOSITORY / "scripts" / "scale.py"
  spec = importlib.util.spec_from_file_location("scale", path)
  assert spec
  assert spec.loader
  module = importlib.util.module_from_spec(spec)
  sys.modules["scale"] = module
  spec.loader.exec_module(module)
  return module


scale = load()
SMALL = scale.Size(hosts=64, steps=100_000, phases=10, records=50)
LONG = dataclasses.replace(SMALL, steps=100_000_000)


def growth(work: str, large: object) -> float:
  """How much more calls the work takes for `large` than for SMALL."""
  made = scale.WORKS[work]
  small_work, large_work = made(SMALL), made(large)
  for each in (small_work, large_work):
    each()  # What is imported or kept on the first call.
  return scale.calls(large_work) / scale.calls(small_work)


@pytest.mark.parametrize("work", scale.WORKS)
def test_nothing_takes_longer_because_a_run_has_more_steps(work):
  assert growth(work, LONG) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("work", scale.WORKS)
def test_nothing_grows_faster_than_hosts_phases_and_records(work):
  factor = 8
  for part in ("hosts", "phases", "records"):
    large = dataclasses.replace(SMALL, **{part: factor * getattr(SMALL, part)})
    assert growth(work, large) <= 1.1 * factor, part


@pytest.mark.parametrize("streamed", [False, True])
def test_the_row_plan_of_a_long_run_is_as_small_as_that_of_a_short_one(streamed):
  def size(run: object) -> int:
    plan = scale.ramp_of(run)
    return len(pickle.dumps(dispatches(plan, Position(0, 0), streamed=streamed)))

  assert size(LONG) <= size(SMALL) + 50
