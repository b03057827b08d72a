"""num_pipeline_microbatches=-1: what is compiled, predicted, dropped and taken, on pretended machines."""

import dataclasses
import math
from collections.abc import Callable

import pytest
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.tuning.pipeline_microbatches import (
  Line,
  RankedStep,
  Ranking,
  fitted,
  fitted_cost,
  rank,
)
from maxbatch.tuning.search import ProbeResult, most_probes

GIB = 1 << 30
FOUR = {
  "base_num_decoder_layers": 8,
  "ici_pipeline_parallelism": 4,
  "pipeline_schedule": "1f1b",
  "per_device_batch_size": 8,
}


def compiled(
  peak: int, capacity: int, fits: bool, seconds: float | None = None, other: float = 0.0
) -> ProbeResult:
  """What is known of a choice whose step takes `seconds`, however many microbatches it has."""
  each, rest = (None, 0.0) if seconds is None else (0.0, seconds)
  return ProbeResult(peak, capacity, fits, each, rest, other_seconds=other)


def pipeline(**keys: object) -> Pipeline:
  of = config(**FOUR | keys)
  layout = topology(of.mesh, 4)
  return pipeline_of(of, layout, plan_batches(of.batch, of.run, layout))


def steps(passes: int = 1, *, streamed: bool = False, **keys: object) -> RankedStep:
  """4, 8, 16 or 32 microbatches of 8 to 1 samples."""
  one = RankedStep(pipeline(**keys), passes, streamed)
  assert one.pipeline.choices == (4, 8, 16, 32)
  return one


class Machine:
  """Ticks of fixed + per_sample × samples, some more for the rest; memory grows with the samples."""

  def __init__(
    self,
    of: RankedStep,
    fixed: float,
    per_sample: float,
    *,
    capacity: float = 16.0,
    beside: Callable[[int], float] = lambda num_pipeline_microbatches: 1.0,
    scatter: Callable[[int], float] = lambda num_pipeline_microbatches: 1.0,
  ):
    self.of, self.fixed, self.per_sample, self.capacity = of, fixed, per_sample, capacity
    self.beside, self.scatter = beside, scatter
    self.compiled: list[int] = []

  def seconds(self, num_pipeline_microbatches: int) -> float:
    tick = self.fixed + self.per_sample * self.of.samples(num_pipeline_microbatches)
    return self.of.full_ticks(num_pipeline_microbatches) * tick * self.scatter(
      num_pipeline_microbatches
    ) + self.beside(num_pipeline_microbatches)

  def gib(self, num_pipeline_microbatches: int) -> float:
    return 2.0 + 1.5 * self.of.samples(num_pipeline_microbatches)

  def __call__(self, num_pipeline_microbatches: int) -> ProbeResult:
    self.compiled.append(num_pipeline_microbatches)
    peak, capacity = round(self.gib(num_pipeline_microbatches) * GIB), round(self.capacity * GIB)
    seconds = self.seconds(num_pipeline_microbatches) if peak <= capacity else None
    return compiled(
      peak, capacity, peak <= capacity, seconds, self.beside(num_pipeline_microbatches)
    )


def best(machine: Machine) -> int:
  """The truth about all choices."""
  return min(machine.of.pipeline.choices, key=machine.seconds)


def predicted(result: Ranking) -> dict[int, float | None]:
  return {one.num_pipeline_microbatches: one.step_seconds for one in result.entries}


# --- the times ------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fixed", [0.0, 0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "circular"])
def test_the_fastest_is_taken_and_the_others_are_predicted(passes, streamed, fixed, schedule):
  of = steps(passes, streamed=streamed, pipeline_schedule=schedule)
  machine = Machine(
    of, fixed, 1.0, beside=lambda num_pipeline_microbatches: 1.0 + 0.01 * num_pipeline_microbatches
  )
  result = rank(of, machine)
  assert result.chosen == best(machine)
  assert machine.compiled[:2] == [32, 4]
  # Nothing is compiled twice; what is taken is, and what comes close to it.
  close = {
    n for n in of.pipeline.choices if machine.seconds(n) <= 1.05 * machine.seconds(best(machine))
  }
  assert set(machine.compiled) == {4, 32} | close
  assert len(machine.compiled) == len(set(machine.compiled)) <= most_probes(4)
  truth = {
    num_pipeline_microbatches: pytest.approx(machine.seconds(num_pipeline_microbatches))
    for num_pipeline_microbatches in of.pipeline.choices
  }
  assert predicted(result) == truth
  assert [one.num_pipeline_microbatches for one in result.entries] == sorted(
    of.pipeline.choices, key=machine.seconds
  )


def test_a_costly_tick_asks_for_few_and_a_cheap_one_for_many():
  taken = [rank(steps(), Machine(steps(), fixed, 1.0)).chosen for fixed in (100.0, 1.0, 0.01)]
  assert taken == [4, 8, 32]


def test_full_ticks():
  one = steps(2)
  # 2 passes of 8 and 3 ticks to fill; streamed twice 8 and 3.
  assert one.full_ticks(8) == 19
  assert steps(2, streamed=True).full_ticks(8) == 22
  assert steps(pipeline_schedule="interleaved_1f1b").full_ticks(8) == 19
  assert steps(pipeline_schedule="gpipe").full_ticks(8) == 11


def test_of_equals_the_fewest_is_taken():
  of = steps()
  known = {
    num_pipeline_microbatches: compiled(GIB, GIB, True, 1.0)
    for num_pipeline_microbatches in of.pipeline.choices
  }
  assert Ranking(of, known).chosen == 4


def test_what_was_predicted_too_fast_is_found_out():
  of = steps()
  # 8 would be the best, were it not thrice as slow as the line says.
  machine = Machine(
    of,
    1.0,
    1.0,
    scatter=lambda num_pipeline_microbatches: 3.0 if num_pipeline_microbatches == 8 else 1.0,
  )
  result = rank(of, machine)
  assert 8 in machine.compiled
  assert result.chosen == best(machine) == 16
  assert len(machine.compiled) <= most_probes(4)


def test_what_is_far_from_the_fastest_is_not_compiled():
  machine = Machine(steps(), 100.0, 1.0)
  rank(steps(), machine)
  assert machine.compiled == [32, 4]


def test_what_was_predicted_a_little_too_slow_is_found_too():
  of = steps()
  # By the line 8 takes 4.7% longer than 4; its ticks take 6% less than that.
  machine = Machine(
    of,
    2.0,
    0.5,
    scatter=lambda num_pipeline_microbatches: 0.94 if num_pipeline_microbatches == 8 else 1.0,
  )
  plain = Machine(of, 2.0, 0.5)
  assert plain.seconds(4) < plain.seconds(8) < 1.05 * plain.seconds(4)
  assert rank(of, machine).chosen == best(machine) == 8


def test_two_choices_are_both_compiled():
  of = RankedStep(pipeline(per_device_batch_size=2), 1, False)
  assert of.pipeline.choices == (4, 8)
  machine = Machine(of, 1.0, 1.0)
  result = rank(of, machine)
  assert machine.compiled == [8, 4]
  assert "full tick, a forward" not in str(result)


# --- noise ----------------------------------------------------------------------------------------


def test_a_negative_fixed_part_is_said():
  of = steps()
  # A sample costs more in a larger microbatch.
  result = rank(of, Machine(of, -0.4, 1.0))
  assert result.chosen == 32
  assert all(seconds is not None and seconds > 1 for seconds in predicted(result).values())
  assert "\nA negative fixed part: a sample costs more in a larger microbatch, or the" in str(
    result
  )


def test_larger_ones_that_seem_cheaper_are_taken_to_last_the_same():
  of = steps()
  machine = Machine(
    of,
    1.0,
    0.0,
    scatter=lambda num_pipeline_microbatches: 2.0 if num_pipeline_microbatches == 32 else 1.0,
  )
  result = rank(of, machine)
  assert result.tick is not None
  assert result.tick.per_sample == 0
  assert 1.0 < result.tick.fixed < 2.0
  assert result.chosen == 4
  assert "Larger microbatches seemed to take less time, which is the clock's scatter" in str(result)


def test_a_rest_as_long_as_the_step_leaves_some_time_to_the_ticks():
  of = steps()
  known = {n: compiled(GIB, GIB, True, 1.0, other=2.0) for n in (4, 32)}
  result = Ranking(of, known)
  assert result.tick is not None
  assert result.tick.at(4) > 0
  assert all(seconds is not None and seconds > 0 for seconds in predicted(result).values())


def test_lines():
  line = fitted([(1.0, 3.0), (3.0, 7.0)])
  assert (line.fixed, line.per_sample, line.at(2)) == pytest.approx((1.0, 2.0, 5.0))
  assert fitted([(2.0, 4.0)]) == fitted([(2.0, 4.0), (2.0, 4.0)]) == Line(4.0, 0.0)
  more = fitted([(1.0, 3.0), (2.0, 5.0), (3.0, 7.0)])
  assert (more.fixed, more.per_sample) == pytest.approx((1.0, 2.0))
  # Of three that lie on no line, none is hit, and the small one counts as much as the large.
  near = fitted([(1.0, 1.0), (2.0, 4.0), (100.0, 100.0)])
  assert near.at(1.0) < 2.0
  assert fitted_cost([(1.0, 4.0), (2.0, 2.0)]).per_sample == 0.0


# --- the memory -----------------------------------------------------------------------------------


def test_what_is_predicted_not_to_fit_is_neither_compiled_nor_taken():
  of = steps()
  machine = Machine(of, 100.0, 1.0, capacity=7.0)  # 8 samples need 14, 4 need 8, 2 need 5.
  result = rank(of, machine)
  assert machine.compiled == [32, 4, 16]
  assert result.chosen == 16
  assert [(one.num_pipeline_microbatches, one.fits) for one in result.entries] == [
    (16, True), (32, True), (8, False), (4, False),
  ]  # fmt: skip
  eight = next(one for one in result.entries if one.num_pipeline_microbatches == 8)
  assert eight.how == "predicted"
  assert eight.peak_bytes == pytest.approx(8 * GIB)
  assert "predicted, does not fit in 7 GiB" in str(result)


def test_where_memory_grows_faster_than_predicted_the_next_one_is_tried():
  of = steps()

  class Steep(Machine):
    def gib(self, num_pipeline_microbatches: int) -> float:
      return {4: 16.5, 8: 16.2, 16: 5.0, 32: 2.0}[num_pipeline_microbatches]

  machine = Steep(of, 100.0, 1.0)
  assert rank(of, machine).chosen == 16
  assert machine.compiled == [32, 4, 8, 16]


def test_nothing_larger_fits_than_what_was_refused():
  of = steps()
  # Of what the compiler refuses only a lower bound is known: the line would let 8 in.
  known = {32: compiled(GIB, 16 * GIB, True, 1.0)} | {
    num_pipeline_microbatches: compiled(16 * GIB + 1, 16 * GIB, False)
    for num_pipeline_microbatches in (4, 16)
  }
  eight = next(one for one in Ranking(of, known).entries if one.num_pipeline_microbatches == 8)
  assert eight.peak_bytes < 16 * GIB
  assert not eight.fits


def test_where_nothing_fits_the_one_that_needs_least_is_taken_and_that_is_said():
  of = steps()
  machine = Machine(of, 1.0, 1.0, capacity=1.0)
  result = rank(of, machine)
  assert machine.compiled == [32, 4]
  assert result.chosen == 32
  assert result.why() == "none fits, this one needs the least memory"
  assert str(result).endswith(
    "None fits, by the compiler's account; taken is the one that needs the least memory."
  )


def test_without_any_time_the_fewest_that_fit_are_taken():
  of = steps()

  def probe(num_pipeline_microbatches: int) -> ProbeResult:
    return dataclasses.replace(
      Machine(of, 1.0, 1.0, capacity=9.0)(num_pipeline_microbatches), seconds_per_microbatch=None
    )

  result = rank(of, probe)
  assert result.chosen == 8
  assert result.why() == "the fewest that fit; no times are known"


# --- what is said ---------------------------------------------------------------------------------

PRINTED = """\
   num_pipeline_microbatches  samples each  full ticks  bubble   step  memory
1                          8             4          11   27.3%   67 s   8 GiB  measured, taken
2                          4             8           7   42.9%   71 s  14 GiB  measured
3                         16             2          19   15.8%   77 s   5 GiB  predicted
4                         32             1          35    8.6%  106 s   3.5 GiB  measured
A full tick, a forward and a backward of a stage, takes 2000 ms + 1000 ms a sample, measured with \
4, 8 and 32 microbatches.
"""


def test_the_table():
  result = rank(steps(), Machine(steps(), 2.0, 1.0))
  same = [" ".join(line.split()) for line in PRINTED.splitlines()]
  assert [" ".join(line.split()) for line in str(result).splitlines()] == same
  assert result.why() == "the fastest: 67 s a step, measured; with 4: 71 s"
  values = result.as_dict()
  assert values["chosen"] == 8
  assert values["tick"]["per_sample"] == pytest.approx(1.0)
  assert [one["num_pipeline_microbatches"] for one in values["choices"]] == [8, 4, 16, 32]
  assert not any(math.isnan(one["step_seconds"]) for one in values["choices"])
