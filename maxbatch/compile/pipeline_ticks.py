"""From one tick of a pipeline's program to one microbatch and to a step, for reports.

A pipeline's loop runs over ticks, where another step's runs over microbatches. What a tick does depends on
the timetable: every operation counts as often as the work it belongs to (pipeline_parallel/tick_operations.py).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from maxbatch.compile.traced_flops import StepFlops
from maxbatch.estimate.costs import OperationCost
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.tick_operations import (
  EVERY_TICK,
  ONCE_PER_MICROBATCH,
  operation_in_path,
  ticks_by_operation,
)


def in_microbatches(
  pipeline: Pipeline | None, costs: Sequence[OperationCost], flops: StepFlops
) -> tuple[Sequence[OperationCost], StepFlops]:
  """What the program does in one microbatch more, where costs count iterations of its loop.

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
  """What a timetable does while its stages fill and empty: the ticks beyond those of its microbatches."""
  if pipeline is None:
    return ()
  of_a_microbatch = _of_a_microbatch(pipeline)
  first = ticks_by_operation(pipeline.schedule, pipeline.shape_of_one_microbatch)
  ticks = {work: count - of_a_microbatch[work] for work, count in first.items()}
  return _as_often([cost for cost in costs if cost.in_microbatch_loop], ticks)


def beside_layers(
  pipeline: Pipeline | None, costs: Sequence[OperationCost]
) -> Sequence[OperationCost]:
  """What the loop does in a microbatch besides the layers' forwards and backwards: embedding and loss."""
  if pipeline is None:
    return ()
  own = [cost for cost in costs if operation_in_path(cost.condition) in ONCE_PER_MICROBATCH]
  return _as_often(own, _of_a_microbatch(pipeline))


def _of_a_microbatch(pipeline: Pipeline) -> Mapping[str, int]:
  """Ticks with each work that another microbatch adds to a timetable."""
  one, two = (
    ticks_by_operation(pipeline.schedule, pipeline.shape_of(num_microbatches))
    for num_microbatches in (1, 2)
  )
  return {work: two[work] - one[work] for work in one}


def _as_often(costs: Sequence[OperationCost], ticks: Mapping[str, int]) -> list[OperationCost]:
  """With as many executions as there are such ticks; what is outside of the loop stays."""
  return [
    dataclasses.replace(cost, count=cost.count * ticks[operation_in_path(cost.condition)])
    if cost.in_microbatch_loop
    else cost
    for cost in costs
  ]
