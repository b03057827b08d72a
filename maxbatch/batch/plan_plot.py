"""Batch size and learning rate over the samples of a run, drawn."""

from maxbatch.batch.learning_rate import LearningRate
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.plots.chart import Chart, Line, Panel

_POINTS = 400


def plan_chart(plan: BatchPlan, rate: LearningRate) -> Chart:
  """Returns a chart of the batch above and the learning rate below, on one axis of samples."""
  batches, rates = (list(zip(*each, strict=True)) for each in (_batches(plan), _rates(plan, rate)))
  panels = [
    Panel("batch (samples per step)", [Line("batch", batches[:1], batches[1])], low=0),
    Panel("learning rate", [Line("learning rate", rates[:1], rates[1], color=1)], low=0),
  ]
  return Chart("batch and learning rate", ["samples consumed"], panels)


def _batches(plan: BatchPlan) -> list[tuple[float, float]]:
  ends = ((phase, (phase.first, phase.end)) for phase in plan.phases)
  return [(place.samples, phase.batch) for phase, places in ends for place in places]


def _rates(plan: BatchPlan, rate: LearningRate) -> list[tuple[float, float]]:
  """Returns the rate at steps spread evenly over the run, with the ends of every phase."""
  last = max(plan.steps - 1, 0)
  steps = {last * n // _POINTS for n in range(_POINTS + 1)}
  for phase in plan.phases:
    steps |= {phase.first.step, max(phase.first.step, phase.end.step - 1)}
  positions = [Position(step, plan.samples_at(step)) for step in sorted(steps)]
  return [(position.samples, rate(position)) for position in positions]
