"""One optimizer update from top to bottom: accumulate, divide, clip, optax.MultiSteps, state.

A step is one dispatch (fused), or one for each microbatch (streamed), whose sums optax.MultiSteps
adds up. Both divide once, by the whole step's divisor. (MultiSteps' own mean is a mean of means:
wrong where microbatches have different numbers of tokens.)

A group of parameters can have a batch of its own: an update of theirs sums the gradients of several
steps (`by_group`), and the divisors of those steps beside them. Divided once, they are the mean over all
their samples: that of one batch as large as these together, but for what other groups learn meanwhile.
Each group is clipped and updated by itself. What has not come to its group's last step when a run ends
is not applied.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import optax

from maxbatch.core.accumulate import Accumulate, Squares, divisor, objective
from maxbatch.core.terms import Loss, Stats, Terms, joined, zeros_of

StepsOf = Callable[[Any], Any]
"""From a tree like the parameters' to the steps of each leaf's group."""


class Sums(NamedTuple):
  """What the rows of a step, or of its dispatches so far, add up to."""

  terms: Terms
  stats: Stats
  squares: Squares | None = None


class StepState(NamedTuple):
  """What a step reads and writes."""

  params: Any
  opt_state: optax.MultiStepsState
  sums: Sums | None = None
  """Sums over the dispatches of a streamed step so far; None where steps are fused."""


class StepResult(NamedTuple):
  """What a dispatch reports, of the step so far."""

  sums: Sums
  loss: jax.Array
  """float32: the objective, Σ coefficient · numerator / denominator."""
  grad_norm: jax.Array
  """float32: norm of the divided gradient before clipping; 0 unless the dispatch ends the step."""
  gradients: Any
  """float32: summed, not divided."""
  updates: Any
  """What was added to the parameters; zeros unless the dispatch ends the step."""
  is_last: jax.Array
  """bool: whether the dispatch ends the step."""
  measured: Any = None
  """What `reduce` returns besides."""


class GroupState(NamedTuple):
  """What a group has of its update so far."""

  multi_steps: optax.MultiStepsState
  divisor: jax.Array
  """float32: of the gradients summed so far."""


class NormState(NamedTuple):
  """What was measured of the last mean gradient."""

  grad_norm: jax.Array
  """float32: its global norm, before clipping."""


def measure_norm() -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that notes the norm of the mean gradient: summed gradients, which it leaves
  as they are, divided by the extra argument `divisor`."""

  def init(params: Any) -> NormState:
    del params
    return NormState(jnp.zeros((), jnp.float32))

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, NormState]:
    del state, params
    return updates, NormState(_mean_norm(updates, extra["divisor"]))

  return optax.GradientTransformationExtraArgs(init, update)


def mean_clipped(clip_norm: float = 0.0) -> optax.GradientTransformationExtraArgs:
  """Returns the transformation that divides summed gradients by the extra argument `divisor` and clips their
  global norm to `clip_norm`; 0: to none.

  It multiplies once: XLA's CPU compiler writes gradients that are divided, and then clipped, to memory in
  between, and reads both from there for every moment.
  """

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    del params
    factor = 1.0 / _nonzero(extra["divisor"])
    if clip_norm:
      norm = _mean_norm(updates, extra["divisor"])
      factor *= jnp.where(norm < clip_norm, 1.0, clip_norm / norm)
    return jax.tree.map(lambda g: g * factor, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _mean_norm(gradients: Any, divisor: jax.Array) -> jax.Array:
  return optax.tree.norm(gradients) / _nonzero(divisor)


def _nonzero(divisor: jax.Array) -> jax.Array:
  # A step of padding alone has divisor 0 and gradient 0: its mean is 0, not NaN.
  return jnp.where(divisor == 0, 1.0, divisor)


@dataclasses.dataclass(frozen=True, eq=False)
class StepOptimizer:
  """optax.MultiSteps around division, clipping and an update rule; says when a step ends."""

  multi_steps: optax.MultiSteps
  every_k: optax.Schedule
  """Dispatches of the step after so many updates."""

  def init(self, params: Any) -> optax.MultiStepsState:
    """Returns the first state, with float32 moments and accumulators whatever the weights are."""
    return self.multi_steps.init(optax.tree.cast(params, jnp.float32))

  def ends_step(self, state: optax.MultiStepsState) -> jax.Array:
    """Returns whether the next dispatch is the last of its step: the one place that decides it."""
    return jnp.asarray(state.mini_step == self.every_k(state.gradient_step) - 1)

  def update(
    self,
    gradients: Any,
    state: optax.MultiStepsState,
    params: Any,
    divisor: jax.Array,
    **extra: Any,
  ) -> tuple[Any, optax.MultiStepsState]:
    """Returns the updates, zeros before the last dispatch of a step, and the state after it.

    Args:
      gradients: summed over a dispatch, not divided.
      state: the state before.
      params: the parameters.
      divisor: of the step's summed gradients, as far as it is known.
      extra: what the rules take, a learning rate, say.
    """
    is_last = self.ends_step(state)
    return self.multi_steps.update(
      gradients, state, params, divisor=divisor, is_last=is_last, **extra
    )


def step_optimizer(
  *rules: optax.GradientTransformation,
  clip_norm: float = 0.0,
  dispatches: int | optax.Schedule = 1,
  groups: tuple[StepsOf, Collection[int]] | None = None,
) -> StepOptimizer:
  """Returns the optimizer of `train_step`.

  Args:
    rules: any optax transformations, one after another; the first sees the step's mean gradient.
    clip_norm: global norm to which that is clipped; 0: it is not.
    dispatches: of a step; 1 where it is fused. A number, or a function of the updates so far.
    groups: over how many steps each parameter's gradient is summed for an update, and all such
      numbers; then each group is clipped by itself. None: one step for all.
  """
  inner = optax.chain(measure_norm(), mean_clipped(clip_norm), *rules)
  if groups:
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    inner = optax.chain(measure_norm(), by_group(optax.chain(clip, *rules), *groups))
  # MultiSteps runs the rule at every dispatch and discards all results but the last: skip them.
  inner = optax.conditionally_transform(
    inner, lambda step, *, is_last, **extra: is_last, forward_extra_args=True
  )
  every_k: optax.Schedule = dispatches if callable(dispatches) else lambda updates: dispatches
  return StepOptimizer(optax.MultiSteps(inner, dispatches, use_grad_mean=False), every_k)


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


def _over_steps(
  rule: optax.GradientTransformation, steps: int
) -> optax.GradientTransformationExtraArgs:
  """Returns the rule on the mean gradient of `steps` steps, with updates of 0 until the last."""
  rule = optax.with_extra_args_support(optax.chain(mean_clipped(), rule))
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


class Reduce(Protocol):
  """Finishes the sums of a dispatch, where a loss leaves them in parts."""

  def __call__(self, sums: Sums, gradients: Any, /) -> tuple[Sums, Any]:
    """Returns the sums, and whatever else is measured of the summed gradients."""
    ...


def sum_entries(sums: Sums, gradients: Any) -> tuple[Sums, None]:
  """Adds up the entries of all terms; statistics keep their shapes."""
  del gradients
  terms, squares = jax.tree.map(jnp.sum, (sums.terms, sums.squares))
  return Sums(terms, sums.stats, squares), None


Step = Callable[..., tuple[StepState, StepResult]]
"""(state, rows, num_microbatches, keys, denominators, **extra) → (state, result).

`denominators` are those of a streamed step's terms, if these differ: `sum_denominators` of its dispatches.
"""


def train_step(
  accumulate: Accumulate,
  optimizer: StepOptimizer,
  *,
  streamed: bool = False,
  lends: bool = True,
  reduce: Reduce = sum_entries,
  apply_updates: Callable[[Any, Any], Any] = optax.apply_updates,
) -> Step:
  """Returns the step as a function of pytrees, to be jitted with its state donated.

  Args:
    accumulate: sums gradients, terms and statistics over the microbatches of one dispatch.
    optimizer: of `step_optimizer`.
    streamed: whether a step is one dispatch for each microbatch.
    lends: whether the gradients of a fused step may be summed in the optimizer's accumulators; not where
      replicas divide those.
    reduce: finishes the sums of a dispatch.
    apply_updates: from parameters and updates to parameters.
  """

  def step(
    state: StepState,
    rows: Any,
    num_microbatches: Any,
    keys: jax.Array | None = None,
    denominators: Any = None,
    **extra: Any,
  ) -> tuple[StepState, StepResult]:
    zeros, opt_state = _kept(state.opt_state) if streamed else _lent(state.opt_state)
    zeros = zeros if lends else None
    is_last = optimizer.ends_step(opt_state)
    if streamed and denominators is None:
      denominators = {}  # This dispatch's own are not the step's.
    found = accumulate(
      state.params, rows, num_microbatches, keys, zeros=zeros, denominators=denominators
    )
    gradients = jax.tree.map(jnp.add, opt_state.acc_grads, found.gradients)
    sums, measured = reduce(Sums(found.terms, found.stats, found.squares), gradients)
    sums = sums if state.sums is None else joined(state.sums, sums)
    with jax.named_scope("optimizer"):
      updates, opt_state = optimizer.update(
        found.gradients, opt_state, state.params, divisor(sums.terms), **extra
      )
      params = apply_updates(state.params, updates)
    carried = state.sums
    if carried is not None:
      carried = jax.tree.map(lambda x, zero: jnp.where(is_last, zero, x), sums, zeros_of(sums))
    result = StepResult(
      sums=sums,
      loss=objective(sums.terms),
      grad_norm=optax.tree.get(opt_state, "grad_norm"),
      gradients=gradients,
      updates=updates,
      is_last=is_last,
      measured=measured,
    )
    return StepState(params, opt_state, carried), result

  return step


def _kept(opt_state: optax.MultiStepsState) -> tuple[Any, optax.MultiStepsState]:
  """Returns new zeros to form sums in; MultiSteps adds them to what it has."""
  return jax.tree.map(jnp.zeros_like, opt_state.acc_grads), opt_state


def _lent(opt_state: optax.MultiStepsState) -> tuple[Any, optax.MultiStepsState]:
  """Returns MultiSteps' accumulators, zeros between steps, to form sums in.

  It is left with constant zeros, so that the compiler drops its own addition.
  """
  zeros = jax.tree.map(jnp.zeros_like, opt_state.acc_grads)
  emptied = opt_state._replace(mini_step=jnp.zeros((), jnp.int32), acc_grads=zeros)
  return opt_state.acc_grads, emptied


def init_state(
  params: Any, optimizer: StepOptimizer, loss: Loss | None = None, rows: Any = None
) -> StepState:
  """Returns the state before the first step.

  Args:
    params: the parameters.
    optimizer: of `step_optimizer`.
    loss: where steps are streamed, what they minimize.
    rows: some rows (B, …) of it, or their shapes.
  """
  sums = None
  if loss is not None:
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_rows))

    def of_rows(params: Any, rows: Any, keys_B: jax.Array) -> Sums:
      terms, stats = loss(params, rows, keys_B)
      return sum_entries(Sums(OrderedDict(terms), dict(stats)), None)[0]

    sums = zeros_of(jax.eval_shape(of_rows, params, rows, keys))
  return StepState(params, optimizer.init(params), sums)


def mean_gradient(result: StepResult) -> Any:
  """Returns the step's gradient divided by its divisor, before clipping."""
  by = _nonzero(divisor(result.sums.terms))
  return jax.tree.map(lambda g: g / by, cast(Any, result.gradients))
