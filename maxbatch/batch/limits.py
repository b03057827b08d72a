"""What keeps a plan from being otherwise: the next batches, the devices that keep it, its end."""

from fractions import Fraction

from maxbatch.batch.plan import BatchPlan
from maxbatch.batch.solve import counted, nearest_divisors, text


def limits(plan: BatchPlan) -> list[str]:
  """One sentence for each thing that bounds the plan."""
  return [_batches(plan), _devices(plan), _shapes(plan), _end(plan)]


def _batches(plan: BatchPlan) -> str:
  micro, batch = plan.micro_batch_to_train, plan.global_batch_to_train
  near = [f"{size:,}" for size in (batch - micro, batch + micro) if size > 0]
  return (
    f"at this microbatch the batch is a multiple of {micro:,}: next to {batch:,}, "
    f"{' and '.join(near)}"
  )


def _devices(plan: BatchPlan) -> str:
  """How many devices can take the same batch in the same microbatches."""
  groups, devices = plan.topology.num_batch_groups, plan.topology.num_devices
  batch, sharing = plan.global_batch_to_train, devices // groups
  rows = plan.micro_batch_to_train // groups
  near = nearest_divisors(batch // rows, Fraction(groups))
  others = [
    f"{counted(count * sharing, 'device')} ({counted(batch // (rows * count), 'pass', 'passes')})"
    for count in near
  ]
  per_device = text(plan.per_device_batch_size)
  kept = f"; at {per_device} per device also on {' and '.join(others)}" if others else ""
  return f"this batch fits on at most {counted(batch * sharing, 'device')}{kept}"


def _shapes(plan: BatchPlan) -> str:
  return (
    f"{counted(len(plan.micro_batches), 'microbatch shape')} to compile; room for "
    f"{plan.microbatch_capacity:,} passes per step"
  )


def _end(plan: BatchPlan) -> str:
  key, amount = plan.budget.key, plan.budget.amount * plan.budget.scale
  cut = plan.phases[-1].is_cut
  how = f", with a last step of {counted(plan.phases[-1].batch, 'sample')}" if cut else ""
  return f"{key}={text(amount)} ends the run{how}"
