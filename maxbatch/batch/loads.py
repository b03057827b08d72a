"""What is read at once: loads of expansion_factor_real_data times the samples of a step.

A load is a whole number of samples. It begins where the one before ends, so that it may end inside
a step, and its size follows from the step it begins in. Every shape of microbatch has loads of its
own, and the last of them ends with its steps.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from fractions import Fraction

from maxbatch.core.keys import text
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError


class _PartOfSampleError(UserError):
  """A load is not a whole number of samples."""

  def __init__(self, batch: int, factor: Fraction):
    self.batch, self.size = batch, factor * batch
    super().__init__(
      f"expansion_factor_real_data={factor} × global_batch_to_train={batch} is {self.size} samples, "
      "which must be a whole number, at least 1; for example expansion_factor_real_data="
      f"{Fraction(1, batch)} or 2"
    )


def load_factor(plan: BatchPlan, *, streamed: bool) -> Fraction:
  """Returns samples loaded at once, as a multiple of the samples of one dispatch."""
  taken = plan.micro_batch_to_train if streamed else plan.global_batch_to_train
  return Fraction(plan.global_batch_to_load, taken)


def load_ranges(runs: Iterable[tuple[int, int, int]], factor: Fraction) -> Iterator[range]:
  """Yields the first sample of each load, in ranges of equal loads.

  Args:
    runs: stretches of equal dispatches, without gaps: first sample, end, samples of a dispatch.
    factor: samples of a load, as a multiple of those of the dispatch that it begins in.

  Raises:
    UserError: a load is not a whole number of samples.
  """
  begin = 0
  for first, end, batch in runs:
    begin = max(begin, first)
    if begin < end:
      loads = range(begin, end, _load_size(batch, factor))
      yield loads
      begin += len(loads) * loads.step


def check_loads(plan: BatchPlan, *, streamed: bool) -> None:
  """Checks every load of the run, from the plan's first step to its last, before any is read.

  Also those of a partial last step, of the phases of a ramp-up, and of what batch_schedule=gns may
  decide.

  Raises:
    UserError: a load is not a whole number of samples; the message suggests a factor that works.
  """
  factor = plan.expansion_factor_real_data
  try:
    for _, phases in itertools.groupby(plan.phases, lambda phase: phase.micro_batch):
      runs = (
        (one.first.samples, one.end.samples, one.micro_batch if streamed else one.batch)
        for one in phases
      )
      list(load_ranges(runs, load_factor(plan, streamed=streamed)))
    if plan.max_batch > plan.global_batch_to_train:
      # It may be any multiple of the microbatch.
      _load_size(plan.micro_batch_to_train, factor)
  except _PartOfSampleError as error:
    common = math.gcd(plan.micro_batch_to_train, *(phase.batch for phase in plan.phases))
    near = Fraction(max(1, math.floor(common * factor)), common)
    raise UserError(
      f"expansion_factor_real_data={text(factor)} makes a load of {text(error.size)} samples for a "
      f"{'microbatch' if streamed else 'step'} of {error.batch} samples, as this run has or may come "
      "to; loads must be whole numbers of samples, at least 1; for example "
      f"expansion_factor_real_data={text(Fraction(1) if streamed else near)}"
    ) from None


def _load_size(batch: int, factor: Fraction) -> int:
  size = factor * batch
  if size.denominator != 1 or size <= 0:
    raise _PartOfSampleError(batch, factor)
  return int(size)
