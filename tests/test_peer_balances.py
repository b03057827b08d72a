"""Balance losses as other trainers form them, as examples of what depends on the split of a batch.

docs/mixture_of_experts.md says which form does not. E/K · Σ_e f_e · P_e of one microbatch, as Megatron-LM's
aux_loss, OLMo-core's and transformers', is in test_check_split.py (`balance_of_microbatch`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_check_split import E, batch, checked, cross_entropy, hidden, one_hot_routes, parameters

from maxbatch.core.terms import Ratio, Sum


def balance(params: Any, rows: Any) -> tuple[jax.Array, jax.Array]:
  """E · Σ_e f_e · P_e of these rows, and how many tokens each expert is sent."""
  p_BTE, chosen_BTE = one_hot_routes(params, hidden(params, rows), rows)
  tokens = jnp.maximum(rows["weights"].sum(), 1.0)
  tokens_E = chosen_BTE.sum((0, 1))
  return E * (tokens_E / tokens * (p_BTE.sum((0, 1)) / tokens)).sum(), tokens_E


def divided_by_tokens(params: Any, rows: Any, keys_B: Any) -> Any:
  """MaxText with accumulation: a microbatch's balance is added to its sum of cross entropy, and all of it
  is divided by the step's tokens."""
  term = cross_entropy(params, hidden(params, rows), rows)
  return {"loss": Ratio(term.numerator + balance(params, rows)[0], term.denominator)}, {}


def sign_of_each_microbatch(params: Any, rows: Any, keys_B: Any) -> Any:
  """MaxText's routed bias: an update by sign for each microbatch, summed up."""
  tokens_E = balance(params, rows)[1]
  moved_E = jnp.sign(tokens_E.mean() - tokens_E)
  return {"loss": cross_entropy(params, hidden(params, rows), rows)}, {"bias": Sum(moved_E)}


@pytest.mark.parametrize(
  ("loss", "what"),
  [(divided_by_tokens, 'term "loss"'), (sign_of_each_microbatch, 'statistic "bias"')],
)
def test_it_is_named(loss, what):
  result = checked(loss)
  assert [one.what for one in result.findings] == [what], str(result)


def gradient_by_running_counts(num_microbatches: int) -> np.ndarray:
  """Megatron-LM's global_aux_loss: f of the tokens of the step so far, P of the microbatch."""
  params, rows = parameters(), batch()
  before_E, total = jnp.zeros(E), jnp.zeros_like(jnp.asarray(params["router"]))

  def loss(params: Any, rows: Any, before_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    p_BTE, chosen_BTE = one_hot_routes(params, hidden(params, rows), rows)
    so_far_E = before_E + jax.lax.stop_gradient(chosen_BTE.sum((0, 1)))
    load_E = so_far_E / jnp.maximum(so_far_E.sum(), 1)
    return E * (load_E * p_BTE.sum((0, 1))).sum(), so_far_E

  for piece in np.split(np.arange(8), num_microbatches):
    part = {name: x[piece] for name, x in rows.items()}
    gradients, before_E = jax.grad(loss, has_aux=True)(params, part, before_E)
    total += gradients["router"]
  return np.asarray(total)


def test_running_counts_are_another_gradient_for_each_split():
  whole, *split = (gradient_by_running_counts(k) for k in (1, 2, 4))
  for found in split:
    assert np.linalg.norm(found - whole) > 0.01 * np.linalg.norm(whole)
