"""Which format a run's numbers fit in: exponents counted by tensor and layer, and what is lost.

Counts are of float32 numbers by their exponent. A format sets to zero what is below half of its
smallest number, and makes infinite what is beyond its largest; both follow from the exponent.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from maxbatch.precision.formats import BFLOAT16, CBFLOAT16, FLOAT16, Format

WEIGHTS, ACTIVATIONS = "weights", "activations"
GRADIENTS, ACTIVATIONS_GRADIENTS = "weight gradients", "activation gradients"
KINDS = (WEIGHTS, ACTIVATIONS, ACTIVATIONS_GRADIENTS, GRADIENTS)
_SCALED = (ACTIVATIONS_GRADIENTS, GRADIENTS)
"""What a loss scale multiplies."""

REPORTED = (FLOAT16, CBFLOAT16, BFLOAT16)
_BIAS = 127
_ALLOWED = 0.01
"""The share of numbers, of those that are not zero, that may be lost."""
_SHOWN = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Exponents:
  """How many numbers of a tensor have which exponent."""

  kind: str
  name: str
  """Name of the parameter, or of the module whose output the activation is."""
  layer: int | None
  """None: it is there once."""
  counts: np.ndarray
  """[256]: magnitudes in [2^e, 2^(e+1)) at 127 + e; zeros first, what is not finite last."""

  def __str__(self) -> str:
    return self.name if self.layer is None else f"{self.name} of layer {self.layer}"

  @property
  def numbers(self) -> float:
    """Finite ones that are not zero."""
    return float(self.counts[1:-1].sum())

  @property
  def smallest(self) -> int | None:
    """Exponent above which all but a hundredth of the numbers lie; None without numbers."""
    sums = np.cumsum(self.counts[1:-1])
    return int(np.searchsorted(sums, _ALLOWED * sums[-1])) + 1 - _BIAS if sums[-1] else None

  @property
  def largest(self) -> int | None:
    """The largest exponent; None without numbers."""
    there = np.flatnonzero(self.counts[1:-1])
    return int(there[-1]) + 1 - _BIAS if there.size else None

  def underflow(self, to: Format, shift: int = 0) -> float:
    """Returns the share of the numbers, times 2^shift, that a format sets to zero."""
    first = to.smallest_exponent - to.mantissa_bits - 1 - shift
    below = self.counts[1 : max(first + _BIAS, 1)].sum()
    return float(below / self.numbers) if self.numbers else 0.0

  def overflow(self, to: Format, shift: int = 0) -> float:
    """Returns the share of the numbers, times 2^shift, that a format makes infinite."""
    first = to.largest_exponent + 1 - shift
    above = self.counts[min(first + _BIAS, len(self.counts) - 1) : -1].sum()
    return float(above / self.numbers) if self.numbers else 0.0


def best_shift(results: Sequence[Exponents], to: Format) -> int:
  """Returns the exponent of the largest loss scale without overflow, with a bit to spare."""
  largest = [each.largest for each in results if each.kind in _SCALED and each.largest is not None]
  return to.largest_exponent - 1 - max(largest) if largest else 0


def report_text(results: Sequence[Exponents], step: int, tokens: int) -> str:
  """Returns the report: ranges by layer, then what each format would lose, and where."""
  return "\n".join(
    [
      f"Precision report after step {step}: exponents of a microbatch of {tokens:,} tokens, computed in "
      "float32",
      "",
      *_ranges(results),
      "",
      *(line for to in REPORTED for line in _verdict(results, to, tokens)),
    ]
  )


def report_values(results: Sequence[Exponents], step: int, tokens: int) -> dict[str, Any]:
  """Returns the same as JSON holds it, with the counts of every tensor."""
  return {
    "step": step,
    "tokens": tokens,
    "loss_scale": {to.name: 2.0 ** best_shift(results, to) for to in REPORTED},
    "tensors": [
      {
        "kind": each.kind,
        "name": each.name,
        "layer": each.layer,
        "zeros": int(each.counts[0]),
        "not_finite": int(each.counts[-1]),
        "exponents": {
          str(index - _BIAS): int(each.counts[index])
          for index in np.flatnonzero(each.counts[1:-1]) + 1
        },
        "lost": {
          to.name: {"underflow": each.underflow(to), "overflow": each.overflow(to)}
          for to in REPORTED
        },
      }
      for each in results
    ],
  }


def _ranges(results: Sequence[Exponents]) -> Iterator[str]:
  """Yields a line for every kind and layer: of its tensors together."""
  names = ", ".join(to.name for to in REPORTED)
  yield f"  {'':<34}{'99% above':>10}{'largest':>9}{'zeros':>8}   lost by {names}"
  for kind in KINDS:
    of_kind = [each for each in results if each.kind == kind]
    for name in dict.fromkeys(map(_place, of_kind)):
      one = Exponents(kind, name, None, np.sum([e.counts for e in of_kind if _place(e) == name], 0))
      if one.smallest is None or one.largest is None:
        continue
      zeros = one.counts[0] / max(one.counts.sum(), 1)
      lost = ", ".join(f"{one.underflow(to) + one.overflow(to):.2%}" for to in REPORTED)
      low, high = f"2^{one.smallest}", f"2^{one.largest}"
      yield f"  {f'{kind}, {name}':<34}{low:>10}{high:>9}{zeros:>8.1%}   {lost}"


def _place(each: Exponents) -> str:
  return each.name if each.layer is None else f"layer {each.layer}"


def _verdict(results: Sequence[Exponents], to: Format, tokens: int) -> Iterator[str]:
  """Says what a format loses: without a loss scale, with the largest that does not overflow, and
  where the loss is a mean over tokens, as many trainers have it, and not a sum."""
  shift, mean = best_shift(results, to), -round(math.log2(tokens))
  of_a_mean = f"loss_scale={2.0**mean:g}, as of a loss that is a mean"
  shifts = {0: "without a loss scale", mean: of_a_mean}
  if shift and _losers(results, to, 0):
    shifts[shift] = f"loss_scale={2.0**shift:g}"
  for scaled, words in shifts.items():
    lost = _losers(results, to, scaled)
    yield f"{to.name}, {words}: " + ("; ".join(lost) if lost else "holds all")


def _losers(results: Sequence[Exponents], to: Format, scaled: int) -> list[str]:
  """Says which tensors overflow, and which lose more than a hundredth to zero."""
  lines = []
  for verb, share, allowed in (
    ("overflows in", Exponents.overflow, 0.0),
    (f"more than {_ALLOWED:.0%} underflow in", Exponents.underflow, _ALLOWED),
  ):
    shares = [
      (share(each, to, scaled if each.kind in _SCALED else 0), each)
      for each in results
      if each.numbers
    ]
    worst = sorted((pair for pair in shares if pair[0] > allowed), key=lambda pair: -pair[0])
    if worst:
      named = ", ".join(f"{each.kind} {each} ({part:.1%})" for part, each in worst[:_SHOWN])
      more = f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
      lines.append(f"{verb} {named}{more}")
  not_finite = [str(each) for each in results if each.counts[-1]]
  if not_finite:
    lines.append(f"not finite even in float32: {', '.join(not_finite[:_SHOWN])}")
  return lines
