"""Intervals in steps, samples or tokens that stay exact while the batch size changes."""

from maxbatch.batch.plan import BatchPlan, Position, Unit


def is_due(plan: BatchPlan, before: Position, after: Position, period: int, unit: Unit) -> bool:
  """Whether a multiple of `period` lies in (before, after], both counted in `unit`.

  Evaluation and checkpoints use it. A period of -1 is never due.
  """
  if period == -1:
    return False
  return plan.measure(after, unit) // period > plan.measure(before, unit) // period
