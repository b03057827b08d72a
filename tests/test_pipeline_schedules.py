"""pipeline_schedule=auto and pipeline_saved_activations=auto: what is tried, taken, remembered and said."""

import json
import pathlib
import re
from typing import Any

import jax
import pytest
from first_devices import use_first_devices
from lowered_once import lower_once
from support import SMALLEST, config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile import compile_step, measured_time
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target
from maxbatch.pipeline import main as pipeline_command
from maxbatch.plan import main as plan_command
from maxbatch.train import main
from maxbatch.tuning import pipeline_schedules
from maxbatch.tuning.pipeline_schedules import StageChoice, choose_pipeline_schedule
from maxbatch.tuning.search import ProbeResult

GIB = 1 << 30
EIGHT_LAYERS = {
  "base_num_decoder_layers": 8,
  "ici_pipeline_parallelism": 2,
  "pipeline_schedule": "auto",
  "per_device_batch_size": 4,
  "num_simulated_devices": 2,
}


@pytest.fixture(autouse=True)
def _lowers_once(monkeypatch):
  lower_once(monkeypatch)


class Machine:
  """Every schedule takes 1 second but the favourite; residuals of some repeats do not fit, or nothing does."""

  def __init__(
    self,
    favourite: int = 2,
    too_large: tuple[int, ...] = (),
    capacity: int = 99,
    faster: str = "residuals",
  ):
    self.favourite, self.too_large, self.capacity = favourite, too_large, capacity
    self.faster = faster
    self.asked: list[StageChoice] = []

  def __call__(self, choice: StageChoice) -> ProbeResult:
    self.asked.append(choice)
    peak = choice.repeats
    if choice.saved == "residuals":
      peak += 100 if choice.repeats in self.too_large else 10
    seconds = 0.5 if choice.repeats == self.favourite else 1.0
    seconds -= 0.1 if choice.saved == self.faster else 0.0
    fits = peak <= self.capacity
    return ProbeResult(peak * GIB, self.capacity * GIB, fits, seconds if fits else None)


def resolved(
  folder: pathlib.Path, machine: Machine, *, retune: bool = False, **keys: object
) -> tuple[Config, str]:
  """What is chosen, and what is said."""
  of, lines = config(**EIGHT_LAYERS | keys), []
  place = Target(jax.devices()[:2], topology(of.mesh, 2))
  plan = plan_batches(of.batch, of.run, place.layout)
  chosen = choose_pipeline_schedule(
    of, place, machine, folder, plan=plan, retune=retune, say=lines.append
  )
  return chosen, "\n".join(lines)


def taken(chosen: Config) -> tuple[str, int, str]:
  keys = chosen.pipeline
  return keys.pipeline_schedule, keys.num_pipeline_repeats, keys.pipeline_saved_activations


def test_all_repeats_are_tried_and_the_fastest_is_taken_said_and_remembered(tmp_path):
  machine = Machine()
  chosen, said = resolved(tmp_path, machine)
  assert machine.asked == [StageChoice(n, "input") for n in (4, 2, 1)]
  assert taken(chosen) == ("interleaved_1f1b", 2, "input")
  (file,) = tmp_path.iterdir()
  assert len(json.loads(file.read_text())["probes"]) == 3
  line = (
    "pipeline_schedule auto: interleaved_1f1b num_pipeline_repeats=2 pipeline_saved_activations=input "
    "(the fastest that fits: 0.5 s a step, measured)"
  )
  assert said.endswith(f"\n{line}; remembered in {file}\n")
  # A second start asks nothing; --retune does.
  again, said = resolved(tmp_path, other := Machine(1))
  assert (again, other.asked) == (chosen, [])
  assert said.startswith(f"{line} (remembered from ")
  assert taken(resolved(tmp_path, Machine(1), retune=True)[0]) == ("1f1b", 1, "input")


def test_residuals_are_kept_where_they_fit(tmp_path):
  machine = Machine(favourite=4, too_large=(4, 1))
  chosen, said = resolved(tmp_path, machine, pipeline_saved_activations="auto")
  tried = [(4, "residuals"), (4, "input"), (2, "residuals"), (1, "residuals"), (1, "input")]
  assert machine.asked == tried
  assert taken(chosen) == ("interleaved_1f1b", 4, "input")
  assert said.count("does not fit in 99 GiB") == 2


@pytest.mark.parametrize("faster", ["input", "residuals"])
def test_inputs_are_tried_beside_the_fastest(tmp_path, faster):
  machine = Machine(faster=faster)
  chosen, _ = resolved(tmp_path, machine, pipeline_saved_activations="auto")
  residuals = [StageChoice(n, "residuals") for n in (4, 2, 1)]
  assert machine.asked == [*residuals, StageChoice(2, "input")]
  assert taken(chosen) == ("interleaved_1f1b", 2, faster)


def test_of_a_given_schedule_only_what_stages_keep_is_chosen(tmp_path):
  keys: dict[str, Any] = {"pipeline_schedule": "gpipe", "pipeline_saved_activations": "auto"}
  machine = Machine()
  chosen, _ = resolved(tmp_path, machine, **keys)
  assert (machine.asked, taken(chosen)) == (
    [StageChoice(1, "residuals"), StageChoice(1, "input")],
    ("gpipe", -1, "residuals"),
  )


def test_where_nothing_fits_the_least_memory_is_taken(tmp_path):
  chosen, said = resolved(tmp_path, Machine(capacity=0))
  assert taken(chosen) == ("1f1b", 1, "input")
  assert "(none fits, this one needs the least memory)" in said


@pytest.mark.parametrize(
  ("keys", "expected"),
  [
    ({"num_pipeline_repeats": 1}, ("1f1b", 1, "input")),
    ({"num_layers_per_pipeline_stage": 2}, ("interleaved_1f1b", 2, "input")),
    ({"pipeline_schedule": "gpipe"}, ("gpipe", -1, "input")),
  ],
  ids=str,
)
def test_nothing_is_tried_where_nothing_is_open(tmp_path, keys, expected):
  machine = Machine()
  chosen, said = resolved(tmp_path, machine, **keys)
  assert (taken(chosen), said, machine.asked) == (expected, "", [])


def test_what_does_not_divide_is_refused_with_what_does(tmp_path):
  with pytest.raises(UserError, match=r"=3 is 6, which must divide .*nearest: num_layers_per_"):
    resolved(tmp_path, Machine(), num_layers_per_pipeline_stage=3)


def test_a_compiled_step_brings_its_schedule(tmp_path, monkeypatch):
  made = {"num_pipeline_repeats": 1, "pipeline_saved_activations": "input"}
  monkeypatch.setattr(pipeline_schedules, "made_from", lambda path: {"configuration": made})
  machine = Machine()
  assert taken(resolved(tmp_path, machine, compiled_step="file")[0]) == ("1f1b", 1, "input")
  assert machine.asked == []


OPEN = (
  "pipeline_schedule=auto: a run or compile_only=true compiles interleaved_1f1b with num_pipeline_repeats=4, 2, 1 "
  "(1 is 1f1b), and takes the fastest that fits; shown is 4"
)
RESIDUALS = (
  "pipeline_saved_activations=auto: a run or compile_only=true takes residuals where they fit and are faster; shown is "
  "input"
)


def given(**keys: object) -> list[str]:
  values: dict[str, Any] = SMALLEST | EIGHT_LAYERS | {"dataset_type": "synthetic"} | keys
  return ["config=base", *(f"{key}={value}" for key, value in values.items())]


@pytest.mark.parametrize("command", [plan_command, pipeline_command])
def test_commands_without_devices_show_the_smallest_bubble_and_say_so(command, capsys):
  assert command(given(pipeline_saved_activations="auto")) == 0
  said = capsys.readouterr().out
  assert f"\n  {OPEN}\n  {RESIDUALS}\n" in said
  assert "interleaved_1f1b (this)" in said or "interleaved_1f1b: 2 stages × 4 repeats" in said


@pytest.mark.usefixtures("own_cache")
def test_a_run_compiles_and_times_them_and_trains_with_one(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(measured_time, "SECONDS", 0.05)
  use_first_devices(monkeypatch, 2)
  keys: dict[str, Any] = {"base_num_decoder_layers": 4, "num_pipeline_microbatches": 2}
  keys |= {"num_simulated_devices": -1, "steps": 1, "eval_samples": 2, "eval_interval": -1}
  keys |= {"generate_length": 0, "enable_checkpointing": "false", "run_name": "run"}
  keys |= {"per_device_batch_size": 2, "base_output_directory": tmp_path}
  assert main(given(**keys)) == 0
  said = capsys.readouterr().out
  table = re.findall(r"^\d +(\S+) +(\d) +(\d) +input +([\d.]+%) .* GiB  measured", said, re.M)
  assert sorted(table) == [("1f1b", "1", "2", "33.3%"), ("interleaved_1f1b", "2", "1", "20.0%")]
  schedule = re.search(r"^pipeline_schedule auto: (\w+) num_pipeline_repeats=", said, re.M)
  assert schedule
  written = (tmp_path / "run" / "config.yml").read_text()
  assert f"\npipeline_schedule: {schedule[1]}\n" in written
  # A second start takes the same at once.
  monkeypatch.setattr(compile_step, "compile_program", lambda *_: pytest.fail("compiled"))
  assert main(given(**keys | {"run_name": "again"})) == 0
  assert "(remembered from " in capsys.readouterr().out
