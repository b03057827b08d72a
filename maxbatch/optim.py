"""The optimizer: optax.MultiSteps around averaging, clipping and a registered update rule.

Gradients arrive as sums over tokens. MultiSteps adds them up in float32 over the dispatches of a
step; at the last one they are divided once by the step's total weight. (MultiSteps' own mean is a
mean of means: wrong when microbatches hold different numbers of tokens.)

Update rules are built with learning rate 1 and scaled afterwards by the rate of the step, which is
a function of the position in the run and comes in as an argument. Add a rule by writing a function
and registering it in OPTIMIZERS.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxbatch.config.schema import OptimizerConfig
from maxbatch.errors import UserError
from maxbatch.models.registry import Parameters
from maxbatch.sharding import LogicalAxes

Axes = Mapping[tuple[str, ...], LogicalAxes]

_UNDECAYED = ("scale", "bias")
_MUON_RMS = 0.2
"""Root mean square of Muon's update that lets it share AdamW's learning rates (Liu et al. 2025)."""


class AverageState(NamedTuple):
  """What the last average looked like."""

  grad_norm: jax.Array
  """float32: global norm of the averaged gradient, before clipping."""


def average_by_weight() -> optax.GradientTransformationExtraArgs:
  """Divides summed gradients by the extra argument `weight`, the step's number of tokens."""

  def init(params: Any) -> AverageState:
    del params
    return AverageState(jnp.zeros((), jnp.float32))

  def update(
    updates: Any, state: AverageState, params: Any = None, *, weight: jax.Array, **extra: Any
  ) -> tuple[Any, AverageState]:
    del state, params, extra
    # A step of padding only has weight 0 and gradient 0; the average is then 0, not NaN.
    updates = jax.tree.map(lambda g: g / jnp.maximum(weight, 1.0), updates)
    return updates, AverageState(optax.tree.norm(updates))

  return optax.GradientTransformationExtraArgs(init, update)


def scale_by_given_rate() -> optax.GradientTransformationExtraArgs:
  """Multiplies updates by the extra argument `learning_rate`."""

  def update(
    updates: Any, state: Any, params: Any = None, *, learning_rate: jax.Array, **extra: Any
  ) -> tuple[Any, Any]:
    del params, extra
    return jax.tree.map(lambda u: u * learning_rate, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def adamw(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
  """AdamW (Loshchilov & Hutter 2019)."""
  del axes
  return optax.adamw(
    1.0,
    b1=config.adam_b1,
    b2=config.adam_b2,
    eps=config.adam_eps,
    weight_decay=config.adam_weight_decay,
    mask=_decayed,
  )


def sgd(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
  """Gradient descent with momentum."""
  del axes
  return optax.sgd(1.0, momentum=config.sgd_momentum or None)


def adafactor(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
  """Adafactor (Shazeer & Stern 2018): a row and a column of second moments per matrix."""
  del config, axes
  return optax.adafactor(1.0)


def muon(config: OptimizerConfig, axes: Axes) -> optax.GradientTransformation:
  """Muon (Jordan et al. 2024) for the layers' matrices, Adam for everything else."""
  dims = {path: _matrix_dims(path, names) for path, names in axes.items()}

  def dimension_numbers(params: Parameters) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda path, _: dims[tuple(entry.key for entry in path)], params
    )

  return optax.contrib.muon(
    1.0,
    weight_decay=config.adam_weight_decay,
    weight_decay_mask=_decayed,
    adam_b1=config.adam_b1,
    adam_b2=config.adam_b2,
    eps=config.adam_eps,
    muon_weight_dimension_numbers=dimension_numbers,
    consistent_rms=_MUON_RMS,
  )


def _matrix_dims(
  path: tuple[str, ...], axes: LogicalAxes
) -> optax.contrib.MuonDimensionNumbers | None:
  """Which dims of a kernel are its input and its output; None for what is not a kernel."""
  if path[-1] != "kernel":
    return None
  first = axes.index("layers") + 1 if "layers" in axes else 0
  dims = tuple(range(first, len(axes)))
  cut = 1 if axes[first] == "embed" else len(dims) - 1
  return optax.contrib.MuonDimensionNumbers(dims[:cut], dims[cut:])


OPTIMIZERS: dict[str, Callable[[OptimizerConfig, Axes], optax.GradientTransformation]] = {
  "adamw": adamw,
  "sgd": sgd,
  "adafactor": adafactor,
  "muon": muon,
}


def _decayed(params: Parameters) -> Any:
  """True for matrices and tables, False for the scales and biases that weight decay would harm."""
  return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in _UNDECAYED, params)


def make_optimizer(config: OptimizerConfig, axes: Axes, dispatches: int) -> optax.MultiSteps:
  """The optimizer of a run, whose updates take the extra arguments of `average_by_weight`,
  `scale_by_given_rate` and `last`: whether this dispatch ends the step.

  Args:
    config: which rule, and its constants.
    axes: logical axes of every parameter by its path.
    dispatches: dispatches in a step, each of which hands over one sum of gradients.

  Raises:
    UserError: for an unknown opt_type.
  """
  if config.opt_type not in OPTIMIZERS:
    raise UserError(f"opt_type={config.opt_type!r} is unknown; known: {', '.join(OPTIMIZERS)}")
  clip = config.gradient_clipping_threshold
  inner = optax.chain(
    average_by_weight(),
    optax.clip_by_global_norm(clip) if clip else optax.identity(),
    OPTIMIZERS[config.opt_type](config, axes),
    scale_by_given_rate(),
  )
  # MultiSteps runs the rule at every dispatch and discards all results but the last: skip them.
  inner = optax.conditionally_transform(
    inner, lambda step, *, last, **extra: last, forward_extra_args=True
  )
  return optax.MultiSteps(inner, every_k_schedule=dispatches, use_grad_mean=False)


def init_in_float32(optimizer: optax.MultiSteps, params: Parameters) -> optax.MultiStepsState:
  """The optimizer's first state, with float32 moments and accumulators whatever the weights are."""
  return optimizer.init(optax.tree.cast(params, jnp.float32))
