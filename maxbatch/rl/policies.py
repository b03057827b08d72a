"""The parameters that sample: copies, since training uses up the arrays that it is given."""

import threading

import jax
import jax.numpy as jnp

from maxbatch.models.registry import Parameters


class Policies:
  """Parameters by the step before which they stood. One thread publishes, another may wait."""

  def __init__(self, kept: int):
    """`kept`: how many, the newest; those before are forgotten."""
    self._kept = kept
    self._by_step: dict[int, Parameters] = {}
    self._changed = threading.Condition()
    self._ended = False

  def publish(self, step: int, parameters: Parameters) -> None:
    """Copies the parameters from before `step`."""
    copy = _copied(parameters)
    with self._changed:
      self._by_step[step] = copy
      for old in sorted(self._by_step)[: -self._kept]:
        del self._by_step[old]
      self._changed.notify_all()

  def wait(self, step: int) -> Parameters | None:
    """The parameters from before `step`, once they are there; None if nobody will publish them."""
    with self._changed:
      self._changed.wait_for(lambda: self._ended or step in self._by_step)
      return None if self._ended else self._by_step[step]

  def end(self) -> None:
    """Lets go who waits."""
    with self._changed:
      self._ended = True
      self._changed.notify_all()


@jax.jit
def _copied(parameters: Parameters) -> Parameters:
  # Not the identity, whose results would be the given arrays.
  return jax.tree.map(jnp.copy, parameters)
