"""What one microbatch size needs and takes: its program, compiled and timed."""

from collections.abc import Sequence

from maxbatch.compile.compile_step import report_or_refusal
from maxbatch.compile.program import (
  DoesNotFitError,
  capacity_bytes,
)
from maxbatch.compile.report import CompileReport
from maxbatch.config.schema import Config
from maxbatch.core.topology import Topology
from maxbatch.hardware.devices import Device
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.search import ProbeResult


class Prober:
  """What one microbatch size needs and takes, found by compiling, never by running out of memory.

  Called with a candidate; keeps the reports of those that fit.
  """

  def __init__(self, config: Config, devices: Sequence[Device], layout: Topology):
    self._config, self._devices, self._layout = config, devices, layout
    self.reports: dict[Candidate, CompileReport] = {}

  def __call__(self, candidate: Candidate) -> ProbeResult:
    """Compiles this size; measures or estimates it if it fits.

    Raises:
      UserError: a device's memory is not known.
    """
    config, devices = candidate.applied_to(self._config), self._devices
    try:
      report = self._compiled(config)
    except DoesNotFitError as error:
      capacity = capacity_bytes(devices, config.compile.device_memory_gb)
      needed = max(error.needed_bytes, capacity + 1)
      return ProbeResult(needed, capacity, fits=False)
    if report.fits:
      self.reports[candidate] = report
    return _as_probe(report)

  def _compiled(self, config: Config) -> CompileReport:
    return report_or_refusal(config, self._devices, self._layout)


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
  )
