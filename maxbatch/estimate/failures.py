"""How much of the time counts where hosts fail, and how often to save: formulas, and a simulation.

Hosts fail independently, each after a time with an exponential distribution. Then all of them start
again, from the newest checkpoint in storage, or from copies of the state that each host keeps in the
memory of another one; only where a host and the keeper of its copy are both gone is storage needed.

Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006.
"""

import dataclasses
import math
import random

NUM_FAILURES = 4000
"""As many as are simulated: the time lost is known to about 2%."""
_MOST = 700.0
"""The largest exponent of a float, rounded down."""


@dataclasses.dataclass(frozen=True)
class Recovery:
  """One way to keep a state, and to go on from it."""

  save_seconds: float
  """For which training waits each time the state is saved, or copied."""
  restart_seconds: float
  """From a failure to the first step after it."""


def young(save_seconds: float, mtbf_seconds: float) -> float:
  """Returns Young's best seconds of training between two saves, √(2 · save · mtbf).

  Args:
    mtbf_seconds: between failures of any host.
  """
  return math.sqrt(2 * save_seconds * mtbf_seconds)


def daly(save_seconds: float, mtbf_seconds: float) -> float:
  """Returns Daly's, of higher order."""
  share = save_seconds / (2 * mtbf_seconds)
  if share >= 1:
    return mtbf_seconds
  series = 1 + math.sqrt(share) / 3 + share / 9
  return young(save_seconds, mtbf_seconds) * series - save_seconds


def best_interval(save_seconds: float, mtbf_seconds: float) -> float:
  """Returns the seconds of training between two saves for which `goodput` is highest.

  There (x − 1) · exp(x + save/mtbf) = −1 with x = interval/mtbf in (0, 1), by bisection.
  """
  offset, low, high = save_seconds / mtbf_seconds, 0.0, 1.0
  for _ in range(100):
    middle = (low + high) / 2
    if (middle - 1) * math.exp(middle + min(offset, _MOST)) < -1:
      low = middle
    else:
      high = middle
  return (low + high) / 2 * mtbf_seconds


def goodput(interval: float, recovery: Recovery, mtbf_seconds: float) -> float:
  """Returns the share of the time in steps that count, by Daly (2006): exact where times
  between failures are exponential, and hosts may fail while others start again.

  Args:
    interval: seconds of training between two saves.
    mtbf_seconds: between failures of any host.
  """
  exponent = (interval + recovery.save_seconds) / mtbf_seconds
  lost = recovery.restart_seconds / mtbf_seconds
  if exponent + lost > _MOST:
    return 0.0
  return interval / mtbf_seconds / (math.exp(lost) * math.expm1(exponent))


def simulate(
  num_hosts: int,
  mtbf_seconds: float,
  storage: Recovery,
  save_interval: float,
  memory: Recovery | None = None,
  copy_interval: float = 0.0,
  seed: int = 0,
  num_failures: int = NUM_FAILURES,
  storage_share: float = 0.0,
  during_restarts: bool = True,
) -> float:
  """Returns the share of the time in steps that count, by playing through failures of single hosts.

  Host n is kept in the memory of host n + 1. A failure while others start again begins that anew.

  Args:
    mtbf_seconds: of one host.
    storage: checkpoints there.
    save_interval: seconds of training between two checkpoints.
    memory: copies in memory; None: there are none.
    copy_interval: seconds of training between two copies.
    seed: the same gives the same result.
    storage_share: of the failures that need storage for another reason, as two hosts that fail at once.
    during_restarts: whether hosts fail then too; else the clock of the next failure starts with training.
  """
  rng, rate = random.Random(seed), num_hosts / mtbf_seconds
  run = _Run(storage, save_interval, memory, copy_interval)
  down = set[int]()
  seconds = rng.expovariate(rate)
  run.train(seconds)
  for _ in range(num_failures):
    host = rng.randrange(num_hosts)
    lost_copy = (host + 1) % num_hosts in down or (host - 1) % num_hosts in down
    lost_copy |= storage_share > 0 and rng.random() < storage_share
    down.add(host)
    recovery = run.fail(in_memory=memory is not None and not lost_copy)
    left = rng.expovariate(rate) + (0.0 if during_restarts else recovery.restart_seconds)
    seconds += min(left, recovery.restart_seconds)
    if left > recovery.restart_seconds:
      down.clear()
      seconds += left - recovery.restart_seconds
      run.train(left - recovery.restart_seconds)
  return run.trained / seconds


class _Run:
  """What is trained, copied and saved, in seconds of training."""

  def __init__(
    self, storage: Recovery, save_interval: float, memory: Recovery | None, copy_interval: float
  ):
    self._storage, self._memory = storage, memory
    self._each = copy_interval if memory else save_interval
    self._pause = memory.save_seconds if memory else 0.0
    self._num_copies = max(round(save_interval / self._each), 1)
    """Between two saves."""
    self._saved, self._copied = 0, 0
    """In intervals between copies; since the last save."""
    self._from_storage = False

  @property
  def trained(self) -> float:
    """Seconds of training that count."""
    return (self._saved + self._copied) * self._each

  def train(self, seconds: float) -> None:
    """Trains, copies and saves for this time; what is not saved at its end is not counted yet."""
    one, save = self._each + self._pause, self._storage.save_seconds
    to_save = (self._num_copies - self._copied) * one + save
    if seconds >= to_save:
      seconds -= to_save
      cycles, seconds = divmod(seconds, self._num_copies * one + save)
      self._saved += (1 + int(cycles)) * self._num_copies
      self._copied = 0
    self._copied = min(self._copied + int(seconds / one), self._num_copies)
    self._from_storage = False

  def fail(self, *, in_memory: bool) -> Recovery:
    """Loses what is not kept; returns how it goes on. Storage once needed is needed until it trains."""
    self._from_storage |= not in_memory
    if self._memory is not None and not self._from_storage:
      return self._memory
    self._copied = 0
    return self._storage
