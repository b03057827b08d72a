"""The parameters that sample: copies, since training uses up the arrays that it is given."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxbatch.models.registry import Model, Parameters, joined


class Policies:
  """The newest parameters by the step before which they stood; of those that are frozen one copy."""

  def __init__(self, model: Model, kept: int, *, keeps_first: bool = False):
    """Knows none yet.

    Args:
      model: whose parameters they are.
      kept: how many; those before are forgotten.
      keeps_first: whether those from before step 0 stay all the same.
    """
    self._model, self._kept, self._keeps_first = model, kept, keeps_first
    self._trained: dict[int, Parameters] = {}
    self._frozen: Parameters | None = None

  def publish(self, step: int, parameters: Parameters) -> None:
    """Keeps a copy of the parameters from before `step`."""
    self.keep_frozen(parameters)
    trained, _ = self._model.split(parameters)
    self._trained[step] = _copied(trained)
    for old in sorted(self._trained)[: -self._kept]:
      if old or not self._keeps_first:
        del self._trained[old]

  def keep_frozen(self, parameters: Parameters) -> None:
    """Keeps a copy of those that are frozen, which all steps have, unless there is one."""
    if self._frozen is None:
      _, frozen = self._model.split(parameters)
      self._frozen = _copied(frozen) if frozen else {}

  def of(self, step: int) -> Parameters:
    """The parameters from before `step`, one of the newest that were published."""
    assert self._frozen is not None
    return joined(self._trained[step], self._frozen)

  def trained(self, step: int) -> Parameters:
    """Of those the ones that train."""
    return self._trained[step]

  def put_back(self, steps: Sequence[int], parameters: Sequence[Parameters]) -> None:
    """Takes up what `trained` gave for these steps before a run was resumed."""
    self._trained |= dict(zip(steps, parameters, strict=True))


@jax.jit
def _copied(parameters: Parameters) -> Parameters:
  # Not the identity, whose results would be the given arrays.
  return jax.tree.map(jnp.copy, parameters)
