"""What a model, or one of its layers, returns: hidden states, and what it adds to the step.

A balance loss is a term, a router's counts are a statistic (core/terms.py). Both are sums over the
rows that the model is called with; the step adds them up and divides once.

B rows, T tokens, D width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.core.terms import Ratio, Stat, Stats, Terms, map_stats


class Outputs(NamedTuple):
  """Hidden states with terms and statistics; where there are none, the array alone will do."""

  hidden_BTD: jax.Array
  terms: Terms | None = None
  stats: Stats | None = None


def with_sums(hidden_BTD: jax.Array, terms: Terms, stats: Stats) -> jax.Array | Outputs:
  """Returns hidden states, alone where nothing is handed out beside them."""
  return Outputs(hidden_BTD, terms, stats) if terms or stats else hidden_BTD


def outputs_of(result: jax.Array | Outputs) -> tuple[jax.Array, Terms, Stats]:
  """Returns hidden states, terms and statistics of what a model or a layer returned."""
  hidden_BTD, terms, stats = result if isinstance(result, Outputs) else Outputs(result)
  return hidden_BTD, terms or {}, stats or {}


def hidden_of(result: jax.Array | Outputs) -> jax.Array:
  """Returns the hidden states (B, T, D) alone, where nothing is minimized."""
  return outputs_of(result)[0]


def whole_sums(terms: Terms, stats: Stats) -> tuple[dict[str, Ratio], dict[str, Stat]]:
  """Returns terms as scalars, and all sums of floats in float32, by name."""

  def in_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

  def of_term(term: Ratio) -> Ratio:
    numerator, denominator = (in_float32(x.sum()) for x in (term.numerator, term.denominator))
    return Ratio(numerator, denominator, term.coefficient)

  return (
    {name: of_term(term) for name, term in sorted(terms.items())},
    {name: map_stats(in_float32, lambda x: x, stat) for name, stat in sorted(stats.items())},
  )


def over_layers(stacked: tuple[Terms, Stats]) -> tuple[Terms, Stats]:
  """Returns terms and statistics of all layers, (L, …) each, joined by their own rules."""
  return map_stats(lambda x: x.sum(0), lambda x: x.max(0), stacked)
