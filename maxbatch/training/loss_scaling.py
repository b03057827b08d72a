"""The loss scale in a step: gradients divided by it, and steps with an overflow skipped whole.

A step is skipped where its loss or its gradient, summed over all microbatches and devices, is not
finite: one bad value anywhere is enough. Every device comes to that by the same two reduced numbers.
Parameters and optimizer state are then those of before. Samples, steps and the learning rate's
schedule, which follow the position in the run, go on.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxbatch.core.accumulate import Accumulate, Accumulated
from maxbatch.core.keys import counted
from maxbatch.errors import TrainingDivergedError
from maxbatch.models.registry import Parameters
from maxbatch.precision.loss_scale import LossScale, LossScaling
from maxbatch.run_folder.metrics import Record
from maxbatch.training.objective import PROBES


class ScalingMetrics(NamedTuple):
  """What a step reports of the scale of its loss, as scalars on the devices."""

  loss_scale: jax.Array
  """float32: of this step."""
  is_skipped: jax.Array
  """bool: whether loss or gradient was not finite, so that nothing was updated."""
  skipped_steps: jax.Array
  """int32: all of the run, this one included."""
  skipped_in_a_row: jax.Array
  """int32: of these the last ones."""


def scaling_record(metrics: ScalingMetrics | None) -> Record:
  """Returns a step's record of the loss scale; `metrics` are on the host."""
  if metrics is None:
    return {}
  return {"loss_scale": float(metrics.loss_scale), "skipped_steps": int(metrics.skipped_steps)}


def check_skips(
  scaling: LossScaling,
  metrics: ScalingMetrics,
  step: int,
  loss: float,
  saved: Callable[[], str],
) -> None:
  """Stops a run that skips one step after the other.

  Args:
    metrics: of a skipped step, on the host.

  Raises:
    TrainingDivergedError: as many in a row as the run allows.
  """
  count, scale = int(metrics.skipped_in_a_row), float(metrics.loss_scale)
  if count < scaling.max_skipped_in_a_row:
    return
  if math.isfinite(loss):
    smaller = "min_loss_scale" if scaling.is_dynamic else "loss_scale, or loss_scale=dynamic"
    why = (
      f"the gradients overflow, as far as the scale has shrunk; a smaller {smaller}, a lower "
      "learning_rate or a longer warmup_steps may help, or precision=bfloat16, which has the range "
      "of float32"
    )
  else:
    why = (
      f"the loss itself is {loss}: activations overflow or training has diverged, and no loss scale "
      "helps; precision=bfloat16 has the range of float32, or a lower learning_rate or a longer "
      "warmup_steps may help"
    )
  raise TrainingDivergedError(
    f"step {step}: the last {count} steps were skipped, max_consecutive_skipped_steps, at last with "
    f"loss_scale={scale:g}; {why}. {saved()}"
  )


def nothing_learned(state: LossScale | None, step: int) -> str:
  """Returns what to say of a run of so many steps if all were skipped; nothing if some were not."""
  if state is None or step == 0 or int(state.skipped_steps) < step:
    return ""
  return (
    f"nothing was learned: all {counted(step, 'step')} were skipped, as gradients overflow; a lower "
    "initial_loss_scale, or precision=bfloat16, which has the range of float32, may help"
  )


class Applied(NamedTuple):
  """What an update changes."""

  params: Parameters
  updates: Parameters
  """What was added to them."""
  opt_state: optax.MultiStepsState


def unscaled(accumulate: Accumulate, state: LossScale | None) -> Accumulate:
  """Returns the accumulation of a scaled loss, with gradients and their squares without the scale."""
  if state is None:
    return accumulate
  scale = state.scale

  def run(*arguments: Any, **options: Any) -> Accumulated:
    sums = accumulate(*arguments, **options)
    stats, squares = dict(sums.stats), sums.squares
    if PROBES in stats:
      stats[PROBES] = jax.tree.map(lambda x: x / scale**2, stats[PROBES])
    if squares is not None:
      squares = squares._replace(
        of_microbatches=squares.of_microbatches / scale**2,
        of_replicas=squares.of_replicas / scale**2,
      )
    gradients = jax.tree.map(lambda g: g / scale, sums.gradients)
    return sums._replace(gradients=gradients, stats=stats, squares=squares)

  return run


def unless_skipped(
  before: Applied, after: Applied, is_finite: jax.Array, last: jax.Array
) -> Applied:
  """Returns the state after a dispatch: updated if it ends a step that is finite, else unchanged.

  Args:
    before: the state that was updated; its updates are not used.
    after: what the optimizer made of it.
    is_finite: bool: whether loss and gradient of the step are.
    last: bool: whether the dispatch ends the step.
  """
  made, zero = last & is_finite, jnp.zeros((), jnp.float32)

  def chosen(new: Parameters, old: Parameters) -> Parameters:
    return jax.tree.map(lambda n, o: jnp.where(made, n, o), new, old)

  inner = chosen(after.opt_state.inner_opt_state, before.opt_state.inner_opt_state)
  # MultiSteps empties its sums by multiplying with zero, which leaves what is not finite.
  sums = jax.tree.map(lambda x: jnp.where(last, zero, x), after.opt_state.acc_grads)
  return Applied(
    chosen(after.params, before.params),
    jax.tree.map(lambda u: jnp.where(made, u, zero), after.updates),
    after.opt_state._replace(inner_opt_state=inner, acc_grads=sums),
  )


def next_scale(
  scaling: LossScaling, state: LossScale, is_finite: jax.Array, last: jax.Array
) -> tuple[LossScale, ScalingMetrics]:
  """Returns the scale after a dispatch, which changes only where it ends a step, and what is
  reported."""
  after = scaling.after(state, is_finite)
  metrics = ScalingMetrics(state.scale, ~is_finite, after.skipped_steps, after.skipped_in_a_row)
  return jax.tree.map(lambda new, old: jnp.where(last, new, old), after, state), metrics
