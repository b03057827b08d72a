"""num_pipeline_microbatches=-1: from a Config that leaves it open to one that has it chosen.

All processes compile together, and every number that decides is process 0's, as for the microbatch
size (microbatch_size.py).

Every choice is ranked by the time of a step, of which few are compiled. More microbatches leave less
idle time and cut smaller matrix products. A step takes

  full ticks × (fixed + per_sample × samples of a microbatch) + the rest

where a full tick is a forward and a backward of a stage, be they in one tick of the timetable or in
two, and the rest is what no number of microbatches changes much: embedding and loss of all samples,
the update. The most and the fewest microbatches are compiled and timed; the rest is predicted. What
is predicted to be the fastest, or close to it, is compiled as well, and tells the line more.

A line is fitted, and the choices are not one more dimension of the sizes that micro_batch_size=auto
bisects: there the largest that fits is nearly always the fastest, and here neither end is. What weighs
idle time against small products is the fixed cost of a tick, and two compilations give it. So two or
three programs, of which each may take a minute, are compiled instead of ⌈log2 n⌉ + 2, and the table has
a time for those that were not.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from maxbatch.batch.from_config import plan_batches
from maxbatch.command_line.screen import Table, gib
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_file import made_from
from maxbatch.compile.step_identity import CONFIGURATION
from maxbatch.config.schema import Config
from maxbatch.core.keys import counted
from maxbatch.core.plan import BatchPlan
from maxbatch.hardware.devices import Target
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.schedule import TimetableShape
from maxbatch.pipeline_parallel.sizes import Pipeline, percent, predicted_bubble
from maxbatch.training.build import streams
from maxbatch.tuning.microbatch_size import what_it_depends_on
from maxbatch.tuning.remembered import Made, RememberedChoice
from maxbatch.tuning.search import (
  CompilingProber,
  ProbeResult,
  Say,
  agreed,
  largest_phase,
  largest_step_report,
  most_probes,
  search,
)

Point = tuple[float, float]
"""(samples, value)."""
KEY = "num_pipeline_microbatches"
_CLOSE = 0.05
"""Predictions, of a TPU program's ticks too, have been off by up to this share and a little more."""
Probe = Callable[[int], ProbeResult]
"""Compiles for a number of pipeline microbatches, and times it if it fits."""


@dataclasses.dataclass(frozen=True)
class Line:
  """A value by the samples of a microbatch."""

  fixed: float
  per_sample: float

  def at(self, samples: float) -> float:
    """Returns the value for a microbatch of so many samples."""
    return self.fixed + self.per_sample * samples


def fitted(points: Sequence[Point]) -> Line:
  """Returns the line that misses the points least, each by a share of itself; through two, exactly.

  Through one point the line is level: no sample costs anything, as far as is known.

  Args:
    points: at least one, with positive values.
  """
  ones = [(1 / value, samples / value) for samples, value in points]
  aa, ab, bb = (sum(one[i] * one[j] for one in ones) for i, j in ((0, 0), (0, 1), (1, 1)))
  a, b = (sum(one[i] for one in ones) for i in (0, 1))
  if len({samples for samples, _ in points}) < 2:
    return Line(a / aa, 0.0)
  scale = aa * bb - ab * ab
  return Line((a * bb - b * ab) / scale, (b * aa - a * ab) / scale)


def fitted_cost(points: Sequence[Point]) -> Line:
  """Returns the same for a time, level if larger microbatches seem to take less.

  A negative fixed part stays: between the points, where predictions lie, the line is above 0.
  """
  line = fitted(points)
  return line if line.per_sample >= 0 else fitted([(0.0, value) for _, value in points])


@dataclasses.dataclass(frozen=True)
class RankedStep:
  """What is ranked for: the run's largest step, one timetable for all its microbatches or one for each."""

  pipeline: Pipeline
  num_microbatches: int
  streamed: bool

  def as_dict(self) -> dict[str, Any]:
    """Returns what a choice for such steps depends on."""
    return {
      "choices": list(self.pipeline.choices),
      "samples": self.pipeline.rows,
      "microbatches": self.num_microbatches,
      "max_microbatches": self.pipeline.max_num_microbatches,
    }

  def full_ticks(self, num_pipeline_microbatches: int) -> int:
    """Returns the forwards, and as many backwards, that the stages wait for in a step."""
    timetables = self.num_microbatches if self.streamed else 1
    shape = self._shape(num_pipeline_microbatches)
    return timetables * (shape.forwards_per_stage + shape.warmup_ticks)

  def samples(self, num_pipeline_microbatches: int) -> int:
    """Returns those of a microbatch, in each group of devices."""
    return self.pipeline.with_num_pipeline_microbatches(num_pipeline_microbatches).rows

  def bubble(self, num_pipeline_microbatches: int) -> str:
    """Returns the idle share."""
    return percent(predicted_bubble(self._shape(num_pipeline_microbatches)))

  def _shape(self, num_pipeline_microbatches: int) -> TimetableShape:
    """Returns the shape of one timetable."""
    other = self.pipeline.with_num_pipeline_microbatches(num_pipeline_microbatches)
    return other.shape_of(1 if self.streamed else self.num_microbatches)


@dataclasses.dataclass(frozen=True)
class RankedChoice:
  """A choice with its time and memory, known or predicted; None where neither."""

  num_pipeline_microbatches: int
  step_seconds: float | None
  peak_bytes: float
  fits: bool
  how: Literal["measured", "estimated", "compiled", "predicted"]
  """compiled: without a time. predicted: not even compiled."""


@dataclasses.dataclass(frozen=True)
class Ranking:
  """What is known of all choices after some were compiled; `n` is a number of pipeline microbatches."""

  steps: RankedStep
  known: Mapping[int, ProbeResult]

  @property
  def entries(self) -> list[RankedChoice]:
    """All choices: what fits, the fastest first; then what does not. Of equals the fewest first."""
    return sorted(
      map(self._entry, self.steps.pipeline.choices),
      key=lambda one: (
        not one.fits,
        one.step_seconds is None,
        one.step_seconds or 0.0,
        one.num_pipeline_microbatches,
      ),
    )

  @property
  def chosen(self) -> int:
    """The fastest of those compiled that fit; where none does, the one that needs least."""
    fitting = [one.num_pipeline_microbatches for one in self.entries if one.fits]
    ranked = [n for n in fitting if n in self.known]
    return ranked[0] if ranked else min(self.known, key=lambda n: self.known[n].peak_bytes)

  @property
  def capacity_bytes(self) -> int:
    """Memory that one device may use."""
    return next(iter(self.known.values())).capacity_bytes

  @property
  def tick(self) -> Line | None:
    """Seconds of a full tick by samples; None where no time is known."""
    points = []
    for n, seconds in self._timed().items():
      # Never all of it, however the clock scatters: a tick takes some time.
      inside = max(seconds - self.known[n].other_seconds, seconds / 1000)
      points.append((self.steps.samples(n), inside / self.steps.full_ticks(n)))
    return fitted_cost(points) if points else None

  def _timed(self) -> dict[int, float]:
    """Returns the seconds of a step where they are known, by choice, ascending."""
    results = {n: self._step_seconds(n) for n in sorted(self.known)}
    return {n: seconds for n, seconds in results.items() if seconds}

  def _step_seconds(self, n: int) -> float | None:
    return self.known[n].step_seconds(self.steps.num_microbatches)

  def _entry(self, n: int) -> RankedChoice:
    one, samples = self.known.get(n), self.steps.samples(n)
    if one is not None:
      seconds = self._step_seconds(n)
      return RankedChoice(n, seconds, one.peak_bytes, one.fits, one.how if seconds else "compiled")
    sizes = {self.steps.samples(other): result for other, result in self.known.items()}
    memory = fitted([(x, float(result.peak_bytes)) for x, result in sizes.items()]).at(samples)
    too_large = [x for x, result in sizes.items() if not result.fits]
    fits = memory <= self.capacity_bytes and all(samples < more for more in too_large)
    return RankedChoice(n, self._predicted_seconds(n), memory, fits, "predicted")

  def _predicted_seconds(self, n: int) -> float | None:
    if self.tick is None:
      return None
    # What is done once for each microbatch grows with their number, if it grows: a straight line from
    # the first that was timed to the last.
    first, last = min(self._timed()), max(self._timed())
    other, more = self.known[first].other_seconds, self.known[last].other_seconds
    other += (more - other) * (n - first) / (last - first) if last > first else 0.0
    return self.steps.full_ticks(n) * self.tick.at(self.steps.samples(n)) + max(0.0, other)

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values."""
    return {
      "chosen": self.chosen,
      "tick": dataclasses.asdict(self.tick) if self.tick else None,
      "choices": [dataclasses.asdict(one) for one in self.entries],
    }

  def __str__(self) -> str:
    """Returns the table, and what its predictions rest on."""
    head = ("", KEY, "samples each", "full ticks", "bubble", "step", "memory", "")
    table = Table(head, [self._row(*one) for one in enumerate(self.entries, 1)], left=(7,))
    return "\n".join([*table.lines(indent=""), *self._sentences()])

  def why(self) -> str:
    """Returns the choice in words, against the fewest microbatches, which leave the most idle."""
    one, fewest = self._entry(self.chosen), self._entry(self.steps.pipeline.choices[0])
    if not one.fits:
      return "none fits, this one needs the least memory"
    if one.step_seconds is None:
      return "the fewest that fit; no times are known"
    why = f"the fastest: {one.step_seconds:.4g} s a step, {one.how}"
    if one == fewest:
      return why
    if not fewest.fits or fewest.step_seconds is None:
      return f"{why}; {fewest.num_pipeline_microbatches:,} do not fit"
    return f"{why}; with {fewest.num_pipeline_microbatches:,}: {fewest.step_seconds:.4g} s"

  def _row(self, rank: int, one: RankedChoice) -> tuple[str, ...]:
    return (
      str(rank) if one.fits else "",
      f"{one.num_pipeline_microbatches:,}",
      f"{self.steps.samples(one.num_pipeline_microbatches):,}",
      f"{self.steps.full_ticks(one.num_pipeline_microbatches):,}",
      self.steps.bubble(one.num_pipeline_microbatches),
      "" if one.step_seconds is None else f"{one.step_seconds:.4g} s",
      f"{gib(one.peak_bytes)} GiB",
      self._note(one),
    )

  def _note(self, one: RankedChoice) -> str:
    fits = "" if one.fits else f", does not fit in {gib(self.capacity_bytes)} GiB"
    return f"{one.how}{fits}" + (", taken" if one.num_pipeline_microbatches == self.chosen else "")

  def _sentences(self) -> list[str]:
    """Returns what the predictions are made from, if there are any."""
    if not any(one.fits for one in self.entries):
      return ["None fits, by the compiler's account; taken is the one that needs the least memory."]
    line = self.tick
    if line is None or len(self.known) == len(self.entries):
      return []
    timed = [f"{n:,}" for n in self._timed()]
    listed = f"{', '.join(timed[:-1])} and {timed[-1]}" if len(timed) > 1 else timed[0]
    how = self.known[min(self._timed())].how
    sentences = [
      f"A full tick, a forward and a backward of a stage, takes {line.fixed * 1e3:.4g} ms + "
      f"{line.per_sample * 1e3:.4g} ms a sample, {how} with {listed} microbatches."
    ]
    if line.fixed < -line.per_sample / 100:
      sentences.append(
        "A negative fixed part: a sample costs more in a larger microbatch, or the clock scatters."
      )
    if line.per_sample == 0 and len(timed) > 1:
      sentences.append(
        "Larger microbatches seemed to take less time, which is the clock's scatter: all ticks are "
        "taken to last the same."
      )
    if len(timed) == 1:
      sentences.append("With one time known, a sample is taken to cost nothing.")
    return sentences


def rank(steps: RankedStep, probe: Probe) -> Ranking:
  """Compiles the most and the fewest microbatches, then what may be the fastest by prediction.

  Args:
    steps: what is ranked for; its pipeline has at least two choices.
    probe: called at most `most_probes` times, and once for a choice.
  """
  choices = steps.pipeline.choices
  # The most first: they need the least memory.
  ends = (choices[-1], choices[0])

  def next_choice(known: Mapping[int, ProbeResult]) -> int | None:
    return ends[len(known)] if len(known) < len(ends) else _next(Ranking(steps, known))

  return Ranking(steps, search(next_choice, probe, most_probes(len(choices))))


def _next(result: Ranking) -> int | None:
  """Returns what is worth compiling: predicted to be the fastest, or so close that it may be."""
  fitting = {one.num_pipeline_microbatches: one.step_seconds for one in result.entries if one.fits}
  timed = [seconds for n, seconds in fitting.items() if n in result.known and seconds]
  # Without any time only the first counts.
  close = list(fitting) if timed else list(fitting)[:1]
  limit = min(timed, default=math.inf) * (1 + _CLOSE)
  worth = (n for n in close if n not in result.known and (fitting[n] or 0.0) <= limit)
  return next(worth, None)


class PipelineMicrobatchProber(CompilingProber[int]):
  """Finds what one number of microbatches needs and takes in the largest step."""

  def _with(self, size: int) -> Config:
    return with_num_pipeline_microbatches(self._config, size)

  def _compiled(self, config: Config) -> CompileReport:
    return largest_step_report(config, self._devices, self._layout)


def choose_num_pipeline_microbatches(
  config: Config,
  place: Target,
  probe: Probe,
  folder: pathlib.Path,
  *,
  retune: bool = False,
  say: Say = print,
  plan: BatchPlan | None = None,
) -> Config:
  """Returns the configuration with num_pipeline_microbatches chosen, if it was open.

  Args:
    config: a micro_batch_size that was to be chosen has been chosen.
    probe: what one number needs and takes; called in all processes in the same order.
    say: prints the table and the choice; called in process 0 only.
    plan: the run's, where it is known already.

  Raises:
    UserError: layers or samples do not divide as the schedule asks; or compiled_step cannot be read.
  """
  if config.pipeline.pipeline_schedule == "none":
    return config
  plan = plan or plan_batches(config.batch, config.run, place.layout, config.optimizer)
  pipeline = pipeline_of(config, place.layout, plan)
  if not pipeline.is_open:
    return config
  if config.compile.compiled_step:
    # The number that the run's program was compiled for; a file for another run says so later.
    number = made_from(config.compile.compiled_step)[CONFIGURATION].get(KEY)
    return with_num_pipeline_microbatches(config, number) if number in pipeline.choices else config
  phase = largest_phase(plan)
  steps = RankedStep(
    pipeline.for_phase(plan, phase), phase.num_microbatches, streamed=streams(config)
  )
  # All that the size of a microbatch depends on, and the steps that are ranked for.
  depends_on = what_it_depends_on(config, place, ()) | steps.as_dict()

  def make() -> Made:
    ranking = rank(steps, agreed(probe))
    heading = f"{_heading(steps)}\n{ranking}\n"
    return Made(ranking.chosen, ranking.why(), ranking.as_dict()["choices"], heading)

  memory = RememberedChoice(folder, KEY, "-1", depends_on)
  number = memory.recalled_or_made(
    pipeline.choices,
    make,
    lambda number, why: f"{KEY} -1: {number:,} ({why})",
    retune=retune,
    say=say,
  )
  return with_num_pipeline_microbatches(config, number)


def with_num_pipeline_microbatches(config: Config, num_pipeline_microbatches: int) -> Config:
  """Returns the configuration with num_pipeline_microbatches chosen."""
  keys = dataclasses.replace(config.pipeline, num_pipeline_microbatches=num_pipeline_microbatches)
  return dataclasses.replace(config, pipeline=keys)


def _heading(steps: RankedStep) -> str:
  num_microbatches = counted(steps.num_microbatches, "microbatch", "microbatches")
  apart = (
    ", each with a timetable of its own" if steps.streamed and steps.num_microbatches > 1 else ""
  )
  return (
    f"Pipeline microbatches of {steps.pipeline.schedule} on {steps.pipeline.stages} stages, for steps of "
    f"{num_microbatches}{apart}"
  )
