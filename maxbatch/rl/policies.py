"""The parameters that sample: copies, since training uses up the arrays that it is given."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from maxbatch.hardware.sharding import replicated
from maxbatch.models.registry import Parameters

Move = Callable[[Parameters], Parameters]
"""From parameters where they are trained to a copy where they sample."""


class Policies:
  """The newest parameters by the step before which they stood."""

  def __init__(
    self,
    kept: int,
    *,
    keeps_first: bool = False,
    move: Move | None = None,
    is_asked_for: bool = True,
  ):
    """Knows none yet.

    Args:
      kept: how many; those before are forgotten.
      keeps_first: whether those from before step 0 stay all the same.
      move: to the devices that sample, where these do not train.
      is_asked_for: whether `of` will be called; else, with `move`, the devices that train keep none.
    """
    self._kept, self._keeps_first = kept, keeps_first
    self._move, self._is_asked_for = move, is_asked_for
    self._by_step: dict[int, Parameters] = {}
    self._to_sample = self._by_step if move is None else dict[int, Parameters]()

  def publish(self, step: int, parameters: Parameters) -> None:
    """Keeps a copy of the parameters from before `step`."""
    # What is forgotten is so before, so that there are never more.
    if self._move is None or self._is_asked_for:
      self._forget(self._by_step, keeps_first=self._keeps_first)
      self._by_step[step] = _copied(parameters)
    if self._move is not None:
      self._forget(self._to_sample, keeps_first=False)
      self._to_sample[step] = self._move(parameters)

  def of(self, step: int) -> Parameters:
    """The parameters from before `step`, one of the newest that were published."""
    return self._by_step[step]

  def to_sample(self, step: int) -> Parameters:
    """The same where they sample."""
    return self._to_sample[step]

  def put_back(self, steps: Sequence[int], parameters: Sequence[Parameters]) -> None:
    """Takes up what `of` gave for these steps before a run was resumed."""
    for step, each in zip(steps, parameters, strict=True):
      self._by_step[step] = each
      if self._move is not None:
        self._to_sample[step] = self._move(each)

  def _forget(self, kept: dict[int, Parameters], *, keeps_first: bool) -> None:
    """All but the newest, of which one less than there may be."""
    for old in sorted(kept, reverse=True)[self._kept - 1 :]:
      if old or not keeps_first:
        del kept[old]


def mover(training: Mesh, sampling: Mesh) -> Move:
  """Copies parameters from one mesh to each device of another, without waiting for them."""
  # Made whole first: from parts that lie otherwise jax copies by way of the host, and waits.
  whole = jax.jit(_copied, out_shardings=replicated(training))
  return lambda parameters: jax.device_put(whole(parameters), replicated(sampling))


@jax.jit
def _copied(parameters: Parameters) -> Parameters:
  # Not the identity, whose results would be the given arrays.
  return jax.tree.map(jnp.copy, parameters)
