"""What one size needs and takes: its program, compiled and timed, never run until memory is out."""

import abc
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from maxbatch.compile.compile_step import report_or_refusal
from maxbatch.compile.program import DoesNotFitError, capacity_bytes
from maxbatch.compile.report import CompileReport
from maxbatch.config.schema import Config
from maxbatch.core.topology import Topology
from maxbatch.hardware.devices import Device
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.search import ProbeResult

Size = TypeVar("Size", bound=Hashable)


class CompilingProber(abc.ABC, Generic[Size]):
  """Called with a size; keeps the reports of those that fit."""

  def __init__(self, config: Config, devices: Sequence[Device], layout: Topology):
    self._config, self._devices, self._layout = config, devices, layout
    self.reports: dict[Size, CompileReport] = {}

  def __call__(self, size: Size) -> ProbeResult:
    """Compiles this size; measures or estimates it if it fits.

    Raises:
      UserError: a device's memory is not known.
    """
    config = self._with(size)
    try:
      report = self._compiled(config)
    except DoesNotFitError as error:
      capacity = capacity_bytes(self._devices, config.compile.device_memory_gb)
      return ProbeResult(max(error.needed_bytes, capacity + 1), capacity, fits=False)
    if report.fits:
      self.reports[size] = report
    return _as_probe(report)

  @abc.abstractmethod
  def _with(self, size: Size) -> Config:
    """Returns the configuration with the choice made."""

  def _compiled(self, config: Config) -> CompileReport:
    return report_or_refusal(config, self._devices, self._layout)


class Prober(CompilingProber[Candidate]):
  """Finds what one microbatch size needs and takes."""

  def _with(self, size: Candidate) -> Config:
    return size.applied_to(self._config)


def _as_probe(report: CompileReport) -> ProbeResult:
  time = report.time
  measured = time is not None and time.how == "measured"
  each, rest = (time.seconds_per_microbatch, time.rest) if time else (None, 0.0)
  if report.sampled_step_seconds is not None:
    each, rest = report.sampled_step_seconds / report.num_microbatches, 0.0
  return ProbeResult(
    peak_bytes=report.peak,
    capacity_bytes=report.capacity_bytes,
    fits=report.fits,
    seconds_per_microbatch=each,
    seconds_rest=rest,
    spread=(time.spread or 0.0) if time else 0.0,
    how="measured" if measured else "estimated",
    coverage=1.0 if measured else min(1.0, report.work.coverage),
    utilisation=report.utilisation,
    other_seconds=time.other_of(report.num_microbatches) if time else 0.0,
  )
