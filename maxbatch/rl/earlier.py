"""What earlier policies say of completions: the one before the first step on their batch, and the first of all."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.data.rows import Rows
from maxbatch.models.registry import Parameters
from maxbatch.rl.completions import Completions
from maxbatch.rl.log_probs import token_log_probs
from maxbatch.rl.policies import Policies
from maxbatch.rl.policy_loss import PolicyLoss
from maxbatch.training.step import Trainer


@dataclasses.dataclass(frozen=True, eq=False)
class EarlierPolicies:
  """Adds to completions the log-probabilities that the loss takes of them, by the program of training."""

  plan: RLPlan
  loss: PolicyLoss
  policies: Policies
  log_probs: Callable[[Parameters, Rows, jax.Array | None], jax.Array]

  def __call__(self, batch: int, completions: Completions) -> Completions:
    """The completions of a batch, (1, B, …) on the devices, with all that the loss takes."""
    if self.loss.has_proximal:
      first = self.policies.of(self.plan.first_step(batch))
      completions = completions._replace(proximal_BT=self._of(first, completions))
    if self.loss.objective.beta:
      completions = completions._replace(reference_BT=self._of(self.policies.of(0), completions))
    return completions

  def _of(self, params: Parameters, completions: Completions) -> jax.Array:
    found = self.log_probs(params, completions.rows, completions.kept_BTW)
    return jax.device_put(found, completions.behaviour_BT.sharding)


def log_prob_program(
  trainer: Trainer, loss: PolicyLoss
) -> Callable[[Parameters, Rows, jax.Array | None], jax.Array]:
  """From parameters, rows (1, B, T) and `Completions.kept_BTW` to the log-probabilities of the targets."""
  allowed_V = np.frombuffer(loss.allowed, bool)

  def program(params: Parameters, rows: Rows, kept_1BTW: jax.Array | None) -> jax.Array:
    with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
      own, kept_BTW = jax.tree.map(lambda x: x[0], (rows, kept_1BTW))
      options = allowed_V, loss.temperature, kept_BTW
      found = token_log_probs(trainer.model, params, own, *options)
      return found.targets_BT[None]

  return jax.jit(program)
