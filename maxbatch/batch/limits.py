"""What limits a plan: the neighbouring batches, other device counts, compilations and the budget."""

from fractions import Fraction

from maxbatch.core.keys import counted, text
from maxbatch.core.plan import BatchPlan
from maxbatch.core.solve import nearest_batches, nearest_divisors


def limits(plan: BatchPlan) -> list[str]:
  """Returns one sentence for each limit of the plan."""
  return [_batches(plan), *_rows(plan), _devices(plan), _shapes(plan), _end(plan)]


def _batches(plan: BatchPlan) -> str:
  micro, batch = plan.micro_batch_to_train, plan.global_batch_to_train
  sizes = [batch - micro, batch + micro]
  rule = f"with this microbatch the global batch is a multiple of {micro:,}"
  if plan.padding_rows:
    sizes = nearest_batches(batch, plan.topology)
    rule = f"without padding the global batch is a multiple of {plan.topology.num_batch_groups:,}"
  near = [f"{size:,}" for size in sizes if size > 0]
  return f"{rule}; nearest to {batch:,}: {' and '.join(near)}"


def _rows(plan: BatchPlan) -> list[str]:
  """Says how many devices share the tokens of a row, and which sizes that allows."""
  mesh, length = plan.topology, plan.tokens(1)
  if (ways := mesh.shape.get("context", 1)) == 1:
    return []
  unit = text(Fraction(mesh.num_batch_groups, mesh.num_devices))
  return [
    f"{ways} devices share each row along context, {length // ways:,} of its {length:,} tokens each; "
    f"per_device_batch_size is a multiple of {unit}"
  ]


def _devices(plan: BatchPlan) -> str:
  """Says on how many devices the same batch divides into the same per-device batches."""
  groups, devices = plan.topology.num_batch_groups, plan.topology.num_devices
  batch, sharing = plan.global_batch_to_train, devices // groups
  rows = plan.micro_batch_to_train // groups
  near = [] if plan.padding_rows else nearest_divisors(batch // rows, Fraction(groups))
  others = [
    f"{counted(count * sharing, 'device')} "
    f"({counted(batch // (rows * count), 'microbatch', 'microbatches')})"
    for count in near
  ]
  per_device = text(plan.per_device_batch_size)
  kept = f"; with per-device batch {per_device} also on {' and '.join(others)}" if others else ""
  return f"this batch divides over at most {counted(batch * sharing, 'device')}{kept}"


def _shapes(plan: BatchPlan) -> str:
  return (
    f"{counted(len(plan.micro_batches), 'microbatch shape')} to compile, for up to "
    f"{plan.microbatch_capacity:,} microbatches per step"
  )


def _end(plan: BatchPlan) -> str:
  key, amount = plan.budget.key, plan.budget.amount * plan.budget.scale
  cut = plan.phases[-1].is_cut
  how = f", with a partial last step of {counted(plan.phases[-1].batch, 'sample')}" if cut else ""
  return f"{key}={text(amount)} ends the run{how}"
