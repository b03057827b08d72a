"""Whole runs whose batch follows the noise scale: exact to the sample, and resumed anywhere."""

import contextlib
import functools
import itertools
import math
from typing import Any

import pytest
from noise_runs import CALIBRATED, WINDOW, Done, Run, T, training
from support import stop_at

from maxbatch.batch.schedule_file import read_changes
from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.errors import UserError
from maxbatch.noise.controller import Controller, ControllerLimits, Decision
from maxbatch.run_folder.metrics import Record

STEERED = {"batch_schedule": "gns", "gns_windows_before_growth": 1, "gns_hold_tokens": 0}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
  with training(tmp_path_factory.mktemp("runs")) as train:
    yield train


@contextlib.contextmanager
def bold():
  """The controller as it is, but for the width of the intervals that it acts on."""
  with pytest.MonkeyPatch.context() as patch:
    wide = functools.partial(ControllerLimits, max_relative_half_width=1e6)
    patch.setattr("maxbatch.noise.controller.ControllerLimits", wide)
    yield


@contextlib.contextmanager
def growing(batches: dict[int, int]):
  """A controller that goes to these batches at these steps."""

  def decide(self: Controller, position: Any, batch: int, estimate: Any) -> Decision:
    del self, estimate
    larger = batches.get(position.step, batch)
    return Decision(larger, "it was told to", grew=larger > batch)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(Controller, "decide", decide)
    yield


@pytest.fixture(scope="module")
def steered(train: Run) -> Done:
  with bold():
    return train("steered", **STEERED)


def changes(done: Done) -> list[tuple[int, int]]:
  """(step, batch) wherever the batch is another one than in the step before."""
  batches = done.values("global_batch_to_train")
  pairs = enumerate(itertools.pairwise(batches[: -1 if batches[-1] < batches[-2] else None]), 1)
  return [(step, int(after)) for step, (before, after) in pairs if before != after]


def test_the_batch_grows_where_the_noise_scale_allows_it(steered):
  grown = changes(steered)
  assert [batch for _, batch in grown] == [4, 8]
  batch = 2
  for step, larger in grown:
    record = steered.records[step]
    assert step % (WINDOW // 2) == 0
    assert record["gns/total_low"] > 2 * batch
    reason = f"the noise scale is at least {math.floor(record['gns/total_low'])} samples"
    assert f"step {step}: the batch goes from {batch} to {larger}: {reason}" in steered.said
    batch = larger


def test_no_sample_is_left_out_or_taken_twice(steered):
  ends = steered.values("samples")
  taken = [end - begin for begin, end in itertools.pairwise([0, *ends])]
  assert taken == steered.values("global_batch_to_train")
  assert ends[-1] == 240
  assert all(value == 2 for value in steered.values("micro_batch_to_train"))
  assert steered.values("gradient_accumulation_steps") == [size / 2 for size in taken]


def test_a_growing_batch_compiles_one_program(steered):
  assert steered.compiled == (2,)


def test_a_pipeline_s_batch_grows_as_without_stages(train, steered):
  """In one program, whose timetable has room for the largest batch."""
  with bold():
    piped = train("piped", **STEERED, pipeline_schedule="1f1b", ici_pipeline_parallelism=2)
  assert changes(piped) == changes(steered)
  assert len(piped.compiled) == 1
  assert piped.values("loss") == pytest.approx(steered.values("loss"), rel=1e-4)


def test_the_learning_rate_grows_with_the_root_of_the_batch(steered):
  for before, record in itertools.pairwise(steered.records):
    begun, batch = before["samples"], record["global_batch_to_train"]
    peak = 1e-3 * math.sqrt(batch / 2)
    share = min(1.0, record["samples"] / 20)
    if begun >= 20:
      share = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (begun - 20) / 220))
    assert record["learning_rate"] == pytest.approx(peak * share, rel=1e-12)


def test_the_decisions_are_written(steered):
  written = read_changes(steered.folder / "batch_schedule.yml")
  samples = [0, *(int(steered.records[step]["samples"]) for step, _ in changes(steered))]
  assert [(change.samples, change.batch) for change in written] == [
    *zip(samples, [2, 4, 8], strict=True)
  ]
  assert written[0].reason == "the first batch"
  assert all(change.reason in steered.said for change in written[1:])


def test_a_run_that_grew_ends_complete(train, steered):
  steps = len(steered.records) - 1
  assert f"Finished after step {steps}: 240 samples, {240 * T:,} tokens" in steered.said
  assert "the same command again" not in steered.said
  assert "batch 8 " in steered.said.splitlines()[-1]
  with bold():
    again = train("steered", **STEERED)
  assert f"This run is complete at step {steps}" in again.said


def test_the_written_schedule_takes_the_same_steps(train, steered):
  file = steered.folder / "batch_schedule.yml"
  replayed = train("replayed", batch_schedule="file", batch_schedule_file=file)
  assert replayed.records == steered.records
  assert fingerprints(replayed.params) == fingerprints(steered.params)
  assert replayed.compiled == (2,)


def test_a_dry_run_says_what_it_would_do_and_does_not(train):
  with bold():
    with pytest.MonkeyPatch.context() as patch:
      stop_at(patch, 17)
      begun = train("dry", **STEERED, gns_dry_run="true")
    dry = train("dry", **STEERED, gns_dry_run="true")
  assert "step 16: the batch would go from 2 to 4: the noise scale is at least" in begun.said
  constant = train("constant")
  assert_same_records(dry.records, constant.records)
  assert fingerprints(dry.params) == fingerprints(constant.params)
  assert read_changes(dry.folder / "batch_schedule.yml")[1].batch == 4
  assert not (constant.folder / "batch_schedule.yml").exists()


def test_a_run_that_keeps_its_batch_writes_that_down(train):
  with growing({}):
    done = train("kept", **STEERED)
  (written,) = read_changes(done.folder / "batch_schedule.yml")
  assert (written.samples, written.batch) == (0, 2)
  replayed = train(
    "kept, replayed",
    batch_schedule="file",
    batch_schedule_file=done.folder / "batch_schedule.yml",
  )
  assert replayed.records == done.records


# --- going on ------------------------------------------------------------------------------------


def assert_same_records(ours: list[Record], theirs: list[Record]) -> None:
  """To the last bit; being stopped adds an evaluation."""
  for mine, other in zip(ours, theirs, strict=True):
    assert {key: mine[key] for key in mine if key in other or key != "eval/loss"} == other


@pytest.mark.parametrize(("change", "after"), [(0, -1), (0, 0), (0, 1), (1, 0)])
def test_stopped_anywhere_it_decides_and_measures_the_same(train, steered, change, after):
  step = changes(steered)[change][0] + after
  name = f"stopped at {step}"
  with bold():
    with pytest.MonkeyPatch.context() as patch:
      stop_at(patch, step)
      stopped = train(name, **STEERED)
    assert stopped.records[-1]["step"] == step
    assert f"Stopped after step {step}:" in stopped.said
    resumed = train(name, **STEERED)
  assert_same_records(resumed.records, steered.records)
  assert fingerprints(resumed.params) == fingerprints(steered.params)
  assert "The batch schedule is another one" not in resumed.said
  # Once: the plan that is printed first has what the checkpoint says was decided.
  assert resumed.said.count("Batch plan") == 1
  written = [(done.folder / "batch_schedule.yml").read_text() for done in (resumed, steered)]
  assert written[0] == written[1]


FORCED = {8: 6, 16: 12}


@pytest.fixture(scope="module")
def forced(train: Run) -> Done:
  with growing(FORCED):
    return train("forced", batch_size=4, **STEERED, **CALIBRATED)


def test_a_calibrated_run_compiles_two_programs_however_it_grows(forced):
  assert changes(forced) == [*FORCED.items()]
  assert forced.compiled == (2, 2)


@pytest.mark.parametrize("step", [8, 17])
def test_stopped_between_calibrations_it_predicts_the_same(train, forced, step):
  assert "gns/total" in forced.records[-1]
  name = f"forced, stopped at {step}"
  with growing(FORCED):
    with pytest.MonkeyPatch.context() as patch:
      stop_at(patch, step)
      train(name, batch_size=4, **STEERED, **CALIBRATED)
    resumed = train(name, batch_size=4, **STEERED, **CALIBRATED)
  assert_same_records(resumed.records, forced.records)


def test_sizes_that_do_not_fit_the_decisions_are_refused(train):
  with growing(FORCED):
    with pytest.MonkeyPatch.context() as patch:
      stop_at(patch, 9)
      train("moved", batch_size=4, **STEERED)
    with pytest.raises(UserError) as caught:
      train("moved", batch_size=4, per_device_batch_size=2, **STEERED)
    assert str(caught.value) == (
      "micro_batch_to_train=4 must divide the 6 samples per step that batch_schedule=gns has "
      "reached in this run; for example per_device_batch_size=1 gradient_accumulation_steps=-1"
    )
    with pytest.raises(UserError) as caught:
      train("moved", batch_size=6, **STEERED)
    assert str(caught.value) == (
      "global_batch_to_train=6 must be the 4 samples per step with which this run began, because "
      "batch_schedule=gns continues from there; for example batch_size=4, or another run_name"
    )
