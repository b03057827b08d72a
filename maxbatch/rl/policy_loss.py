"""GRPO as the loss of a training step: what the step is fed are completions instead of rows."""

import dataclasses
import functools
from collections import OrderedDict
from typing import Any

import jax
import numpy as np

from maxbatch.core.terms import Max, Ratio, Stat, Stats, Terms
from maxbatch.data.rows import Routes, Rows
from maxbatch.errors import UserError
from maxbatch.models.experts import FLIPS
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
  sizes,
)
from maxbatch.rl.log_probs import share_log_probs
from maxbatch.training import partial_sums
from maxbatch.training.loss import TokenShare
from maxbatch.training.metrics import Metrics
from maxbatch.training.objective import LOSS, microbatch_sums, ratios


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
  """The loss of completions, see `Loss`; there is no dropout, as there is none where they are sampled."""

  objective: Objective
  allowed: bytes
  """1 for each token that may be sampled."""
  temperature: float
  has_proximal: bool = False
  """Whether completions have the log-probabilities of before the first step on their batch."""
  kept_words: int = 0
  """Words of a target's bits where it was chosen from some of the allowed tokens; 0: from all."""
  halves: bool = False
  """Whether a microbatch is fed as two halves, which have half of the completions of every prompt."""
  routes_LK: tuple[int, int] = (0, 0)
  """Layers of a mixture and experts of a token, where completions have those that sampling chose."""
  replays: bool = False
  """Whether tokens are sent to these."""

  @property
  def compares_parts(self) -> bool:
    """Whether a dispatch is fed halves."""
    return self.halves

  def batch_shapes(self, rows: Rows) -> Completions:
    """Returns the shapes of the completions that a step is fed."""
    if self.halves:
      rows = jax.tree.map(_in_two, rows)
    per_token, per_row = rows.weights, rows.sample_ids
    advantages = jax.ShapeDtypeStruct(per_row.shape, np.float32)
    log_probs = jax.ShapeDtypeStruct(per_token.shape, np.float32)
    own = Rows(rows.inputs, rows.targets, rows.weights, rows.sample_ids)
    if any(self.routes_LK):
      experts: Any = jax.ShapeDtypeStruct((*per_token.shape, *self.routes_LK), np.int16)
      own = own._replace(routes=Routes(experts, self.replays))
    arrays: dict[str, Any] = {"advantages_B": advantages, "behaviour_BT": log_probs}
    if self.has_proximal:
      arrays["proximal_BT"] = log_probs
    if self.objective.beta:
      arrays["reference_BT"] = log_probs
    if self.kept_words:
      shape = *per_token.shape, self.kept_words
      arrays["kept_BTW"] = jax.ShapeDtypeStruct(shape, np.uint32)
    return Completions(own, **arrays)

  def rows(self, batch: Completions) -> Rows:
    """Returns the rows of the completions."""
    return batch.rows

  def keys(self, model: Model, dropout_key: jax.Array, batch: Completions) -> None:
    """Returns no keys: there is no dropout."""
    del model, dropout_key, batch

  def metrics(self, chosen: Metrics) -> Metrics:
    """Returns the loss's own metrics, which are always reported, and those of updates.

    Raises:
      UserError: one is of the cross entropy, which there is none of.
    """
    if chosen.of_tokens:
      names = [name for name, _ in chosen.of_tokens]
      raise UserError(
        f"metrics={names} are means over the tokens of a text, and reinforcement learning has a loss "
        "of its own, whose metrics are always reported; for example metrics=[param_norm]"
      )
    of_routes = (FLIPS,) if any(self.routes_LK) else ()
    return dataclasses.replace(chosen, of_loss=METRICS + of_routes, largest=(LARGEST_GAP,))

  def __call__(
    self,
    model: Model,
    parameters: Parameters,
    microbatch: Completions,
    keys_B: jax.Array | None,
    probes: Parameters,
    metrics: Metrics,
    scale: jax.Array | None = None,
  ) -> tuple[Terms, Stats]:
    """Returns the sums over some completions.

    The model is not run on a microbatch without a gradient: where no reward of a group differs, and
    there is neither a KL divergence nor a term or a statistic of the model's own. (Of the tokens that
    experts are sent all count, or their biases would depend on which groups share a microbatch.)
    """
    given = microbatch, keys_B, probes, metrics, scale
    run = functools.partial(microbatch_sums, self, model, parameters, *given)
    if self.objective.beta or any(model.own_sums):
      return run()
    skipped = functools.partial(self._skipped, microbatch)
    return jax.lax.cond(self.has_gradient(microbatch), run, skipped)

  def has_gradient(self, microbatch: Completions) -> jax.Array:
    """Returns whether any completion's reward differs from those of its group."""
    return (microbatch.advantages_B != 0).any()

  def in_order(self, batch: Completions, order_T: np.ndarray) -> Completions:
    """Returns completions with their tokens in another order."""
    return batch.in_order(order_T)

  def of_share(
    self,
    share: TokenShare,
    microbatch: Completions,
    metrics: Metrics,
    scale: jax.Array | None = None,
  ) -> tuple[Ratio, Stats]:
    """Returns the sums by the model's log-probabilities of some tokens."""
    del metrics
    own, part = sizes(microbatch.rows, self.objective), microbatch.of_tokens(share.cut)
    if share.counts_rows is not None:
      own = own.counted(share.counts_rows)
    options = np.frombuffer(self.allowed, bool), self.temperature, part.kept_BTW
    log_probs = share_log_probs(share, part.rows.targets, part.rows.weights, *options)
    if scale is not None:
      # Where all is float32 yet: what flows back from here into the model is scaled.
      scaled = scaled_gradient(log_probs.targets_BT, scale)
      log_probs = log_probs._replace(targets_BT=scaled)
    return _terms(grpo_sums(log_probs, part, self.objective, own), share.form)

  def without_gradient(self, batch: Completions) -> tuple[jax.Array, tuple[Terms, Stats]] | None:
    """Returns whether no reward differs from those of its group, and the sums if so; None: there is a KL
    divergence, from which something is always learned."""
    if self.objective.beta:
      return None
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch.rows)
    loss, stats = _terms(nothing_learned(rows, self.objective), partial_sums.AT_ONCE)
    return ~self.has_gradient(batch), ({LOSS: loss}, stats)

  def _skipped(self, microbatch: Completions) -> tuple[Terms, Stats]:
    """Returns the sums of a microbatch whose advantages are all 0."""
    loss, stats = _terms(nothing_learned(microbatch.rows, self.objective), partial_sums.IN_PARTS)
    return OrderedDict({LOSS: loss}), stats


def _terms(sums: GrpoSums, form: partial_sums.Form) -> tuple[Ratio, dict[str, Stat]]:
  """Returns the loss and its statistics."""
  of_tokens = jax.tree.map(form.of_one, quotients(sums))
  loss, weight = form.of_one(sums.loss), form.of_one(sums.weight)
  largest: dict[str, Stat] = {LARGEST_GAP: Max(sums.largest_gap)}
  return Ratio(loss, weight), largest | ratios(of_tokens, weight)


def _in_two(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape of a microbatch (1, B, …) as two halves."""
  return jax.ShapeDtypeStruct((2, x.shape[1] // 2, *x.shape[2:]), x.dtype)
