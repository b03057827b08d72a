"""Loss scaling: gradients are computed times a factor that keeps them in the format's range.

float16 sets to zero what is below 6e-8. The loss's gradient is multiplied by the scale before it is
first rounded, and the step's sum of gradients divided by it afterwards, in float32 (Micikevicius et
al. 2018). Where a gradient overflows, the whole step is skipped: parameters and moments stay as they
are. A dynamic scale then shrinks, and grows again after so many steps without an overflow.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.config.schema import PrecisionConfig
from maxbatch.errors import UserError
from maxbatch.precision.formats import compute_format


class LossScale(NamedTuple):
  """The scale and its history, as scalars on the devices."""

  scale: jax.Array
  """float32: of the step to come."""
  good_steps: jax.Array
  """int32: steps since it last changed, or since one was skipped."""
  skipped_steps: jax.Array
  """int32: all that were skipped."""
  skipped_in_a_row: jax.Array
  """int32: of these the last ones; 0 after a step that was not."""


@dataclasses.dataclass(frozen=True)
class LossScaling:
  """How the scale begins and changes."""

  initial: float
  is_dynamic: bool
  minimum: float
  maximum: float
  window: int
  growth_factor: float
  backoff_factor: float
  max_skipped_in_a_row: int

  def __str__(self) -> str:
    kind = "dynamic, from" if self.is_dynamic else "fixed at"
    return f"loss scale {kind} {self.initial:g}"

  def begin(self, noted: Mapping[str, float] | None = None) -> LossScale:
    """Returns the scale of the first step, or of the one after the step that `noted`.

    A scale that is fixed, or beyond bounds that have changed since, is what the keys say.
    """
    results = dict(noted or {})
    scale = results.get("scale", self.initial) if self.is_dynamic else self.initial
    scale = min(max(scale, self.minimum), self.maximum) if self.is_dynamic else scale
    counts = (jnp.int32(results.get(name, 0)) for name in LossScale._fields[1:])
    return LossScale(jnp.float32(scale), *counts)

  @staticmethod
  def note(state: LossScale) -> dict[str, float]:
    """Returns the scale as plain JSON, for a checkpoint."""
    return {name: each.item() for name, each in jax.device_get(state)._asdict().items()}

  def after(self, state: LossScale, is_finite: jax.Array) -> LossScale:
    """Returns the scale after a step whose loss and gradients were finite, or not."""
    skipped = jnp.where(is_finite, 0, 1)
    good = jnp.where(is_finite, state.good_steps + 1, 0)
    scale = state.scale
    if self.is_dynamic:
      grows = good >= self.window
      grown = jnp.minimum(scale * self.growth_factor, self.maximum)
      shrunk = jnp.maximum(scale * self.backoff_factor, self.minimum)
      scale = jnp.where(is_finite, jnp.where(grows, grown, scale), shrunk)
      good = jnp.where(grows, 0, good)
    in_a_row = jnp.where(is_finite, 0, state.skipped_in_a_row + 1)
    return LossScale(scale, good, state.skipped_steps + skipped, in_a_row)


def scaling_of(config: PrecisionConfig) -> LossScaling | None:
  """Returns the loss scaling that the keys describe; None for none.

  Raises:
    UserError: a scale that is not positive, bounds that exclude it, or factors that do not grow and
      shrink.
  """
  scale = config.loss_scale
  if scale == "auto":
    formats = (compute_format(config).name, config.grad_dtype)
    scale = "dynamic" if "float16" in formats else "none"
  if scale == "none":
    return None
  is_dynamic = scale == "dynamic"
  if is_dynamic:
    _check_dynamic(config)
  return LossScaling(
    initial=config.initial_loss_scale if isinstance(scale, str) else scale,
    is_dynamic=is_dynamic,
    minimum=config.min_loss_scale,
    maximum=config.max_loss_scale,
    window=config.loss_scale_window,
    growth_factor=config.loss_scale_growth_factor,
    backoff_factor=config.loss_scale_backoff_factor,
    max_skipped_in_a_row=config.max_consecutive_skipped_steps,
  )


def _check_dynamic(config: PrecisionConfig) -> None:
  low, first, high = config.min_loss_scale, config.initial_loss_scale, config.max_loss_scale
  if not low <= first <= high:
    working = min(max(first, low), max(low, high))
    raise UserError(
      f"initial_loss_scale={first:g} must lie between min_loss_scale={low:g} and "
      f"max_loss_scale={high:g}; for example initial_loss_scale={working:g} "
      f"max_loss_scale={max(working, high):g}"
    )


@jax.custom_vjp
def scaled_gradient(x: jax.Array, scale: jax.Array) -> jax.Array:
  """Returns `x` unchanged, through which gradients flow back `scale` times as large."""
  del scale
  return x


scaled_gradient.defvjp(
  lambda x, scale: (x, scale),
  lambda scale, gradient: (gradient * scale, None),
)
