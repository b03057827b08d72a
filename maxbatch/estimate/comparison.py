"""Two compiled steps side by side, in a screen: why is theirs faster, or ours."""

import dataclasses
from collections.abc import Iterator, Sequence

from maxbatch.estimate.breakdown import Breakdown, Direction, Part, Share, differences
from maxbatch.estimate.chips import Chip

_TERA, _GIGA = 1e12, 1e9
_NUM_LONGER, _NUM_SHORTER = 6, 3
_LEAST_SHARE = 0.003
"""Of a step: a difference below it is not worth a line."""
_SAME_WORK = 0.03
_DIRECTIONS: Sequence[Direction] = ("forward", "recomputed", "backward", "update")


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Their step and ours, as a screen of text."""

  theirs: Breakdown
  ours: Breakdown
  chip: Chip

  def __str__(self) -> str:
    lines = [*self._totals(), "", *self._by_part(), "", *self._reasons()]
    return "\n".join(line.rstrip() for line in lines)

  def _totals(self) -> Iterator[str]:
    theirs, ours = self.theirs, self.ours
    yield f"theirs: {theirs.name}"
    yield f"ours:   {ours.name}"
    yield _row("", "theirs", "ours", "ours/theirs")
    yield _row("step", f"{theirs.seconds:.4f} s", f"{ours.seconds:.4f} s", _ratio(theirs, ours))
    mine = ours.by_work()
    for work, seconds in theirs.by_work().items():
      label = f"  {work}" + (", waiting" if work in ("copies", "collectives") else "")
      yield _row(label, f"{seconds:.4f}", f"{mine[work]:.4f}", _over(seconds, mine[work]))
    yield _both("collectives hidden, s", theirs.hidden_seconds, ours.hidden_seconds, 4)
    yield _both("products, TFLOP", theirs.flops() / _TERA, ours.flops() / _TERA, 2)
    again = (theirs.flops(["recomputed"]) / _TERA, ours.flops(["recomputed"]) / _TERA)
    yield _both("  recomputed", *again, 2)
    yield _both("memory traffic, GB", theirs.bytes / _GIGA, ours.bytes / _GIGA, 1)
    if theirs.peak_bytes and ours.peak_bytes:
      peaks = (theirs.peak_bytes / _GIGA, ours.peak_bytes / _GIGA)
      yield _both("peak memory, GB", *peaks, 2)
    if not self._is_same_work():
      yield "The products differ, without the recomputed ones: is it the same model, batch and length?"

  def _is_same_work(self) -> bool:
    # Not the forward pass alone: whose loss forms its gradients at once does their products there.
    theirs, ours = (each.flops() - each.flops(["recomputed"]) for each in (self.theirs, self.ours))
    return abs(theirs - ours) <= _SAME_WORK * max(theirs, ours)

  def _by_part(self) -> Iterator[str]:
    yield _row("part, pass (seconds)", "theirs", "ours", "ours - theirs")
    rows = []
    for scope in sorted({part.scope for each in (self.theirs, self.ours) for part in each.parts}):
      for direction in _DIRECTIONS:
        theirs, ours = (
          each.total(lambda part, at=(scope, direction): part[:2] == at)
          for each in (self.theirs, self.ours)
        )
        rows.append((theirs, ours, f"{scope}, {direction}"))
    for theirs, ours, label in sorted(rows, key=lambda row: -max(row[:2])):
      if max(theirs, ours) > _LEAST_SHARE * self.ours.seconds:
        yield _row(label, f"{theirs:.4f}", f"{ours:.4f}", f"{ours - theirs:+.4f}")

  def _reasons(self) -> Iterator[str]:
    found = list(differences(self.theirs, self.ours))
    least = _LEAST_SHARE * self.ours.seconds
    longer = [entry for entry in found if entry[0] > least][:_NUM_LONGER]
    shorter = [entry for entry in reversed(found) if entry[0] < -least][:_NUM_SHORTER]
    for title, entries in (("Where ours takes longer", longer), ("Where theirs does", shorter)):
      yield f"{title}:" if entries else f"{title}: nowhere"
      for difference, part, theirs, ours in entries:
        yield f"  {difference:+.4f} s {part}: {self._words(part, ours)} against {self._words(part, theirs)}"
        yield f"     {_longest(ours if difference > 0 else theirs)}"

  def _words(self, part: Part, share: Share) -> str:
    if not share.operations:
      return "none"
    words = f"{share.seconds:.4f} s ({len(share.operations)}"
    if part.work in ("products", "kernels") and share.flops and share.seconds:
      used = share.flops / share.seconds / self.chip.peak_flops
      words += f", {share.flops / _TERA:.2f} TFLOP at {used:.0%} of peak"
    return f"{words})"


def _longest(share: Share) -> str:
  """The longest operations, each with its executions, seconds and the end of its path."""
  words = []
  for seconds, cost in share.operations[:2]:
    place = "/".join(cost.op_name.split("/")[-2:])[-44:]
    words.append(f"{cost.name} × {share.times(cost):,} {seconds:.4f} s ({place or 'no path'})")
  return "; ".join(words)


def _row(label: str, *cells: str) -> str:
  return f"{label:<28}" + "".join(f"{cell:>15}" for cell in cells)


def _both(label: str, theirs: float, ours: float, digits: int) -> str:
  return _row(label, f"{theirs:,.{digits}f}", f"{ours:,.{digits}f}", _over(theirs, ours))


def _over(theirs: float, ours: float) -> str:
  return f"{ours / theirs:.2f}" if theirs else ""


def _ratio(theirs: Breakdown, ours: Breakdown) -> str:
  return _over(theirs.seconds, ours.seconds)
