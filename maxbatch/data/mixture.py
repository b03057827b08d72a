"""The canonical stream: which row of which source each sample is, as a pure function of (seed, sample).

So a run's only position is the number of samples it has consumed: nothing about workers, hosts or
batch sizes can change what comes next. The sequence of a mixture's sources is exact (data/shares.py),
and each source has a stream of its own: every row once per epoch, in an order of its own in each
epoch. Where the weights change, each source goes on where it stands. The rows of all sources are
numbered one after the other, so that a mixture is a RowSource like any other and only its stream
differs.

R rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import grain
import numpy as np

from maxbatch.data.dataset import Arrays, RowSource
from maxbatch.data.shares import ExactShares

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
    """Returns the source int64[R] of each of the samples int64[R], and its index within that
    source."""
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
    which = np.searchsorted(self.begins, indices, side="right") - 1
    joined: Arrays = {}
    for source in np.unique(which) if len(which) else [0]:
      here = which == source
      arrays = self.sources[source].rows(indices[here] - self.begins[source])
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
    """Says how many of the first `samples` samples each source has given, and how many epochs that
    is."""
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
    self._streams = [
      SampleStream(len(source), source_seed(seed, number))
      for number, source in enumerate(rows.sources)
    ]

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
