"""What the step consumes: measured here, from a run's metrics, or from a compile report."""

import dataclasses
import json
import math
import statistics
from typing import Any

from maxbatch.compile.compile_step import placeholder_rows, report_or_refusal
from maxbatch.compile.measured_time import measure_step
from maxbatch.compile.program import compile_program
from maxbatch.config.find import user_path
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target
from maxbatch.run_folder.metrics import Record, read_metrics
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.build import build_trainer


@dataclasses.dataclass(frozen=True)
class Need:
  """A step of the run, without any wait for data."""

  samples: int
  step_seconds: float
  how: str

  @property
  def samples_per_second(self) -> float:
    return self.samples / self.step_seconds


def from_metrics(path: str, plan: BatchPlan) -> Need:
  """Reads the need from the steps of an earlier run, of any batch size; the first is left out.

  Args:
    path: its folder, or its metrics.jsonl.

  Raises UserError: there are no such steps.
  """
  folder = user_path(path)
  folder = folder.parent if folder.name == RunFolder(folder).metrics.name else folder
  steps = [record for record in read_metrics(folder) if "step_seconds" in record][1:]
  of_a_sample = [seconds for one in steps if (seconds := _seconds_of_a_sample(one)) > 0]
  if not of_a_sample:
    raise UserError(
      f"run_metrics={path}: no metrics.jsonl with at least two steps that did more than wait for "
      "data; for example run_metrics=runs/first_run, the folder of a run"
    )
  samples = plan.global_batch_to_train
  how = f"the median of {len(of_a_sample):,} steps of {folder}, without their waits for data"
  return Need(samples, statistics.median(of_a_sample) * samples, how)


def _seconds_of_a_sample(one: Record) -> float:
  """Returns a step's seconds for each sample, without waiting; 0 where its record does not say."""
  seconds = one["step_seconds"] - one.get("data_wait_seconds", 0.0)
  samples = one.get("global_batch_to_train", 0)
  return seconds / samples if samples > 0 and math.isfinite(seconds) else 0.0


def from_report(path: str, plan: BatchPlan) -> Need:
  """Reads the need from the compile report of such a step, by its tokens per second.

  Args:
    path: compile_report.json, or the folder that it is in.

  Raises UserError: it cannot be read, or tells no time.
  """
  file = user_path(path)
  file = RunFolder(file).compile_report_json if file.is_dir() else file
  example = (
    "for example compile_report=runs/mine/compile_report.json, which compile_only=true writes"
  )
  try:
    reports = json.loads(file.read_text(encoding="utf-8"))
    report: dict[str, Any] = [one for one in reports if "time" in one][-1]
    time = report["time"]
    samples = plan.global_batch_to_train
    speed = time["tokens_per_second"]
    if not (isinstance(speed, float) and 0 < speed < math.inf):
      raise ValueError(speed)
    about = " ".join(str(report.get("title", "")).removeprefix("Compile report: ").split())
    how = f"the compile report {file} ({time['how']}{about and f'; {about}'})"
    return Need(samples, plan.tokens(samples) / speed, how)
  except OSError as error:
    raise UserError(f"compile_report={path}: {error.strerror or error}; {example}") from error
  except (ValueError, KeyError, TypeError, IndexError, RecursionError, AttributeError) as error:
    raise UserError(
      f"compile_report={path}: this is not a report with a step's time; {example}"
    ) from error


def estimated(config: Config, target: Target) -> Need:
  """Estimates the need by compiling the step for devices that are not here. Raises UserError: it
  does not fit, or nothing is published about the devices."""
  report = report_or_refusal(config, target.devices, target.layout)
  if report.step_seconds is None:
    raise UserError(
      f"compile_topology={config.compile.compile_topology}: the speed of these devices is "
      "not known; give a run's metrics instead, for example run_metrics=runs/mine"
    )
  how = f"estimated for {config.compile.compile_topology}"
  return Need(report.plan.global_batch_to_train, report.step_seconds, how)


def measured(config: Config, plan: BatchPlan, target: Target, seconds: float) -> Need:
  """Measures the need by some steps on the devices that are here, with rows that are on them
  already. Raises UserError: the step does not fit."""
  trainer = build_trainer(config, plan, target.devices)
  micro_batch = plan.micro_batch_to_train
  program = compile_program(config, plan, trainer, placeholder_rows(config), micro_batch)
  count = plan.num_microbatches
  timing = measure_step(
    trainer,
    program.step,
    program.rows,
    streamed=program.streamed,
    num_microbatches=count,
    seconds=seconds,
  )
  step_seconds = timing.seconds_rest + timing.seconds_per_microbatch * count
  return Need(
    plan.global_batch_to_train, step_seconds, f"measured here, {counted(timing.repeats, 'time')}"
  )
