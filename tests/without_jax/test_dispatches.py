"""What is sent to the devices, and what is loaded at once, from any step to the end of the run."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from maxbatch.batch.from_config import plan_batches
from maxbatch.batch.host_loads import load_factor
from maxbatch.batch.row_plan import StepRows, dispatches
from maxbatch.config.load import load_config
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.topology import Topology

_CONFIG = load_config(["config=base"])
small = st.integers(1, 5)


def plan_of(micro: int, accumulation: int, steps: int, factor: int = 1) -> BatchPlan:
  batch = dataclasses.replace(
    _CONFIG.batch,
    per_device_batch_size=Fraction(micro),
    gradient_accumulation_steps=accumulation,
    expansion_factor_real_data=Fraction(factor),
  )
  run = dataclasses.replace(_CONFIG.run, steps=steps)
  return plan_batches(batch, run, Topology.of())


def samples_of(dispatched: Sequence[StepRows], micro: int) -> list[int]:
  return [
    sample
    for one in dispatched
    for sample in range(one.first_sample, one.first_sample + one.num_microbatches * micro)
  ]


@given(small, small, small, st.booleans(), st.data())
def test_every_sample_from_the_start_on_is_sent_once_and_in_order(
  micro, accumulation, steps, streamed, data
):
  plan = plan_of(micro, accumulation, steps)
  step = data.draw(st.integers(0, steps))
  start = Position(step, plan.samples_at(step))
  (segment,) = dispatches(plan, start, streamed=streamed)
  sent = segment.steps
  assert samples_of(sent, micro) == list(range(start.samples, plan.total_samples))
  assert len(sent) == (steps - step) * (accumulation if streamed else 1)


@given(small, small, small, st.booleans())
def test_what_is_loaded_at_once_does_not_depend_on_how_it_is_sent(
  micro, accumulation, factor, streamed
):
  plan = plan_of(micro, accumulation, 10, factor)
  first = dispatches(plan, Position(0, 0), streamed=streamed)[0].steps[0]
  taken = len(samples_of([first], micro))
  assert load_factor(plan, streamed=streamed) * taken == plan.global_batch_to_load


@given(st.booleans(), st.integers(0, 200))
def test_stages_of_another_microbatch_are_segments_of_their_own(streamed, start):
  keys = ["batch_size=12", "micro_batch_size=4", "batch_schedule=[[0, 4], [40, 6], [80, 12]]"]
  config = load_config(["config=base", *keys, "steps=30"])
  plan = plan_batches(config.batch, config.run, Topology.of())
  position = Position(0, 0)
  while position.samples < min(start, plan.total_samples):
    position = plan.advance(position)
  segments = dispatches(plan, position, streamed=streamed)
  expected = [4, 3, 4] if position.samples < 40 else [3, 4] if position.samples < 80 else [4]
  assert [segment.micro_batch for segment in segments] == expected
  samples = [sample for one in segments for sample in samples_of(one.steps, one.micro_batch)]
  assert samples == list(range(position.samples, plan.total_samples))
