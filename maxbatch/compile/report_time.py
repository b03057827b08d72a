"""Seconds of a step, measured or estimated, and which of them are no work of a pipeline's layers.

A pipeline's loop runs over ticks, where another step's runs over microbatches. What a tick does depends on
the timetable: every operation counts as often as the work it belongs to
(pipeline_parallel/sizes.py).

The text of a compiled program is no stable format: another compiler may write loops, operands or kernels in
a new way. What is then not counted would make the estimate a wrong figure, so there is none.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from maxbatch.compile.measured_time import Timing
from maxbatch.compile.traced_flops import StepFlops
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.costs import OperationCost
from maxbatch.estimate.step_time import StepEstimate, seconds_of
from maxbatch.pipeline_parallel.sizes import (
  EVERY_TICK,
  ONCE_PER_MICROBATCH,
  Pipeline,
  operation_in_path,
  ticks_by_operation,
)

LEAST_COVERAGE = 0.97
"""Share of the traced matrix products that must be found: the program computes some of them
again."""

TESTED_VERSIONS = (
  {"jax": "0.10.2", "libtpu": "0.0.51"},
  {"jax": "0.12.0.1", "libtpu": "0.0.52"},
)
"""With which the tests compare estimates with traced programs; the first is in constraints.txt."""
_TESTED_FOR_GPUS = ({"jax": "0.10.2", "jax-cuda13-plugin": "0.10.2"},)

_NUM_NAMED = 5
_TERA = 1e12


def why_not_estimated(
  work: StepEstimate,
  costs: Sequence[OperationCost],
  expected_flops: float,
  versions: Mapping[str, object],
) -> str:
  """Returns why operations found in a program are no base for its time; empty: they are one.

  It says what was counted, what was not, and what helps: versions that are tested, or, where this is one,
  to leave out what is beside the model.

  Args:
    expected_flops: as traced, of a step of one microbatch on one device.
    versions: of jax and libtpu, or the plugin for GPUs, by package.
  """
  if not work.coverage < LEAST_COVERAGE:
    return ""
  return (
    f"the time of the compiled step cannot be estimated: {work.coverage:.1%} of its matrix products "
    f"were found in the compiler's text, and less than {LEAST_COVERAGE:.0%} is no estimate. "
    f"Counted, of {expected_flops / _TERA:.4g} TFLOP a device: {_counted(costs)}. Not counted: "
    f"{_not_counted(costs)}. {_what_helps(versions)} The memory above is the compiler's own and holds"
  )


def _what_helps(versions: Mapping[str, object]) -> str:
  """Returns which versions to install, or that they are here and the step itself is not understood."""
  for_gpus = "jax-cuda13-plugin" in versions
  tested = [dict(each) for each in (_TESTED_FOR_GPUS if for_gpus else TESTED_VERSIONS)]
  own = {package: versions[package] for package in tested[0]}
  if own in tested:
    return (
      f"This is {_words(own)}, with which estimates are tested: what is not counted is in the step. "
      "Compile it without what is measured beside the model (gns, gns_from_microbatches) and without "
      "plug-ins for an estimate, or measure it on the devices."
    )
  pins = " ".join(f"{package}=={version}" for package, version in tested[0].items())
  known = " and with ".join(map(_words, tested))
  return f"This is {_words(own)}; estimates are tested with {known}: pip install {pins}."


def _words(versions: Mapping[str, object]) -> str:
  return " and ".join(f"{package} {version}" for package, version in versions.items())


def _counted(costs: Sequence[OperationCost]) -> str:
  """Returns FLOPs by the model's parts."""
  scopes: dict[str, int] = collections.defaultdict(int)
  for cost in costs:
    scopes[cost.scope] += cost.flops * cost.count
  results = sorted(((flops, scope) for scope, flops in scopes.items() if flops), reverse=True)
  return ", ".join(f"{scope} {flops / _TERA:.4g}" for flops, scope in results) or "nothing"


def _not_counted(costs: Sequence[OperationCost]) -> str:
  """Returns what is known to be missing: further iterations of loops, and kernels."""
  loops = {name for cost in costs for name in cost.unread_loops}
  kernels = {cost.name for cost in costs if cost.opcode == "custom-call" and not cost.flops}
  parts = ["what is written in a way that is not known here"]
  if kernels:
    parts.insert(0, f"products in the kernels {_some(kernels)} (pallas_call takes a cost_estimate)")
  if loops:
    parts.insert(0, f"all but one iteration of the loops {_some(loops)}")
  return "; ".join(parts)


def _some(names: set[str]) -> str:
  listed = sorted(names)
  more = len(listed) - _NUM_NAMED
  return ", ".join(listed[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def in_microbatches(
  pipeline: Pipeline | None, costs: Sequence[OperationCost], flops: StepFlops
) -> tuple[Sequence[OperationCost], StepFlops]:
  """Returns what the program does in one microbatch more, where costs count iterations of its loop.

  Filling and emptying the stages, once per timetable, is not in it.
  """
  if pipeline is None:
    return costs, flops
  ticks = _of_a_microbatch(pipeline)
  by_work = flops.by_tick_work
  always = (flops.per_microbatch - sum(by_work.values())) * ticks[EVERY_TICK]
  per_microbatch = always + sum(flops * ticks[work] for work, flops in by_work.items())
  return _as_often(costs, ticks), flops._replace(per_microbatch=per_microbatch, by_tick_work={})


def in_filling(
  pipeline: Pipeline | None, costs: Sequence[OperationCost]
) -> Sequence[OperationCost]:
  """Returns the work of the ticks in which stages fill and empty, beyond those of microbatches."""
  if pipeline is None:
    return ()
  of_a_microbatch = _of_a_microbatch(pipeline)
  first = ticks_by_operation(pipeline.schedule, pipeline.shape_of_one_microbatch)
  ticks = {work: count - of_a_microbatch[work] for work, count in first.items()}
  return _as_often([cost for cost in costs if cost.in_microbatch_loop], ticks)


def beside_layers(
  pipeline: Pipeline | None, costs: Sequence[OperationCost]
) -> Sequence[OperationCost]:
  """Returns the loop's work besides the layers' forwards and backwards: embedding and loss."""
  if pipeline is None:
    return ()
  own = [cost for cost in costs if operation_in_path(cost.condition) in ONCE_PER_MICROBATCH]
  return _as_often(own, _of_a_microbatch(pipeline))


def _of_a_microbatch(pipeline: Pipeline) -> Mapping[str, int]:
  """Returns the ticks with each kind of work that another microbatch adds to a timetable."""
  one, two = (
    ticks_by_operation(pipeline.schedule, pipeline.shape_of(num_microbatches))
    for num_microbatches in (1, 2)
  )
  return {work: two[work] - one[work] for work in one}


def _as_often(costs: Sequence[OperationCost], ticks: Mapping[str, int]) -> list[OperationCost]:
  """Counts executions as often as there are such ticks; what is outside of the loop stays."""
  return [
    dataclasses.replace(cost, count=cost.count * ticks[operation_in_path(cost.condition)])
    if cost.in_microbatch_loop
    else cost
    for cost in costs
  ]


@dataclasses.dataclass(frozen=True)
class StepTime:
  """Seconds of a step of n microbatches: rest + n × seconds_per_microbatch."""

  seconds_per_microbatch: float
  rest: float
  how: str
  """estimate or measured."""
  spread: float | None = None
  """Spread of a measurement, as a share; None where there is one alone."""
  other_per_microbatch: float = 0.0
  """In a pipeline, the part of `seconds_per_microbatch` that is no forward or backward of layers,
  as far as known."""
  other_rest: float = 0.0
  """The same part of `rest`."""

  def of(self, num_microbatches: int) -> float:
    """Returns a step of so many microbatches."""
    return self.rest + num_microbatches * self.seconds_per_microbatch

  def other_of(self, num_microbatches: int) -> float:
    """Returns the seconds that are no forward or backward of a pipeline's layers."""
    return self.other_rest + num_microbatches * self.other_per_microbatch


def measured_time(timing: Timing, *, streamed: bool) -> StepTime:
  """Returns the time that a clock has shown."""
  # A streamed microbatch is a dispatch of its own, with ticks to fill and empty in each.
  other = timing.seconds_rest if streamed else timing.seconds_without_ticks or 0.0
  spread = timing.spread if timing.repeats > 1 else None
  return StepTime(
    timing.seconds_per_microbatch, timing.seconds_rest, "measured", spread, other_rest=other
  )


def estimated_time(
  work: StepEstimate,
  once: Sequence[OperationCost],
  pipeline: Pipeline | None,
  chip: Chip,
  per_slice: int | None,
  *,
  streamed: bool,
) -> StepTime:
  """Returns the time that a chip's figures give.

  Args:
    work: of a microbatch and the rest, as `in_microbatches` counts.
    once: the program's operations, one tick of a pipeline's loop.
    per_slice: devices of a slice, where there are several.
    streamed: whether every microbatch is a dispatch of its own.
  """
  fills = seconds_of(in_filling(pipeline, once), chip, per_slice)
  beside = seconds_of(beside_layers(pipeline, once), chip, per_slice)
  outside = seconds_of([one for one in once if not one.in_microbatch_loop], chip, per_slice)
  in_each, in_rest = (1, 0) if streamed else (0, 1)
  return StepTime(
    seconds_per_microbatch=work.microbatch_seconds + in_each * fills,
    rest=work.rest_seconds + in_rest * fills,
    how="estimate",
    other_per_microbatch=beside + in_each * outside,
    other_rest=in_rest * outside,
  )
