"""What is trained on: prompts with their completions as rows, and what was known when they were sampled.

B completions, P places of prompts, N of completions, T tokens of a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from maxbatch.data.rows import Routes, Rows, in_order, whole_in_order


class Rollout(NamedTuple):
  """Sampled completions as a sampler leaves them."""

  prompts_BP: np.ndarray
  """int32: ids, padded on the left."""
  prompt_lengths_B: np.ndarray
  completions_BN: np.ndarray
  """int32: ids, padded on the right."""
  lengths_B: np.ndarray
  """int32: tokens of the completions, with the one that ends them."""
  log_probs_BN: np.ndarray
  """float32: of those tokens, by the policy that sampled them."""
  kept_BNW: np.ndarray | None = None
  """uint32: bits of the tokens from which each was chosen; None: all that are allowed."""
  experts_BSLK: np.ndarray | None = None
  """int16: of a mixture, the experts that each of S = P + N tokens was sent to in each layer."""


class Completions(NamedTuple):
  """A microbatch of completions as the loss takes them."""

  rows: Rows
  """The targets that count are the tokens of the completions, and no others."""
  advantages_B: jax.Array
  behaviour_BT: jax.Array
  """float32: log-probabilities of the targets by the policy that sampled them."""
  proximal_BT: jax.Array | None = None
  """The same by the policy before the first step on this batch; None: this is the first step."""
  reference_BT: jax.Array | None = None
  """The same by the policy that training began with; None: no KL divergence is taken."""
  kept_BTW: jax.Array | None = None
  """uint32: bits of the tokens from which each target was chosen, all of which a probability is of
  (sampling/choice.py); None: all that are allowed."""

  def in_order(self, order_T: np.ndarray) -> "Completions":
    """Returns completions (B, T) with their tokens in another order, as `Rows.in_order`, without `Rows.places`."""

    def moved(x_BT: jax.Array) -> jax.Array:
      return whole_in_order(x_BT, order_T) if x_BT.ndim == 2 else in_order(x_BT, order_T)

    rows = self.rows.in_order(order_T)._replace(places=None)
    return self.of_tokens(moved)._replace(rows=rows)

  def of_tokens(self, function: Callable[[jax.Array], jax.Array]) -> "Completions":
    """Returns what the loss takes of tokens, by a function of each array (B, T, …)."""
    names = ("behaviour_BT", "proximal_BT", "reference_BT", "kept_BTW")
    arrays = {name: x for name in names if (x := self._asdict()[name]) is not None}
    targets, weights = function(self.rows.targets), function(self.rows.weights)
    rows = self.rows._replace(targets=targets, weights=weights)
    return self._replace(rows=rows, **{name: function(x) for name, x in arrays.items()})


def make_completions(
  rollout: Rollout,
  advantages_B: np.ndarray,
  first_completion: int,
  length: int,
  *,
  replays: bool = False,
) -> Completions:
  """Makes rows of a rollout: the prompt, its completion, and padding that no token sees.

  Which targets count follows from the lengths alone: padding may have the id of any token.

  Args:
    rollout: what was sampled.
    advantages_B: of each completion.
    first_completion: index of the first completion in the run's stream of completions.
    length: T.
    replays: whether training sends tokens to the experts that sampling sent them to.
  """
  prompt_B1, own_B1 = rollout.prompt_lengths_B[:, None], rollout.lengths_B[:, None]
  B, P = rollout.prompts_BP.shape
  place_1S = np.arange(length + 1)[None]
  tokens_BS = np.where(
    place_1S < prompt_B1,
    _taken(rollout.prompts_BP, place_1S + P - prompt_B1),
    _taken(rollout.completions_BN, place_1S - prompt_B1),
  )
  number_BS = place_1S - prompt_B1
  counts_BS = (number_BS >= 0) & (number_BS < own_B1)
  tokens_BS = np.where((place_1S < prompt_B1) | counts_BS, tokens_BS, 0).astype(np.int32)
  log_probs_BS = np.where(counts_BS, _taken(rollout.log_probs_BN, number_BS), 0)
  fields: dict[str, Any] = {
    "inputs": tokens_BS[:, :-1],
    "targets": tokens_BS[:, 1:],
    "weights": counts_BS[:, 1:].astype(np.float32),
    "sample_ids": np.arange(first_completion, first_completion + B, dtype=np.int32),
  }
  known: dict[str, Any] = {
    "advantages_B": advantages_B.astype(np.float32),
    "behaviour_BT": log_probs_BS[:, 1:].astype(np.float32),
  }
  if rollout.kept_BNW is not None:
    places_BT1 = np.clip(number_BS[:, 1:, None], 0, rollout.kept_BNW.shape[1] - 1)
    known["kept_BTW"] = np.take_along_axis(rollout.kept_BNW, places_BT1, 1)
  if rollout.experts_BSLK is not None:
    # What has a token after it was sent somewhere; the last token, and padding, was not.
    was_sent_BT = place_1S[:, 1:] < prompt_B1 + own_B1
    places_BT = np.where(was_sent_BT, place_1S[:, :-1] + P - prompt_B1, 0)
    experts_BTLK = np.take_along_axis(rollout.experts_BSLK, places_BT[..., None, None], 1)
    experts: Any = np.where(was_sent_BT[..., None, None], experts_BTLK, np.int16(-1))
    fields["routes"] = Routes(experts, replays)
  return Completions(Rows(**fields), **known)


def _taken(x_BN: np.ndarray, index_BS: np.ndarray) -> np.ndarray:
  """Takes the elements at these places of each row; anything where there is none."""
  return np.take_along_axis(x_BN, np.clip(index_BS, 0, x_BN.shape[1] - 1), 1)
