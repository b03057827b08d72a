"""Batch size and learning rate over the samples of a run, drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxbatch.batch.learning_rate import LearningRate
from maxbatch.batch.plan import BatchPlan, Position
from maxbatch.plots.figure import COLORS, count_axis, new_figure

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_POINTS = 400


def plot(plan: BatchPlan, rate: LearningRate, title: str) -> Figure:
  """Batch above, learning rate below, on one axis of samples."""
  figure, (above, below) = new_figure(title, 2)
  above.plot(*zip(*_batches(plan), strict=True), color=COLORS[0], gid="batch")
  above.set_ylabel("batch (samples per step)")
  count_axis(above.yaxis)
  below.plot(*zip(*_rates(plan, rate), strict=True), color=COLORS[1], gid="learning_rate")
  below.set_ylabel("learning rate")
  below.set_xlabel("samples consumed")
  for axes in (above, below):
    axes.set_xlim(0, max(plan.total_samples, 1))
    axes.set_ylim(bottom=0)
    count_axis(axes.xaxis)
  return figure


def _batches(plan: BatchPlan) -> list[tuple[float, float]]:
  """The corners of the staircase."""
  return [
    (samples, phase.batch)
    for phase in plan.phases
    for samples in (phase.first.samples, phase.end.samples)
  ]


def _rates(plan: BatchPlan, rate: LearningRate) -> list[tuple[float, float]]:
  """The rate at steps spread evenly over the run, the first and last of every phase included."""
  last = max(plan.steps - 1, 0)
  steps = {last * n // _POINTS for n in range(_POINTS + 1)}
  for phase in plan.phases:
    steps |= {phase.first.step, max(phase.first.step, phase.end.step - 1)}
  positions = [Position(step, plan.samples_at(step)) for step in sorted(steps)]
  return [(position.samples, rate(position)) for position in positions]
