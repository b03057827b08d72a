"""A step's estimated time by part of the model, pass and kind of work, and two steps side by side.

The passes: forward; recomputed, what the backward pass computes again under jax.checkpoint or because
the compiler did not keep it; backward; update, what is differentiated by nobody.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from maxbatch.estimate.chips import Chip
from maxbatch.estimate.costs import OTHER, SCOPES, Kind, Naming, OperationCost
from maxbatch.estimate.hlo import Instruction
from maxbatch.estimate.step_time import elapsed_by_operation, link_seconds

_TERA, _GIGA = 1e12, 1e9
_NUM_LONGER, _NUM_SHORTER = 6, 3
_LEAST_SHARE = 0.003
"""Of a step: a difference below it is not worth a line."""
_SAME_WORK = 0.03

_STACK_FRAME = re.compile(r"metadata=\{[^}]*?stack_frame_id=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ENTRY = re.compile(r"(\d+) (.*)")
_FIELD = re.compile(r"(\w+)=(\d+)")

Direction = Literal["forward", "recomputed", "backward", "update"]
Work = Kind | Literal["collectives"]

_DIRECTIONS: Sequence[Direction] = ("forward", "recomputed", "backward", "update")
WORKS: Sequence[Work] = (
  "products",
  "kernels",
  "elementwise",
  "relayouts",
  "slices",
  "copies",
  "collectives",
)


@dataclasses.dataclass(frozen=True)
class PeerNaming(Naming):
  """What another trainer's names say: the words of its modules, and functions on the stack."""

  functions: Sequence[tuple[str, str]] = ()
  """(pattern, part): of the first pattern found in the name of a function on the stack, from the
  innermost function outwards; only where no word is found."""
  frames: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  """Functions on the stack when an operation was traced, by its stack_frame_id."""

  def of(self, one: Instruction) -> str:
    """The part that an instruction's own names say, without what it calls; or "other"."""
    result, frame = super().of(one), _STACK_FRAME.search(one.attributes)
    if result != OTHER or frame is None:
      return result
    parts = (
      part
      for name in self.frames.get(int(frame[1]), ())
      for pattern, part in self.functions
      if re.search(pattern, name)
    )
    return next(parts, OTHER)


PEERS = PeerNaming(
  words={scope: scope for scope in SCOPES}
  | dict.fromkeys(("self_attention", "self_attn", "attn", "Attention_0"), "attention")
  | dict.fromkeys(("feed_forward", "ffn", "MlpBlock_0", "MoeBlock_0"), "mlp")
  | dict.fromkeys(("lm_head", "unembed", "logits_dense"), "head")
  | dict.fromkeys(("embed", "token_embedder", "wte"), "embedding"),
  functions=(
    (r"Norm\w*\.__call__", "norm"),
    (r"attend_on_embedding|cross_entropy|one_hot|output_head|logits|softmax_loss", "head"),
    (r"(?i)attention\w*\.|rotary|splash|attention_layer", "attention"),
    (r"(?i)\bmlp|feed_?forward|MlpBlock", "mlp"),
    (r"\bEmbed\w*\.|embed_tokens|apply_embedding", "embedding"),
    (
      r"apply_gradients|Optimizer\.|clip_by_global_norm|gradient_clipping|l2norm|scale_by_|apply_updates",
      "optimizer",
    ),
    (r"DecoderLayer\.__call__|apply_layers", OTHER),
    (r"\bloss_fn", "head"),
  ),
)
"""MaxText 0.2.5's functions, and names that jax trainers commonly give their modules."""


def peers(text: str) -> PeerNaming:
  """Returns the naming of a peer's program, whose text says which functions were on the stack."""
  return dataclasses.replace(PEERS, frames=stack_frames(text))


def stack_frames(text: str) -> Mapping[int, tuple[str, ...]]:
  """Returns names of functions by frame, the innermost first, from the tables at the top of HLO text.

  jax 0.12 writes them: FileNames, FunctionNames, FileLocations (a function and a line) and StackFrames
  (a location and the frame that called it). Empty if there are none.
  """
  tables = _tables(text)
  functions = {number: name.strip('"') for number, name in tables["FunctionNames"].items()}
  function_of = {
    number: functions.get(dict(_FIELD.findall(row)).get("function_name_id", ""), "")
    for number, row in tables["FileLocations"].items()
  }
  frames = {number: dict(_FIELD.findall(row)) for number, row in tables["StackFrames"].items()}
  # The number written for a caller is one more than its frame's; 1, or none, is no caller.
  callers = {number: int(fields.get("parent_frame_id", 1)) - 1 for number, fields in frames.items()}
  named: dict[int, tuple[str, ...]] = {}
  for number in sorted(frames, key=int):
    own = function_of.get(frames[number].get("file_location_id", ""), "")
    named[int(number)] = (own, *named.get(callers[number], ()))
  return named


def _tables(text: str) -> dict[str, dict[str, str]]:
  tables: dict[str, dict[str, str]] = {name: {} for name in _TABLES}
  current: dict[str, str] | None = None
  for line in text.splitlines():
    if line.startswith(("%", "ENTRY")):
      break
    if line in tables:
      current = tables[line]
    elif current is not None and (entry := _ENTRY.fullmatch(line)):
      current[entry[1]] = entry[2]
  return tables


class Part(NamedTuple):
  """What is compared."""

  scope: str
  direction: Direction
  work: Work

  def __str__(self) -> str:
    return f"{self.scope}, {self.direction}, {self.work}"


class Timed(NamedTuple):
  """An operation with the seconds that it adds to a step."""

  seconds: float
  cost: OperationCost


@dataclasses.dataclass(frozen=True)
class Share:
  """What one part takes of a step."""

  operations: Sequence[Timed] = ()
  """The longest first."""
  num_microbatches: int = 1

  @property
  def seconds(self) -> float:
    """Of all its operations."""
    return sum(one.seconds for one in self.operations)

  @property
  def flops(self) -> int:
    """Of its matrix products."""
    return sum(self.times(one.cost) * one.cost.flops for one in self.operations)

  def times(self, cost: OperationCost) -> int:
    """Executions in a step."""
    return cost.count * (self.num_microbatches if cost.in_microbatch_loop else 1)


@dataclasses.dataclass(frozen=True)
class Breakdown:
  """A compiled step, part by part."""

  name: str
  parts: Mapping[Part, Share]
  hidden_seconds: float
  """Of collectives beside other work."""
  bytes: int
  """Read from and written to main memory."""
  peak_bytes: int | None = None

  @property
  def seconds(self) -> float:
    """Of a step."""
    return sum(share.seconds for share in self.parts.values())

  def flops(self, directions: Sequence[Direction] = ()) -> int:
    """Of matrix products, in these passes; none: in all."""
    return sum(
      share.flops
      for part, share in self.parts.items()
      if part.work != "collectives" and (not directions or part.direction in directions)
    )

  def by_work(self) -> dict[Work, float]:
    """Seconds of every kind of work."""
    return {work: self.total(lambda part, work=work: part.work == work) for work in WORKS}

  def total(self, chosen: Callable[[Part], bool]) -> float:
    """Seconds of the parts that are chosen."""
    return sum(share.seconds for part, share in self.parts.items() if chosen(part))


def breakdown(
  name: str,
  costs: Sequence[OperationCost],
  chip: Chip,
  *,
  num_microbatches: int = 1,
  devices_per_slice: int | None = None,
  peak_bytes: int | None = None,
) -> Breakdown:
  """What a step takes, part by part.

  Args:
    name: of the program.
    costs: from program_costs.
    chip: one device.
    num_microbatches: iterations of a loop over microbatches whose number is data.
    devices_per_slice: where there are several slices.
    peak_bytes: of a device's memory, if known.
  """
  backward = _backward_loops(costs)
  results: dict[Part, list[Timed]] = collections.defaultdict(list)
  waiting = 0.0
  for inside in (True, False):
    times = num_microbatches if inside else 1
    those = [cost for cost in costs if cost.in_microbatch_loop == inside]
    for cost, parts in elapsed_by_operation(those, chip, devices_per_slice):
      on_links = parts.interconnect > 0
      waiting += times * parts.interconnect
      work: Work = "collectives" if on_links else cost.kind
      part = Part(cost.scope, _direction(cost, backward), work)
      if parts.total or (cost.flops and not on_links):
        results[part].append(Timed(times * parts.total, cost))
  every = Share(num_microbatches=num_microbatches)
  linked = sum(
    every.times(cost) * link_seconds(cost.collective, chip, devices_per_slice)
    for cost in costs
    if cost.collective
  )
  shares = {
    part: Share(sorted(timed, key=lambda one: -one.seconds), num_microbatches)
    for part, timed in results.items()
  }
  moved = sum(every.times(cost) * cost.bytes for cost in costs)
  return Breakdown(name, shares, max(0.0, linked - waiting), moved, peak_bytes)


def _direction(cost: OperationCost, backward_loops: set[str]) -> Direction:
  """In which pass an operation is, by jax's path; a kernel without one by its loop's other operations."""
  path = cost.op_name
  if "rematted_computation" in path or ".remat" in cost.name:
    return "recomputed"
  if "transpose(" in path:
    return "backward"
  if "jvp(" in path:
    return "forward"
  if cost.loop in backward_loops:
    return "recomputed" if "_fwd" in path + cost.name else "backward"
  return "update" if cost.scope == "optimizer" or not _in_a_pass(cost) else "forward"


def _in_a_pass(cost: OperationCost) -> bool:
  """Whether it is in a loop, or belongs to a part of the model."""
  return cost.count > 1 or cost.in_microbatch_loop or cost.scope != "other"


def _backward_loops(costs: Iterable[OperationCost]) -> set[str]:
  """Bodies of loops most of whose operations, of those that say it, are of a backward pass."""
  votes: dict[str, int] = collections.Counter()
  for cost in costs:
    votes[cost.loop] += ("transpose(" in cost.op_name) - (
      "jvp(" in cost.op_name and "transpose(" not in cost.op_name
    )
  return {loop for loop, lead in votes.items() if lead > 0}


def differences(theirs: Breakdown, ours: Breakdown) -> Iterator[tuple[float, Part, Share, Share]]:
  """(seconds that ours takes more, part, their share, our share), what costs us most first."""
  parts = theirs.parts.keys() | ours.parts.keys()
  pairs = [(part, theirs.parts.get(part, Share()), ours.parts.get(part, Share())) for part in parts]
  results = [(mine.seconds - other.seconds, part, other, mine) for part, other, mine in pairs]
  yield from sorted(results, key=lambda entry: (-entry[0], entry[1]))


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
    results = list(differences(self.theirs, self.ours))
    least = _LEAST_SHARE * self.ours.seconds
    longer = [entry for entry in results if entry[0] > least][:_NUM_LONGER]
    shorter = [entry for entry in reversed(results) if entry[0] < -least][:_NUM_SHORTER]
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
