"""How layers and batch divide over a pipeline; every offer is tried, every accepted run divides."""

import itertools

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from support import base, configured

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.config.load import load_config, suggested_fixes
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.schedule import SCHEDULES, schedule_named, timetable
from maxbatch.pipeline_parallel.simulator import run
from maxbatch.pipeline_parallel.sizes import Pipeline


def pipeline(*keys: str) -> Pipeline:
  config = configured(*keys)
  layout = topology(config.mesh, 8)
  return pipeline_of(config, layout, plan_batches(config.batch, config.run, layout))


def message(*keys: str) -> str:
  with pytest.raises(UserError) as caught:
    pipeline(*keys)
  return str(caught.value)


FOUR = ("ici_pipeline_parallelism=4", "base_num_decoder_layers=8")


@pytest.mark.parametrize(
  ("keys", "expected"),
  [
    (["pipeline_schedule=1f1b"], (1, 2)),
    (["pipeline_schedule=gpipe", "num_pipeline_repeats=1"], (1, 2)),
    (["pipeline_schedule=gpipe", "num_layers_per_pipeline_stage=2"], (1, 2)),
    # As in MaxText, one layer per stage unless something else is said.
    (["pipeline_schedule=circular"], (2, 1)),
    (["pipeline_schedule=interleaved_1f1b"], (2, 1)),
    (["pipeline_schedule=interleaved_1f1b", "num_pipeline_repeats=1"], (1, 2)),
    (["pipeline_schedule=circular", "num_layers_per_pipeline_stage=2"], (1, 2)),
  ],
)
def test_layers(keys, expected):
  one = pipeline(*FOUR, *keys)
  assert (one.repeats, one.layers) == expected


def test_the_batch_is_cut_into_pieces_and_its_passes_are_folded_in():
  one = pipeline(*FOUR, "pipeline_schedule=1f1b", "gradient_accumulation_steps=8")
  # 32 samples a pass, 2 groups, 4 pieces: 4 samples in each; 8 passes in one timetable.
  assert (one.num_pipeline_microbatches, one.rows, one.num_microbatches, one.timetables) == (
    4,
    4,
    8,
    1,
  )
  assert one.shape.microbatches == 32
  assert one.choices == (4, 8, 16)
  assert one.with_num_pipeline_microbatches(16).rows == 1
  assert f"{one}".endswith(
    "32 microbatches in a timetable, each of 4 samples per group of devices; bubble 8.6%; "
    "pipeline_saved_activations=input"
  )


def test_streamed_passes_have_timetables_of_their_own():
  keys = ["pipeline_schedule=1f1b", "gradient_accumulation_steps=8", "accumulation=streamed"]
  one = pipeline(*FOUR, *keys)
  assert (one.shape.microbatches, one.timetables) == (4, 8)


def test_delayed_forwarding_takes_twice_the_microbatches():
  delay = "pipeline_delay_activation_forwarding=true"
  assert pipeline(*FOUR, "pipeline_schedule=circular", delay).choices == (8, 16)
  assert pipeline(*FOUR, "pipeline_schedule=circular", delay).shape.forwarding_delay == 2
  keys = [*FOUR, "pipeline_schedule=circular", delay, "per_device_batch_size=6"]
  assert pipeline(*keys).choices == (8, 12, 24)
  assert pipeline(*keys, "pipeline_schedule=interleaved_1f1b").choices == (8, 24)


def test_one_number_of_microbatches_must_cut_every_stage_of_a_schedule():
  keys = [*FOUR, "pipeline_schedule=1f1b", "batch_schedule=[[0, 24], [2400, 64]]"]
  assert pipeline(*keys).choices == (4,)


def test_halves_that_are_compared_are_what_is_divided():
  keys = ["pipeline_schedule=1f1b", "num_generations=4", "accumulation=streamed"]
  keys += ["gradient_accumulation_steps=2", "gns_from_microbatches=true"]
  one = pipeline(*FOUR, *keys, "per_device_batch_size=2")
  assert (one.rows, one.choices, one.timetables) == (1, (4,), 4)
  assert (
    "must divide the 2 samples of half a microbatch, which gns_from_microbatches=true compares, in each of "
    "2 groups"
  ) in message(*FOUR, *keys, "per_device_batch_size=1", "num_pipeline_microbatches=4")


def test_a_timetable_has_room_for_the_largest_batch_that_follows_the_noise_scale():
  keys = ["pipeline_schedule=1f1b", "batch_schedule=gns", "gns_max_batch_size=256", "batch_size=64"]
  one = pipeline(*FOUR, *keys, "per_device_batch_size=4")
  assert (one.num_microbatches, one.max_num_microbatches) == (2, 8)
  assert message(*FOUR, *keys[:2], "gns_max_batch_size=1024000", *keys[3:]).endswith(
    "of which there can be 50,000; for example gns_max_batch_size=64, or more samples in a microbatch"
  )


def test_stages_between_slices_count():
  config = load_config(
    ["config=base", "dcn_pipeline_parallelism=2", "ici_pipeline_parallelism=2", "steps=1",
     "pipeline_schedule=1f1b"]
  )  # fmt: skip
  layout = topology(config.mesh, 8, 2)
  assert pipeline_of(config, layout, plan_batches(config.batch, config.run, layout)).stages == 4


I2 = ("ici_pipeline_parallelism=2", "pipeline_schedule=interleaved_1f1b")
STAGES_2 = "ici_pipeline_parallelism=2 × dcn_pipeline_parallelism=1"
MESSAGES = {
  ("pipeline_schedule=1f1b",): (
    "a pipeline has at least 2 stages, but ici_pipeline_parallelism=1 × dcn_pipeline_parallelism=1 "
    "is 1 on 8 devices; nearest: ici_pipeline_parallelism=2 or ici_pipeline_parallelism=4"
  ),
  (*I2, "base_num_decoder_layers=5"): (
    f"{STAGES_2} is 2, which must divide base_num_decoder_layers=5; nearest: "
    "base_num_decoder_layers=4 or base_num_decoder_layers=6"
  ),
  (*I2, "num_pipeline_repeats=3"): (
    f"{STAGES_2} × num_pipeline_repeats=3 is 6, which must divide base_num_decoder_layers=4; "
    "nearest: num_pipeline_repeats=2 or base_num_decoder_layers=6"
  ),
  (*I2, "num_pipeline_repeats=2", "num_layers_per_pipeline_stage=2"): (
    f"{STAGES_2} × num_pipeline_repeats=2 × num_layers_per_pipeline_stage=2 is 8, which must be "
    "base_num_decoder_layers=4; nearest: num_pipeline_repeats=1 or num_layers_per_pipeline_stage=1 "
    "or base_num_decoder_layers=8"
  ),
  (*I2, "pipeline_schedule=1f1b", "num_layers_per_pipeline_stage=1"): (
    f"{STAGES_2} × num_layers_per_pipeline_stage=1 in the 1 repeat of pipeline_schedule=1f1b is 2, "
    "which must be base_num_decoder_layers=4; nearest: num_layers_per_pipeline_stage=2 or "
    "pipeline_schedule=interleaved_1f1b or ici_pipeline_parallelism=4"
  ),
  (*I2, "pipeline_schedule=gpipe", "num_pipeline_repeats=2"): (
    "pipeline_schedule=gpipe has no repeats, but num_pipeline_repeats=2; nearest: "
    "pipeline_schedule=circular or num_pipeline_repeats=-1"
  ),
  (*I2, "num_pipeline_microbatches=3"): (
    "num_pipeline_microbatches=3 must be a multiple of the 2 stages; nearest: "
    "num_pipeline_microbatches=2 or num_pipeline_microbatches=4 or num_pipeline_microbatches=8"
  ),
  (*I2, "num_pipeline_microbatches=6"): (
    "num_pipeline_microbatches=6 must divide the 8 samples of one microbatch in each of 4 groups of "
    "devices (micro_batch_to_train=32); nearest: num_pipeline_microbatches=4 or "
    "num_pipeline_microbatches=8 or num_pipeline_microbatches=2"
  ),
  (*I2, "num_pipeline_microbatches=2", "pipeline_delay_activation_forwarding=true"): (
    "num_pipeline_microbatches=2 must be a multiple of 4, twice the stages with "
    "pipeline_delay_activation_forwarding=true; nearest: num_pipeline_microbatches=4 or "
    "num_pipeline_microbatches=8"
  ),
  (
    "ici_pipeline_parallelism=2", "pipeline_schedule=circular", "num_pipeline_microbatches=2",
    "pipeline_delay_activation_forwarding=true",
  ): (
    "num_pipeline_microbatches=2 must be a multiple of the 2 stages, and at least 4 with "
    "pipeline_delay_activation_forwarding=true; nearest: num_pipeline_microbatches=4 or "
    "num_pipeline_microbatches=8"
  ),
  (*I2, "batch_size=12"): (
    "num_pipeline_microbatches must divide the 3 samples of one microbatch in each of 4 groups of "
    "devices (micro_batch_to_train=12) and be a multiple of the 2 stages; no number is both; "
    "nearest: batch_size=8 or batch_size=16"
  ),
  (*I2, "per_device_batch_size=1.5", "num_pipeline_repeats=1"): (
    "num_pipeline_microbatches must divide the 3 samples of one microbatch in each of 4 groups of "
    "devices (micro_batch_to_train=12) and be a multiple of the 2 stages; no number is both; "
    "nearest: per_device_batch_size=1 or per_device_batch_size=2"
  ),
  (*I2, "batch_size=48", "gradient_accumulation_steps=4"): (
    "num_pipeline_microbatches must divide the 3 samples of one microbatch in each of 4 groups of "
    "devices (micro_batch_to_train=12) and be a multiple of the 2 stages; no number is both; "
    "nearest: gradient_accumulation_steps=3 or gradient_accumulation_steps=6 or batch_size=32"
  ),
  (*I2, "batch_schedule=[[0, 12], [1200, 64]]", "num_pipeline_microbatches=2"): (
    "num_pipeline_microbatches=2 must divide the samples of each of 4 groups of devices in all "
    "microbatches, of 12 and 64 samples; nearest: batch_schedule=[[0, 16], [1200, 64]]"
  ),
  (*I2, "num_experts=4", "first_num_dense_layers=1"): (
    f"{STAGES_2} is 2, which must divide base_num_decoder_layers=4 − first_num_dense_layers=1; nearest: "
    "base_num_decoder_layers=3 or base_num_decoder_layers=5"
  ),
  # Two mistakes at once: what is offered mends both.
  (*I2, "base_num_decoder_layers=5", "num_pipeline_microbatches=3"): (
    f"{STAGES_2} is 2, which must divide base_num_decoder_layers=5; nearest: "
    "num_pipeline_microbatches=-1 base_num_decoder_layers=4 or "
    "num_pipeline_microbatches=-1 base_num_decoder_layers=6"
  ),
}  # fmt: skip


@pytest.mark.parametrize("keys", MESSAGES, ids=" ".join)
def test_messages(keys):
  assert message(*keys) == MESSAGES[keys]


def test_an_offer_changes_something_and_is_the_first_that_works():
  offers = [{"steps": 400}, {"steps": 5, "packing": False}, {"steps": 6}, {"steps": 7}]
  assert suggested_fixes(base(), offers, [{}], lambda config: config.run.steps != 6) == [
    "steps=5 packing=false", "steps=7",
  ]  # fmt: skip
  beside = [{}, {"log_period": 3}, {"log_period": 4}]
  assert suggested_fixes(base(), offers, beside, lambda config: config.run.log_period == 3)[0] == (
    "log_period=3 steps=5 packing=false"
  )
  assert suggested_fixes(base(), offers, beside, lambda config: False) == []


def attempt(*keys: str) -> tuple[Pipeline | None, str]:
  """The pipeline, or why there is none."""
  try:
    return pipeline(*keys), ""
  except UserError as error:
    return None, str(error)


def count(low: int, high: int) -> st.SearchStrategy[int]:
  return st.one_of(st.just(-1), st.integers(low, high))


@settings(max_examples=examples(150))
@given(
  st.fixed_dictionaries(
    {
      "pipeline_schedule": st.sampled_from(list(SCHEDULES)),
      "ici_pipeline_parallelism": st.sampled_from([1, 2, 4, 8]),
      "base_num_decoder_layers": st.integers(1, 16),
      "num_pipeline_microbatches": count(1, 20),
      "num_pipeline_repeats": count(1, 4),
      "num_layers_per_pipeline_stage": count(1, 4),
      "pipeline_delay_activation_forwarding": st.sampled_from(["true", "false"]),
      "per_device_batch_size": st.integers(1, 8),
      "gradient_accumulation_steps": st.integers(1, 4),
    }
  )
)
def test_what_is_accepted_runs_and_what_is_offered_is_accepted(keys):
  arguments = [f"{key}={value}" for key, value in keys.items()]
  one, refusal = attempt(*arguments)
  if one is None:
    offers = refusal.partition("; nearest: ")[2]
    assert offers, refusal
    for offer in offers.split(" or "):
      pipeline(*arguments, *offer.split())
    return
  assert one.stages * one.repeats * one.layers == keys["base_num_decoder_layers"]
  limits = schedule_named(one.schedule).limits(one.shape)
  for num_pipeline_microbatches in one.choices:
    other = one.with_num_pipeline_microbatches(num_pipeline_microbatches)
    assert num_pipeline_microbatches % one.stages == 0
    assert num_pipeline_microbatches * other.rows == one.num_pipeline_microbatches * one.rows
    assert run(timetable(one.schedule, other.shape)).fault is None
  assert run(timetable(one.schedule, one.shape), limits).fault is None


def test_every_choice_is_found():
  for rows, name, delay in itertools.product((3, 4, 8, 12, 20, 24), SCHEDULES, ("true", "false")):
    keys = [*FOUR, f"pipeline_schedule={name}", f"pipeline_delay_activation_forwarding={delay}"]
    keys += [f"batch_size={2 * rows}"]
    tried = [
      attempt(*keys, f"num_pipeline_microbatches={num_pipeline_microbatches}")[0]
      for num_pipeline_microbatches in range(1, 25)
    ]
    results = [one.num_pipeline_microbatches for one in tried if one]
    if results:
      assert pipeline(*keys).choices == tuple(results)
      assert pipeline(*keys).num_pipeline_microbatches == results[0]
    else:
      assert "no number is both" in message(*keys)


def test_the_schedules_that_the_configuration_knows_are_those_that_there_are():
  for name in SCHEDULES:
    assert load_config(["config=base", f"pipeline_schedule={name}"])
  with pytest.raises(UserError, match="one of none, " + ", ".join(SCHEDULES)):
    load_config(["config=base", "pipeline_schedule=zero_bubble"])


def test_a_ramp_that_does_not_divide_is_offered_one_that_does():
  """And no batch without a ramp beside keys of one, which would be refused in their turn."""
  keys = ("ici_pipeline_parallelism=2", "base_num_decoder_layers=4", "pipeline_schedule=1f1b")
  ramp = ("batch_schedule_type=linear", "batch_schedule_length=8", "batch_size=8")
  said = message(*keys, *ramp, "batch_size_start=4", "batch_size_increment=4")
  offered = "batch_size_start=8 batch_size_increment=-1 batch_size=16"
  assert said.endswith(f"; nearest: {offered}")
  pipeline(*keys, *ramp, *offered.split())
