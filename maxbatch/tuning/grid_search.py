"""Which candidates of a grid of sizes, policies and sets of flags are worth a compilation.

explore with several keys compiles along one key after the other, through the best so far: the sizes, from one
that is estimated to be fast up and down until one is slower by `INTERACTION`, the sets of flags, and the
policies, each with the largest size that fits; again whenever the best has moved, until no single key makes it
faster. On these lines it leaves out

- what cannot fit, by the memory of another policy and the bytes that this one keeps besides;
- a policy that keeps more than one that is compiled, and saves too few of its products: a step takes at least
  as long as in proportion to its products;
- a policy between two others, which is expected to take a time between theirs;
- what was slower beside it with other flags, or with another size.

The last two are expectations: keys are nearly independent. So what is left out was expected to be slower by
`INTERACTION` or more, and is said with its reason.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from maxbatch.core.keys import text
from maxbatch.models.remat import POLICIES
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.search import Tried

INTERACTION = 0.03
"""By how much, as a share, one key's effect on the speed may depend on another's."""
_MEMORY_ERROR = 0.06
"""By how much a device's memory may be less than its policy's bytes say."""


class PolicyWork(NamedTuple):
  """What a policy asks of a device for one sample, as traced."""

  flops: float
  """Of matrix products."""
  kept_bytes: float
  """Of the tensors that it keeps on the device."""


class LeftOut(NamedTuple):
  """A candidate that is not worth a compilation."""

  candidate: Candidate
  why: str
  expected: float | None = None
  """Samples per second that it is expected to reach; None: no more than the best, or not known."""


class Expectation(NamedTuple):
  """What a candidate is expected to reach, by one argument."""

  why: str
  """Why it is left out, where that is too little."""
  speed: float
  """Samples per second."""
  error: float = INTERACTION
  """Of the speed, as a share of it."""

  @property
  def most(self) -> float:
    """The speed, if the error is to its advantage."""
    return self.speed * (1 + self.error)


class Level(NamedTuple):
  """A candidate's value of each key."""

  place: tuple[int | None, Fraction]
  """Devices that share a row, samples of a microbatch on a device."""
  policy: str | None
  flags: str | None


class Grid:
  """The candidates, and the order in which they are compiled."""

  def __init__(
    self,
    candidates: Sequence[Candidate],
    work: Mapping[str, PolicyWork] | None = None,
    first: Candidate | None = None,
  ):
    """Args:
    candidates: every combination of a size, a policy and a set of flags.
    work: of policies, where it is known.
    first: of these, where the search begins; None: the smallest size.
    """
    self._by_level = {level_of(one): one for one in candidates}
    self._work = work or {}
    self._first = first or candidates[0]

  def pending(self, known: Mapping[Candidate, Tried]) -> list[Candidate]:
    """Returns the candidates that are to be compiled, as far as is known, in this order; more sizes
    come where the next ones are not slower."""
    best = fastest(known)
    open_ones = [one for one in self._by_level.values() if one not in known]
    open_ones = [one for one in open_ones if not misfit(one, known.values())]
    if best is None:
      return self._from_first(open_ones)
    is_open = {*open_ones}
    line = [one for one in self._line(best, known) if one in is_open]
    return [one for one in dict.fromkeys(line) if self._why_not(one, best, known) is None]

  def left_out(self, known: Mapping[Candidate, Tried]) -> list[LeftOut]:
    """Returns every candidate that is neither known nor pending, nor known not to fit, with the reason."""
    best, pending = fastest(known), set(self.pending(known))
    if best is None:
      return []
    return [
      self._why_not(one, best, known) or self._off_line(one, best, known)
      for one in self._by_level.values()
      if one not in known and one not in pending and not misfit(one, known.values())
    ]

  def _from_first(self, open_ones: Sequence[Candidate]) -> list[Candidate]:
    """Orders from the first one down in size: something must fit before the others are worth a look."""
    first = self._first

    def distance(one: Candidate) -> tuple[bool, bool, bool, Fraction]:
      other = (one.context != first.context, one.variant != first.variant)
      is_above = one.per_device > first.per_device
      return (*other, is_above, abs(one.per_device - first.per_device))

    return sorted(open_ones, key=distance)

  def _line(self, best: Tried, known: Mapping[Candidate, Tried]) -> Iterator[Candidate]:
    """Yields the candidates that differ from the best in one key: sizes first where the search began, so that
    all else is tried with a good one, and last elsewhere."""
    here = level_of(best.candidate)
    if best.candidate.variant == self._first.variant:
      yield from self._sizes_beside(best, known)
    for flags in dict.fromkeys(level.flags for level in self._by_level):
      yield from self._at(here._replace(flags=flags))
    for policy in self._policies():
      yield from self._largest(here._replace(policy=policy), known)
    for context in dict.fromkeys(level.place[0] for level in self._by_level):
      if context != here.place[0]:
        yield from self._nearest(here, context)
    yield from self._sizes_beside(best, known)

  def _at(self, level: Level) -> list[Candidate]:
    return [self._by_level[level]] if level in self._by_level else []

  def _policies(self) -> list[str | None]:
    """Returns the policies, those with the fewest products first: they bound the others."""
    policies = list(dict.fromkeys(level.policy for level in self._by_level))
    works = [self._work.get(str(one), PolicyWork(math.inf, 0.0)) for one in policies]
    order = sorted(range(len(policies)), key=lambda index: (works[index], index))
    return [policies[index] for index in order]

  def _largest(self, level: Level, known: Mapping[Candidate, Tried]) -> list[Candidate]:
    """Returns a policy's largest size that may fit, up to the largest that is the best of any policy; none if
    one was tried."""
    context, _ = level.place
    policies = {one.remat_policy for one in known}
    bests = [
      fastest({one: tried for one, tried in known.items() if one.remat_policy == policy})
      for policy in policies
    ]
    tops = [best.candidate.per_device for best in bests if best]
    sizes = [
      one
      for other, one in self._by_level.items()
      if other._replace(place=level.place) == level
      and other.place[0] == context
      and one.per_device <= max(tops)
    ]
    if any(one in known and known[one].probe.fits for one in sizes):
      return []
    fitting = [one for one in sizes if not self._is_too_large(one, known)]
    return [one for one in fitting if not misfit(one, known.values())][-1:]

  def _nearest(self, level: Level, context: int | None) -> list[Candidate]:
    """Returns the candidate whose size is nearest, on a mesh with other devices to share rows."""
    alike = [
      one
      for other, one in self._by_level.items()
      if other.place[0] == context and other._replace(place=level.place) == level
    ]
    return sorted(alike, key=lambda one: abs(one.per_device - level.place[1]))[:1]

  def _sizes_beside(self, best: Tried, known: Mapping[Candidate, Tried]) -> Iterator[Candidate]:
    """Yields the sizes above the best and below it, up to the first that is not known or clearly slower."""
    for sizes in self._up_and_down(level_of(best.candidate)):
      for one in sizes:
        yield one
        if one not in known or _is_clearly_slower(known[one], best):
          break

  def _up_and_down(self, level: Level) -> tuple[list[Candidate], list[Candidate]]:
    """Returns the candidates that differ in size alone: the larger ones, and the smaller ones, the nearest first."""
    context, size = level.place
    alike = sorted(
      (one.per_device, one)
      for other, one in self._by_level.items()
      if other.place[0] == context and other._replace(place=level.place) == level
    )
    above = [one for each, one in alike if each > size]
    return above, [one for each, one in reversed(alike) if each < size]

  def _why_not(
    self, one: Candidate, best: Tried, known: Mapping[Candidate, Tried]
  ) -> LeftOut | None:
    """Returns why a candidate is not worth a compilation, wherever it lies; None: it may be."""
    if self._is_too_large(one, known):
      return LeftOut(one, "expected not to fit")
    expected = [each for each in self._expectations(one, best, known) if each.speed]
    least = min(expected, key=lambda each: each.most, default=None)
    if least is None or least.most > best.samples_per_second:
      return None
    return LeftOut(one, least.why, least.speed if least.error else None)

  def _is_too_large(self, one: Candidate, known: Mapping[Candidate, Tried]) -> bool:
    """Returns whether a policy needs too much memory, by what another one does."""
    mine = self._work.get(str(one.remat_policy))
    if mine is None:
      return False
    for other, tried in known.items():
      theirs = self._work.get(str(other.remat_policy))
      if theirs is None or other.context != one.context:
        continue
      # The state is as large with any size, so that a part of a size needs at least its part.
      share = min(1.0, float(one.per_device / other.per_device))
      beside = min(one.per_device, other.per_device)
      more = mine.kept_bytes * float(one.per_device) - theirs.kept_bytes * float(beside)
      needed = share * tried.probe.peak_bytes + more
      if more > 0 and needed > tried.probe.capacity_bytes * (1 + _MEMORY_ERROR):
        return True
    return False

  def _expectations(
    self, one: Candidate, best: Tried, known: Mapping[Candidate, Tried]
  ) -> Iterator[Expectation]:
    """Yields what a candidate is expected to reach, at most."""
    yield from self._by_products(one, known)
    yield from self._between(one, known)
    yield from self._beside(one, best, known)

  def _by_products(self, one: Candidate, known: Mapping[Candidate, Tried]) -> Iterator[Expectation]:
    mine = self._work.get(str(one.remat_policy))
    for other, tried in known.items():
      theirs = self._work.get(str(other.remat_policy))
      alike = other.context == one.context and other.compiler_flags == one.compiler_flags
      if not (mine and theirs and alike and tried.probe.fits):
        continue
      is_other = other.remat_policy != one.remat_policy and keeps_no_more(other, one)
      if not is_other or other.per_device < one.per_device:
        continue
      error = INTERACTION if other.per_device > one.per_device else 0.0
      why = f"saves too few of the products of {other.remat_policy}"
      yield Expectation(why, tried.samples_per_second * theirs.flops / mine.flops, error)

  def _between(self, one: Candidate, known: Mapping[Candidate, Tried]) -> Iterator[Expectation]:
    mine = self._work.get(str(one.remat_policy))
    here = level_of(one)
    alike = [
      tried
      for other, tried in known.items()
      if tried.probe.fits and level_of(other)._replace(policy=here.policy) == here
    ]
    for less, more in itertools.permutations(alike, 2):
      works = [self._work.get(str(each.candidate.remat_policy)) for each in (less, more)]
      nested = keeps_no_more(less.candidate, one) and keeps_no_more(one, more.candidate)
      if mine is None or None in works or not nested:
        continue
      low, high = (each.flops for each in works if each)
      times = [1 / (each.samples_per_second or math.inf) for each in (less, more)]
      if low <= high or min(times) == 0:
        continue
      share = (low - mine.flops) / (low - high)
      names = f"{less.candidate.remat_policy} and {more.candidate.remat_policy}"
      expected = times[0] + share * (times[1] - times[0])
      yield Expectation(f"lies between {names}, and is expected to be slower", 1 / expected)

  def _beside(
    self, one: Candidate, best: Tried, known: Mapping[Candidate, Tried]
  ) -> Iterator[Expectation]:
    """Yields what it is expected to reach by how it does beside the best with other values of the keys in
    which they are alike."""
    mine, theirs = level_of(one), level_of(best.candidate)
    if mine.policy == theirs.policy and mine.flags == theirs.flags:
      return  # A size is compared with its neighbours.
    for other, tried in known.items():
      changed = {
        key: value
        for key, value in level_of(other)._asdict().items()
        if value != theirs._asdict()[key]
      }
      if not changed or any(mine._asdict()[key] != theirs._asdict()[key] for key in changed):
        continue
      twin = known.get(*self._at(mine._replace(**changed)) or [one])
      if twin is None or not (twin.probe.fits and tried.samples_per_second):
        continue
      ratio = twin.samples_per_second / tried.samples_per_second
      why = f"slower with {_named(changed)}"
      yield Expectation(why, ratio * best.samples_per_second)

  def _off_line(self, one: Candidate, best: Tried, known: Mapping[Candidate, Tried]) -> LeftOut:
    mine, theirs = level_of(one), level_of(best.candidate)
    if mine._replace(place=theirs.place) == theirs and mine.place[0] == theirs.place[0]:
      is_above = one.per_device > best.candidate.per_device
      sizes = self._up_and_down(theirs)[0 if is_above else 1]
      end = next(
        each for each in sizes if each not in known or _is_clearly_slower(known[each], best)
      )
      why = "is slower" if end in known else "is not tried"
      speed = known[end].samples_per_second if end in known else None
      where = "above" if is_above else "below"
      return LeftOut(one, f"{where} {text(end.size)}, which {why}", speed)
    return LeftOut(one, "differs in several keys, none of which is faster alone")


def level_of(one: Candidate) -> Level:
  """Returns a candidate's value of each key."""
  return Level((one.context, one.per_device), one.remat_policy, one.compiler_flags)


def fastest(known: Mapping[Candidate, Tried]) -> Tried | None:
  """Returns the fastest that fits; of equals the first."""
  fitting = [one for one in known.values() if one.probe.fits]
  return max(fitting, key=lambda one: one.samples_per_second, default=None)


def _is_clearly_slower(one: Tried, best: Tried) -> bool:
  return one.samples_per_second * (1 + INTERACTION) < best.samples_per_second


def keeps_no_more(one: Candidate, other: Candidate) -> bool:
  """Returns whether the policy of one keeps nothing that the other's does not, wherever."""
  if one.remat_policy == other.remat_policy:
    return True
  mine, theirs = (POLICIES.get(str(each.remat_policy)) for each in (one, other))
  if mine is None:
    return False
  if theirs is None:
    return not mine.on_host
  return {*mine.on_device} <= {*theirs.on_device} and {*mine.on_host} <= {*theirs.on_host}


def misfit(one: Candidate, tried: Iterable[Tried]) -> Tried | None:
  """Returns what is known not to fit although it needs less: a size that is no larger, of the same mesh and
  flags, with a policy that keeps no more; None if there is nothing."""
  return next((each for each in tried if not each.probe.fits and _needs_less(each, one)), None)


def _needs_less(tried: Tried, one: Candidate) -> bool:
  other = tried.candidate
  same = other.context == one.context and other.compiler_flags == one.compiler_flags
  is_smaller = other.per_device <= one.per_device and keeps_no_more(other, one)
  return same and is_smaller and other != one


def _named(changed: Mapping[str, object]) -> str:
  values = [
    f"micro_batch_size={value[1]}" if isinstance(value, tuple) else str(value)
    for value in changed.values()
  ]
  return " ".join(values)
