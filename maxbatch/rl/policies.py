"""The parameters that sample: copies, since training uses up its arrays; what they say of completions."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
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
InOrder = Callable[[Parameters], Parameters]
"""From all parameters or some, as they are trained, to the model's order of layers."""


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
    in_order: InOrder = lambda parameters: parameters,
  ):
    """Knows none yet.

    Args:
      model: whose parameters they are.
      kept: how many; those before are forgotten.
      keeps_first: whether those from before step 0 stay all the same.
      move: to the devices that sample, where these do not train.
      is_asked_for: whether `of` will be called; else, with `move`, the devices that train keep none.
      in_order: what is published has the layers in the order of a pipeline's stages.
    """
    self._in_order = in_order
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
    trained = self._in_order(trained)
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
    frozen = self._in_order(frozen)
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


@dataclasses.dataclass(frozen=True, eq=False)
class Mover:
  """Copies parameters from one mesh to the devices of another, part by part.

  A part is what one device of the other mesh holds. Each is made whole on all devices that train, of
  which every process has some, and from these every process copies it to its own devices: no
  device that trains ever holds more than a part besides. A policy that is not divided is one part,
  for which nobody waits.
  """

  training: Mesh
  sampling: Parameters
  """Shapes and shardings where they sample."""

  @functools.cached_property
  def parts(self) -> np.ndarray:
    """The devices that sample, (copies, parts)."""
    mesh = jax.tree.leaves(self.sampling)[0].sharding.mesh
    return mesh.devices.reshape(mesh.shape["data"], -1)  # data is the outermost axis.

  @property
  def num_parts(self) -> int:
    """Devices that share a copy."""
    return self.parts.shape[1]

  @functools.cached_property
  def program(self) -> Any:
    """Compiled by jax: from parameters and the number of a part to that part, on every device that trains."""
    # Made whole first: from parts that lie otherwise jax copies by way of the host, and waits.
    return jax.jit(self._part, static_argnums=1, out_shardings=replicated(self.training))

  def __call__(self, parameters: Parameters) -> Parameters:
    """Returns a copy of all parameters, or of some of them."""
    pieces: list[Parameters] = []
    for number in range(self.num_parts):
      sent = self.program(parameters, number)
      pieces.append(jax.tree.map(functools.partial(_on_each, self._own_devices(number)), sent))
      if self.num_parts > 1:
        jax.block_until_ready((sent, pieces[-1]))
    return jax.tree.map(_assembled, self._of(parameters), *pieces)

  def _own_devices(self, number: int) -> Sequence[Any]:
    """Returns this process's devices with a part."""
    return [one for one in self.parts[:, number] if one.process_index == jax.process_index()]

  def _of(self, parameters: Parameters) -> Parameters:
    """Returns shapes and shardings of these parameters where they sample."""
    known = flatten_dict(self.sampling)
    return unflatten_dict({path: known[path] for path in flatten_dict(parameters)})

  def _part(self, parameters: Parameters, number: int) -> Parameters:
    device = self.parts[0, number]

    def cut(x: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
      assert wanted.sharding is not None
      # Not the identity, whose results would be the given arrays.
      return jnp.copy(x[wanted.sharding.devices_indices_map(x.shape)[device]])

    return jax.tree.map(cut, parameters, self._of(parameters))


def _on_each(devices: Sequence[Any], x: jax.Array) -> list[jax.Array]:
  """Copies an array that this process's devices have to each of others."""
  return [jax.device_put(x.addressable_data(0), device) for device in devices]


def _assembled(wanted: jax.ShapeDtypeStruct, *pieces: list[jax.Array]) -> jax.Array:
  """Returns the array of all pieces, which lie where `wanted` says."""
  own = [*itertools.chain(*pieces)]
  return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, own)


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
      # By its own choice of experts: it is another model, and not the one that sampled.
      rows = completions.rows._replace(routes=None)
      reference_BT = self._of(self.policies.of(0), completions._replace(rows=rows))
      completions = completions._replace(reference_BT=reference_BT)
    return completions

  def _of(self, params: Parameters, completions: Completions) -> jax.Array:
    rows = completions.rows
    if rows.routes is not None and not rows.routes.is_replayed:
      rows = rows._replace(routes=None)
    result = self.log_probs(params, rows, completions.kept_BTW)
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
