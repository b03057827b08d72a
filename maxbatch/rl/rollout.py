"""Completions as a loader brings them: microbatch after microbatch, in the order in which steps take them.

One thread, the training loop's, dispatches all that runs on the devices, in an order that follows from
numbers alone (batch/rollout_order.py): programs that talk to each other are dispatched alike on all
devices, and no lock is needed. It waits for no completions: training on a microbatch is dispatched while the
next one is sampled, and the one after it while that training is under way, so that devices go from
one program to the next. Completions are read and rewarded in a thread of their own meanwhile.

Devices that only sample (rollout_devices) share no program with those that train, so that no order
between the two matters: they are fed by a thread of their own, one microbatch after the other, as far
ahead as there is a policy. In several processes the one thread feeds them too: on CPUs Gloo does one program
after the other, on all devices of a process, and waits for ever where processes differ in the order.
"""

import collections
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.batch.rollout_order import last_with_a_policy, sampled_before
from maxbatch.core.plan import Position
from maxbatch.hardware.sharding import put
from maxbatch.models.registry import Parameters
from maxbatch.rl.completions import Completions
from maxbatch.rl.microbatches import Microbatch, MicrobatchMaker, Unrewarded
from maxbatch.rl.policies import Policies
from maxbatch.rl.steps import StepRecords
from maxbatch.training.step import rows_shardings


class RolloutLoader:
  """Samples each batch by the policy that its lag says, then yields its completions.

  A context manager, and an iterator of completions on the devices, (1, B, …).
  """

  def __init__(
    self,
    plan: RLPlan,
    position: Position,
    make: MicrobatchMaker,
    policies: Policies,
    mesh: Mesh,
    records: StepRecords,
    complete: Callable[[int, Completions], Completions],
    *,
    overlaps: bool = True,
    apart: bool = False,
  ):
    """Prepares; samples nothing yet.

    Args:
      plan: the run's.
      position: of the first step.
      make: what makes a microbatch.
      policies: where the training loop publishes its parameters.
      mesh: the devices that train.
      records: are told, of every step, what its microbatches count, before the last is yielded.
      complete: adds to the completions of a batch, on the devices, what the loss takes besides.
      overlaps: else each microbatch is made when it is asked for: the same, one after the other.
      apart: whether other devices sample than train, and are fed by a thread of their own.
    """
    self._plan, self._make, self._policies, self._mesh = plan, make, policies, mesh
    self._records, self._complete, self._overlaps = records, complete, overlaps
    self._waited = self._trained = 0.0
    self._step, self._place = position.step, 0
    self._sampled = plan.first_microbatch(plan.batch_of_step(position.step))
    self._last = plan.first_microbatch(plan.num_batches) - 1
    self._under_way: object = None
    self._ahead: collections.deque[Future[Microbatch]] = collections.deque()
    self._batch: list[Microbatch] = []
    self._rewards = ThreadPoolExecutor(1, thread_name_prefix="rewards")
    self._rollout = ThreadPoolExecutor(1, thread_name_prefix="rollout") if apart else None
    self._pools = [pool for pool in (self._rollout, self._rewards) if pool]

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    for pool in self._pools:
      pool.shutdown(wait=False, cancel_futures=True)
    self._make.rewards.give_up()  # Nobody waits for a function that takes a minute.
    for pool in self._pools:
      pool.shutdown(wait=True)
    self._ahead.clear()

  def __next__(self) -> Completions:
    """Returns the next microbatch.

    Raises:
      UserError: a reward function fails, or a prompt is too long.
      TrainingDivergedError: the policy gives no probabilities.
    """
    began = time.perf_counter()
    plan = self._plan
    batch = plan.batch_of_step(self._step)
    while len(self._batch) <= self._place:
      self._take(plan.first_microbatch(batch) + len(self._batch))
    completions = self._batch[self._place].completions
    self._place += 1
    if self._place == plan.num_microbatches:
      self._records.note(self._step, [made.counts for made in self._batch])
      self._step, self._place = self._step + 1, 0
      if plan.begins_batch(self._step):
        self._batch = []
    waited = time.perf_counter() - began - self._trained
    self._trained = 0.0
    self._waited += waited
    self._records.goes_on()
    dispatch = jax.tree.map(lambda x: np.asarray(x)[None], completions)
    return self._complete(batch, put(dispatch, rows_shardings(dispatch, self._mesh)))

  def waited_seconds(self) -> float:
    """Returns how long `next` has sampled, and waited for rewards, since this was last asked.

    Not for the policy, which is there when the step before has ended.
    """
    waited, self._waited = self._waited, 0.0
    return waited

  def _take(self, number: int) -> None:
    """Waits for a microbatch, numbered through all batches, with what is sampled before."""
    plan, last = self._plan, number
    if self._overlaps:
      ahead = last_with_a_policy if self._rollout else sampled_before
      last = ahead(number, plan.num_microbatches, plan.staleness)
    self._sample_up_to(min(last, self._last))
    self._await_policy(plan.place_of_microbatch(number)[0])
    self._batch.append(self._ahead.popleft().result())

  def _sample_up_to(self, last: int) -> None:
    while self._sampled <= last:
      batch, place = self._plan.place_of_microbatch(self._sampled)
      params = self._policies.to_sample(self._plan.policy_of_batch(batch))
      if self._rollout:
        sampled = self._rollout.submit(self._sample, params, batch, place)
        self._ahead.append(self._rewards.submit(self._rewarded, sampled))
      else:
        self._await_policy(batch)
        unrewarded = self._sample(params, batch, place)
        self._ahead.append(self._rewards.submit(self._make.reward, unrewarded))
      self._sampled += 1

  def _sample(self, params: Parameters, batch: int, place: int) -> Unrewarded:
    """Dispatches the sampling of a microbatch once that of the one before has ended, so that the devices hold
    keys and values of one at a time."""
    jax.block_until_ready(self._under_way)
    unrewarded = self._make.sample(params, batch, place)
    self._under_way = unrewarded.sampling.samples
    return unrewarded

  def _rewarded(self, sampled: Future[Unrewarded]) -> Microbatch:
    return self._make.reward(sampled.result())

  def _await_policy(self, batch: int) -> None:
    """Waits until the policy that samples a batch is there, which takes no longer than training."""
    began = time.perf_counter()
    jax.block_until_ready(self._policies.to_sample(self._plan.policy_of_batch(batch)))
    self._trained += time.perf_counter() - began
