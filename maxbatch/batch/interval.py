"""When something that happens "every n samples" is due, whatever the batch does meanwhile."""

from maxbatch.batch.plan import BatchPlan, Position, Unit


def is_due(plan: BatchPlan, before: Position, after: Position, period: int, unit: Unit) -> bool:
  """Whether a multiple of `period` (in `unit`) lies in (before, after]; never if period is -1."""
  if period == -1:
    return False
  return plan.measure(after, unit) // period > plan.measure(before, unit) // period
