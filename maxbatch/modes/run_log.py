"""What a run writes of itself beside its metrics: events, the page for people, reports that keys ask for.

For a precision report these are the exponents of weights, activations and gradients of one microbatch.

B rows, T tokens, L layers, N bins.

Of a trace of steps it is the longest operations, and the time of each part of the model. The trace names operations as the compiled program does, whose text says to which part of the model
each belongs. Loops and branches are left out: their time is that of the operations inside.
"""

import collections
import contextlib
import dataclasses
import importlib.metadata
import inspect
import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from maxbatch.compile.step_identity import library_versions
from maxbatch.config.schema import Config
from maxbatch.core.plan import Position
from maxbatch.data.rows import Rows
from maxbatch.errors import TrainingDivergedError
from maxbatch.estimate import hlo
from maxbatch.estimate.costs import OTHER, program_costs
from maxbatch.hardware.agreement import write_shared_file
from maxbatch.hardware.devices import Device, describe_devices
from maxbatch.hardware.sharding import replicated
from maxbatch.models.probes import EXPONENT_KINDS, NUM_BINS, histograms
from maxbatch.models.registry import Model, Parameters, build_model, by_path
from maxbatch.precision.report import (
  ACTIVATIONS,
  ACTIVATIONS_GRADIENTS,
  GRADIENTS,
  WEIGHTS,
  Exponents,
  report_text,
  report_values,
)
from maxbatch.run_folder.atomic import write_run_file
from maxbatch.run_folder.events import END, NOTICE, START, VERIFIED, EventLog, NoEventLog
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_report.background import BackgroundReport
from maxbatch.training.evaluation import eval_shardings
from maxbatch.training.job import Job, Traced
from maxbatch.training.loss import loss_parts
from maxbatch.training.model_parts import is_layered
from maxbatch.training.step import Step, Trainer

_NUM_LARGEST = 20
_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_OPERATION = re.compile(r"%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Operation:
  """One operation of the program, in all traced steps."""

  name: str
  scope: str
  count: float
  """Executions in a step of one device."""
  seconds: float


@dataclasses.dataclass(frozen=True)
class StepProfile:
  """Where the time of a traced step went, on the devices of this process."""

  num_steps: int
  num_devices: int
  operations: Sequence[Operation]
  """The longest first."""

  def by_scope(self) -> dict[str, float]:
    """Returns seconds of a step by part of the model, the longest first."""
    results = collections.defaultdict[str, float](float)
    for one in self.operations:
      results[one.scope] += one.seconds
    return dict(_descending(results))

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values."""
    return {
      "steps": self.num_steps,
      "devices": self.num_devices,
      "seconds_by_scope": self.by_scope(),
      "largest": [dataclasses.asdict(one) for one in self.operations[:_NUM_LARGEST]],
    }


def step_profile(folder: Path, text: str, num_steps: int) -> StepProfile | None:
  """Reads the latest trace in a folder; None if it has no operation of the program.

  Args:
    folder: where jax's profiler has written.
  """
  scopes = {one.name: one.scope or OTHER for one in program_costs(hlo.parse(text))}
  module = _MODULE.match(text)
  seconds, counts = collections.defaultdict[str, float](float), collections.Counter[str]()
  devices = set[object]()
  for name, duration, device in _events(folder, module[1] if module else ""):
    if name in scopes:
      seconds[name] += duration
      counts[name] += 1
      devices.add(device)
  if not devices:
    return None
  each = num_steps * len(devices)
  operations = [
    Operation(name, scopes[name], counts[name] / each, total / each)
    for name, total in _descending(seconds)
  ]
  return StepProfile(num_steps, len(devices), operations)


def _descending(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
  return sorted(seconds.items(), key=lambda pair: -pair[1])


def _events(folder: Path, module: str) -> Iterator[tuple[str, float, object]]:
  """Yields name, seconds and device of every operation executed in a program of this name."""
  files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
  if not files:
    return
  for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
    is_device = plane.name.startswith("/device:")
    for line in plane.lines:
      if is_device and "Ops" not in line.name:
        continue
      for event in line.events:
        stats = dict(event.stats)
        name = _OPERATION.match(str(stats.get("hlo_op", event.name if is_device else "")))
        if name and str(stats.get("hlo_module", module)).startswith(module):
          device = stats.get("device_ordinal", plane.name)
          yield name[1], event.duration_ns / 1e9, device


def exponents(trainer: Trainer, parameters: Parameters, rows: Rows) -> list[Exponents]:
  """Returns what a backward pass in float32 through a microbatch (B, T) meets, by tensor and layer.

  All processes must call it, with layers in the model's order. Formats of the model do not matter.
  """
  config, length = trainer.model.config, rows.inputs.shape[1]
  model = build_model(config, length, "exponents", trainer.model.trainable)

  def counted(parameters: Parameters, rows: Rows) -> tuple[Parameters, Parameters, Parameters]:
    def loss(parameters: Parameters, probes: Parameters) -> jax.Array:
      return loss_parts(model, parameters, rows, trainer.dropout_key, probes).loss.sum()

    with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
      probes = model.probes(EXPONENT_KINDS, NUM_BINS)
      gradients, counts = jax.grad(loss, (0, 1))(parameters, probes)
      layered = by_path(lambda path, _: is_layered(model, path), parameters)
      return counts, histograms(parameters, layered), histograms(gradients, layered)

  rows = rows._replace(checksums=None)
  function = jax.jit(
    counted,
    in_shardings=(None, eval_shardings(rows, trainer.mesh)),
    out_shardings=replicated(trainer.mesh),
  )
  return list(_listed(model, *jax.device_get(function(parameters, rows))))


def _listed(
  model: Model, counts: Parameters, weights: Parameters, gradients: Parameters
) -> Iterator[Exponents]:
  for path, both in _flat(counts).items():
    for kind, index in ((ACTIVATIONS, 0), (ACTIVATIONS_GRADIENTS, 1)):
      yield from _by_layer(kind, path[:-1], np.moveaxis(both, -2, 0)[index])
  for kind, tree in ((WEIGHTS, weights), (GRADIENTS, gradients)):
    for path, result in _flat(tree).items():
      yield from _by_layer(kind, path, result)


def _flat(tree: Parameters) -> dict[tuple[str, ...], np.ndarray]:
  return cast(dict[tuple[str, ...], np.ndarray], flatten_dict(tree))


def _by_layer(kind: str, path: tuple[str, ...], counts: np.ndarray) -> Iterator[Exponents]:
  name = "/".join(path) or "embedding"
  if counts.ndim == 1:
    yield Exponents(kind, name, None, counts)
  else:
    yield from (Exponents(kind, name, layer, each) for layer, each in enumerate(counts))


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
  """Returns the report of a run's first microbatch from `position` on; None unless asked for."""
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
  # Without what waits for its first run.
  program = cast(jax.stages.Compiled, inspect.unwrap(step))
  text = program.as_text() or ""
  result = step_profile(folder.profile, text, traced.last - traced.first)
  print(f"\nTraced steps {traced.first + 1} to {traced.last}, in {folder.profile}", flush=True)
  if result is None:
    # On GPUs the kernels of a CUDA graph have its name alone.
    graphs = jax.default_backend() == "gpu"
    why = ": its kernels ran in CUDA graphs; xprof shows them" if graphs else ""
    print(f"  the trace has no operation of the step{why}", flush=True)
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

  ended: ClassVar[float] = 0.0
  """When the run before it in this process ended, or the wait for its order, in seconds since 1970; 0: none."""

  def __init__(self, folder: Path, *, write_report: bool):
    """Events that cannot be written are left out."""
    first, self.events, self._folder = jax.process_index() == 0, NoEventLog(), folder
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
    self._has_begun, metrics = True, RunFolder(self._folder).metrics
    self.events.note(
      START,
      began=round(max(_process_began(), RunLog.ended), 3),
      last_seen=round(metrics.stat().st_mtime, 3) if metrics.is_file() else None,
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
      RunLog.ended = time.time()
    self._has_begun = False


def _process_began() -> float:
  """Returns when this process began, in seconds since 1970; where the system does not say it: now.

  Linux says it in ticks since the machine began (proc_pid_stat(5), field 22).
  """
  try:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
  except (OSError, AttributeError):
    age = 0.0
  return time.time() - age


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
