"""The parameters that sample: copies, since training uses up its arrays; what they say of completions."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import replicated
from maxbatch.models.registry import Model, Parameters, joined
from maxbatch.rl.completions import Completions
from maxbatch.rl.log_probs import token_log_probs
from maxbatch.rl.policy_loss import PolicyLoss
from maxbatch.training.step import Trainer

Move = Callable[[Parameters], Parameters]
"""From parameters where they are trained to a copy where they sample."""


class Policies:
  """The newest parameters by the step before which they stood; of those that are frozen one copy."""

  def __init__(
    self,
    model: Model,
    kept: int,
    *,
    keeps_first: bool = False,
    move: Move | None = None,
    is_asked_for: bool = True,
  ):
    """Knows none yet.

    Args:
      model: whose parameters they are.
      kept: how many; those before are forgotten.
      keeps_first: whether those from before step 0 stay all the same.
      move: to the devices that sample, where these do not train.
      is_asked_for: whether `of` will be called; else, with `move`, the devices that train keep none.
    """
    self._model, self._kept, self._keeps_first = model, kept, keeps_first
    self._move, self._is_asked_for = move, move is None or is_asked_for
    self._trained: dict[int, Parameters] = {}
    self._frozen: Parameters | None = None
    self._moved: dict[int, Parameters] = {}
    self._moved_frozen: Parameters = {}

  def publish(self, step: int, parameters: Parameters) -> None:
    """Keeps a copy of the parameters from before `step`."""
    self.keep_frozen(parameters)
    trained, _ = self._model.split(parameters)
    # What is forgotten is so before, so that there are never more.
    if self._is_asked_for:
      self._forget(self._trained, step, keeps_first=self._keeps_first)
      self._trained[step] = _copied(trained)
    if self._move is not None:
      self._forget(self._moved, step, keeps_first=False)
      self._moved[step] = self._move(trained)

  def keep_frozen(self, parameters: Parameters) -> None:
    """Keeps a copy of those that are frozen, which all steps have, unless there is one."""
    if self._frozen is not None:
      return
    _, frozen = self._model.split(parameters)
    self._frozen = _copied(frozen) if frozen and self._is_asked_for else {}
    if self._move is not None and frozen:
      self._moved_frozen = self._move(frozen)

  def of(self, step: int) -> Parameters:
    """Returns the parameters from before `step`, one of the newest that were published."""
    assert self._frozen is not None
    return joined(self._trained[step], self._frozen)

  def trained(self, step: int) -> Parameters:
    """Returns those of them that train."""
    return self._trained[step]

  def to_sample(self, step: int) -> Parameters:
    """Returns the parameters from before `step` where they sample."""
    if self._move is None:
      return self.of(step)
    return joined(self._moved[step], self._moved_frozen)

  def put_back(self, steps: Sequence[int], parameters: Sequence[Parameters]) -> None:
    """Takes up what `trained` gave for these steps before a run was resumed."""
    for step, each in zip(steps, parameters, strict=True):
      self._trained[step] = each
      if self._move is not None:
        self._moved[step] = self._move(each)

  def _forget(self, kept: dict[int, Parameters], step: int, *, keeps_first: bool) -> None:
    """Drops all but the newest, so that with that of `step` there are as many as there may be."""
    others = sorted(set(kept) - {step}, reverse=True)
    for old in others[self._kept - 1 :]:
      if old or not keeps_first:
        del kept[old]


def mover(training: Mesh, sampling: Mesh) -> Move:
  """Copies parameters from one mesh to each device of another, without waiting for them.

  Every process copies to its own devices, and has some of both meshes.
  """
  # Made whole first: from parts that lie otherwise jax copies by way of the host, and waits.
  whole = jax.jit(_copied, out_shardings=replicated(training))
  place = replicated(sampling)

  def moved(x: jax.Array) -> jax.Array:
    parts = [jax.device_put(x.addressable_data(0), each) for each in place.addressable_devices]
    return jax.make_array_from_single_device_arrays(x.shape, place, parts)

  return lambda parameters: jax.tree.map(moved, whole(parameters))


@jax.jit
def _copied(parameters: Parameters) -> Parameters:
  # Not the identity, whose results would be the given arrays.
  return jax.tree.map(jnp.copy, parameters)


@dataclasses.dataclass(frozen=True, eq=False)
class EarlierPolicies:
  """Adds to completions the log-probabilities that the loss takes of them, by the program of training."""

  plan: RLPlan
  loss: PolicyLoss
  policies: Policies
  log_probs: Callable[[Parameters, Rows, jax.Array | None], jax.Array]

  def __call__(self, batch: int, completions: Completions) -> Completions:
    """Returns the completions of a batch, (1, B, …) on the devices, with all that the loss
    takes."""
    if self.loss.has_proximal:
      first = self.policies.of(self.plan.first_step(batch))
      completions = completions._replace(proximal_BT=self._of(first, completions))
    if self.loss.objective.beta:
      completions = completions._replace(reference_BT=self._of(self.policies.of(0), completions))
    return completions

  def _of(self, params: Parameters, completions: Completions) -> jax.Array:
    result = self.log_probs(params, completions.rows, completions.kept_BTW)
    return jax.device_put(result, completions.behaviour_BT.sharding)


def log_prob_program(
  trainer: Trainer, loss: PolicyLoss
) -> Callable[[Parameters, Rows, jax.Array | None], jax.Array]:
  """Compiles a program from parameters, rows (1, B, T) and `Completions.kept_BTW` to the
  log-probabilities of the targets."""
  allowed_V = np.frombuffer(loss.allowed, bool)

  def program(params: Parameters, rows: Rows, kept_1BTW: jax.Array | None) -> jax.Array:
    with jax.sharding.use_abstract_mesh(trainer.mesh.abstract_mesh):
      own, kept_BTW = jax.tree.map(lambda x: x[0], (rows, kept_1BTW))
      options = allowed_V, loss.temperature, kept_BTW
      result = token_log_probs(trainer.model, params, own, *options)
      return result.targets_BT[None]

  return jax.jit(program)
