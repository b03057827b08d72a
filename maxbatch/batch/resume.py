"""Whether a run whose batch was decided as it went can go on with the sizes it is given now."""

import math

from maxbatch.batch.plan import BatchPlan
from maxbatch.batch.solve import text
from maxbatch.errors import UserError


def check_can_continue(plan: BatchPlan, first: int, now: int) -> None:
  """Refuses sizes with which a steered run cannot go on.

  Args:
    plan: the plan of the keys as they are now.
    first: samples per step with which the run began.
    now: samples per step to which it has come.

  Raises:
    UserError: it began with another batch, or has come to one that its microbatch does not divide.
  """
  batch, micro = plan.global_batch_to_train, plan.micro_batch_to_train
  if batch != first:
    raise UserError(
      f"global_batch_to_train={batch}: this run began with {first} samples per step, and "
      f"batch_schedule=gns goes on from there; for example batch_size={first}, or another run_name"
    )
  if now % micro:
    raise UserError(
      f"micro_batch_to_train={micro}: batch_schedule=gns has brought this run to {now} samples per "
      f"step, which must be a multiple of it; for example {_micro_batch_that_works(plan, now)}"
    )


def _micro_batch_that_works(plan: BatchPlan, batch: int) -> str:
  common = math.gcd(batch, plan.micro_batch_to_train)
  if common % plan.topology.num_batch_groups:
    return "another mesh, or another run_name"
  return f"per_device_batch_size={text(plan.per_device(common))} gradient_accumulation_steps=-1"
