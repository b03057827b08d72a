"""The result of a critical-batch measurement as a table, sentences and JSON."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from maxbatch.command_line.screen import Table
from maxbatch.core.keys import text
from maxbatch.experiments.branching import Branch, Branching
from maxbatch.experiments.losses import Judged, Measured, critical
from maxbatch.experiments.tradeoff import Tradeoff, branch_tradeoff

_HEADINGS = ("factor", "batch", "tokens/step", "learning rate", "steps")
_RESULTS = ("loss", "above best smaller", "eval loss", "seconds", "")


@dataclasses.dataclass(frozen=True)
class Origin:
  """The checkpoint that the branches start from."""

  folder: str
  step: int
  samples: int
  tokens: int
  learning_rate: float
  """The learning rate of the run's next step."""


@dataclasses.dataclass(frozen=True)
class CriticalBatchReport:
  """A finished measurement."""

  origin: Origin
  branching: Branching
  coupling: str
  tolerance: float
  judged: tuple[Judged, ...]

  @property
  def critical(self) -> Judged:
    """The largest branch within the tolerance."""
    return self.judged[critical(self.judged)]

  @property
  def above(self) -> Judged | None:
    """The next larger branch, which is beyond the tolerance; None if there is none."""
    place = critical(self.judged) + 1
    return self.judged[place] if place < len(self.judged) else None

  @property
  def at_least(self) -> int | None:
    """Lower bound of the critical batch in samples; None if it is the smallest branch."""
    return self.critical.measured.branch.batch if self.critical.best_smaller else None

  @property
  def below(self) -> int | None:
    """Upper bound of the critical batch in samples; None if all branches are within."""
    return self.above.measured.branch.batch if self.above else None

  @functools.cached_property
  def tradeoff(self) -> Tradeoff | None:
    """Samples against steps to one loss, in samples; None where the branches do not tell."""
    return branch_tradeoff(self.judged, self.origin.samples)

  def as_dict(self) -> dict[str, Any]:
    """Returns the whole result for JSON; null where not measured or not finite."""
    return {
      "checkpoint": dataclasses.asdict(self.origin),
      "coupling": self.coupling,
      "tolerance": self.tolerance,
      "branch_tokens": self.branching.tokens,
      "window_tokens": self.branching.window_tokens,
      "critical_batch_at_least": self.at_least,
      "critical_batch_below": self.below,
      "tradeoff": dataclasses.asdict(self.tradeoff) if self.tradeoff else None,
      "conclusion": self.sentences(),
      "branches": [_row_as_dict(one) for one in self.judged],
    }

  def sentences(self) -> list[str]:
    """Returns the conclusion, then its caveats."""
    return [_conclusion(self), *_contradiction(self), *_doubts(self)]

  def __str__(self) -> str:
    rows = [(*_plan_cells(one.measured), *_result_cells(one)) for one in self.judged]
    twice = []
    if self.tradeoff:
      result = self.tradeoff.critical_batch
      twice = [
        f"To one loss, a batch of {result.value:,.0f} samples (95% {result.low:,.0f}–"
        f"{result.high:,.0f}) takes twice the data of small ones from here, by the curve of "
        "McCandlish et al. (2018), off which the branches lie by "
        f"{self.tradeoff.misfit:.0%}: that is what the noise scale estimates."
      ]
    table = Table((*_HEADINGS, *_RESULTS), rows)
    return "\n".join([*table.lines(), "", *self.sentences(), *twice])


def plan_table(branching: Branching, learning_rates: Sequence[float]) -> str:
  """Returns the branches before they are trained."""
  planned = zip(branching.branches, learning_rates, strict=True)
  rows = [_plan_cells(Measured(branch, rate, (), None, 0.0)) for branch, rate in planned]
  return "\n".join(Table(_HEADINGS, rows).lines())


def _plan_cells(measured: Measured) -> tuple[str, ...]:
  branch = measured.branch
  return (
    text(branch.factor),
    f"{branch.batch:,}",
    f"{branch.tokens_per_step:,}",
    f"{measured.learning_rate:.3g}",
    f"{branch.steps:,}",
  )


def _result_cells(one: Judged) -> tuple[str, ...]:
  measured, best = one.measured, one.best_smaller
  difference = remark = ""
  if best is not None:
    difference = f"{one.difference:+.4f} ± {one.half_width:.4f} ({best.name})"
    remark = ("within" if one.within else "beyond") + ("" if one.clear else "?")
  return (
    "diverged" if measured.diverged else f"{one.loss:.4f}",
    "–" if best is None or measured.diverged else difference,
    "–" if measured.eval_loss is None else f"{measured.eval_loss:.4f}",
    f"{measured.seconds:,.1f}",
    remark,
  )


def _samples(branch: Branch) -> str:
  return f"{branch.batch:,} samples ({branch.tokens_per_step:,} tokens)"


def _conclusion(report: CriticalBatchReport) -> str:
  largest, above = report.critical, report.above
  if above is None:
    smaller = largest.best_smaller
    assert smaller is not None  # two branches at least, and this one is not the smallest
    return (
      f"The critical batch is at least {_samples(largest.measured.branch)}: the largest tried, it "
      f"ends within {report.tolerance:g} of {smaller.name}, the best smaller one."
    )
  excess = _excess(above)
  if largest.best_smaller is None:
    return (
      f"The critical batch is below {_samples(above.measured.branch)}, which {excess}. Whether "
      f"{largest.measured.branch.batch:,} is below it, only smaller factors can show."
    )
  return (
    f"The critical batch is between {_samples(largest.measured.branch)} and "
    f"{_samples(above.measured.branch)}, which {excess}."
  )


def _excess(one: Judged) -> str:
  if one.measured.diverged:
    return "diverges"
  assert one.best_smaller is not None
  return f"ends {one.difference:.3g} nats per token above {one.best_smaller.name}"


def _contradiction(report: CriticalBatchReport) -> list[str]:
  """Returns a sentence if branches are beyond the tolerance although a larger one is within it."""
  odd = [one for one in report.judged[: critical(report.judged)] if not one.within]
  if not odd:
    return []
  names = ", ".join(f"{one.measured.branch.name} (which {_excess(one)})" for one in odd)
  return [
    f"Yet {names} is beyond the tolerance: the losses do not rise with the batch. Look at the plot."
  ]


def _doubts(report: CriticalBatchReport) -> list[str]:
  """Lists branches that decide the conclusion and whose interval includes the tolerance."""
  unclear = [one for one in report.judged[critical(report.judged) :] if not one.clear]
  if not unclear:
    return []
  spans = ", ".join(
    f"{one.measured.branch.name} {one.difference:+.4f} ± {one.half_width:.4f}" for one in unclear
  )
  widest = max(one.half_width for one in unclear)
  noise = (
    f"Insufficient: the noise of the smoothed losses is larger than tolerance={report.tolerance:g}"
    if widest > report.tolerance
    else f"Not certain: the noise leaves open on which side of tolerance={report.tolerance:g} it is"
  )
  return [
    f"{noise} ({spans}). With branch_tokens={4 * report.branching.tokens}, which continues these "
    "branches, the noise is about half as large."
  ]


def _row_as_dict(one: Judged) -> dict[str, Any]:
  measured, branch = one.measured, one.measured.branch
  return {
    "factor": float(branch.factor),
    "batch": branch.batch,
    "tokens_per_step": branch.tokens_per_step,
    "learning_rate": measured.learning_rate,
    "steps": branch.steps,
    "diverged": measured.diverged,
    "loss": _finite(one.loss),
    "best_smaller_factor": float(one.best_smaller.factor) if one.best_smaller else None,
    "difference": _finite(one.difference) if one.best_smaller else None,
    "difference_half_width": None if measured.diverged else one.half_width,
    "within": one.within,
    "clear": one.clear,
    "eval_loss": measured.eval_loss,
    "seconds": measured.seconds,
  }


def _finite(value: float) -> float | None:
  return value if math.isfinite(value) else None
