"""Metrics of a step beside loss, grad_norm and weight: the key `metrics` lists those a run reports.

To add one: write a function here and register it in METRICS, as a mean over tokens (TokenMetric)
or as a value of the update (UpdateMetric). It then appears by its name in metrics.jsonl and
TensorBoard, a TokenMetric as eval/NAME too, however the batch is split: sums over tokens take the
same way as the loss, through microbatches, devices and pipeline stages, and are divided once.

B rows, C tokens of a tile.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxbatch.config.declare import PlugIns
from maxbatch.config.registry import registered
from maxbatch.models.registry import Parameters


class Tokens(NamedTuple):
  """What the loss sees of some tokens; float32 but for `targets`."""

  loss_BC: jax.Array
  """Cross entropy in nats, without z-loss."""
  log_z_BC: jax.Array
  """Log normalizer: log Σ exp(logits)."""
  target_logit_BC: jax.Array
  max_logit_BC: jax.Array
  weights_BC: jax.Array
  targets_BC: jax.Array


class Update(NamedTuple):
  """What an optimizer update was made of; trees are divided over the devices like the parameters."""

  params: Parameters
  """After the update."""
  updates: Parameters
  """What was added to them."""
  gradients: Parameters
  """float32: the mean over the step's tokens, before clipping."""
  loss: jax.Array
  grad_norm: jax.Array
  weight: jax.Array
  learning_rate: jax.Array


@dataclasses.dataclass(frozen=True)
class TokenMetric:
  """A mean over tokens: Σ weight · value / Σ weight · per, over all tokens of a step."""

  value: Callable[[Tokens], jax.Array]
  """(B, C), finite wherever the weight is not 0."""
  per: Callable[[Tokens], jax.Array] | None = None
  """Likewise; None: 1."""


@dataclasses.dataclass(frozen=True)
class UpdateMetric:
  """A value of a whole step, as a scalar."""

  value: Callable[[Update], jax.Array]


def _norm(tree: Any) -> jax.Array:
  return optax.tree.norm(optax.tree.cast(tree, jnp.float32))


METRICS: Mapping[str, TokenMetric | UpdateMetric] = {
  "accuracy": TokenMetric(
    lambda tokens: (tokens.target_logit_BC >= tokens.max_logit_BC).astype(jnp.float32)
  ),
  "log_z": TokenMetric(lambda tokens: tokens.log_z_BC),
  "param_norm": UpdateMetric(lambda update: _norm(update.params)),
  "update_norm": UpdateMetric(lambda update: _norm(update.updates)),
}


@dataclasses.dataclass(frozen=True)
class Metrics:
  """The metrics of a run, by name."""

  of_tokens: tuple[tuple[str, TokenMetric], ...] = ()
  of_update: tuple[tuple[str, UpdateMetric], ...] = ()
  of_loss: tuple[str, ...] = ()
  """Names of quotients whose two sums the loss forms itself (training/objective.py)."""
  largest: tuple[str, ...] = ()
  """Names of what the loss finds and a step reports the largest of."""


NO_METRICS = Metrics()


def chosen_metrics(names: Iterable[str], plugins: PlugIns = ()) -> Metrics:
  """Returns the registered metrics of these names.

  Raises:
    UserError: a name is not registered; offers the nearest.
  """
  results = {name: registered("metrics", name, METRICS, plugins) for name in names}
  return Metrics(
    tuple((name, each) for name, each in results.items() if isinstance(each, TokenMetric)),
    tuple((name, each) for name, each in results.items() if isinstance(each, UpdateMetric)),
  )


class Quotient(NamedTuple):
  """The two sums of a TokenMetric."""

  value: jax.Array
  per: jax.Array | None
  """None: the summed weight."""


TokenSums = dict[str, Quotient]
"""By the metric's name."""


def token_sums(metrics: Metrics, tokens: Tokens) -> TokenSums:
  """Sums over some tokens, as float32 scalars."""

  def weighted(function: Callable[[Tokens], jax.Array]) -> jax.Array:
    # Padding may be anything, NaN too.
    return jnp.where(tokens.weights_BC == 0, 0.0, tokens.weights_BC * function(tokens)).sum()

  return {
    name: Quotient(weighted(metric.value), None if metric.per is None else weighted(metric.per))
    for name, metric in metrics.of_tokens
  }


def zero_token_sums(metrics: Metrics, shape: tuple[int, ...] = ()) -> TokenSums:
  """Returns the sums over no tokens; `shape` is that of every leaf."""
  zero = jnp.zeros(shape, jnp.float32)
  return {
    name: Quotient(zero, None if metric.per is None else zero) for name, metric in metrics.of_tokens
  } | {name: Quotient(zero, zero) for name in metrics.of_loss}


def token_values(sums: TokenSums, weight: jax.typing.ArrayLike) -> dict[str, jax.Array]:
  """Returns the metrics themselves; 0 where there was nothing to divide by."""

  def mean(quotient: Quotient) -> jax.Array:
    per = jnp.asarray(weight if quotient.per is None else quotient.per)
    return jnp.where(per == 0, 0.0, quotient.value / jnp.where(per == 0, 1.0, per))

  return {name: mean(quotient) for name, quotient in sums.items()}


def update_values(metrics: Metrics, update: Update) -> dict[str, jax.Array]:
  """Returns the metrics of an update."""
  return {name: metric.value(update) for name, metric in metrics.of_update}


def by_name(values: Mapping[str, Any]) -> dict[str, float]:
  """Returns metrics on the host as numbers, of arrays each entry by its index: `name/0`."""
  numbers: dict[str, float] = {}
  for name, value in values.items():
    entries = np.ravel(value).tolist()
    many = len(entries) > 1
    numbers |= {f"{name}/{at}" if many else name: float(x) for at, x in enumerate(entries)}
  return numbers
