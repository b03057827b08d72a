"""GRPO as the loss of a training step: what the step is fed are completions instead of rows."""

import dataclasses
from typing import Any

import jax
import numpy as np

from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.models.registry import Model, Parameters
from maxbatch.precision.loss_scale import scaled_gradient
from maxbatch.rl.completions import Completions
from maxbatch.rl.grpo import (
  LARGEST_GAP,
  METRICS,
  GrpoSums,
  Objective,
  grpo_sums,
  nothing_learned,
  quotients,
)
from maxbatch.rl.log_probs import token_log_probs
from maxbatch.training.loss import LossSums
from maxbatch.training.metrics import Metrics
from maxbatch.training.objective import MicrobatchLoss


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
  """The loss of completions, see `Loss`; there is no dropout, as there is none where they are sampled."""

  objective: Objective
  allowed: bytes
  """Of a token each: 1 where it may be sampled."""
  temperature: float
  has_proximal: bool = False
  """Whether completions have the log-probabilities of before the first step on their batch."""
  kept_words: int = 0
  """Words of a target's bits where it was chosen from some of the allowed tokens; 0: from all."""
  halves: bool = False
  """See `Loss.halves`; each has half of the completions of every prompt."""

  def fed(self, rows: Rows) -> Completions:
    """See `Loss.fed`."""
    if self.halves:
      rows = jax.tree.map(_in_two, rows)
    per_token, per_row = rows.weights, rows.sample_ids
    advantages = jax.ShapeDtypeStruct(per_row.shape, np.float32)
    log_probs = jax.ShapeDtypeStruct(per_token.shape, np.float32)
    own = Rows(rows.inputs, rows.targets, rows.weights, rows.sample_ids)
    arrays: dict[str, Any] = {"advantages_B": advantages, "behaviour_BT": log_probs}
    if self.has_proximal:
      arrays["proximal_BT"] = log_probs
    if self.objective.beta:
      arrays["reference_BT"] = log_probs
    if self.kept_words:
      shape = *per_token.shape, self.kept_words
      arrays["kept_BTW"] = jax.ShapeDtypeStruct(shape, np.uint32)
    return Completions(own, **arrays)

  def rows(self, microbatch: Completions) -> Rows:
    """See `Loss.rows`."""
    return microbatch.rows

  def metrics(self, chosen: Metrics) -> Metrics:
    """See `Loss.metrics`.

    Raises:
      UserError: one is of the cross entropy, which there is none of.
    """
    if chosen.of_tokens:
      names = [name for name, _ in chosen.of_tokens]
      raise UserError(
        f"metrics={names} are means over the tokens of a text, and reinforcement learning has a loss "
        "of its own, whose metrics are always reported; for example metrics=[param_norm]"
      )
    return dataclasses.replace(chosen, of_loss=METRICS, largest=(LARGEST_GAP,))

  def __call__(
    self,
    model: Model,
    parameters: Parameters,
    microbatch: Completions,
    dropout_key: jax.Array,
    probes: Parameters,
    metrics: Metrics,
    scale: jax.Array | None = None,
  ) -> MicrobatchLoss:
    """See `Loss`."""
    del dropout_key, probes, metrics
    allowed_V = np.frombuffer(self.allowed, bool)
    options = allowed_V, self.temperature, microbatch.kept_BTW
    found = token_log_probs(model, parameters, microbatch.rows, *options)
    if scale is not None:
      # Where all is float32 yet: what flows back from here into the model is scaled.
      found = found._replace(targets_BT=scaled_gradient(found.targets_BT, scale))
    return _found(grpo_sums(found, microbatch, self.objective))

  def has_gradient(self, fed: Completions) -> jax.Array | None:
    """See `SkippingLoss`: without a KL divergence none where no reward of a group differs."""
    return None if self.objective.beta else (fed.advantages_B != 0).any(1)

  def without_gradient(self, microbatch: Completions) -> MicrobatchLoss:
    """See `SkippingLoss`."""
    return _found(nothing_learned(microbatch.rows, self.objective))


def _found(sums: GrpoSums) -> MicrobatchLoss:
  of_tokens = jax.tree.map(lambda x: x[None], quotients(sums))
  return MicrobatchLoss(
    LossSums(sums.loss[None], of_tokens), sums.weight[None], {LARGEST_GAP: sums.largest_gap}
  )


def _in_two(x: Any) -> jax.ShapeDtypeStruct:
  """The shape of a microbatch (1, B, …) as its halves are fed."""
  return jax.ShapeDtypeStruct((2, x.shape[1] // 2, *x.shape[2:]), x.dtype)
