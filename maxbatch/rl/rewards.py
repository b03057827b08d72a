"""Rewards of completions by the user's functions, in processes of their own with a time limit.

A function sees the completions of one prompt at a time, so that one which raises or hangs names the
prompt, and rewards depend neither on the number of processes nor on micro_batch_size.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from maxbatch.config.find import shown
from maxbatch.config.registry import registered
from maxbatch.config.schema import RLConfig
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import Exchange, check_none_failed, failed_here
from maxbatch.rl.checkers import REWARDS
from maxbatch.rl.reward_calls import Call, Reply

_PROGRAM = ("-m", "maxbatch.rl.reward_worker")
_START_SECONDS = 300
"""For a process to import what the functions import."""


@dataclasses.dataclass(frozen=True)
class Group:
  """A prompt with its completions, and the other columns of its data."""

  prompt: str
  completions: Sequence[str]
  columns: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Failure:
  """A call that gave no rewards."""

  function: str
  prompt: str
  problem: str

  def __str__(self) -> str:
    return f"reward function {self.function}, prompt {shown(self.prompt)}: {self.problem}"


@dataclasses.dataclass(frozen=True)
class Scores:
  """The rewards of some groups."""

  rewards_N: np.ndarray
  """float64: of every completion, the groups one after the other: the sum over the functions, or 0 for
  all completions of a prompt for which one failed."""
  failures: tuple[Failure, ...]


@dataclasses.dataclass
class _Worker:
  """A process, and what it is doing."""

  process: subprocess.Popen
  connection: Connection
  deadline: float
  call: tuple[int, int] | None = None
  """Group and function; None: it starts, or waits."""
  is_ready: bool = False


def check_rewards(config: RLConfig) -> tuple[str, ...]:
  """Returns the names of the reward functions, each of which is checked to be there.

  Raises:
    UserError: one is not, or there is none.
  """
  names = config.reward_functions or (("exact",) if config.rl_task else ())
  if not names:
    raise UserError(
      "reward_functions=[] and rl_task= is empty: nothing says what a good completion is; for example "
      "reward_functions=[my_rewards:score], reward_functions=[gsm8k], or rl_task=format"
    )
  for name in names:
    registered("reward_functions", name, REWARDS, config.plugins)
  return names


class RewardPool:
  """The processes that run the reward functions, from `with` to its end."""

  def __init__(self, config: RLConfig):
    """Starts nothing yet.

    Raises:
      UserError: as `check_rewards`.
    """
    self._names = check_rewards(config)
    self._config = config
    self._workers: list[_Worker] = []
    self._lock, self._given_up = threading.Lock(), threading.Event()

  def __enter__(self) -> "RewardPool":
    self._workers = [self._started() for _ in range(self._config.reward_processes)]
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    for worker in self._workers:
      _end(worker)
    self._workers = []

  def score(self, groups: Sequence[Group]) -> Scores:
    """Returns the rewards of the groups' completions.

    Raises:
      UserError: a function fails, and reward_failure=stop; or a process cannot start.
      CancelledError: see `give_up`.
    """
    # Evaluations score in one thread, rollouts in another.
    with self._lock:
      return self._scored(groups)

  def give_up(self) -> None:
    """Ends a `score` under way in another thread, and the calls that it has begun."""
    self._given_up.set()
    for worker in list(self._workers):
      if worker.call is not None:
        _kill(worker)
    with self._lock:
      self._given_up.clear()

  def _scored(self, groups: Sequence[Group]) -> Scores:
    for worker in [worker for worker in self._workers if worker.call is not None]:
      self._replace(worker)  # What it does has been given up.
    waiting = collections.deque(
      (group, function) for group in range(len(groups)) for function in range(len(self._names))
    )
    replies: dict[tuple[int, int], Reply] = {}
    total = len(waiting)
    while len(replies) < total:
      self._check_wanted()
      for worker in self._workers:
        if worker.is_ready and worker.call is None and waiting:
          self._begin(worker, waiting.popleft(), groups)
      ended = self._ended()
      self._check_wanted()  # Else it would be the function whose process has ended.
      for worker in ended:
        place = worker.call
        reply = self._outcome(worker)
        if place is not None:
          replies[place] = reply
          self._check(reply, place, groups)
    return self._scores(groups, replies)

  def _check_wanted(self) -> None:
    if self._given_up.is_set():
      raise concurrent.futures.CancelledError

  def _begin(self, worker: _Worker, place: tuple[int, int], groups: Sequence[Group]) -> None:
    group, function = groups[place[0]], place[1]
    worker.call = place
    worker.deadline = time.monotonic() + self._config.reward_timeout_seconds
    with contextlib.suppress(BrokenPipeError):  # It has ended; the connection says so.
      worker.connection.send(Call(function, group.prompt, group.completions, group.columns))

  def _ended(self) -> list[_Worker]:
    """Waits for workers that have something to say, or whose time is over."""
    busy = [worker for worker in self._workers if worker.call is not None or not worker.is_ready]
    left = min(worker.deadline for worker in busy) - time.monotonic()
    ready = multiprocessing.connection.wait(
      [worker.connection for worker in busy], timeout=max(left, 0)
    )
    now = time.monotonic()
    return [one for one in busy if one.connection in ready or one.deadline <= now]

  def _outcome(self, worker: _Worker) -> Reply:
    """Receives what a worker says, after which it is free; in place of one that hangs or has ended comes another.

    Raises:
      UserError: it did not even start.
    """
    was_ready, worker.call = worker.is_ready, None
    try:
      reply = worker.connection.recv() if worker.connection.poll() else None
    except (EOFError, ConnectionResetError):
      code = worker.process.wait()
      reply = Reply([], f"its process ended with exit code {code}")
      self._replace(worker)
    if reply is None:
      limit = f"reward_timeout_seconds={self._config.reward_timeout_seconds}"
      reply = Reply(
        [], f"no answer within {limit if was_ready else f'{_START_SECONDS} s of its start'}"
      )
      self._replace(worker)
    if not was_ready:
      if reply.problem:
        raise UserError(f"reward_functions={list(self._names)}: {reply.problem}")
      worker.is_ready = True
    return reply

  def _replace(self, worker: _Worker) -> None:
    _end(worker)
    self._workers[self._workers.index(worker)] = self._started()

  def _check(self, reply: Reply, place: tuple[int, int], groups: Sequence[Group]) -> None:
    if reply.problem and self._config.reward_failure == "stop":
      failure = self._failure(reply, place, groups)
      raise UserError(
        f"{failure}; correct it, or continue with reward_failure=zero, which scores all completions of "
        "such a prompt 0 and counts them"
      )

  def _failure(self, reply: Reply, place: tuple[int, int], groups: Sequence[Group]) -> Failure:
    return Failure(self._names[place[1]], groups[place[0]].prompt, reply.problem)

  def _scores(self, groups: Sequence[Group], replies: Mapping[tuple[int, int], Reply]) -> Scores:
    rewards, failures = [], []
    for number, group in enumerate(groups):
      of_group = {place: replies[place] for place in replies if place[0] == number}
      failed = [
        self._failure(reply, place, groups)
        for place, reply in sorted(of_group.items())
        if reply.problem
      ]
      failures += failed
      summed = np.zeros(len(group.completions))
      for reply in () if failed else of_group.values():
        summed += reply.rewards
      rewards.append(summed)
    return Scores(np.concatenate(rewards) if rewards else np.zeros(0), tuple(failures))

  def _started(self) -> _Worker:
    ours, theirs = multiprocessing.connection.Pipe()
    # Where this process finds modules, the user's own among them.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with theirs:
      process = subprocess.Popen(
        [sys.executable, *_PROGRAM, str(theirs.fileno()), *self._names],
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        env=env,
        # What a function starts ends with it, and Ctrl-C is for whoever trains.
        start_new_session=True,
      )
      ours.send(self._config.plugins)
    return _Worker(process, ours, time.monotonic() + _START_SECONDS)


def _kill(worker: _Worker) -> None:
  """Ends a process and what it has started; its connection says so."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(worker.process.pid, signal.SIGKILL)


def _end(worker: _Worker) -> None:
  """Ends a process for good."""
  _kill(worker)
  worker.process.wait()
  worker.connection.close()
  assert worker.process.stdin is not None
  worker.process.stdin.close()


class GroupRewards(NamedTuple):
  """The rewards of some groups."""

  rewards_N: np.ndarray
  """float64: of every completion, the groups one after the other."""
  num_failures: int
  """Prompts for which a function gave none."""


class SharedRewards:
  """The reward functions of all processes: group number g is of process g modulo their number.

  All processes call it for the same groups in the same order, in one thread at a time.
  """

  def __init__(self, pool: RewardPool):
    """Takes the rewards of this process."""
    self._pool, self._exchange = pool, Exchange()

  def __call__(self, groups: Sequence[Group], first: int) -> GroupRewards:
    """Returns the rewards of all completions.

    Args:
      groups: of which all processes have all.
      first: the number of the first of them.

    Raises:
      UserError: a function fails in some process, and reward_failure=stop.
    """
    count, process = jax.process_count(), jax.process_index()
    owners = [number % count for number in range(first, first + len(groups))]
    own = [group for group, owner in zip(groups, owners, strict=True) if owner == process]
    rewards, failures, problem = [], 0, ""
    try:
      scores = self._pool.score(own)
    except UserError as error:
      problem = str(error)
    else:
      rewards = scores.rewards_N.tolist()
      failures = len({failure.prompt for failure in scores.failures})
    result = self._exchange([failed_here(problem), rewards, failures])
    check_none_failed([failed for failed, _, _ in result])
    of_process = [iter(each) for _, each, _ in result]
    in_order = [
      next(of_process[owner])
      for group, owner in zip(groups, owners, strict=True)
      for _ in group.completions
    ]
    return GroupRewards(np.array(in_order, np.float64), sum(each for *_, each in result))

  def give_up(self) -> None:
    """Ends a call under way in another thread, and all later ones."""
    self._exchange.give_up()
    self._pool.give_up()
