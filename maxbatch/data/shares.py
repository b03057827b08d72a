"""Which source each sample of a mixture comes from: exact shares, and any sample can be asked first.

Source i has the share w_i = a_i / A, with whole weights a_i and A = Σ a_i. After n samples it has
given ⌊n·w_i⌋ or ⌈n·w_i⌉ of them, for every n. So its sample j (from 0) must come after j/w_i of the
mixture's samples have begun and before more than (j+1)/w_i have ended: a unit job with a release
and a deadline. Fair scheduling shows that all deadlines can be met (Baruah, Cohen, Plaxton and
Varvel, "Proportionate progress", 1996), and taking the released job with the earliest deadline
meets them.

That rule alone would have to run from sample 0. Here it runs inside blocks, and which jobs are done
at the beginning of a block is computed: at sample t, f_i = t·w_i mod 1 is how much of its current job
source i should have had, and m = Σ f_i of these jobs, a whole number, are to be done. They are chosen
one by one: when f_i, summed in the order of the releases, reaches 1, 2, … m, the released one with
the earliest deadline. Among all choices that have ⌊Σ f⌋ or more of every earliest-released set done
(so that what leads up to t can be scheduled), that one has the fewest late deadlines (it is the
greedy basis of a matroid), so at most ⌈Σ f⌉ of any latest-deadline set (so that what follows can be).
A block in which every source finishes a job at least once then has a schedule between its two ends,
by Hall's condition for intervals, and the earliest deadline finds it: what is not to be done in the
block is left out of it, and as many jobs are left as the block has samples.
"""

import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_BLOCK = 4096
"""Samples of a block, if every source has one of them."""
SMALLEST_SHARE = Fraction(1, 2**20)
"""A block is as long as the rarest source needs, and takes about a microsecond per sample."""
LARGEST_TOTAL = 2**40
"""Largest total of whole weights, so that products of a block's length and a weight are 64-bit
numbers."""


def whole_weights(weights: Sequence[Fraction]) -> tuple[int, ...]:
  """Returns the smallest whole numbers in the same proportions."""
  denominator = math.lcm(*(weight.denominator for weight in weights))
  whole = [int(weight * denominator) for weight in weights]
  divisor = math.gcd(*whole)
  return tuple(weight // divisor for weight in whole)


class ExactShares:
  """The sequence of sources of a mixture with fixed weights."""

  def __init__(self, weights: Sequence[int]):
    """Takes `weights` that are whole and positive; see `SMALLEST_SHARE` and `LARGEST_TOTAL`."""
    total = sum(weights)
    if not weights or min(weights) < 1 or total > LARGEST_TOTAL:
      raise ValueError(f"weights {weights} are not from 1 to {LARGEST_TOTAL} together")
    if Fraction(min(weights), total) < SMALLEST_SHARE:
      raise ValueError(f"a weight of {min(weights)} is less than {SMALLEST_SHARE} of {total}")
    self._weights = tuple(weights)
    rarest = -(-total // min(weights))
    # At multiples of the total no job is under way, so whole periods are best.
    periods = -(-_BLOCK // total)
    self._length = total * periods if total <= _BLOCK else max(_BLOCK, rarest)

  def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source int64[R] of each of the samples int64[R], and its index within that
    source."""
    sources, indices = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
    numbers = samples // self._length
    for number in np.unique(numbers):
      here = numbers == number
      order, index = _block(self._weights, self._length, int(number))
      place = samples[here] - number * self._length
      sources[here], indices[here] = order[place], index[place]
    return sources, indices

  def counts(self, samples: int) -> list[int]:
    """Returns how many of the first `samples` samples each source has given."""
    number, rest = divmod(samples, self._length)
    order, _ = _block(self._weights, self._length, number)
    within = np.bincount(order[:rest], minlength=len(self._weights))
    done = _done(self._weights, number * self._length)
    return [before + int(more) for before, more in zip(done, within, strict=True)]


@functools.lru_cache(maxsize=8)
def _block(weights: tuple[int, ...], length: int, number: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the source uint16[L] of every sample of block `number`, and its index int64[L] within
  it."""
  begin = number * length
  done, end = _done(weights, begin), _done(weights, begin + length)
  release, deadline, source = _jobs(weights, begin, length, done, end)
  order = np.empty(length, np.uint16)
  waiting: list[tuple[int, int]] = []
  by_release = np.argsort(release, kind="stable")
  jobs = list(
    zip(*(each[by_release].tolist() for each in (release, deadline, source)), strict=True)
  )
  next_job = 0
  for slot in range(length):
    while next_job < length and jobs[next_job][0] <= slot:
      heapq.heappush(waiting, jobs[next_job][1:])
      next_job += 1
    latest, order[slot] = heapq.heappop(waiting)
    assert latest > slot
  index = np.empty(length, np.int64)
  for each, first in enumerate(done):
    places = np.flatnonzero(order == each)
    index[places] = first + np.arange(len(places))
  return order, index


def _jobs(
  weights: tuple[int, ...], begin: int, length: int, done: Sequence[int], end: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns release and deadline, in samples since `begin`, and source of the block's jobs,
  int64[L] each."""
  total, parts = sum(weights), []
  for source, weight in enumerate(weights):
    current, fraction = divmod(begin * weight, total)
    jobs = np.arange(done[source] - current, end[source] - current)
    release = np.maximum((jobs * total - fraction) // weight, 0)
    deadline = -((fraction - (jobs + 1) * total) // weight)
    parts.append((release, deadline, np.full(len(jobs), source)))
  release, deadline, source = map(np.concatenate, zip(*parts, strict=True))
  return release, deadline, source


def _done(weights: tuple[int, ...], samples: int) -> list[int]:
  """Returns how many of the first `samples` each source has given, where a block begins."""
  total = sum(weights)
  done, fractions = map(
    list, zip(*(divmod(samples * each, total) for each in weights), strict=True)
  )
  under_way = [source for source, fraction in enumerate(fractions) if fraction]
  released = sorted(under_way, key=lambda i: (-fractions[i] // weights[i], i))
  reached, chosen = 0, 0
  waiting: list[tuple[int, int]] = []
  for source in released:
    left = total - fractions[source]
    heapq.heappush(waiting, (-(-left // weights[source]), source))
    reached += fractions[source]
    if reached >= (chosen + 1) * total:
      done[heapq.heappop(waiting)[1]] += 1
      chosen += 1
  return done
