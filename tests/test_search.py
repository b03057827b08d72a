"""auto and explore over made-up machines: against brute force, in few probes, in these words."""

import dataclasses
import math
from fractions import Fraction

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch.errors import UserError
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.exploration import Exploration, explore
from maxbatch.tuning.search import Choice, ProbeResult, choose_largest, most_probes

GIB = 1 << 30
DEVICES, LENGTH = 2, 1024
SUGGESTED_FIXES = "remat_policy=full"


def sizes(*per_device: int, batch: int = 0) -> list[Candidate]:
  """Candidates for `batch`, by default the smallest that all sizes divide."""
  batch = batch or math.lcm(*per_device) * DEVICES
  return [
    Candidate(Fraction(n), batch // (n * DEVICES), n * DEVICES, batch, LENGTH) for n in per_device
  ]


class Machine:
  """Memory by size, seconds of a pass by size; counts what is asked of it."""

  def __init__(self, gib, capacity=16.0, seconds=None, **known):
    self.gib, self.capacity, self.seconds, self.known = gib, capacity, seconds or {}, known
    self.asked: list[int] = []

  def __call__(self, candidate: Candidate) -> ProbeResult:
    size = int(candidate.per_device)
    assert size not in self.asked, "asked twice"
    self.asked.append(size)
    fits = self.gib(size) <= self.capacity
    return ProbeResult(
      round(self.gib(size) * GIB),
      round(self.capacity * GIB),
      fits,
      self.seconds.get(size, float(size)) if fits else None,
      **self.known,
    )


def chosen(choice: Choice) -> tuple[int, int, int | None]:
  above = int(choice.above.candidate.per_device) if choice.above else None
  largest = choice.largest.candidate.per_device
  return int(choice.chosen.candidate.per_device), int(largest), above


def linear(size: int) -> float:
  return 1.0 + 2.0 * size


@settings(max_examples=examples(300))
@given(
  per_device=st.sets(st.integers(1, 400), min_size=1, max_size=40),
  growth=st.integers(1, 5),
  capacity=st.integers(0, 2000),
)
def test_bisection_finds_what_trying_every_size_finds(per_device, growth, capacity):
  candidates = sizes(*sorted(per_device))
  machine = Machine(lambda size: growth * size, capacity)
  fitting = [size for size in sorted(per_device) if growth * size <= capacity]
  beyond = [size for size in sorted(per_device) if growth * size > capacity]
  if not fitting:
    with pytest.raises(UserError, match="fits"):
      choose_largest(candidates, machine, SUGGESTED_FIXES)
  else:
    choice = choose_largest(candidates, machine, SUGGESTED_FIXES)
    assert chosen(choice) == (fitting[-1], fitting[-1], beyond[0] if beyond else None)
    assert [one.candidate.per_device for one in choice.tried] == machine.asked
  assert len(machine.asked) <= math.ceil(math.log2(len(candidates))) + 2


@settings(max_examples=examples(200))
@given(
  count=st.integers(1, 20),
  capacity=st.integers(1, 20),
  speeds=st.lists(st.floats(0.5, 2.0), min_size=20, max_size=20),
)
def test_a_smaller_size_is_taken_only_if_a_probe_shows_it_clearly_faster(count, capacity, speeds):
  per_device = range(1, count + 1)
  seconds = {n: n / speeds[n - 1] for n in per_device}
  machine = Machine(float, capacity, seconds)
  choice = choose_largest(sizes(*per_device), machine, SUGGESTED_FIXES)
  largest = min(count, capacity)
  speed = {n: speeds[n - 1] for n in machine.asked if n <= capacity}
  best = max(speed, key=lambda n: speed[n])
  # Times of whole steps are sums and products of these: equal to rounding.
  gain = speed[best] / speed[largest]
  taken, found_largest, _ = chosen(choice)
  assert found_largest == largest
  if abs(gain - 1.03) > 1e-9:
    # Of equally fast ones any may be taken.
    assert speed[taken] == pytest.approx(speed[best]) if gain >= 1.03 else taken == largest
  assert len(machine.asked) <= math.ceil(math.log2(count)) + 2 == most_probes(count)
  # Below the chosen size lies one that was looked at, wherever the probes allow.
  below = chosen(choice)[0] - 1
  assert below in {0, *speed} or len(machine.asked) == most_probes(count)


def test_the_line_names_the_largest_and_what_the_next_one_needs():
  choice = choose_largest(
    sizes(1, 2, 4, 8, 16, 32), Machine(lambda n: 1.2 + 1.25 * n), SUGGESTED_FIXES
  )
  assert choice.why() == "largest that fits of 1…32: 11.2 of 16 GiB; next size 16 needs 21.2 GiB"
  choice = choose_largest(sizes(1, 2), Machine(linear), SUGGESTED_FIXES)
  assert choice.why() == "largest that fits of 1…2: 5 of 16 GiB"
  choice = choose_largest(sizes(3), Machine(linear), SUGGESTED_FIXES)
  assert choice.why() == "largest that fits the only size allowed: 7 of 16 GiB"


def test_a_clearly_faster_smaller_size_and_why():
  machine = Machine(linear, seconds={4: 4.0, 2: 1.8}, how="estimated")
  choice = choose_largest(sizes(1, 2, 4, 8), machine, SUGGESTED_FIXES)
  assert chosen(choice) == (2, 4, 8)
  assert choice.why() == (
    "11% more samples per second, estimated, than 4, the largest that fits of 1…8: 9 of 16 GiB; "
    "next size 8 needs 17 GiB"
  )


@pytest.mark.parametrize(
  ("gain", "spread", "expected"),
  [(1.031, 0.0, 1), (1.029, 0.0, 2), (1.05, 0.06, 2), (1.07, 0.06, 1)],
)
def test_clearly_is_three_per_cent_and_more_than_the_clocks_scatter(gain, spread, expected):
  machine = Machine(linear, seconds={1: 1 / gain, 2: 2.0}, spread=spread)
  assert chosen(choose_largest(sizes(1, 2), machine, SUGGESTED_FIXES))[0] == expected


def test_speed_is_that_of_a_whole_step_at_the_batch():
  # The update takes as long as a pass: many small passes share it, one large pass does too.
  machine = Machine(linear, seconds={1: 0.9, 2: 2.0}, seconds_rest=10.0)
  assert chosen(choose_largest(sizes(1, 2, batch=8), machine, SUGGESTED_FIXES))[0] == 2
  machine = Machine(linear, seconds={1: 0.9, 2: 2.0}, seconds_rest=0.0)
  assert chosen(choose_largest(sizes(1, 2, batch=8), machine, SUGGESTED_FIXES))[0] == 1
  # With the batch open a larger size is a larger batch, which pays for its update.
  candidates = [Candidate(Fraction(n), 1, n * DEVICES, n * DEVICES, LENGTH) for n in (1, 2)]
  machine = Machine(linear, seconds={1: 0.9, 2: 2.0}, seconds_rest=1.0)
  assert chosen(choose_largest(candidates, machine, SUGGESTED_FIXES))[0] == 2


def test_the_way_down_ends_with_the_probes():
  machine = Machine(linear, capacity=99, seconds={n: n**1.5 for n in range(1, 9)})
  choice = choose_largest(sizes(*range(1, 9)), machine, SUGGESTED_FIXES)
  assert machine.asked == [4, 6, 7, 8, 3]
  assert chosen(choice) == (3, 8, None)


def test_what_does_not_fit_is_never_taken_however_fast_it_is_said_to_be():
  def hasty(candidate: Candidate) -> ProbeResult:
    return dataclasses.replace(Machine(linear)(candidate), seconds_per_microbatch=1.0)

  assert chosen(choose_largest(sizes(1, 2, 4, 8), hasty, SUGGESTED_FIXES)) == (4, 4, 8)


def test_without_times_the_largest_is_taken():
  def untimed(candidate: Candidate) -> ProbeResult:
    return dataclasses.replace(Machine(linear)(candidate), seconds_per_microbatch=None)

  assert chosen(choose_largest(sizes(1, 2, 4, 8), untimed, SUGGESTED_FIXES)) == (4, 4, 8)


def test_nothing_fits():
  with pytest.raises(UserError) as caught:
    choose_largest(sizes(2, 4), Machine(lambda n: 10.6 * n), "remat_policy=full (now none)")
  assert str(caught.value) == (
    "not even micro_batch_size=2, the smallest size allowed, fits: 2 samples per device in a microbatch "
    "needs 21.2 of 16 GiB; remat_policy=full (now none), or device_memory_gb=22 if the devices "
    "have that much"
  )


# --- explore --------------------------------------------------------------------------------------


def explored(candidates: list[Candidate], machine: Machine) -> tuple[list[str], Exploration]:
  """Returns what is said after each candidate, and what is known at the end."""
  lines: list[str] = []
  result = explore(candidates, machine, SUGGESTED_FIXES, lines.append)
  assert [line.startswith("INFO: Trying ") for line in lines] == [True, False] * len(machine.asked)
  return lines[1::2], result


def test_lines_as_it_goes():
  machine = Machine(
    linear, seconds={2: 2.0, 4: 10 / 3, 8: 8.0, 1: 1.5}, how="estimated", coverage=0.98
  )
  lines, result = explored(sizes(1, 2, 4, 8, 16, batch=32), machine)
  assert machine.asked == [2, 4, 8, 1]
  assert lines == [
    "INFO: Current recommended micro_batch_size: 2, estimated performance: 1.00x base, "
    "exploration progress: 20%, confidence: 19 (of 99)",
    "INFO: Current recommended micro_batch_size: 4, estimated performance: 1.20x base, "
    "exploration progress: 40%, confidence: 38 (of 99)",
    # 16 cannot fit either, so it is settled.
    "INFO: Current recommended micro_batch_size: 4, estimated performance: 1.20x base, "
    "exploration progress: 80%, confidence: 77 (of 99)",
    "INFO: Current recommended micro_batch_size: 4, estimated performance: 1.20x base, "
    "exploration progress: 100%, confidence: 97 (of 99)",
  ]
  assert result.best is not None
  assert result.best.size == "4"


def test_each_candidate_is_named_before_it_is_tried():
  lines: list[str] = []
  explore(sizes(1, 2, 4, 8, 16, batch=32), Machine(linear), SUGGESTED_FIXES, lines.append)
  assert lines[::2] == [
    "INFO: Trying micro_batch_size: 2 (1 of 5)",
    "INFO: Trying micro_batch_size: 4 (2 of 5)",
    "INFO: Trying micro_batch_size: 8 (3 of 5)",
    # 8 does not fit, nor does 16.
    "INFO: Trying micro_batch_size: 1 (4 of 4)",
  ]


def test_what_is_measured_says_so():
  lines, _ = explored(sizes(2), Machine(linear))
  assert "measured performance: 1.00x base, exploration progress: 100%, conf" in lines[0]


def test_a_time_that_is_not_known_is_said_to_be():
  """Of the first size, beside which the others are; and the table has no speed of it."""

  def probe(candidate: Candidate) -> ProbeResult:
    each = None if candidate.per_device == 2 else 1.0
    return dataclasses.replace(Machine(linear)(candidate), seconds_per_microbatch=each)

  lines: list[str] = []
  result = explore(sizes(2, 4), probe, SUGGESTED_FIXES, lines.append)
  for line, size in zip(lines[1::2], (2, 4), strict=True):
    assert f"micro_batch_size: {size}, measured performance: not known, expl" in line
  first, last = result.ranked
  assert (first.size, last.size) == ("4", "2")
  assert str(result).splitlines()[2].split() == [
    "2",
    "2",
    "2",
    "5",
    "of",
    "16",
    "GiB",
    "4,",
    "8,",
    "12",
  ]


def test_a_first_guess_that_does_not_fit_is_no_recommendation():
  lines, result = explored(sizes(1, 4, batch=8), Machine(linear, capacity=8))
  assert lines[0] == (
    "INFO: micro_batch_size: 4 does not fit (9 of 8 GiB), exploration progress: 50%"
  )
  assert lines[1].startswith("INFO: Current recommended micro_batch_size: 1, measured performance")
  assert result.best is not None


def test_the_table_ranks_what_fits_and_says_what_does_not():
  machine = Machine(linear, seconds={2: 2.0, 4: 3.0, 1: 1.5}, utilisation=0.456, seconds_rest=1.0)
  _, result = explored(sizes(1, 2, 4, 8, 16, batch=32), machine)
  assert str(result).splitlines() == [
    "   micro_batch_size  microbatches  peak memory  step  samples/s  tokens/s  utilisation"
    "  suggested global batches",
    "1                 4             4  9 of 16 GiB  13 s      2.462     2,521        45.6%"
    "                24, 32, 40",
    "2                 2             8  5 of 16 GiB  17 s      1.882     1,928        45.6%"
    "                28, 32, 36",
    "3                 1            16  3 of 16 GiB  25 s       1.28     1,311        45.6%"
    "                30, 32, 34",
    "                  8             2  does not fit: 17 of 16 GiB",
    "                 16             1  does not fit (as 8)",
    "Times are measured.",
    "Confidence 99 of 99: 100% of the candidates are explored, times the share of work",
    "that the best one's time accounts for, times the chance that it is faster than the second, "
    "given their spread.",
  ]


def test_the_table_says_how_times_scatter():
  _, result = explored(sizes(2), Machine(linear, spread=0.021))
  assert "  2 s ± 2.1%  " in str(result)
  assert result.as_dict()["fitting"][0]["spread"] == 0.021


def test_the_table_as_plain_values():
  machine = Machine(linear, seconds={2: 2.0, 4: 3.0})
  _, result = explored(sizes(2, 4, 8, 16, batch=32), machine)
  values = result.as_dict()
  assert values["recommended"] == "4"
  assert [one["micro_batch_size"] for one in values["fitting"]] == ["4", "2"]
  assert [one["micro_batch_size"] for one in values["not_fitting"]] == ["8", "16"]
  assert values["fitting"][0]["step_seconds"] == 12.0
  assert "step_seconds" not in values["not_fitting"][0]


@pytest.mark.parametrize(
  ("seconds", "spread", "coverage", "expected"),
  [
    ({2: 2.0, 4: 2.0}, 0.0, 1.0, 99),  # far ahead, without scatter
    ({2: 2.0, 4: 4.0}, 0.0, 1.0, 49),  # equals: as good as a coin
    ({2: 2.0, 4: 2.0}, 0.0, 0.5, 49),  # half of the work accounted for
    ({2: 2.0, 4: 3.6}, 0.05, 1.0, 92),  # 1/9 ahead, 1.49 spreads of both: Φ(1.49) = 0.93
    ({2: 2.0, 4: 3.6}, 0.5, 1.0, 55),  # the same lead lost in the scatter
  ],
)
def test_confidence_is_work_seen_and_lead_against_scatter(seconds, spread, coverage, expected):
  machine = Machine(linear, seconds=seconds, spread=spread, coverage=coverage)
  _, result = explored(sizes(2, 4), machine)
  assert result.confidence == expected


def test_policies_are_explored_jointly():
  """A policy that needs less memory fits larger sizes; only its own misfits are skipped."""

  def probe(candidate: Candidate) -> ProbeResult:
    factor = {"none": 4.0, "full": 1.0}[str(candidate.remat_policy)]
    seconds = {"none": 1.0, "full": 2.0}[str(candidate.remat_policy)] * (candidate.per_device + 1)
    need = factor * float(candidate.per_device)
    return ProbeResult(int(need * GIB), 8 * GIB, need <= 8, float(seconds))

  candidates = [
    dataclasses.replace(one, remat_policy=policy)
    for policy in ("none", "full")
    for one in sizes(2, 4, 8, 16, batch=32)
  ]
  lines: list[str] = []
  result = explore(candidates, probe, SUGGESTED_FIXES, lines.append)
  assert result.best is not None
  assert (result.best.size, result.best.candidate.remat_policy) == ("2", "none")
  assert lines[-1].endswith(", remat_policy: none")
  # none: 2, 4 (8 and 16 skipped); full: 2, 4, 8, 16.
  assert (len(result.tried), len(result.skipped)) == (6, 2)
  assert "8 full" in str(result)


def test_nothing_fits_in_the_range():
  with pytest.raises(UserError, match="not even micro_batch_size=1, the smallest"):
    explored(sizes(1, 2, 4, batch=8), Machine(lambda n: 20.0 * n))
