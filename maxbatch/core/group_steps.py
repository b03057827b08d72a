"""Parameter groups with a batch of their own: an update of theirs sums the gradients of several steps.

optax.MultiSteps adds a group's gradients up over its steps, and the divisors of those steps beside
them. Divided once, they are the mean over all their samples, however each step was split and whatever
its batch: that of one batch as large as these together, but for what other groups learn meanwhile.
Each group is clipped and updated by itself. What has not come to its group's last step when a run ends is
not applied.
"""

from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

StepsOf = Callable[[Any], Any]
"""From a tree like the parameters' to the steps of each leaf's group."""


class GroupState(NamedTuple):
  """What a group has of its update so far."""

  multi_steps: optax.MultiStepsState
  divisor: jax.Array
  """float32: of the gradients summed so far."""


def quotient(updates: Any, divisor: jax.Array) -> Any:
  """Returns sums divided by `divisor`."""
  # A step of padding alone has divisor 0 and gradient 0: its mean is 0, not NaN.
  by = jnp.where(divisor == 0, 1.0, divisor)
  return jax.tree.map(lambda g: g / by, updates)


def by_group(
  rule: optax.GradientTransformation, steps_of: StepsOf, steps: Collection[int]
) -> optax.GradientTransformationExtraArgs:
  """Returns the rule for each group by itself, on its mean gradient.

  Args:
    rule: what follows the division.
    steps_of: the steps of each parameter's group.
    steps: all that there are.
  """
  rules: dict[Hashable, optax.GradientTransformation] = {
    _name(each): _over_steps(rule, each) for each in steps
  }
  return optax.partition(rules, lambda tree: jax.tree.map(_name, steps_of(tree)))


def _name(steps: int) -> str:
  return f"every_{steps}"


def _divided() -> optax.GradientTransformationExtraArgs:
  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    del params
    return quotient(updates, extra["divisor"]), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _over_steps(
  rule: optax.GradientTransformation, steps: int
) -> optax.GradientTransformationExtraArgs:
  """Returns the rule on the mean gradient of `steps` steps, with updates of 0 until the last."""
  rule = optax.with_extra_args_support(optax.chain(_divided(), rule))
  if steps == 1:
    return rule
  rule = optax.conditionally_transform(
    rule, lambda step, *, ends_group, **extra: ends_group, forward_extra_args=True
  )
  multi_steps = optax.MultiSteps(rule, steps, use_grad_mean=False)

  def init(params: Any) -> GroupState:
    return GroupState(multi_steps.init(params), jnp.zeros((), jnp.float32))

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, GroupState]:
    total, last = state.divisor + extra["divisor"], state.multi_steps.mini_step == steps - 1
    extra |= {"divisor": total, "ends_group": last}
    updates, inner = multi_steps.update(updates, state.multi_steps, params, **extra)
    return updates, GroupState(inner, jnp.where(last, 0.0, total))

  return optax.GradientTransformationExtraArgs(init, update)
