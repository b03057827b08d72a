"""The clock on a compiled step: pass and rest apart, nothing of the training touched, memory freed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile import measured_time
from maxbatch.compile.measured_time import Timing, measure_step
from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import Rows
from maxbatch.training.build import build_trainer, compiled_step, step_rows, streams
from maxbatch.training.step import Step, Trainer


@dataclasses.dataclass
class Made:
  """A step with what it is compiled from, once somebody runs it."""

  trainer: Trainer
  shapes: Rows
  streamed: bool
  compiled: Callable[[], Step]

  @functools.cached_property
  def step(self) -> Step:
    return self.compiled()


@functools.cache
def made(accumulation: str = "fused", packing: bool = False) -> Made:
  settings = config(
    accumulation=accumulation,
    packing=packing,
    dataset_type="synthetic",
    gradient_accumulation_steps=4,
    per_device_batch_size=2,
  )
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, 8))
  parts = build_trainer(settings, plan, jax.devices())
  source = build_dataset(settings.data, settings.batch.max_target_length).train
  streamed = streams(settings)
  rows = step_rows(plan, parts, source, plan.micro_batch_to_train)
  given = (settings, plan, parts, source, plan.micro_batch_to_train)
  return Made(parts, rows, streamed, functools.partial(compiled_step, *given))


class Pretend:
  """A clock that advances by what steps are said to take, which do nothing else."""

  def __init__(self, parts: Made, rest: float, per_pass: float, scatter: float = 0.0):
    self.now, self.parts, self.rest, self.per_pass = 0.0, parts, rest, per_pass
    self.scatter, self.random = scatter, np.random.default_rng(0)
    self.num_microbatches: list[Any] = []

  def clock(self) -> float:
    return self.now

  def step(self, state: Any, rows: Any, count: Any, rate: Any) -> Any:
    ended, passes = True, 1
    if self.parts.streamed:
      optimizer, at = self.parts.trainer.optimizer, state.opt_state
      ended = bool(optimizer.ends_step(at))
      state = state._replace(opt_state=at._replace(mini_step=at.mini_step + 1))
    else:
      passes = int(count)
      self.num_microbatches.append(passes)
    took = self.per_pass * passes + (self.rest if ended else 0.0)
    self.now += took * (1 + self.scatter * self.random.normal())
    return state, {}

  def timing(self, num_microbatches: int) -> Timing:
    parts = self.parts
    return measure_step(
      parts.trainer, self.step, parts.shapes,
      streamed=parts.streamed, num_microbatches=num_microbatches, clock=self.clock,
    )  # fmt: skip


@pytest.mark.parametrize("accumulation", ["fused", "streamed"])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_pass_and_rest_come_apart(accumulation, passes):
  pretend = Pretend(made(accumulation), rest=0.03, per_pass=0.02)
  timing = pretend.timing(passes)
  assert timing.seconds_per_microbatch == pytest.approx(0.02)
  assert timing.seconds_rest == pytest.approx(0.03)
  assert timing.spread == pytest.approx(0.0)
  if accumulation == "fused":
    # As many passes as the run's step takes, and never fewer than two.
    assert set(pretend.num_microbatches) == {1, max(2, passes)}


def test_the_longer_step_has_room_in_the_program_and_in_the_time():
  quick = Pretend(made(), rest=0.001, per_pass=0.001)
  quick.timing(num_microbatches=50)
  assert max(quick.num_microbatches) == 16  # the capacity
  slow = Pretend(made(), rest=5.0, per_pass=10.0)
  assert slow.timing(num_microbatches=16).repeats == 3
  assert max(slow.num_microbatches) == 2
  long = Pretend(made(), rest=10.0, per_pass=20.0)
  assert long.timing(num_microbatches=16) == Timing(30.0, 0.0, 0.0, repeats=1)
  assert long.num_microbatches == [1]


def test_scatter_is_told():
  timing = Pretend(made(), rest=0.0, per_pass=0.01, scatter=0.1).timing(num_microbatches=4)
  assert 0.02 < timing.spread < 0.15
  assert timing.repeats == 15
  assert timing.seconds_per_microbatch == pytest.approx(0.01, rel=0.1)


def test_a_step_without_ticks_is_kept_apart():
  timing = measured_time._timing([3.0] * 3, [5.0] * 3, 2, [0.5, 0.25, 9.0])
  assert timing == Timing(2.0, 1.0, 0.0, 3, seconds_without_ticks=0.5)


def test_a_rest_lost_in_scatter_is_none_at_all():
  # A step of one pass that seems shorter than a pass.
  assert measured_time._timing([0.9] * 3, [4.0] * 3, 4) == Timing(1.0, 0.0, 0.0, 3)
  # More passes that seem to take no longer.
  assert measured_time._timing([4.0] * 3, [4.0] * 3, 4) == Timing(1.0, 0.0, 0.0, 3)


@pytest.mark.parametrize(("accumulation", "packing"), [("fused", False), ("streamed", True)])
def test_real_steps_are_timed_and_their_memory_is_freed(accumulation, packing, monkeypatch):
  monkeypatch.setattr(measured_time, "SECONDS", 0.1)
  parts = made(accumulation, packing)
  before = {id(array) for array in jax.live_arrays()}
  timing = measure_step(
    parts.trainer, parts.step, parts.shapes, streamed=parts.streamed, num_microbatches=4
  )
  assert 0 < timing.seconds_per_microbatch < 10
  assert 0 <= timing.seconds_rest < 10
  assert 0 <= timing.spread < 5
  held = [x for x in jax.live_arrays() if id(x) not in before and x.nbytes > 8]
  assert held == []


def test_what_breaks_off_holds_no_memory_either():
  parts = made()
  before = {id(array) for array in jax.live_arrays()}

  def broken(*_: object) -> Any:
    raise RuntimeError("out of order")

  with pytest.raises(RuntimeError, match="out of order") as caught:
    measure_step(parts.trainer, broken, parts.shapes, streamed=False, num_microbatches=1)
  # The error holds every frame that it came through.
  assert caught.tb
  assert [x for x in jax.live_arrays() if id(x) not in before and x.nbytes > 8] == []


def test_synthetic_rows_look_like_the_loaders():
  parts = made(packing=True)
  rows = measured_time.synthetic(parts.trainer, parts.shapes)
  for made_row, shape in zip(jax.tree.leaves(rows), jax.tree.leaves(parts.shapes), strict=True):
    assert (made_row.shape, made_row.dtype) == (shape.shape, shape.dtype)
  assert len(jnp.unique(rows.inputs)) > 100
  assert int(rows.inputs.max()) < 256
  assert float(rows.weights.min()) == 1.0


def test_the_training_state_is_not_touched(monkeypatch):
  monkeypatch.setattr(measured_time, "SECONDS", 0.1)
  parts = made()
  state = parts.trainer.init(seed=0)
  before = jax.device_get(state)
  measure_step(parts.trainer, parts.step, parts.shapes, streamed=False, num_microbatches=2)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)
