"""The canonical stream: which row of which source each sample is, as a pure function of (seed, sample).

So a run's only position is the number of samples it has consumed: nothing about workers, hosts or
batch sizes can change what comes next. The sequence of a mixture's sources is exact (below),
and each source has a stream of its own: every row once per epoch, in an order of its own in each
epoch. Where the weights change, each source goes on where it stands. The rows of all sources are
numbered one after the other, so that a mixture is a RowSource like any other and only its stream
differs.

R rows.

Which source each sample of a mixture comes from: exact shares, and any sample can be asked first.

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

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import grain
import numpy as np

from maxbatch.data.rows import WHOLE, Arrays, RowPart, RowSource, part_of_rows

_BLOCK = 4096
"""Samples of a block, if every source has one of them."""
SMALLEST_SHARE = Fraction(1, 2**20)
"""A block is as long as the rarest source needs, and takes about a microsecond per sample."""
LARGEST_TOTAL = 2**40
"""Largest total of whole weights: a block's length times a weight is then a 64-bit number."""


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
    """Returns the sources int64[R] of samples int64[R], and their indices within these."""
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
  """Returns the source uint16[L] of every sample of a block, and its index int64[L] within it."""
  begin = number * length
  done, end = _done(weights, begin), _done(weights, begin + length)
  release, deadline, source = _jobs(weights, begin, length, done, end)
  order = np.empty(length, np.uint16)
  waiting: list[tuple[int, int]] = []
  by_release = np.argsort(release, kind="stable")
  columns = (each[by_release].tolist() for each in (release, deadline, source))
  jobs = list(zip(*columns, strict=True))
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
  """Returns the jobs' release and deadline, in samples since `begin`, and source, int64[L] each."""
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
  both = zip(*(divmod(samples * each, total) for each in weights), strict=True)
  done, fractions = map(list, both)
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


STREAM_VERSION = "grain-shuffle-1"
"""Saved with checkpoints: a stream that orders rows otherwise is another one, and its samples after
a resume would repeat some of those before and leave out others."""


class SampleStream:
  """Every row once per epoch, shuffled anew in each epoch, without end."""

  def __init__(self, num_rows: int, seed: int):
    # MapDataset.range would do, but its length check refuses nothing below 2**63 while the
    # shuffle numbers rows with 32 bits.
    if not 0 < num_rows < 2**32:
      raise ValueError(f"the shuffle numbers 1 to 2**32 - 1 rows, not {num_rows}")
    self._rows = grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat(None)

  def __call__(self, sample_ids: np.ndarray) -> np.ndarray:
    """Returns the dataset rows int64[R] of the samples int64[R], counted from 0 over all epochs."""
    return np.array([self._rows[int(sample)] for sample in sample_ids], np.int64)


VERSION = "mixture-1"
"""Part of a mixture's fingerprint: another order of sources or seeds is another stream."""


@dataclasses.dataclass(frozen=True)
class MixturePhase:
  """Weights that hold from a sample on."""

  first_sample: int
  weights: tuple[int, ...]
  """Whole, one for each source; 0: none of its samples."""

  @property
  def shares(self) -> tuple[Fraction, ...]:
    """The weights as parts of 1."""
    return tuple(Fraction(weight, sum(self.weights)) for weight in self.weights)

  @functools.cached_property
  def drawn(self) -> np.ndarray:
    """The sources int64[S] that samples come from."""
    return np.flatnonzero(self.weights)

  @functools.cached_property
  def _order(self) -> ExactShares:
    return ExactShares([self.weights[source] for source in self.drawn])

  def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns sources and indices, see `ExactShares`, of samples counted from the phase's first."""
    place, index = self._order(samples)
    return self.drawn[place], index

  def counts(self, samples: int) -> np.ndarray:
    """Returns how many of the phase's first `samples` each source gives, int64[sources]."""
    counts = np.zeros(len(self.weights), np.int64)
    counts[self.drawn] = self._order.counts(samples)
    return counts


@dataclasses.dataclass(frozen=True)
class Mixture:
  """The sources by name, and their weights over a run."""

  names: tuple[str, ...]
  phases: tuple[MixturePhase, ...]
  """The first begins at sample 0."""

  @functools.cached_property
  def _given_before(self) -> list[np.ndarray]:
    """Samples that each source has given when each phase begins."""
    given = [np.zeros(len(self.names), np.int64)]
    for phase, after in zip(self.phases, self.phases[1:], strict=False):
      given.append(given[-1] + phase.counts(after.first_sample - phase.first_sample))
    return given

  def __call__(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sources int64[R] of samples int64[R], and their indices within these."""
    sources, indices = np.empty(len(samples), np.int64), np.empty(len(samples), np.int64)
    numbers = np.searchsorted([phase.first_sample for phase in self.phases], samples, "right") - 1
    for number in np.unique(numbers):
      here, phase = numbers == number, self.phases[number]
      source, index = phase(samples[here] - phase.first_sample)
      sources[here], indices[here] = source, index + self._given_before[number][source]
    return sources, indices

  def counts(self, samples: int) -> list[int]:
    """Returns how many of the first `samples` samples of the run each source gives."""
    number = sum(phase.first_sample <= samples for phase in self.phases) - 1
    phase = self.phases[number]
    return (self._given_before[number] + phase.counts(samples - phase.first_sample)).tolist()


@dataclasses.dataclass(frozen=True)
class JoinedRows:
  """The rows of several sources, numbered one after the other."""

  sources: tuple[RowSource, ...]

  @functools.cached_property
  def begins(self) -> np.ndarray:
    """int64[sources + 1]: the first row of each, and the number of all."""
    return np.cumsum([0, *map(len, self.sources)])

  def __len__(self) -> int:
    return int(self.begins[-1])

  def rows(self, indices: np.ndarray) -> Arrays:
    return self.part_of_rows(indices, WHOLE)

  def part_of_rows(self, indices: np.ndarray, part: RowPart) -> Arrays:
    which = np.searchsorted(self.begins, indices, side="right") - 1
    joined: Arrays = {}
    for source in np.unique(which) if len(which) else [0]:
      here = which == source
      numbers = indices[here] - self.begins[source]
      arrays = part_of_rows(self.sources[source], numbers, part)
      for name, array in arrays.items():
        if name not in joined:
          joined[name] = np.empty((len(indices), *array.shape[1:]), array.dtype)
        joined[name][here] = array
    return joined


@dataclasses.dataclass(frozen=True)
class MixedRows(JoinedRows):
  """The rows of a mixture's sources."""

  mixture: Mixture

  def epochs(self, samples: int) -> dict[str, Fraction]:
    """Returns how many epochs of each source the first `samples` samples take."""
    counts = self.mixture.counts(samples)
    return {
      name: Fraction(count, len(rows))
      for name, rows, count in zip(self.mixture.names, self.sources, counts, strict=True)
    }

  def report(self, samples: int) -> str:
    """Says how many of the first `samples` each source has given, and how many epochs that is."""
    counts, epochs = self.mixture.counts(samples), self.epochs(samples).items()
    parts = [
      f"{name} {count:,} ({count / max(samples, 1):.2%}, {float(number):.2f} epochs)"
      for (name, number), count in zip(epochs, counts, strict=True)
    ]
    return f"Samples by source: {', '.join(parts)}"


class MixtureStream:
  """Every source's rows once per epoch of its own, shuffled anew in each, in exact shares."""

  def __init__(self, rows: MixedRows, seed: int):
    self._rows = rows
    sources = enumerate(rows.sources)
    self._streams = [SampleStream(len(each), source_seed(seed, at)) for at, each in sources]

  def __call__(self, sample_ids: np.ndarray) -> np.ndarray:
    """Returns the rows int64[R] of the mixture that the samples int64[R] are."""
    sources, indices = self._rows.mixture(sample_ids)
    numbers = np.empty(len(sample_ids), np.int64)
    for source, stream in enumerate(self._streams):
      here = sources == source
      numbers[here] = self._rows.begins[source] + stream(indices[here])
    return numbers


def source_seed(seed: int, source: int) -> int:
  """Returns the seed of a source's order: the run's own for the first, so that one source alone is
  a plain dataset, and for others seeds that sources of equal length do not share."""
  return int(np.random.SeedSequence((seed, source)).generate_state(1)[0]) if source else seed


def sample_stream(source: RowSource, seed: int) -> Callable[[np.ndarray], np.ndarray]:
  """Returns the stream of a source: from samples int64[R] to its rows int64[R]."""
  if isinstance(source, MixedRows):
    return MixtureStream(source, seed)
  return SampleStream(len(source), seed)


def described(mixture: Mixture, num_rows: Sequence[int]) -> list[str]:
  """Describes the shares of each phase, a line each; `num_rows` are those of the sources."""
  lines = []
  for phase in mixture.phases:
    parts = [
      f"{100 * float(share):.6g}% {name}" + (f" ({rows:,} rows)" if not lines else "")
      for name, share, rows in zip(mixture.names, phase.shares, num_rows, strict=True)
    ]
    since = f"from sample {phase.first_sample:,} on" if phase.first_sample else "mixture"
    lines.append(f"{since}: {', '.join(parts)}")
  return lines
