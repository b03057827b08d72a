"""From one tick of a pipeline's program to one pass, for reports.

A pipeline's loop runs over ticks, where another step's runs over passes. Every tick is counted as
if it had a forward, a loss and a backward; of a loss in one repeat of several that is too much.
"""

import dataclasses
from collections.abc import Sequence

from maxbatch.batch.pipelining import Pipeline
from maxbatch.compile.flops import StepFlops
from maxbatch.estimate.costs import Cost
from maxbatch.estimate.step_time import StepEstimate


def in_passes(
  pipeline: Pipeline | None, costs: Sequence[Cost], flops: StepFlops
) -> tuple[Sequence[Cost], StepFlops]:
  """What the program does in a pass, where it has been counted by trips of its loop."""
  if pipeline is None:
    return costs, flops
  ticks = _ticks(pipeline)
  counted = [
    dataclasses.replace(cost, count=cost.count * ticks) if cost.in_microbatch_loop else cost
    for cost in costs
  ]
  return counted, flops._replace(of_pass=flops.of_pass * ticks)


def idle_seconds(pipeline: Pipeline | None, work: StepEstimate) -> float:
  """Of a timetable, while the stages fill and empty."""
  if pipeline is None:
    return 0.0
  return work.pass_seconds / _ticks(pipeline) * pipeline.shape.delay


def _ticks(pipeline: Pipeline) -> int:
  return pipeline.shape_of_a_pass.work
