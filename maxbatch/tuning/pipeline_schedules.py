"""pipeline_schedule=auto and pipeline_saved_activations=auto: from a Config that leaves a pipeline's schedule, or
what its stages keep, open to one that has them chosen.

1f1b and interleaved_1f1b with every number of repeats are one family: more repeats leave less idle time, and send
more results from stage to stage; their backwards are shorter loops. Neither bubble nor bytes say what that
comes to on some devices, so all are compiled and timed, with num_pipeline_microbatches as it is given or, where it
is open, the fewest: with more, bubbles are smaller and schedules closer to each other. Residuals save the
forwards that a backward begins with, and move more bytes: inputs alone are tried where these do not fit, and beside
the fastest. All processes compile together, and every number that decides is process 0's.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from maxbatch.command_line.screen import Table, gib
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_file import made_from
from maxbatch.compile.step_identity import CONFIGURATION
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.hardware.devices import Target
from maxbatch.pipeline_parallel.layout import pipeline_of, with_repeats
from maxbatch.pipeline_parallel.sizes import Pipeline, percent, predicted_bubble
from maxbatch.tuning.microbatch_size import what_it_depends_on
from maxbatch.tuning.remembered import Made, RememberedChoice
from maxbatch.tuning.search import (
  CompilingProber,
  ProbeResult,
  Say,
  agreed,
  largest_phase,
  largest_step_report,
)


class StageChoice(NamedTuple):
  """What is chosen: of a schedule that is given, its own repeats."""

  repeats: int
  saved: str

  def applied_to(self, config: Config) -> Config:
    """Returns the configuration with these where it leaves them open."""
    keys = config.pipeline
    if keys.pipeline_saved_activations == "auto":
      keys = dataclasses.replace(keys, pipeline_saved_activations=self.saved)  # pyright: ignore[reportArgumentType]
    closed = dataclasses.replace(config, pipeline=keys)
    return with_repeats(closed, self.repeats) if keys.pipeline_schedule == "auto" else closed


Probe = Callable[[StageChoice], ProbeResult]
"""Compiles for one choice, and times it if it fits."""


class ScheduleProber(CompilingProber[StageChoice]):
  """Finds what one choice needs and takes in the largest step."""

  def _with(self, size: StageChoice) -> Config:
    return size.applied_to(self._config)

  def _compiled(self, config: Config) -> CompileReport:
    return largest_step_report(config, self._devices, self._layout)


@dataclasses.dataclass(frozen=True)
class RankedSchedules:
  """What is known of the choices that were tried."""

  config: Config
  plan: BatchPlan
  known: Mapping[StageChoice, ProbeResult]

  @property
  def ranked(self) -> list[StageChoice]:
    """Those that fit, the fastest first, or where no time is known the smallest bubble; then what needs the
    least memory."""

    def rank(choice: StageChoice) -> tuple[Any, ...]:
      one, seconds = self.known[choice], self.seconds(choice)
      if not one.fits:
        return True, one.peak_bytes
      return False, seconds is None, seconds or 0.0, -choice.repeats

    return sorted(self.known, key=rank)

  def seconds(self, choice: StageChoice) -> float | None:
    """Returns the time of the largest step; None: not known."""
    return self.known[choice].step_seconds(largest_phase(self.plan).num_microbatches)

  def why(self) -> str:
    """Returns the choice in words."""
    first = self.ranked[0]
    one, seconds = self.known[first], self.seconds(first)
    if not one.fits:
      return "none fits, this one needs the least memory"
    if seconds is None:
      return "the smallest bubble of those that fit; no times are known"
    return f"the fastest that fits: {seconds:.4g} s a step, {one.how}"

  def probes(self) -> list[dict[str, Any]]:
    """Returns plain values."""
    return [
      {**choice._asdict(), "step_seconds": self.seconds(choice)}
      | {"peak_bytes": self.known[choice].peak_bytes, "fits": self.known[choice].fits}
      for choice in self.ranked
    ]

  def __str__(self) -> str:
    head = ("", *_KEYS, "layers each", "stages keep", "bubble", "step", "memory", "")
    table = Table(head, [self._row(*one) for one in enumerate(self.ranked, 1)], left=(1, 4, 8))
    return "\n".join(["Pipeline schedules", *table.lines(indent="")])

  def _row(self, place: int, choice: StageChoice) -> tuple[str, ...]:
    one, seconds = self.known[choice], self.seconds(choice)
    pipeline = pipeline_of(choice.applied_to(self.config), self.plan.topology, self.plan)
    fits = "" if one.fits else f"does not fit in {gib(one.capacity_bytes)} GiB"
    return (
      str(place) if one.fits else "",
      pipeline.schedule,
      str(pipeline.repeats),
      str(pipeline.layers),
      pipeline.stash,
      percent(predicted_bubble(pipeline.shape)),
      "" if seconds is None else f"{seconds:.4g} s",
      f"{gib(one.peak_bytes)} GiB",
      ", ".join(filter(None, (one.how if seconds else "", fits, "taken" * (place == 1)))),
    )


_KEYS = "pipeline_schedule", "repeats"


def tried(config: Config, plan: BatchPlan, pipeline: Pipeline, probe: Probe) -> RankedSchedules:
  """Tries the schedules, the most repeats first, with inputs where residuals do not fit; of the fastest both."""
  known: dict[StageChoice, ProbeResult] = {}
  for repeats in _repeats(pipeline):
    for saved in _saved(pipeline):
      choice = StageChoice(repeats, saved)
      known[choice] = probe(choice)
      if known[choice].fits:
        break
  ranking = RankedSchedules(config, plan, known)
  last = ranking.ranked[0]._replace(saved=_saved(pipeline)[-1])
  return (
    ranking if last in known else dataclasses.replace(ranking, known=known | {last: probe(last)})
  )


def _repeats(pipeline: Pipeline) -> Sequence[int]:
  return pipeline.repeats_choices or (pipeline.repeats,)


def _saved(pipeline: Pipeline) -> Sequence[str]:
  return ("residuals", "input") if pipeline.stash_is_open else (pipeline.stash,)


def choose_pipeline_schedule(
  config: Config,
  place: Target,
  probe: Probe,
  folder: pathlib.Path,
  *,
  plan: BatchPlan,
  retune: bool = False,
  say: Say = print,
) -> Config:
  """Returns the configuration with pipeline_schedule and pipeline_saved_activations chosen, if they were auto.

  Args:
    config: a micro_batch_size that was to be chosen has been chosen.
    probe: what one choice needs and takes; called in all processes in the same order.
    say: prints the table and the choice; called in process 0 only.
    plan: the run's.

  Raises:
    UserError: layers or samples do not divide; or compiled_step cannot be read.
  """
  keys = config.pipeline
  if "auto" not in (keys.pipeline_schedule, keys.pipeline_saved_activations):
    return config
  pipeline = pipeline_of(config, place.layout, plan)
  choices = [StageChoice(n, saved) for n in _repeats(pipeline) for saved in _saved(pipeline)]
  if config.compile.compiled_step:
    # Those that the run's program was compiled for; a file for another run says so later.
    of = made_from(config.compile.compiled_step)[CONFIGURATION]
    given = of.get("num_pipeline_repeats"), of.get("pipeline_saved_activations")
    return next((one for one in choices if one == given), choices[0]).applied_to(config)
  if len(choices) == 1:
    return choices[0].applied_to(config)
  depends_on = what_it_depends_on(config, place, ()) | {"choices": choices}
  depends_on["num_microbatches"] = largest_phase(plan).num_microbatches

  def make() -> Made:
    ranking = tried(config, plan, pipeline, agreed(probe))
    return Made(list(ranking.ranked[0]), ranking.why(), ranking.probes(), f"{ranking}\n")

  def line(value: Sequence[Any], why: str) -> str:
    one = pipeline_of(StageChoice(*value).applied_to(config), place.layout, plan)
    return (
      f"pipeline_schedule {keys.pipeline_schedule}: {one.schedule} num_pipeline_repeats={one.repeats} "
      f"pipeline_saved_activations={one.stash} ({why})"
    )

  memory = RememberedChoice(folder, "pipeline_schedule", keys.pipeline_schedule, depends_on)
  value = memory.recalled_or_made(
    [list(choice) for choice in choices], make, line, retune=retune, say=say
  )
  return StageChoice(*value).applied_to(config)
