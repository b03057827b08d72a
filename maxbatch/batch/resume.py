"""Whether a run with batch_schedule=gns can be resumed with the batch sizes given now."""

import math

from maxbatch.batch.plan import BatchPlan
from maxbatch.batch.solve import text
from maxbatch.errors import UserError


def check_can_continue(plan: BatchPlan, first: int, now: int) -> None:
  """Refuses sizes with which a run with batch_schedule=gns cannot be resumed.

  Args:
    plan: of the configuration as it is now.
    first: samples per step with which the run began.
    now: samples per step at the checkpoint.

  Raises:
    UserError: the run began with another batch, or the microbatch does not divide the present one.
  """
  batch, micro = plan.global_batch_to_train, plan.micro_batch_to_train
  if batch != first:
    raise UserError(
      f"global_batch_to_train={batch} must be the {first} samples per step with which this run "
      f"began, because batch_schedule=gns continues from there; for example batch_size={first}, or "
      "another run_name"
    )
  if now % micro:
    raise UserError(
      f"micro_batch_to_train={micro} must divide the {now} samples per step that "
      f"batch_schedule=gns has reached in this run; for example {_micro_batch_that_works(plan, now)}"
    )


def _micro_batch_that_works(plan: BatchPlan, batch: int) -> str:
  common = math.gcd(batch, plan.micro_batch_to_train)
  if common % plan.topology.num_batch_groups:
    return "another mesh, or another run_name"
  return f"per_device_batch_size={text(plan.per_device(common))} gradient_accumulation_steps=-1"
