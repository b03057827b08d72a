"""The loss of GRPO (Shao et al. 2024) as sums that any split of a step's completions adds up to.

For a token of a completion with advantage A, of log-probability p now, p' before the first step on its batch
(proximal) and b when it was sampled (behaviour):

    loss = −w · min(r·A, clip(r, 1 − ε, 1 + ε_high)·A) + β·k3,     r = exp(p − p')
    w    = min(exp(p' − b), cap)                                    constant
    k3   = exp(q − p) − (q − p) − 1                                 q: by the reference

ε_high > ε is DAPO's clip higher (Yu et al. 2025). w corrects what a policy behind by some steps has
sampled (decoupled PPO, Hilton et al. 2022, truncated); with cap = 0 there is none, and p' is b. k3
(Schulman 2020) has the gradient of the KL divergence's estimate where p − q, k1, has none towards q.

A step's loss is Σ loss / Σ weight over all of its completions, divided once, by the type:

    dapo     Σ over tokens                                          / tokens
    grpo     Σ over completions of the mean over the completion's tokens        / completions
    dr_grpo  Σ over tokens                    / (completions · longest completion) (Liu et al. 2025)

So the gradient does not depend on how a step is split into microbatches. B completions, T tokens.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.config.schema import RLConfig
from maxbatch.data.rows import Rows
from maxbatch.rl.completions import Completions
from maxbatch.rl.log_probs import LogProbs
from maxbatch.training.metrics import Quotient


@dataclasses.dataclass(frozen=True)
class Objective:
  """What the loss is made of; known when the step is compiled."""

  loss_type: Literal["dapo", "grpo", "dr_grpo"]
  beta: float
  epsilon: float
  epsilon_high: float
  importance_sampling_cap: float
  max_completion_length: int


def objective(config: RLConfig, max_completion_length: int) -> Objective:
  """Returns the objective that the keys describe, for completions of so many tokens at most."""
  high = config.grpo_epsilon if config.grpo_epsilon_high == -1 else config.grpo_epsilon_high
  return Objective(
    loss_type=config.loss_type,
    beta=config.grpo_beta,
    epsilon=config.grpo_epsilon,
    epsilon_high=high,
    importance_sampling_cap=config.importance_sampling_cap,
    max_completion_length=max_completion_length,
  )


class GrpoSums(NamedTuple):
  """Sums over completions, as float32 scalars; `largest_gap` is a maximum."""

  loss: jax.Array
  weight: jax.Array
  """What the step's sum of losses, and its gradient, are divided by."""
  tokens: jax.Array
  completions: jax.Array
  run_tokens: jax.Array
  """Those on which the model was run: over them all that follow are sums."""
  entropy: jax.Array
  kl: jax.Array
  """From the reference, k3; 0 without one."""
  clipped_low: jax.Array
  """Tokens whose ratio is clipped at 1 − ε."""
  clipped_high: jax.Array
  importance: jax.Array
  """Importance weights."""
  gap: jax.Array
  """|p − b|: how far the policy has gone from the one that sampled; if that is this one, how far
  sampler and trainer disagree."""
  largest_gap: jax.Array

  def add(self, other: "GrpoSums") -> "GrpoSums":
    """Adds the sums over other completions."""
    summed = jax.tree.map(jnp.add, self, other)
    return summed._replace(largest_gap=jnp.maximum(self.largest_gap, other.largest_gap))


def grpo_sums(
  result: LogProbs,
  completions: Completions,
  objective: Objective,
  own_sizes: "Sizes | None" = None,
) -> GrpoSums:
  """Sums the loss and the metrics of some completions; differentiate `loss`.

  Args:
    result: log-probabilities and entropies of the targets by the policy that is trained.
    completions: the completions, or some of their tokens.
    objective: the loss.
    own_sizes: of the completions, where these are some of their tokens; None: these are all.
  """
  counts_BT = completions.rows.weights > 0
  now_BT = jnp.where(counts_BT, result.targets_BT, 0.0)
  behaviour_BT = jnp.where(counts_BT, completions.behaviour_BT, 0.0)
  ratio_BT, importance_BT = _ratios(now_BT, behaviour_BT, completions, counts_BT, objective)
  advantage_B1 = completions.advantages_B[:, None]
  low, high = 1 - objective.epsilon, 1 + objective.epsilon_high
  clipped_BT = jnp.clip(ratio_BT, low, high) * advantage_B1
  loss_BT = -importance_BT * jnp.minimum(ratio_BT * advantage_B1, clipped_BT)
  kl_BT = _kl(now_BT, completions.reference_BT, counts_BT)
  loss_BT += objective.beta * kl_BT
  gap_BT = jnp.abs(now_BT - behaviour_BT)
  own = sizes(completions.rows, objective) if own_sizes is None else own_sizes
  loss = _aggregated(loss_BT * counts_BT, own.tokens_B, objective)

  def summed(x_BT: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(jnp.where(counts_BT, x_BT, 0.0).sum(dtype=jnp.float32))

  return GrpoSums(
    loss=loss,
    weight=own.weight,
    tokens=own.tokens,
    completions=own.completions,
    run_tokens=own.tokens,
    entropy=summed(result.entropy_BT),
    kl=summed(kl_BT),
    clipped_low=summed((ratio_BT < low) & (advantage_B1 < 0)),
    clipped_high=summed((ratio_BT > high) & (advantage_B1 > 0)),
    importance=summed(importance_BT),
    gap=summed(gap_BT),
    largest_gap=jax.lax.stop_gradient(gap_BT.max(initial=0.0)),
  )


def _ratios(
  now_BT: jax.Array,
  behaviour_BT: jax.Array,
  completions: Completions,
  counts_BT: jax.Array,
  objective: Objective,
) -> tuple[jax.Array, jax.Array]:
  """Returns r and w of every token; 1 where it does not count."""
  cap = objective.importance_sampling_cap
  if not cap:
    return jnp.exp(now_BT - behaviour_BT), jnp.ones_like(now_BT)
  proximal_BT = now_BT if completions.proximal_BT is None else completions.proximal_BT
  proximal_BT = jax.lax.stop_gradient(jnp.where(counts_BT, proximal_BT, 0.0))
  weight_BT = jnp.minimum(jnp.exp(proximal_BT - behaviour_BT), cap)
  return jnp.exp(now_BT - proximal_BT), weight_BT


def _kl(now_BT: jax.Array, reference_BT: jax.Array | None, counts_BT: jax.Array) -> jax.Array:
  """Returns k3 of every token; 0 where it does not count, or without a reference."""
  if reference_BT is None:
    return jnp.zeros_like(now_BT)
  further_BT = jnp.where(counts_BT, reference_BT, 0.0) - now_BT
  return jnp.expm1(further_BT) - further_BT


def _aggregated(loss_BT: jax.Array, tokens_B: jax.Array, objective: Objective) -> jax.Array:
  """Sums losses by the type of loss."""
  if objective.loss_type == "grpo":
    return (loss_BT.sum(1) / jnp.maximum(tokens_B, 1.0)).sum()
  return loss_BT.sum()


class Sizes(NamedTuple):
  """What the sums over some completions are divided by; float32."""

  tokens_B: jax.Array
  tokens: jax.Array
  completions: jax.Array
  weight: jax.Array
  """Weight of the loss, by its type."""

  def counted(self, is_counted: jax.Array) -> "Sizes":
    """Returns the sizes with sums of 0 where they are counted elsewhere."""
    sums = (jnp.where(is_counted, x, 0.0) for x in self[1:])
    return Sizes(self.tokens_B, *sums)


def sizes(rows: Rows, objective: Objective) -> Sizes:
  """Returns the sizes of whole completions, whatever their advantages."""
  tokens_B = (rows.weights > 0).sum(1).astype(jnp.float32)
  completions = (rows.sample_ids >= 0).astype(jnp.float32).sum()
  weight = {
    "dapo": tokens_B.sum(),
    "grpo": completions,
    "dr_grpo": completions * objective.max_completion_length,
  }
  return Sizes(tokens_B, tokens_B.sum(), completions, weight[objective.loss_type])


def nothing_learned(rows: Rows, objective: Objective) -> GrpoSums:
  """Returns the sums over completions whose advantages are all 0, without running the model on
  them."""
  own, zero = sizes(rows, objective), jnp.zeros((), jnp.float32)
  none = GrpoSums(*(zero for _ in GrpoSums._fields))
  return none._replace(weight=own.weight, tokens=own.tokens, completions=own.completions)


MEAN_GAP, LARGEST_GAP = "rl/log_prob_gap", "rl/largest_log_prob_gap"


def quotients(sums: GrpoSums) -> dict[str, Quotient]:
  """Returns the metrics of a step as sums and their denominators, by their names in
  metrics.jsonl."""
  of_tokens = {
    "rl/entropy": sums.entropy,
    "rl/kl": sums.kl,
    "rl/clipped_low": sums.clipped_low,
    "rl/clipped_high": sums.clipped_high,
    "rl/importance_weight": sums.importance,
    MEAN_GAP: sums.gap,
  }
  means = {name: Quotient(value, sums.run_tokens) for name, value in of_tokens.items()}
  return means | {"rl/completion_length": Quotient(sums.tokens, sums.completions)}


MODEL_METRICS = (
  "rl/entropy",
  "rl/kl",
  "rl/clipped_low",
  "rl/clipped_high",
  "rl/importance_weight",
  MEAN_GAP,
  LARGEST_GAP,
)
"""Names of metrics for which the model was run."""
METRICS = (*MODEL_METRICS[:-1], "rl/completion_length")
"""The names of `quotients`."""
