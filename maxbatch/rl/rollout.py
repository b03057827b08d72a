"""Pairs as a loader brings them: microbatch after microbatch, in the order in which steps take them."""

import time
from collections.abc import Callable, Iterator
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.batch.plan import Position
from maxbatch.batch.rl_plan import RLPlan
from maxbatch.errors import TrainingDivergedError
from maxbatch.models.registry import Parameters
from maxbatch.rl.microbatches import Counts, Microbatch
from maxbatch.rl.pairs import Pairs
from maxbatch.rl.policies import Policies
from maxbatch.training.step import rows_shardings

Make = Callable[[Parameters, int, int], Microbatch]
"""From parameters, batch and number of the microbatch in it."""


class RolloutLoader:
  """Samples each batch by the policy of before its first step, then yields its pairs.

  A context manager, and an iterator of pairs on the devices, (1, B, …).
  """

  def __init__(
    self,
    plan: RLPlan,
    position: Position,
    make: Make,
    policies: Policies,
    mesh: Mesh,
    note: Callable[[int, list[Counts]], None],
  ):
    """Samples nothing yet.

    Args:
      plan: the run's.
      position: of the first step.
      make: what makes a microbatch.
      policies: where the training loop publishes its parameters.
      mesh: the devices that train.
      note: is told, of every step, what its microbatches count, before the last is yielded.
    """
    self._plan, self._make, self._policies, self._mesh = plan, make, policies, mesh
    self._note, self._waited = note, 0.0
    self._microbatches = self._in_order(position.step)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self._microbatches.close()

  def __iter__(self) -> Self:
    return self

  def __next__(self) -> Pairs:
    """The next microbatch.

    Raises:
      UserError: a reward function fails, or a prompt is too long.
      TrainingDivergedError: the policy gives no probabilities.
    """
    began = time.perf_counter()
    pairs = next(self._microbatches)
    self._waited += time.perf_counter() - began
    fed = jax.tree.map(lambda x: np.asarray(x)[None], pairs)
    return jax.device_put(fed, rows_shardings(fed, self._mesh))

  def waited_seconds(self) -> float:
    """How long `next` has waited since this was last asked."""
    waited, self._waited = self._waited, 0.0
    return waited

  def _in_order(self, step: int) -> Iterator[Pairs]:
    for batch in range(self._plan.batch_of_step(step), self._plan.num_batches):
      params = self._policies.wait(self._plan.policy_of_batch(batch))
      if params is None:
        raise TrainingDivergedError("nobody trains any more")
      counts = []
      for number in range(self._plan.num_microbatches):
        made = self._make(params, batch, number)
        counts.append(made.counts)
        if len(counts) == self._plan.num_microbatches:
          self._note(batch, counts)
        yield made.pairs
