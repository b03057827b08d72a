"""num_pipeline_microbatches=-1 settled: remembered, said, agreed on, and what shows it without."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import jax
import pytest
from first_devices import use_first_devices
from lowered_once import lower_once
from support import SMALLEST, config

from maxbatch.batch.from_config import topology
from maxbatch.compile import compile_step, measured_time
from maxbatch.compile.program import DoesNotFitError
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target
from maxbatch.modes import pretraining
from maxbatch.modes.method import Purpose
from maxbatch.pipeline import main as pipeline_command
from maxbatch.plan import main as plan_command
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import main
from maxbatch.tuning import pipeline_microbatches, search
from maxbatch.tuning.pipeline_microbatches import (
  PipelineMicrobatchProber,
  choose_num_pipeline_microbatches,
  with_num_pipeline_microbatches,
)
from maxbatch.tuning.search import ProbeResult

GIB = 1 << 30
FOUR = {
  "base_num_decoder_layers": 4,
  "ici_pipeline_parallelism": 4,
  "pipeline_schedule": "1f1b",
  "per_device_batch_size": 8,
  "num_simulated_devices": 4,
}


@pytest.fixture(autouse=True)
def _lowers_once(monkeypatch):
  lower_once(monkeypatch)


def settings(**keys: object) -> Config:
  return config(**FOUR | keys)


RAMP = {"batch_size": -1, "per_device_batch_size": -1, "micro_batch_size": "none"}


def place(of: Config) -> Target:
  return Target(jax.devices()[:4], topology(of.mesh, 4))


class Machine:
  """Every number takes 1 second but the favourite."""

  def __init__(self, favourite: int = 4):
    self.favourite = favourite
    self.asked: list[int] = []

  def __call__(self, num_pipeline_microbatches: int) -> ProbeResult:
    self.asked.append(num_pipeline_microbatches)
    return ProbeResult(
      num_pipeline_microbatches * GIB,
      99 * GIB,
      True,
      0.5 if num_pipeline_microbatches == self.favourite else 1.0,
    )


def resolved(of: Config, folder: pathlib.Path, **options: Any) -> tuple[Config, str, Machine]:
  """What is chosen, what is said, and the machine that was asked."""
  machine, lines = options.pop("machine", None) or Machine(), []
  result = choose_num_pipeline_microbatches(
    of, place(of), machine, folder, say=lines.append, **options
  )
  return result, "\n".join(lines), machine


def test_the_choice_is_made_said_and_remembered(tmp_path):
  of = settings()
  result, said, machine = resolved(of, tmp_path)
  assert result == with_num_pipeline_microbatches(of, 4) == settings(num_pipeline_microbatches=4)
  assert machine.asked[:2] == [32, 4]
  (file,) = tmp_path.iterdir()
  assert file.name.startswith("num_pipeline_microbatches-")
  lines = said.splitlines()
  assert lines[0] == "Pipeline microbatches of 1f1b on 4 stages, for steps of 1 microbatch"
  assert [line.split()[1] for line in lines[2:6] if line.endswith("taken")] == ["4"]
  assert said.endswith(
    "\nnum_pipeline_microbatches -1: 4 (the fastest: 0.5 s a step, measured); remembered in "
    f"{file}\n"
  )
  assert len(json.loads(file.read_text())["probes"]) == 4


def test_a_second_start_asks_nothing(tmp_path):
  first, _, _ = resolved(settings(), tmp_path)
  second, said, machine = resolved(settings(), tmp_path, machine=Machine(32))
  assert (second, machine.asked) == (first, [])
  (file,) = tmp_path.iterdir()
  assert said == (
    "num_pipeline_microbatches -1: 4 (the fastest: 0.5 s a step, measured) (remembered from "
    f"{file}; --retune measures again)"
  )
  # And --retune does.
  third, _, machine = resolved(settings(), tmp_path, machine=Machine(32), retune=True)
  assert machine.asked
  assert third.pipeline.num_pipeline_microbatches == 32
  assert resolved(settings(), tmp_path)[0] == third


@pytest.mark.parametrize(
  "change",
  [
    {"gradient_accumulation_steps": 2},
    {"pipeline_schedule": "gpipe"},
    {"base_mlp_dim": 128},
    {"per_device_batch_size": 16},
    {"compile_topology": "v5e-4"},
    {"batch_schedule": "[[0, 32], [3200, 64]]", "per_device_batch_size": -1, "micro_batch_size": 8},
  ],
  ids=str,
)
def test_what_it_depends_on_measures_anew(tmp_path, change):
  resolved(settings(), tmp_path)
  assert resolved(settings(**change), tmp_path)[2].asked


def test_a_larger_step_that_is_now_reached_measures_anew(tmp_path):
  ramp = RAMP | {"micro_batch_size": 8, "batch_schedule": "[[0, 32], [3200, 64]]"}
  for number in (10, 500):
    assert resolved(settings(**ramp, steps=number), tmp_path)[2].asked
    assert not resolved(settings(**ramp, steps=number + 1), tmp_path)[2].asked


def test_a_damaged_memory_is_said_and_replaced(tmp_path):
  resolved(settings(), tmp_path)
  (file,) = tmp_path.iterdir()
  content = json.loads(file.read_text())
  file.write_text(json.dumps(content | {"choice": {"num_pipeline_microbatches": 5}}))
  result, said, machine = resolved(settings(), tmp_path)
  assert said.startswith(
    f"num_pipeline_microbatches -1: {file} has a damaged choice; measured again\n"
  )
  assert machine.asked
  assert result.pipeline.num_pipeline_microbatches == 4


@pytest.mark.parametrize(
  "keys",
  [
    {"pipeline_schedule": "none"},
    {"num_pipeline_microbatches": 8},
    {"per_device_batch_size": 1},  # One choice.
  ],
  ids=str,
)
def test_nothing_is_done_where_there_is_nothing_to_choose(tmp_path, keys):
  of = settings(**keys)
  result, said, machine = resolved(of, tmp_path)
  assert (result, said, machine.asked) == (of, "", [])
  assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_cut_is_refused(tmp_path):
  with pytest.raises(UserError, match="num_pipeline_microbatches=6 must be a multiple"):
    resolved(settings(num_pipeline_microbatches=6), tmp_path)


def test_all_numbers_are_process_0s(tmp_path, monkeypatch):
  def broadcast_one_to_all(value: Any) -> Any:
    faster = {"seconds_per_microbatch": 0.1} if value["peak_bytes"] == 32 * GIB else {}
    return value | faster

  monkeypatch.setattr(search, "broadcast_one_to_all", broadcast_one_to_all)
  result, _, _ = resolved(settings(), tmp_path, machine=Machine(4))
  assert result.pipeline.num_pipeline_microbatches == 32


def test_what_the_compiler_refuses_is_known_not_to_fit(monkeypatch):
  def refuse(*_: object) -> Any:
    raise DoesNotFitError(0)

  monkeypatch.setattr(search, "report_or_refusal", refuse)
  of = settings(device_memory_gb=3)
  result = PipelineMicrobatchProber(of, jax.devices()[:4], place(of).layout)(4)
  assert result == ProbeResult(3 * GIB + 1, 3 * GIB, False)


@pytest.mark.parametrize(
  ("schedule", "micro_batch", "passes"),
  [
    ("[[0, 24], [48, 96]]", 96, "1 microbatch"),
    ("[[0, 24], [2400, 96]]", 24, "1 microbatch"),
    ("[[0, 96], [96, 24]]", 24, "4 microbatches"),
  ],
)
def test_a_schedule_is_ranked_for_its_largest_step_that_is_reached(
  tmp_path, monkeypatch, schedule, micro_batch, passes
):
  compiled: list[int] = []

  def refuse(config: Config, devices: Any, layout: Any, size: int) -> Any:
    compiled.append(size)
    raise DoesNotFitError(0)

  monkeypatch.setattr(search, "report_or_refusal", refuse)
  of = settings(**RAMP, batch_schedule=schedule, steps=10)
  prober = PipelineMicrobatchProber(of, place(of).devices, place(of).layout)
  _, said, _ = resolved(of, tmp_path, machine=prober)
  assert set(compiled) == {micro_batch}
  # One number must cut all passes, those of 24 samples too.
  heading, _, *rows = said.splitlines()[:6]
  assert heading.endswith(f", for steps of {passes}")
  assert {(int(row.split()[0]), int(row.split()[1])) for row in rows} == {
    (num_pipeline_microbatches, micro_batch // num_pipeline_microbatches)
    for num_pipeline_microbatches in (4, 8, 12, 24)
  }


# --- commands that touch no device ----------------------------------------------------------------

OPEN = (
  "num_pipeline_microbatches=-1: a run or compile_only=true takes the fastest of 4, 8, 16, 32, "
  "compiling and timing some; shown is 4, the fewest, which num_pipeline_microbatches=4 takes at "
  "once"
)


EIGHT = {"num_simulated_devices": 8, "ici_data_parallelism": 2, "per_device_batch_size": 8}


def given(**keys: object) -> list[str]:
  values = SMALLEST | FOUR | {"dataset_type": "synthetic"} | keys
  return ["config=base", *(f"{key}={value}" for key, value in values.items())]


def test_the_plan_shows_the_fewest_and_says_so(capsys):
  assert plan_command(given()) == 0
  assert f"\n  {OPEN}\n" in capsys.readouterr().out
  assert plan_command([*given(), "--json"]) == 0
  values = json.loads(capsys.readouterr().out)["pipeline"]
  assert (values["num_pipeline_microbatches"], values["choice"]) == (4, OPEN)
  assert values["choices"] == [4, 8, 16, 32]
  assert plan_command([*given(num_pipeline_microbatches=4), "--json"]) == 0
  assert json.loads(capsys.readouterr().out)["pipeline"]["choice"] == ""


def test_the_pipeline_command_says_so_below_the_table(capsys):
  assert pipeline_command(given()) == 0
  assert re.search(rf"\n  32 .*\n  {re.escape(OPEN)}\n\n", capsys.readouterr().out)
  assert pipeline_command(given(num_pipeline_microbatches=4)) == 0
  assert "num_pipeline_microbatches=-1" not in capsys.readouterr().out


def test_validate_only_says_so_and_compiles_nothing(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(compile_step, "compile_program", lambda *_: pytest.fail("compiled"))
  assert main(given(**EIGHT, validate_only="true", base_output_directory=tmp_path)) == 0
  assert f"\n  {OPEN}\n" in capsys.readouterr().out


# --- runs -----------------------------------------------------------------------------------------

RUN = {
  "base_num_decoder_layers": 2,
  "ici_pipeline_parallelism": 2,
  "ici_data_parallelism": 4,
  "num_simulated_devices": 8,
  "steps": 2,
  "eval_samples": 8,
  "eval_interval": -1,
  "generate_length": 0,
  "enable_checkpointing": "false",
  "run_name": "run",
}
"""2 or 4 microbatches of 2 samples or 1."""


pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_run_compiles_and_times_both_and_trains_with_one_of_them(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(measured_time, "SECONDS", 0.05)
  timed, bench_run = [], measured_time._Bench.run

  def run(bench: Any, passes: int) -> float:
    timed.append(passes)
    return bench_run(bench, passes)

  monkeypatch.setattr(measured_time._Bench, "run", run)
  use_first_devices(monkeypatch, 2)
  keys = RUN | {"ici_data_parallelism": 1, "num_simulated_devices": -1, "eval_samples": 2}
  keys |= {"per_device_batch_size": 2, "base_output_directory": tmp_path}
  assert main(given(**keys)) == 0
  said = capsys.readouterr().out
  table = re.findall(r"^\d +(\d) +(\d) +(\d) +([\d.]+%) .* GiB  measured", said, re.M)
  # Beside whole steps empty ones are timed, which say what is no tick.
  assert timed.count(0) == 2 * 3
  assert sorted(table) == [("2", "2", "3", "33.3%"), ("4", "1", "5", "20.0%")]
  taken = re.search(
    r"^num_pipeline_microbatches -1: (\d) \(the fastest: .*; remembered in", said, re.M
  )
  assert taken
  assert f"{taken[1]} microbatches in a timetable" in said
  written = (tmp_path / "run" / "config.yml").read_text()
  assert f"\nnum_pipeline_microbatches: {taken[1]}\n" in written
  losses = [one["loss"] for one in read_metrics(tmp_path / "run") if "loss" in one]
  assert len(losses) == 2
  # A resume takes the same number at once.
  monkeypatch.setattr(compile_step, "compile_program", lambda *_: pytest.fail("compiled"))
  assert main(given(**keys | {"run_name": "again"})) == 0
  again = capsys.readouterr().out
  assert f"num_pipeline_microbatches -1: {taken[1]} (the fastest: " in again
  assert "(remembered from " in again


def test_explore_tries_the_fewest_and_says_so(tmp_path, capsys, monkeypatch):
  tried: list[tuple[int, int]] = []

  def compile_program(config: Config, plan: Any, trainer: Any, *_: object) -> Any:
    tried.append((trainer.pipeline.num_pipeline_microbatches, trainer.pipeline.rows))
    raise DoesNotFitError(0)

  monkeypatch.setattr(compile_step, "compile_program", compile_program)
  keys = {"micro_batch_size": "{explore: {min: 2, max: 4}}", "batch_size": 32}
  keys |= {"compile_only": "true", "base_output_directory": tmp_path, "per_device_batch_size": -1}
  assert main(given(**RUN | keys)) == 2
  # The smaller size is tried when the larger does not fit.
  assert tried == [(2, 4), (2, 2)]
  assert capsys.readouterr().out.startswith(
    "num_pipeline_microbatches=-1: every size is tried with the fewest microbatches that work; "
    "compile_only=true with the size that you take ranks the others too\n"
  )


def test_the_size_is_settled_first_then_how_it_is_cut(monkeypatch):
  order: list[str] = []
  of = settings(micro_batch_size="auto", per_device_batch_size=-1, batch_size=32)

  def size(config: Config, *_: object, **__: object) -> Config:
    order.append("size")
    batch = dataclasses.replace(config.batch, micro_batch_size="none")
    return dataclasses.replace(config, batch=batch)

  def num_pipeline_microbatches(config: Config, *_: object, **__: object) -> Config:
    order.append(f"cuts of {config.batch.micro_batch_size}")
    return config

  monkeypatch.setattr(pretraining, "choose", size)
  monkeypatch.setattr(pretraining, "choose_num_pipeline_microbatches", num_pipeline_microbatches)
  pretraining.PRETRAINING.resolve(of, place(of), Purpose.RUN)
  assert order == ["size", "cuts of none"]


def test_a_compiled_step_brings_its_number(tmp_path, monkeypatch):
  of = settings(compiled_step="file")
  monkeypatch.setattr(
    pipeline_microbatches,
    "made_from",
    lambda path: {"configuration": {"num_pipeline_microbatches": 8}},
  )
  result, said, machine = resolved(of, tmp_path)
  assert (result, said, machine.asked) == (with_num_pipeline_microbatches(of, 8), "", [])
  # One for another run is refused when it is loaded, by what differs.
  monkeypatch.setattr(
    pipeline_microbatches,
    "made_from",
    lambda path: {"configuration": {"num_pipeline_microbatches": 3}},
  )
  assert resolved(of, tmp_path)[0] == of
