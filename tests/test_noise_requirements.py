"""What a person is told whose keys do not go with the noise scale, word for word."""

import dataclasses

import pytest

from maxbatch.batch.from_config import plan_batches
from maxbatch.config.load import load_config, without_effect
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.hardware.topologies import count_devices
from maxbatch.noise.controller import check_noise
from maxbatch.train import main
from maxbatch.training.noise_run import check_can_continue

STEERED = {
  "batch_schedule": "gns",
  "gns": "norm",
  "batch_size": 32,
  "steps": -1,
  "total_samples": 6400,
  "schedule_unit": "samples",
}
ONE = {"num_simulated_devices": 1, "steps": 10, "per_device_batch_size": 1}


def checked(**keys: object) -> BatchPlan:
  """The plan of these keys, on simulated devices that nobody starts."""
  config = load_config(["config=base", *(f"{key}={value}" for key, value in keys.items())])
  plan = plan_batches(config.batch, config.run, count_devices(config).layout)
  check_noise(config, plan)
  return plan


def message(**keys: object) -> str:
  with pytest.raises(UserError) as caught:
    checked(**keys)
  return str(caught.value)


@pytest.mark.parametrize("gns", ["norm", "all"])
def test_a_single_sample_has_nothing_to_be_compared_with(gns):
  assert message(**ONE, gns=gns) == (
    f"gns={gns} needs at least 2 samples per step, and global_batch_to_train=1 has one; for "
    "example batch_size=2 gradient_accumulation_steps=-1, or gns=off"
  )


def test_nor_has_a_single_microbatch_of_a_single_replica():
  keys = ONE | {"gns_from_microbatches": "true", "per_device_batch_size": 4}
  assert message(**keys) == (
    "gns_from_microbatches=true compares the gradients of microbatches, and a step has one microbatch "
    "and one replica of the model (data 1); for example gradient_accumulation_steps=2, or gns=norm "
    "gns_from_microbatches=false"
  )
  assert checked(**keys, gradient_accumulation_steps=2)
  assert checked(**(keys | {"gns_from_microbatches": "false"}), gns="norm")
  assert checked(**(keys | {"num_simulated_devices": 2}))
  assert "one replica" in message(
    **(keys | {"num_simulated_devices": 2}), ici_data_parallelism=1, ici_fsdp_parallelism=2
  )


def test_nor_has_one_phase_of_a_schedule():
  keys = ONE | {"batch_size": 2}
  assert message(**keys, gns="all", batch_schedule="[[0, 1], [4, 2]]").startswith(
    "gns=all needs at least 2 samples per step"
  )


@pytest.mark.parametrize(
  ("keys", "expected"),
  [
    (
      {"gns": "off"},
      "batch_schedule=gns needs the noise scale, and gns=off; for example gns=norm",
    ),
    (
      {"gns_calibrate_every": 0},
      "batch_schedule=gns needs the noise scale of the whole model, which gns=norm predicts "
      "from calibration steps, and gns_calibrate_every=0; for example gns_calibrate_every=10, or "
      "gns=all",
    ),
    (
      {"steps": 400, "total_samples": -1},
      "steps=400: with batch_schedule=gns the steps of a run are not known beforehand; give its "
      "samples or tokens, for example steps=-1 total_tokens=1638400",
    ),
    (
      {"schedule_unit": "steps"},
      "schedule_unit=steps: with batch_schedule=gns steps are of different sizes; for example "
      "schedule_unit=samples, in which the learning rate's schedule, evaluations and checkpoints "
      "are then counted",
    ),
    (
      {"accumulation": "streamed"},
      "batch_schedule=gns changes the number of microbatches during the run, which "
      "accumulation=streamed compiles into the step; for example accumulation=fused",
    ),
    (
      {"gns_max_batch_size": 31},
      "gns_max_batch_size=31 must be at least batch_size=32, with which batch_schedule=gns begins; "
      "for example gns_max_batch_size=512",
    ),
    (
      {"batch_schedule_type": "doubling"},
      "batch_schedule_type=doubling and batch_schedule=gns are different schedules; keep one of "
      "them, for example enable_rampup_batch_size=false batch_schedule=[]",
    ),
  ],
)
def test_keys_that_steering_does_not_go_with(keys, expected):
  assert message(**(STEERED | keys)) == expected


@pytest.mark.parametrize(
  "keys",
  [
    {},
    {"gns": "all", "gns_calibrate_every": 0},
    {"gns": "off", "gns_from_microbatches": "true"},
    {"total_samples": -1, "total_tokens": 819200, "schedule_unit": "tokens"},
    {"gns_dry_run": "true"},
    {"gns_max_batch_size": 32},
    {"batch_schedule": "[]", "accumulation": "streamed"},
  ],
)
def test_keys_that_work(keys):
  assert checked(**(STEERED | keys)).global_batch_to_train == 32


def test_the_offered_values_work():
  checked(**(ONE | {"num_simulated_devices": 2}), gns="all")
  assert checked(**(STEERED | {"gns_max_batch_size": 512})).max_batch == 512
  assert checked(**STEERED).max_batch == 512
  keys = {"total_samples": -1, "steps": -1, "total_tokens": 128 * 32 * 10}
  assert checked(**(STEERED | keys)).total_samples == 320


# --- batch_schedule=file -------------------------------------------------------------------------

FOLLOWING = STEERED | {"batch_schedule": "file", "gns": "off"}


def test_following_needs_a_file():
  assert message(**FOLLOWING) == (
    "batch_schedule=file needs batch_schedule_file, the schedule that a run with "
    "batch_schedule=gns wrote; for example batch_schedule_file=runs/steered/batch_schedule.yml"
  )


def test_following_a_file_that_is_not_there(tmp_path):
  file = tmp_path / "batch_schedule.yml"
  said = message(**FOLLOWING, batch_schedule_file=file)
  assert said.startswith(f"{file}: cannot be read: No such file or directory; a file that works:\n")


@pytest.mark.parametrize(
  ("pairs", "expected"),
  [
    (
      "[0, 16], [160, 32]",
      "begins with 16 samples and batch_size is 32; to follow the file, batch_size=16",
    ),
    (
      "[0, 32], [320, 60]",
      "batch_schedule: phase 2, [320, 60], has 60 samples, which must be a positive multiple of "
      "the 8 data-parallel groups (data 8 × fsdp 1); nearest: [320, 56] or [320, 64]",
    ),
  ],
)
def test_a_file_that_does_not_fit(tmp_path, pairs, expected):
  file = tmp_path / "mine.yml"
  file.write_text(f"batch_schedule: [{pairs}]\n")
  said = message(**FOLLOWING, batch_schedule_file=file)
  assert said.removeprefix(f"batch_schedule_file={file} ") == expected


def test_a_file_by_hand_is_followed(tmp_path):
  file = tmp_path / "mine.yml"
  file.write_text("batch_schedule:\n- [0, 32]\n- [320, 64, from there on]\n- [960, 24]\n")
  keys = {"batch_schedule_file": file, "total_samples": 1200, "per_device_batch_size": 2}
  plan = checked(**(FOLLOWING | keys))
  assert [(phase.first.samples, phase.batch) for phase in plan.phases] == [
    (0, 32),
    (320, 64),
    (960, 24),
  ]
  # The microbatch of 16 does not divide 24.
  assert [phase.micro_batch for phase in plan.phases] == [16, 16, 8]
  assert plan.rate_is_of_first_batch


# --- going on ------------------------------------------------------------------------------------


def test_sizes_with_which_a_steered_run_goes_on():
  plan = checked(**STEERED, per_device_batch_size=2)
  check_can_continue(plan, first=32, now=32)
  check_can_continue(plan, first=32, now=48)


@pytest.mark.parametrize(
  ("per_device", "devices", "expected"),
  [
    (4, 8, "per_device_batch_size=1 gradient_accumulation_steps=-1"),
    (2, 16, "another mesh, or another run_name"),
  ],
)
def test_a_microbatch_that_does_not_divide_the_batch(per_device, devices, expected):
  keys = {"per_device_batch_size": per_device, "num_simulated_devices": devices}
  plan = checked(**STEERED, **keys)
  with pytest.raises(UserError) as caught:
    check_can_continue(plan, first=32, now=40)
  assert str(caught.value) == (
    "micro_batch_to_train=32 must divide the 40 samples per step that batch_schedule=gns has "
    f"reached in this run; for example {expected}"
  )


def test_another_first_batch():
  plan = dataclasses.replace(checked(**STEERED), global_batch_to_train=64)
  with pytest.raises(UserError) as caught:
    check_can_continue(plan, first=32, now=64)
  assert str(caught.value) == (
    "global_batch_to_train=64 must be the 32 samples per step with which this run began, because "
    "batch_schedule=gns continues from there; for example batch_size=32, or another run_name"
  )


# --- the commands --------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("keys", "named"),
  [
    ({"gns": "off"}, "error: batch_schedule=gns needs the noise scale, and gns=off;"),
    (
      {"gns": "off", "compile_only": "true"},
      "error: batch_schedule=gns needs the noise scale, and gns=off;",
    ),
  ],
)
def test_the_command_refuses_before_anything_is_done(tmp_path, capsys, keys, named):
  keys = STEERED | keys | {"base_output_directory": tmp_path / "runs"}
  assert main(["config=base", *(f"{key}={value}" for key, value in keys.items())]) == 2
  printed = capsys.readouterr()
  assert printed.err.startswith(named)
  assert printed.out == ""
  assert not (tmp_path / "runs").exists()


def test_validate_only_refuses_what_a_run_would(capsys):
  keys = STEERED | {"gns": "off", "validate_only": "true"}
  assert main(["config=base", *(f"{key}={value}" for key, value in keys.items())]) == 2
  assert "batch_schedule=gns needs the noise scale, and gns=off" in capsys.readouterr().err


def test_a_pipeline_measures_rows_and_compares_its_microbatches():
  of_parts = {"gns": "off", "gns_from_microbatches": "true", "pipeline_schedule": "1f1b"}
  of_parts |= {"ici_pipeline_parallelism": 2, "num_simulated_devices": 4}
  # Of a single step of accumulation it makes several.
  checked(**of_parts, ici_fsdp_parallelism=2, ici_data_parallelism=1)
  checked(**of_parts | {"gns": "norm"}, ici_fsdp_parallelism=2)
  checked(**STEERED | of_parts)


def test_a_file_that_nothing_follows():
  with pytest.raises(UserError, match="it has one with batch_schedule=file"):
    without_effect(
      load_config(["config=base", "batch_schedule_file=runs/steered/batch_schedule.yml"])
    )
