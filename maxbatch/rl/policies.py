"""The parameters that sample: copies, since training uses up the arrays that it is given."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from maxbatch.models.registry import Parameters


class Policies:
  """The newest parameters by the step before which they stood."""

  def __init__(self, kept: int, *, keeps_first: bool = False):
    """Knows none yet.

    Args:
      kept: how many; those before are forgotten.
      keeps_first: whether those from before step 0 stay all the same.
    """
    self._kept, self._keeps_first = kept, keeps_first
    self._by_step: dict[int, Parameters] = {}

  def publish(self, step: int, parameters: Parameters) -> None:
    """Keeps a copy of the parameters from before `step`."""
    self._by_step[step] = _copied(parameters)
    for old in sorted(self._by_step)[: -self._kept]:
      if old or not self._keeps_first:
        del self._by_step[old]

  def of(self, step: int) -> Parameters:
    """The parameters from before `step`, one of the newest that were published."""
    return self._by_step[step]

  def put_back(self, steps: Sequence[int], parameters: Sequence[Parameters]) -> None:
    """Takes up what `of` gave for these steps before a run was resumed."""
    self._by_step |= dict(zip(steps, parameters, strict=True))


@jax.jit
def _copied(parameters: Parameters) -> Parameters:
  # Not the identity, whose results would be the given arrays.
  return jax.tree.map(jnp.copy, parameters)
