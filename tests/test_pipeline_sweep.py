"""Whatever is accepted runs, and computes what the same run without a pipeline computes.

MAXBATCH_SWEEP=100 runs so many more, other ones each time.
"""

import os

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_sweep import (
  HAS_REPEATS,
  MODEL,
  Keys,
  broken,
  configuration,
  configurations,
  evaluated,
  evaluated_plainly,
  offered,
  planned,
  prepared,
  reached,
  without_pipeline,
)

from maxbatch.pipeline_parallel.schedule import schedule_named, timetable
from maxbatch.pipeline_parallel.simulator import run
from maxbatch.pipeline_parallel.timetable_arrays import buffer_capacity, step_arrays

MORE = int(os.environ.get("MAXBATCH_SWEEP", "0"))
SLOWLY = [HealthCheck.too_slow, HealthCheck.data_too_large]


def mended(keys: Keys) -> Keys:
  """The keys with what is offered, until all is accepted."""
  done, refusal = reached(keys)
  while refusal:
    offers = offered(refusal)
    assert offers, refusal
    for offer in offers:
      further, why = reached(keys | offer)
      # What a pipeline refuses is mended as a whole; before that, one mistake may follow another.
      assert further == 3 or (done < 2 and why != refusal), (refusal, offer, why)
    keys = keys | offers[0]
    done, refusal = reached(keys)
  return keys


@settings(max_examples=examples(200) + 20 * MORE, derandomize=not MORE)
@given(broken())
def test_a_refusal_offers_what_works_and_what_works_has_a_timetable_without_fault(keys):
  plan, pipeline = planned(configuration(mended(keys)))
  schedule = schedule_named(pipeline.schedule)
  for passes in {1 if pipeline.timetables > 1 else one.num_microbatches for one in plan.phases}:
    shape = pipeline.shape_of(passes)
    outcome = run(timetable(pipeline.schedule, shape), schedule.limits(shape))
    assert outcome.fault is None
    capacity, ticks = buffer_capacity(pipeline), step_arrays(pipeline, passes)
    assert max(outcome.input_slots) <= capacity.inputs
    assert max(outcome.gradient_slots) <= capacity.gradients
    assert ticks.stages.forward.slot.max() == capacity.inputs


def assert_same_step(keys: Keys, smallest: bool) -> None:
  """Loss and gradient norm with and without the pipeline."""
  one = prepared(configuration(keys), smallest=smallest)
  result, expected = one.step(one.trainer), without_pipeline(one)
  # bfloat16 has 8 bits, and rounds elsewhere in microbatches and parts: of 79 at random, the loss
  # was off by up to 1e-4 and the norm by up to 6e-3; float32 by less than 3e-7.
  exact = one.config.precision.dtype in ("auto", "float32")
  assert result.weight == expected.weight > 0 < expected.grad_norm
  assert result.loss == pytest.approx(expected.loss, rel=1e-5 if exact else 1e-3)
  assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5 if exact else 1e-2)


def assert_same_evaluation(keys: Keys) -> None:
  one = prepared(configuration(keys))
  exact = one.config.precision.dtype in ("auto", "float32")
  result = evaluated(one, one.trainer)
  assert result == pytest.approx(evaluated_plainly(one), rel=1e-5 if exact else 1e-3)


THREE = {"num_pipeline_repeats": 3, "base_num_decoder_layers": 6, "ici_pipeline_parallelism": 2}


@pytest.mark.parametrize(
  "keys",
  [
    {
      "pipeline_schedule": "interleaved_1f1b",
      "num_simulated_devices": 2,
      "ici_data_parallelism": 1,
      "per_device_batch_size": 2,
      "gradient_accumulation_steps": 2,
      "accumulation": "streamed",
      "packing": "true",
    },
    {
      "pipeline_schedule": "circular",
      "num_simulated_devices": 4,
      "ici_data_parallelism": 1,
      "ici_fsdp_parallelism": 2,
      "per_device_batch_size": 1,
      "gradient_accumulation_steps": 2,
      "dropout_rate": 0.1,
      "packing": "false",
    },
  ],
)
def test_three_repeats_on_one_group_of_devices_and_with_fsdp(keys):
  assert_same_step(MODEL | THREE | keys, smallest=False)


@pytest.mark.parametrize("schedule", HAS_REPEATS)
@settings(max_examples=MORE or 2, derandomize=not MORE, suppress_health_check=SLOWLY)
@given(st.data())
def test_a_step_is_that_without_a_pipeline(schedule, data):
  # The first example is of all that comes first: one replica and a plain model, as in other tests.
  if data.draw(st.integers(0, 10_000)) == 0:
    return
  keys = data.draw(configurations((schedule,)))
  assert_same_step(keys, smallest=data.draw(st.booleans()))


@settings(max_examples=MORE or 2, derandomize=not MORE, suppress_health_check=SLOWLY)
@given(configurations())
def test_an_evaluation_is_that_without_a_pipeline(keys):
  assert_same_evaluation(keys)
