"""What a run writes of itself beside its metrics: events, the page for people, reports that keys ask for."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from maxbatch.compile.profile import StepProfile, step_profile
from maxbatch.compile.step_identity import library_versions
from maxbatch.config.schema import Config
from maxbatch.core.plan import Position
from maxbatch.data.rows import Rows
from maxbatch.errors import TrainingDivergedError
from maxbatch.hardware.agreement import write_shared_file
from maxbatch.hardware.devices import Device, describe_devices
from maxbatch.models.registry import Parameters
from maxbatch.precision.report import report_text, report_values
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.events import END, NOTICE, START, VERIFIED, EventLog, NoEventLog
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_report.background import BackgroundReport
from maxbatch.training.exponents import exponents
from maxbatch.training.job import Job
from maxbatch.training.profiling import Traced
from maxbatch.training.step import Step


@dataclasses.dataclass
class PrecisionReport:
  """The report, which grows by a part each time it is written."""

  job: Job
  folder: RunFolder
  rows: Rows
  texts: list[str] = dataclasses.field(default_factory=list)
  values: list[dict[str, Any]] = dataclasses.field(default_factory=list)

  def write(self, parameters: Parameters, step: int) -> None:
    """Adds what these parameters make of the microbatch; all processes must call it."""
    trainer = self.job.trainer
    result = exponents(trainer, trainer.by_layer(parameters), self.rows)
    tokens = self.rows.inputs.size
    self.texts.append(report_text(result, step, tokens))
    self.values.append(report_values(result, step, tokens))
    write_shared_file(self.folder.precision_report_text, "\n\n\n".join(self.texts) + "\n")
    write_shared_file(self.folder.precision_report_json, json.dumps(self.values) + "\n")
    self.job.outputs.progress.say(f"Written: {self.folder.precision_report_text}")


def precision_report(
  config: Config, job: Job, folder: RunFolder, position: Position
) -> PrecisionReport | None:
  """Returns the report of a run, of the first microbatch from `position` on; None unless it is
  asked for."""
  if not config.precision.precision_report:
    return None
  with job.train_rows(job.plan, position) as loader:
    rows = next(loader)
  return PrecisionReport(job, folder, jax.tree.map(lambda x: x[0], rows))


def write_profile(folder: RunFolder, traced: Traced, step: Step) -> None:
  """Writes profile.json, and says where the time went.

  Raises:
    UserError: it cannot be written.
  """
  text = cast(jax.stages.Compiled, step).as_text() or ""
  result = step_profile(folder.profile, text, traced.last - traced.first)
  print(f"\nTraced steps {traced.first + 1} to {traced.last}, in {folder.profile}", flush=True)
  if result is None:
    print("  the trace has no operation of the step", flush=True)
    return
  write_run_file(folder.profile_json, json.dumps(result.as_dict(), indent=2) + "\n")
  print("\n".join(_lines(result)), flush=True)


def _lines(result: StepProfile) -> list[str]:
  scopes = result.by_scope()
  total = sum(scopes.values())
  return [f"  {name:<26}{each:10.4g} s {each / total:6.1%}" for name, each in scopes.items()]


_LIBRARIES = ("jax", "jaxlib", "numpy", "grain", "orbax-checkpoint")


class RunLog:
  """Of one start, in process 0; in others it writes nothing."""

  def __init__(self, folder: Path, *, write_report: bool):
    """Events that cannot be written are left out."""
    first, self.events = jax.process_index() == 0, NoEventLog()
    if first:
      with contextlib.suppress(OSError):  # What can be written there, the metrics say.
        self.events = EventLog(folder)
    self.page = BackgroundReport(folder, self.say, enabled=first and write_report)
    self._has_begun = False

  def say(self, line: str) -> None:
    """Prints what deserves a person's attention, and keeps it."""
    print(line, flush=True)
    self.events.note(NOTICE, text=line)

  def verified(self, step: int) -> None:
    """Takes note that a checkpoint reads back as it was saved."""
    self.events.note(VERIFIED, step=step)

  def begin(self, position: Position, devices: Sequence[Device], about: str) -> None:
    """Takes note of the start: from where, with which command, on what."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES} | library_versions()
    self._has_begun = True
    self.events.note(
      START,
      step=position.step,
      samples=position.samples,
      command=sys.orig_argv,
      folder=os.getcwd(),
      process=os.getpid(),
      host=socket.gethostname(),
      num_processes=jax.process_count(),
      devices=describe_devices(devices),
      about=about,
      versions=", ".join(
        f"{name} {version}"
        for name, version in {"python": platform.python_version(), **versions}.items()
        if version
      ),
    )

  def end(self, how: str, step: int | None = None, text: str = "") -> None:
    """Takes note of the end, the first time: finished, stopped, diverged or failed."""
    if self._has_begun:
      self.events.note(END, how=how, step=step, text=text)
    self._has_begun = False


@contextlib.contextmanager
def open_run_log(folder: Path, *, write_report: bool) -> Iterator[RunLog]:
  """Logs a run inside this context, and writes its page at the end, however it ends."""
  log = RunLog(folder, write_report=write_report)
  with log.events:
    try:
      yield log
    except KeyboardInterrupt:
      log.end("stopped", text="at once, by a signal")
      raise
    except BaseException as error:
      log.end("diverged" if isinstance(error, TrainingDivergedError) else "failed", text=str(error))
      log.page.finish()
      raise
