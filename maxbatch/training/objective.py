"""What a step minimizes: the loss of a model as terms and statistics over a microbatch.

A step is fed rows of text, or whatever else a loss is of. Everything that is summed over a step's
rows passes through the core's seam (core/terms.py) from here: cross entropy, metrics, what the model
itself hands out, and what the noise scale is estimated from.

k microbatches, B rows of a microbatch, F devices along fsdp, S along tensor.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from maxbatch.core.terms import Max, Ratio, Stat, Stats, Sum, Terms, zeros_of
from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters
from maxbatch.precision.loss_scale import scaled_gradient
from maxbatch.training import partial_sums
from maxbatch.training.loss import TokenShare, row_keys, row_order, share_sums, token_share
from maxbatch.training.metrics import Metrics, Quotient

LOSS = "loss"
"""The term whose denominator is a step's weight: in text, its tokens."""
ROWS, ROW_TOKENS_SQUARED, PROBES = "gns/rows", "gns/row_tokens_squared", "gns/probes"
"""Statistics that the noise scale is estimated from: rows that count, Σ (their tokens)², and for each probe
Σ ‖gradient of a row's summed loss‖²."""

AMAXES = "amax"
"""The statistic of the largest magnitudes that products in float8 had, by path of their buffer."""


class Loss(Protocol):
  """The loss of a microbatch; hashable, since a step is compiled for it."""

  @property
  def compares_parts(self) -> bool:
    """Whether a dispatch is fed parts for the noise scale to compare, as the halves of groups, which nothing
    divides any further for that."""
    ...

  def batch_shapes(self, rows: Rows) -> Any:
    """Returns the shapes of what a step is fed, given those of its rows."""
    ...

  def rows(self, batch: Any) -> Rows:
    """Returns the rows of what a step is fed."""
    ...

  def keys(self, model: Model, dropout_key: jax.Array, batch: Any) -> jax.Array | None:
    """Returns a random key for each row (k, B); None: nothing is drawn."""
    ...

  def metrics(self, chosen: Metrics) -> Metrics:
    """Returns what a step reports, of the metrics that the run lists."""
    ...

  def in_order(self, batch: Any, order_T: np.ndarray) -> Any:
    """Returns a microbatch with its tokens in another order, as `Rows.in_order`, arrays alone: without
    `Rows.places`."""
    ...

  def of_share(
    self, share: TokenShare, microbatch: Any, metrics: Metrics, scale: jax.Array | None = None
  ) -> tuple[Ratio, Stats]:
    """Returns what some tokens of a microbatch contribute to `LOSS`, and to its statistics: over all shares
    they add up to those of the whole. Floats are as `share.form` makes them.

    Args:
      share: the tokens, after the model's layers.
      microbatch: what the step is fed of it, all of its tokens.
      metrics: of `metrics`.
      scale: as below.
    """
    ...

  def without_gradient(self, batch: Any) -> tuple[jax.Array, tuple[Terms, Stats]] | None:
    """Returns whether what a dispatch is fed has no gradient, and its sums if so, as scalars: a model without
    terms and statistics of its own need not be run on it. None: it always has one."""
    ...

  def __call__(
    self,
    model: Model,
    parameters: Parameters,
    microbatch: Any,
    keys_B: jax.Array | None,
    probes: Parameters,
    metrics: Metrics,
    scale: jax.Array | None = None,
  ) -> tuple[Terms, Stats]:
    """Returns the terms, `LOSS` first, and statistics of a microbatch, floats in parts (…, F, S), as
    `microbatch_sums` does.

    Args:
      microbatch: what the step is fed of it.
      probes: zeros to differentiate by (models/probes.py).
      scale: float32 scalar by which gradients, not the sums, are multiplied
        (precision/loss_scale.py); None: by nothing.
    """
    ...


@dataclasses.dataclass(frozen=True)
class TextLoss:
  """Cross entropy, weighted by token: what is fed are rows alone."""

  compares_parts = False

  def batch_shapes(self, rows: Rows) -> Rows:
    return rows

  def rows(self, batch: Rows) -> Rows:
    return batch

  def keys(self, model: Model, dropout_key: jax.Array, batch: Rows) -> jax.Array | None:
    return row_keys(model, dropout_key, batch)

  def metrics(self, chosen: Metrics) -> Metrics:
    return chosen

  def in_order(self, batch: Rows, order_T: np.ndarray) -> Rows:
    return batch.in_order(order_T)._replace(places=None)

  def of_share(
    self, share: TokenShare, microbatch: Rows, metrics: Metrics, scale: jax.Array | None = None
  ) -> tuple[Ratio, Stats]:
    targets_BC, weights_BC = share.cut(microbatch.targets), share.cut(microbatch.weights)
    sums = share_sums(share, targets_BC, weights_BC, metrics, scale)
    loss, of_tokens = jax.tree.map(share.form.of_parts, sums)
    weight = share.form.of_rows(weights_BC.sum(1, keepdims=True))
    return Ratio(loss, weight), ratios(of_tokens, weight)

  def without_gradient(self, batch: Rows) -> None:
    del batch

  def __call__(
    self,
    model: Model,
    parameters: Parameters,
    microbatch: Rows,
    keys_B: jax.Array | None,
    probes: Parameters,
    metrics: Metrics,
    scale: jax.Array | None = None,
  ) -> tuple[Terms, Stats]:
    return microbatch_sums(self, model, parameters, microbatch, keys_B, probes, metrics, scale)


TEXT = TextLoss()


def microbatch_sums(
  loss: Loss,
  model: Model,
  parameters: Parameters,
  microbatch: Any,
  keys_B: jax.Array | None,
  probes: Parameters,
  metrics: Metrics,
  scale: jax.Array | None = None,
) -> tuple[Terms, Stats]:
  """Returns the terms and statistics of a microbatch: the loss of all tokens, and the model's own.

  The arguments are those of a `Loss`.
  """
  bound = model.bind(parameters, probes)
  order_T = row_order(model, loss.rows(microbatch))
  if order_T is not None:
    microbatch = loss.in_order(microbatch, order_T)
  rows = loss.rows(microbatch)._replace(places=order_T)
  share, terms, stats = token_share(model, bound, rows, keys_B, is_training=True)
  own_loss, of_loss = loss.of_share(share, microbatch, metrics, scale)
  own_terms, own_stats = model_sums(terms, stats, scale)
  return OrderedDict({LOSS: own_loss} | own_terms), {**of_loss, **own_stats}


def ratios(sums: Mapping[str, Quotient], weight: jax.Array) -> dict[str, Stat]:
  """Returns the sums of metrics as statistics; those without a divisor are means over `weight`."""
  return {
    name: Ratio(each.value, weight if each.per is None else each.per) for name, each in sums.items()
  }


def model_sums(
  terms: Terms, stats: Stats, scale: jax.Array | None
) -> tuple[dict[str, Ratio], dict[str, Stat]]:
  """Returns what a model returns in parts, the gradients of its terms multiplied by `scale`."""

  def in_parts(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
      return x
    return partial_sums.of_one(x.astype(jnp.float32))

  def part_of(term: Ratio) -> Ratio:
    numerator = in_parts(term.numerator.sum())
    if scale is not None:
      numerator = scaled_gradient(numerator, scale)
    return Ratio(numerator, in_parts(term.denominator.sum()), term.coefficient)

  return (
    {name: part_of(term) for name, term in sorted(terms.items())},
    {
      name: stat if isinstance(stat, Max) else jax.tree.map(in_parts, stat)
      for name, stat in sorted(stats.items())
    },
  )


def zero_model_sums(model: Model) -> tuple[dict[str, Ratio], dict[str, Stat]]:
  """Returns what a model returns of no rows, where nothing is in parts."""
  terms, stats = model.own_sums
  zero = jnp.zeros((), jnp.float32)
  none = {name: Ratio(zero, zero, term.coefficient) for name, term in sorted(terms.items())}
  return none, dict(zeros_of(stats))


def zero_amax(model: Model) -> Max:
  """Returns `AMAXES` before the first rows."""
  flat = cast(dict[Any, jax.Array], flatten_dict(model.shapes()))
  return Max({path: jnp.zeros(flat[path].shape) for path in sorted(model.amax_buffers)})


def noise_stats(rows: Rows) -> dict[str, Stat]:
  """Returns what the noise scale needs to know of a microbatch's rows, in parts."""
  tokens_B1 = rows.weights.sum(1, keepdims=True)
  return {
    ROWS: Sum(partial_sums.of_rows((tokens_B1 > 0).astype(jnp.float32))),
    ROW_TOKENS_SQUARED: Sum(partial_sums.of_rows(jnp.square(tokens_B1))),
  }


def zero_stats(metrics: Metrics) -> dict[str, Stat]:
  """Returns the statistics of no rows."""
  zero = jnp.zeros((), jnp.float32)
  stats: dict[str, Stat] = {name: Max(zero - jnp.inf) for name in metrics.largest}
  names = [name for name, _ in metrics.of_tokens] + list(metrics.of_loss)
  return stats | {name: Ratio(zero, zero) for name in names}
