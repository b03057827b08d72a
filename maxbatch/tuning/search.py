"""The search for a size that fits and is fast: probe by probe, as far as a policy asks and a budget allows.

A size is never tried by running it; a probe reads what a compiler says it needs. There are three policies:
that of micro_batch_size=auto, here, takes the largest size that fits, by bisection, unless a smaller one is
clearly faster; that of explore, all of them, is in exploration.py, that of num_pipeline_microbatches=-1 in
pipeline_microbatches.py.

What one size needs and takes: its program, compiled and timed, never run until memory is out.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import jax

from maxbatch.batch.from_config import mesh_of, plan_batches
from maxbatch.command_line.screen import GIB, gib, gib_of
from maxbatch.compile.compile_step import eval_report, report_or_refusal
from maxbatch.compile.program import DoesNotFitError, capacity_bytes
from maxbatch.compile.report import CompileReport
from maxbatch.config.schema import Config
from maxbatch.core.keys import text
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.devices import Device
from maxbatch.tuning.candidates import Candidate

CLEARLY_FASTER = 0.03
"""More samples per second, as a share, for which a size below the largest is taken."""
Say = Callable[[str], None]
"""Prints a line."""
Size = TypeVar("Size", bound=Hashable)
Found = TypeVar("Found")


@dataclasses.dataclass(frozen=True)
class ProbeResult:
  """What is known of one size. A step of n microbatches takes seconds_rest + n × seconds_per_microbatch."""

  peak_bytes: int
  """Memory of one device, at the worst moment of a step; a lower bound if the compiler refused."""
  capacity_bytes: int
  """Memory that one device has, or may use."""
  fits: bool
  seconds_per_microbatch: float | None = None
  """None: not known, as for sizes that do not fit."""
  seconds_rest: float = 0.0
  """What a step takes besides its microbatches: the update, reductions between devices."""
  spread: float = 0.0
  """How uncertain the times are, as a share of them."""
  how: Literal["measured", "estimated"] = "measured"
  coverage: float = 1.0
  """Share of the model's work that an estimate accounts for."""
  utilisation: float | None = None
  """Share of the devices' peak FLOP/s that the model's FLOPs come to; None: not known."""
  other_seconds: float = 0.0
  """Seconds of a pipeline's step that are no forward or backward of layers, as far as known."""

  def step_seconds(self, num_microbatches: int) -> float | None:
    """Returns the time of a step of so many microbatches."""
    if self.seconds_per_microbatch is None:
      return None
    return self.seconds_rest + num_microbatches * self.seconds_per_microbatch

  @property
  def memory(self) -> str:
    """`11.2 of 15.75 GiB`."""
    return gib_of(self.peak_bytes, self.capacity_bytes)


def search(
  next_size: Callable[[Mapping[Size, Found]], Size | None],
  probe: Callable[[Size], Found],
  most: int,
  learnt: Callable[[Mapping[Size, Found]], None] = lambda known: None,
) -> dict[Size, Found]:
  """Probes one size after the other; returns what is known, in the order in which it was learnt.

  Args:
    next_size: the policy: what to probe after what is known; None: enough is.
    probe: of one size, never called twice for it.
    most: so many sizes at most.
    learnt: takes note of what is known after each.
  """
  known: dict[Size, Found] = {}
  while len(known) < most and (size := next_size(known)) is not None:
    known[size] = probe(size)
    learnt(known)
  return known


def most_probes(num_sizes: int) -> int:
  """Returns ⌈log2 n⌉ + 2: what may be spent on n sizes."""
  return (num_sizes - 1).bit_length() + 2


def in_process_0(say: Say) -> Say:
  """Returns the same, silent in the other processes."""
  return say if jax.process_index() == 0 else lambda line: None


def agreed(probe: Callable[[Size], ProbeResult]) -> Callable[[Size], ProbeResult]:
  """Returns the probe with process 0's numbers everywhere, so that all take the same path."""

  def of(size: Size) -> ProbeResult:
    mine = probe(size)
    return dataclasses.replace(mine, **broadcast_one_to_all(dataclasses.asdict(mine)))

  return of


@dataclasses.dataclass(frozen=True)
class Tried:
  """A candidate with its probe."""

  candidate: Candidate
  probe: ProbeResult

  @property
  def step_seconds(self) -> float | None:
    """Time of one step at this candidate's number of microbatches."""
    return self.probe.step_seconds(self.candidate.num_microbatches)

  @property
  def samples_per_second(self) -> float:
    """Speed at the run's batch; 0 where no time is known."""
    seconds = self.step_seconds
    return self.candidate.batch / seconds if seconds else 0.0

  @property
  def size(self) -> str:
    """The size as the configuration reads it."""
    return text(self.candidate.size)

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values; what is not known is left out."""
    probe, candidate = self.probe, self.candidate
    speed = self.samples_per_second
    known = {
      "ici_context_parallelism": candidate.context,
      "remat_policy": candidate.remat_policy,
      "compiler_flags": candidate.compiler_flags,
      "step_seconds": self.step_seconds,
      "samples_per_second": speed or None,
      "tokens_per_second": speed * candidate.max_target_length or None,
      "utilisation": probe.utilisation,
    }
    return {
      **candidate.as_dict(),
      "peak_bytes": probe.peak_bytes,
      "capacity_bytes": probe.capacity_bytes,
      "fits": probe.fits,
      "how": probe.how,
      "spread": probe.spread,
      "coverage": probe.coverage,
    } | {key: value for key, value in known.items() if value is not None}


ProbeSize = Callable[[Candidate], ProbeResult]


@dataclasses.dataclass(frozen=True)
class Choice:
  """What auto found."""

  chosen: Tried
  largest: Tried
  """The largest that fits."""
  above: Tried | None
  """The next size up, which does not fit; None: every size fits."""
  sizes: tuple[Candidate, ...]
  """What was chosen from, ascending."""
  tried: tuple[Tried, ...]
  """In the order in which they were probed."""

  def why(self) -> str:
    """Returns the choice in half a sentence."""
    context = self.chosen.candidate.context
    sharing = f"ici_context_parallelism={context}; " if (context or 1) > 1 else ""
    return sharing + self._why_size()

  def _why_size(self) -> str:
    first, last = text(self.sizes[0].size), text(self.sizes[-1].size)
    of_all = f"of {first}…{last}" if len(self.sizes) > 1 else "the only size allowed"
    bound = f"largest that fits {of_all}: {self.largest.probe.memory}"
    if self.above:
      bound += f"; next size {self.above.size} needs {gib(self.above.probe.peak_bytes)} GiB"
    if self.chosen == self.largest:
      return bound
    gain = self.chosen.samples_per_second / self.largest.samples_per_second - 1
    return (
      f"{gain:.0%} more samples per second, {self.chosen.probe.how}, than {self.largest.size}, the "
      f"{bound}"
    )


def choose_largest(sizes: Sequence[Candidate], probe: ProbeSize, suggested_fixes: str) -> Choice:
  """Returns the largest size that fits, or a smaller one that is clearly faster.

  Args:
    probe: called at most `most_probes(len(sizes))` times, never twice for a size.
    suggested_fixes: keys that reduce the memory needed, for the message when nothing fits.

  Raises:
    UserError: nothing fits.
  """

  def next_index(known: Mapping[int, Tried]) -> int | None:
    largest, above = _bounds(known, len(sizes))
    if above - largest > 1:
      return (largest + above) // 2
    chosen = _fastest(known, largest) if largest >= 0 else 0
    return chosen - 1 if chosen > 0 and chosen - 1 not in known else None

  known = search(
    next_index, lambda index: Tried(sizes[index], probe(sizes[index])), most_probes(len(sizes))
  )
  largest, above = _bounds(known, len(sizes))
  if largest < 0:
    raise UserError(nothing_fits(known[0], suggested_fixes))
  chosen = known[_fastest(known, largest)]
  tried = tuple(known.values())
  return Choice(chosen, known[largest], known.get(above), tuple(sizes), tried)


def name_of(candidate: Candidate) -> str:
  """Returns a size and, if any are tried, its variant."""
  return " ".join(filter(None, (text(candidate.size), candidate.variant)))


def choose_shared(sizes: Sequence[Candidate], probe: ProbeSize, suggested_fixes: str) -> Choice:
  """Returns `choose_largest` of the sizes with which the fewest devices share a row that fit and are fast.

  More and more devices share a row, until one more doubling is not clearly faster. Where not even the smallest
  size fits no other is tried.

  Args:
    sizes: ascending, those of the same `context` one after the other.

  Raises:
    UserError: nothing fits.
  """
  known: dict[Candidate, ProbeResult] = {}

  def once(size: Candidate) -> ProbeResult:
    if size not in known:
      known[size] = probe(size)
    return known[size]

  best = None
  for _, group in itertools.groupby(sizes, lambda one: one.context):
    alike = list(group)
    if len(alike) < len(sizes) and not once(alike[0]).fits:
      if best is not None:
        break
      continue
    choice = choose_largest(alike, once, suggested_fixes)
    if best is not None and not _is_clearly_faster(choice.chosen, best.chosen):
      break
    best = choice
  if best is None:
    least = min(known, key=lambda one: known[one].peak_bytes)
    raise UserError(nothing_fits(Tried(least, known[least]), suggested_fixes))
  return dataclasses.replace(best, tried=tuple(Tried(*each) for each in known.items()))


def _is_clearly_faster(one: Tried, other: Tried) -> bool:
  gain = one.samples_per_second / (other.samples_per_second or math.inf) - 1
  # Clocks that scatter by more than that do not show it clearly.
  return gain >= max(CLEARLY_FASTER, one.probe.spread, other.probe.spread)


def _bounds(known: Mapping[int, Tried], num_sizes: int) -> tuple[int, int]:
  """Returns the largest index that is known to fit, -1 for none, and the smallest known not to."""
  fitting = [index for index, tried in known.items() if tried.probe.fits]
  beyond = [index for index, tried in known.items() if not tried.probe.fits]
  return max(fitting, default=-1), min(beyond, default=num_sizes)


def _fastest(known: Mapping[int, Tried], largest: int) -> int:
  """Returns the fastest of the sizes that fit, if it is clearly faster than the largest; else that."""
  fitting = [index for index, tried in known.items() if tried.probe.fits]
  best = max(fitting, key=lambda index: known[index].samples_per_second)
  return best if _is_clearly_faster(known[best], known[largest]) else largest


def nothing_fits(smallest: Tried, suggested_fixes: str) -> str:
  """Returns the message when not even the smallest size fits."""
  probe = smallest.probe
  enough = math.ceil(probe.peak_bytes / GIB)
  return (
    f"not even {smallest.candidate.key}={smallest.size}, the smallest size allowed, fits: "
    f"{smallest.candidate.words} in a microbatch needs {probe.memory}; {suggested_fixes}, or device_memory_gb={enough} if the "
    "devices have that much"
  )


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
    layout = self._layout
    if config.mesh != self._config.mesh:
      layout = mesh_of(config, len(self._devices), layout.num_slices)
    return report_or_refusal(config, self._devices, layout)


def largest_phase(plan: BatchPlan) -> Phase:
  """Returns the phase that a run is ranked for: as a rule most of its time is spent in it."""
  return max(plan.phases, key=lambda phase: phase.batch)


def largest_step_report(
  config: Config, devices: Sequence[Device], layout: Topology
) -> CompileReport:
  """Returns what the largest step of a run needs and takes.

  Raises:
    DoesNotFitError: the compiler refuses it.
  """
  phase = largest_phase(plan_batches(config.batch, config.run, layout, config.optimizer))
  return report_or_refusal(config, devices, layout, phase.micro_batch)


class Prober(CompilingProber[Candidate]):
  """Finds what one microbatch size needs and takes."""

  def _with(self, size: Candidate) -> Config:
    return size.applied_to(self._config)


class EvalProber(CompilingProber[Candidate]):
  """Finds what evaluation batches of one size need and take."""

  def _with(self, size: Candidate) -> Config:
    return size.applied_to(self._config)

  def _compiled(self, config: Config) -> CompileReport:
    return eval_report(config, self._devices, self._layout)


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
