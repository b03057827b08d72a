"""Why a result depends on the split: what a few rearrangements of the rows do to a loss's sums.

Sums over rows that know nothing of one another are linear in how often each row is there, they double
when every row is doubled, and they do not see the order of the rows. What breaks which of these rules
tells a mean of means from a statistic of the batch, and that from a random key of the microbatch.

AB is the batch in two halves, AA its first half twice; a and b are the first and the last quarter.
"""

import functools
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np

from maxbatch.core.accumulate import Accumulated
from maxbatch.core.split_probe import Arrangement, Probe, difference, norm
from maxbatch.core.terms import Max, Ratio, Stat

Cause = Literal[
  "state",
  "keys",
  "order",
  "mean",
  "product",
  "statistics",
  "comparison",
  "constant",
  "padding",
  "denominator",
  "parameters",
  "maximum as sum",
  "sum as maximum",
  "replicas",
  "tokens",
  "unknown",
]


class Explanation(NamedTuple):
  """A cause in words."""

  what: str
  remedy: str

  def __str__(self) -> str:
    return f"{self.what}. {self.remedy}" if self.remedy else self.what


CAUSES: dict[Cause, Explanation] = {
  "state": Explanation(
    "a counter or other state: the same rows give another result when the loss is traced again",
    "Everything that it reads belongs into params, rows or keys",
  ),
  "keys": Explanation(
    "random numbers drawn by a row's place (one key for all rows, or a key from a counter)",
    "Draw those of each row from its own key: jax.vmap over keys",
  ),
  "order": Explanation(
    "rows that compete with one another in their order, as tokens for an expert's capacity",
    "Give each row a capacity of its own, or drop nothing",
  ),
  "mean": Explanation(
    "a mean of means: it returns a mean over the rows that it sees, or divides by their own "
    "denominator",
    "Hand out the sum as numerator, and what it is divided by as denominator",
  ),
  "product": Explanation(
    "a product of two sums or means over the rows that it sees, as f·P of a balance loss",
    "The products of microbatches do not add up to the batch's: know one factor of the whole step "
    "before (from the last step, or a first pass), or form the loss within each row",
  ),
  "statistics": Explanation(
    "statistics over the batch, as batch normalization",
    "A row's result depends on the other rows of its batch: normalize within a row, or by running statistics",
  ),
  "comparison": Explanation(
    "rows compared with one another, as in-batch negatives",
    "A row has other partners in another microbatch: take them from within a row, or keep the batch "
    "in one microbatch",
  ),
  "constant": Explanation(
    "a part that is the same for any rows, as a penalty on the parameters",
    "It is added once for each microbatch: multiply it by what the denominator counts",
  ),
  "padding": Explanation(
    "rows of zeros that count, with which the last microbatch is filled",
    "Multiply by a weight that is 0 there",
  ),
  "denominator": Explanation(
    "a denominator that is not a sum over the rows (a constant, or a mean)",
    "Hand out what these rows alone contribute, as their number of tokens",
  ),
  "parameters": Explanation(
    "a denominator that depends on the parameters",
    "The gradient is taken of numerators alone",
  ),
  "maximum as sum": Explanation("a maximum in a Sum", "Hand it out as a Max"),
  "sum as maximum": Explanation(
    "a sum in a Max", "Hand it out as a Sum, or as a Ratio if it is to be a mean"
  ),
  "replicas": Explanation(
    "something that differs between devices, as a collective or a device's index",
    "Leave the sums over replicas to accumulate",
  ),
  "tokens": Explanation(
    "tokens of a row of which a device sees its own alone, in a shard_map over `context`",
    "Gather those that it needs, or sum over the axis",
  ),
  "unknown": Explanation("not known", ""),
}

_LOOSE = 16
"""Rules count as broken beyond so many times the share that is rounding."""
PADDED, SINGLES, REPLICAS = "3 microbatches with padding", "single rows", "2 replicas"
TOKENS = "tokens over 2 devices"


class _Parts:
  """The sums of one term or statistic over arrangements of the rows, each as one array."""

  def __init__(self, probe: Probe, name: str, is_stat: bool, share: float):
    self._probe, self._name, self._is_stat = probe, name, is_stat
    self._share = _LOOSE * share
    quarters = np.arange(probe.num_rows).reshape(4, -1)
    self._a, self._b = quarters[0], quarters[3]
    self.half_a, self.half_b = quarters[:2].reshape(-1), quarters[2:].reshape(-1)
    self.whole = self.of(probe.sums(probe.every_row))

  def of(self, sums: Accumulated) -> "_Part":
    stat: Stat = (sums.stats if self._is_stat else sums.terms)[self._name]
    if not isinstance(stat, Ratio):
      value = stat.largest if isinstance(stat, Max) else stat.total
      return _Part(_flat([value]), _flat([value]), np.ones(1))
    if self._is_stat:
      numerator = _flat([stat.numerator])
      return _Part(numerator, numerator, _flat([stat.denominator]))
    numerator, denominator = (np.array([x.sum()]) for x in (stat.numerator, stat.denominator))
    gradient = _flat(jax.tree.leaves(sums.gradients))
    return _Part(gradient if gradient.any() else numerator, numerator, denominator)

  def arranged(self, *rows: np.ndarray, keys_in_place: bool = False) -> "_Part":
    index_kB = np.concatenate(rows)[None]
    keys_kB = np.arange(index_kB.size)[None] if keys_in_place else None
    return self.of(self._probe.sums(Arrangement(index_kB, 1, keys_kB)))

  def half(self, rows: np.ndarray) -> "_Part":
    """Returns a microbatch of half as many rows, by the program of two microbatches."""
    return self.of(self._probe.sums(Arrangement(np.stack([rows] * self._probe.num_rows), 1)))

  def same(self, one: np.ndarray, other: np.ndarray, *scales: np.ndarray) -> bool:
    size = max(norm(x) for x in (one, other, *scales))
    return difference(one, other) <= self._share * size

  @functools.cached_property
  def mixtures(self) -> "list[_Part]":
    """Microbatches of 0, 1, 2, 3 and 4 quarters b, and otherwise a."""
    a, b = self._a, self._b
    return [self.arranged(*[a] * (4 - count), *[b] * count) for count in range(5)]


class _Part:
  """A numerator with its gradient, and the denominator."""

  def __init__(self, profile: np.ndarray, value: np.ndarray, denominator: np.ndarray):
    self.profile = profile
    """The numerator's gradient, or its value where there is none."""
    self.value, self.denominator = value, denominator


def cause_of(
  probe: Probe, name: str, *, is_stat: bool, under: Sequence[str], share: float
) -> Cause:
  """Returns what the dependence of a term or statistic on the split is likely to come from.

  Args:
    probe: the loss, of one term if this is about a term.
    name: of the term or statistic.
    is_stat: which of both it is.
    under: the splits that changed it.
    share: relative differences that are rounding.
  """
  parts = _Parts(probe, name, is_stat, share)
  again = parts.of(probe.traced_anew())
  if not parts.same(again.profile, parts.whole.profile):
    return "state"
  if cause := _rule_mismatch(parts, probe, name, is_stat):
    return cause
  if "rows in another order" in under:
    return "keys" if _separable(parts) else "order"
  if cause := _shape(parts):
    return cause
  if cause := _scaling(parts):
    return cause
  if set(under) <= {PADDED, SINGLES}:
    return "padding"
  if list(under) == [REPLICAS]:
    return "replicas"
  if list(under) == [TOKENS]:
    return "tokens"
  # What is left depends on the number of rows; a shape that random numbers are drawn in does.
  return "keys" if re.search("random_bits|threefry|rng_bit", probe.program()) else "unknown"


def _rule_mismatch(parts: _Parts, probe: Probe, name: str, is_stat: bool) -> Cause | None:
  """Returns whether a maximum is added up, or a sum taken the maximum of."""
  if not is_stat or isinstance(stat := probe.sums(probe.every_row).stats[name], Ratio):
    return None
  a, b = (parts.half(rows).value for rows in (parts.half_a, parts.half_b))
  whole = parts.whole.value
  if isinstance(stat, Max):
    return "sum as maximum" if not parts.same(whole, np.maximum(a, b)) else None
  is_largest = parts.same(whole, np.maximum(a, b)) and not parts.same(whole, a + b)
  return "maximum as sum" if is_largest else None


def _separable(parts: _Parts) -> bool:
  """Returns whether rows in the same places, with the same keys, add up: AB + BA = AA + BB."""
  A, B = parts.half_a, parts.half_b
  halves = ((A, B), (B, A), (A, A), (B, B))
  ab, ba, aa, bb = (parts.arranged(*each, keys_in_place=True).profile for each in halves)
  return parts.same(ab + ba, aa + bb, ab)


def _shape(parts: _Parts) -> Cause | None:
  """Returns the cause by how the sums follow the mixture; None: linearly."""
  profiles = [part.profile for part in parts.mixtures]
  if _is_linear(parts, profiles):
    return None
  if _is_weighted_mean(parts, profiles):
    return "mean"
  by = [part.denominator.sum() for part in parts.mixtures]
  for power in range(3):
    if _is_quadratic(parts, [p * d**power for p, d in zip(profiles, by, strict=True)]):
      return "product"
  # Twice the rows have twice the sum of squares, but twice as many partners.
  halves, twice = parts.half(parts.half_a), parts.arranged(parts.half_a, parts.half_a)
  is_extensive = parts.same(twice.value, 2 * halves.value) or parts.same(twice.value, halves.value)
  return "statistics" if is_extensive else "comparison"


def _is_linear(parts: _Parts, profiles: list[np.ndarray]) -> bool:
  first, last = profiles[0], profiles[4]
  return all(
    parts.same(profiles[at], first + (last - first) * at / 4, first, last) for at in (1, 2, 3)
  )


def _is_weighted_mean(parts: _Parts, profiles: list[np.ndarray]) -> bool:
  """Returns whether they are (x·first + λ·y·last) / (x + λ·y) for x parts of a and y of b."""
  first, _, middle, _, last = profiles
  toward, back = middle - first, last - middle
  weight = float(toward @ back) / (float(back @ back) or 1.0)
  if weight <= 0:
    return False
  expected = [((4 - at) * first + weight * at * last) / (4 - at + weight * at) for at in (1, 2, 3)]
  return all(
    parts.same(profiles[at], one, first, last) for at, one in zip((1, 2, 3), expected, strict=True)
  )


def _is_quadratic(parts: _Parts, profiles: list[np.ndarray]) -> bool:
  first, second, middle, fourth, last = profiles
  return parts.same(second, (3 * first + 6 * middle - last) / 8, first, last) and parts.same(
    fourth, (3 * last + 6 * middle - first) / 8, first, last
  )


def _scaling(parts: _Parts) -> Cause | None:
  """Returns the cause by what twice the rows do."""
  rows = parts.half_a, parts.half_b
  halves = [parts.half(one) for one in rows]
  twice = [parts.arranged(one, one) for one in rows]
  one, two = halves[0], twice[0]
  # A gradient that is a sum, of a value that is not, lacks nothing but a constant.
  for a, b in ((one.profile, two.profile), (one.value, two.value)):
    if norm(a) > 0 and parts.same(a, b):
      return "mean"
    if not parts.same(b, 2 * a):
      rest = [2 * h.value - t.value for h, t in zip(halves, twice, strict=True)]
      profiles = [2 * h.profile - t.profile for h, t in zip(halves, twice, strict=True)]
      is_constant = parts.same(*rest) and parts.same(*profiles, one.profile)
      return "constant" if is_constant else None
  return "denominator" if not parts.same(two.denominator, 2 * one.denominator) else None


def _flat(arrays: Sequence[object]) -> np.ndarray:
  return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in arrays])
