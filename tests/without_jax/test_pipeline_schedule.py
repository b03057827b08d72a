"""Every schedule against the machine and the published formulas; broken tables against the rules."""

import dataclasses
import itertools
import re
from fractions import Fraction

import pytest
from examples import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.schedule import (
  SCHEDULES,
  Backward,
  BufferLimits,
  Cell,
  Forward,
  ModelChunk,
  Timetable,
  TimetableShape,
  assign_slots,
  timetable,
)
from maxbatch.pipeline_parallel.simulator import run
from maxbatch.pipeline_parallel.sizes import (
  PassCosts,
  bubble,
  imbalance,
  predicted_bubble,
  tick_times,
)

SHAPES = [
  TimetableShape(p, m, v, h)
  for p, v, h in itertools.product(range(1, 7), range(1, 4), (1, 2))
  for m in sorted({1, 2, p - 1, p, p + 1, 2 * p, 3 * p, 4 * p, 8 * p} - {0})
]


def allowed(name: str, shape: TimetableShape) -> bool:
  """The rules of the schedules, in one place of their own."""
  round_trip = shape.forwarding_delay * shape.stages
  if shape.repeats == 1:
    return True
  if name == "interleaved_1f1b":
    return shape.microbatches % round_trip == 0
  return name == "circular" and shape.microbatches >= round_trip


TABLES = [(name, shape) for name in SCHEDULES for shape in SHAPES if allowed(name, shape)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_shape_runs_without_fault_in_exactly_the_slots_it_may_use(name):
  for shape in (shape for other, shape in TABLES if other == name):
    limits = SCHEDULES[name].limits(shape)
    outcome = run(timetable(name, shape), limits)
    assert outcome.fault is None, shape
    assert max(outcome.inputs) == max(outcome.input_slots) == limits.inputs, shape
    assert max(outcome.gradients) == max(outcome.gradient_slots) == limits.gradients, shape


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_counted_is_that_of_the_formula_whatever_a_backward_costs(name):
  for shape in (shape for other, shape in TABLES if other == name):
    p, m, v, h = shape.stages, shape.microbatches, shape.repeats, shape.forwarding_delay
    if m * v < h:
      continue  # Then some ticks have no forward at all, and cost nothing.
    expected = Fraction(h * (p - 1), v * m + h * (p - 1))
    table = timetable(name, shape)
    assert predicted_bubble(shape) == expected
    assert (
      bubble(table) == bubble(table, PassCosts(1, 1)) == bubble(table, PassCosts(5, 3)) == expected
    )


def test_1f1b_keeps_the_same_whatever_the_microbatches():
  for p, v, h in itertools.product(range(1, 7), range(1, 4), (1, 2)):
    name = "1f1b" if v == 1 else "interleaved_1f1b"
    most = h * ((v - 1) * p + 2 * (p - 1)) + 1
    for m in (2 * h * p, 4 * h * p):
      outcome = run(timetable(name, TimetableShape(p, m, v, h)))
      # In lockstep stage s waits for everything behind it to come and go.
      assert outcome.inputs == tuple(min(m * v, most - 2 * h * s) for s in range(p))
      assert set(outcome.gradients) == {1}


@pytest.mark.parametrize("name", ["gpipe", "circular"])
def test_the_others_keep_everything(name):
  for m in (4, 32):
    repeats = 2 if name == "circular" else 1
    outcome = run(timetable(name, TimetableShape(4, m, repeats)))
    assert set(outcome.inputs) == {m * repeats}


def test_order_and_direction():
  # Breadth first: circular ends a repeat before the next; depth first goes on after p.
  def forwards(name: str) -> list[tuple[int, int]]:
    table = timetable(name, TimetableShape(2, 4, 2))
    return [(one.repeat, one.microbatch) for _, place, one in table.forwards() if place.stage == 0]

  assert forwards("circular") == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
  assert forwards("interleaved_1f1b") == [
    (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3),
  ]  # fmt: skip


def test_gpipe_has_no_tick_with_both():
  table = timetable("gpipe", TimetableShape(3, 5))
  for row in table.ticks:
    assert not (any(cell.forward for cell in row) and any(cell.backward for cell in row))


def test_places_follow_each_other():
  shape = TimetableShape(3, 1, 2)
  places = list(shape.model_chunks())
  assert [shape.next_chunk(place) for place in places] == [*places[1:], None]
  assert [shape.previous_chunk(place) for place in places] == [None, *places[:-1]]
  assert places[3] == ModelChunk(repeat=1, stage=0)


REFUSED = {
  ("1f1b", TimetableShape(2, 4, 2)): (
    "pipeline_schedule=1f1b has no repeats, but num_pipeline_repeats=2; for example "
    "pipeline_schedule=interleaved_1f1b or num_pipeline_repeats=1"
  ),
  ("gpipe", TimetableShape(2, 4, 3)): (
    "pipeline_schedule=gpipe has no repeats, but num_pipeline_repeats=3; for example "
    "pipeline_schedule=circular or num_pipeline_repeats=1"
  ),
  ("circular", TimetableShape(4, 6, 2, 2)): (
    "pipeline_schedule=circular with 4 stages and num_pipeline_repeats=2 needs a number of "
    "microbatches that is at least 8, not 6; for example num_pipeline_microbatches=8"
  ),
  ("interleaved_1f1b", TimetableShape(4, 6, 2)): (
    "pipeline_schedule=interleaved_1f1b with 4 stages and num_pipeline_repeats=2 needs a "
    "number of microbatches that is a multiple of 4, not 6; for example num_pipeline_microbatches=8"
  ),
  ("zero_bubble", TimetableShape(4, 6)): (
    "pipeline_schedule=zero_bubble: there is no such pipeline_schedule. Known: gpipe, circular, "
    "1f1b, interleaved_1f1b."
  ),
}


@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_what_a_schedule_cannot_be(asked):
  with pytest.raises(UserError) as caught:
    timetable(*asked)
  assert str(caught.value) == REFUSED[asked]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_shape_is_refused_exactly_where_the_rules_say(name):
  for shape in SHAPES:
    if not allowed(name, shape):
      with pytest.raises(UserError, match="for example"):
        timetable(name, shape)


# --- tables that are wrong -----------------------------------------------------------------------


def without_slots(table: Timetable) -> Timetable:
  def bare(cell: Cell) -> Cell:
    forward, backward = cell.forward, cell.backward
    return Cell(
      forward and Forward(forward.repeat, forward.microbatch),
      backward and Backward(backward.repeat, backward.microbatch),
    )

  return Timetable(table.shape, tuple(tuple(map(bare, row)) for row in table.ticks))


def changed(table: Timetable, tick: int, stage: int, **entries: object) -> Timetable:
  rows = [list(row) for row in table.ticks]
  rows[tick][stage] = dataclasses.replace(rows[tick][stage], **entries)
  return Timetable(table.shape, tuple(map(tuple, rows)))


def fault(table: Timetable, limits: BufferLimits | None = None) -> str | None:
  return run(table, limits).fault


BASE = without_slots(timetable("1f1b", TimetableShape(4, 8)))
SLOTTED = timetable("1f1b", TimetableShape(4, 8))
SLOW = without_slots(timetable("1f1b", TimetableShape(2, 4, forwarding_delay=2)))
SEVERAL = without_slots(timetable("interleaved_1f1b", TimetableShape(2, 4, 2)))

FAULTS = [
  (
    changed(BASE, 2, 1, forward=Forward(0, 2)),
    "forward of stage 1, microbatch 2 at tick 2 before its input arrives at tick 3",
  ),
  (changed(BASE, 3, 1, forward=None), "forward of stage 2, microbatch 2 at tick 4, but its input "
   "never arrives: no forward of stage 1, microbatch 2"),
  (
    changed(BASE, 10, 3, forward=None, backward=None),
    "backward of stage 2, microbatch 7 at tick 11, but its gradient never arrives: no backward of "
    "stage 3, microbatch 7",
  ),
  (changed(BASE, 13, 0, backward=None), "backward of stage 0, microbatch 7 is missing"),
  (
    changed(SLOW, 1, 1, forward=Forward(0, 0)),
    "forward of stage 1, microbatch 0 at tick 1 before its input arrives at tick 2",
  ),
  (
    changed(BASE, 9, 1, forward=Forward(0, 2)),
    "forward of stage 1, microbatch 2 at tick 9 for a second time, after tick 3",
  ),
  (
    changed(BASE, 13, 0, backward=Backward(0, 6)),
    "backward of stage 0, microbatch 6 at tick 13 for a second time, after tick 12",
  ),
  (
    changed(BASE, 5, 2, backward=Backward(0, 2)),
    "backward of stage 2, microbatch 2 at tick 5 before its gradient arrives at tick 6",
  ),
  (
    changed(BASE, 4, 3, backward=Backward(0, 2)),
    "backward of stage 3, microbatch 2 at tick 4 before its forward at tick 5",
  ),
  (
    changed(BASE, 2, 1, forward=Forward(0, 8)),
    "forward of stage 1, microbatch 8 at tick 2, but the microbatch must be 0 to 7",
  ),
  (
    changed(BASE, 2, 1, forward=Forward(1, 1)),
    "forward of stage 1, repeat 1, microbatch 1 at tick 2, but the repeat must be 0 to 0",
  ),
  (
    changed(SEVERAL, 1, 0, forward=Forward(1, 1)),
    "forward of stage 0, repeat 1, microbatch 1 at tick 1 before its input arrives at tick 3",
  ),
  (
    changed(SLOTTED, 2, 1, forward=Forward(0, 1, slot=0)),
    "input of stage 1, microbatch 1 arrives at tick 2 in slot 0, which that of stage 1, microbatch "
    "0 needs until tick 5",
  ),
  (
    changed(SLOTTED, 1, 0, forward=Forward(0, 1, slot=0)),
    "input of stage 0, microbatch 1 is written at tick 1 in slot 0, which that of stage 0, "
    "microbatch 0 needs until tick 6",
  ),
  (
    changed(SLOTTED, 6, 0, backward=Backward(0, 0, slot=3, gradient_slot=0)),
    "backward of stage 0, microbatch 0 at tick 6 reads slot 3, but its input is in slot 0",
  ),
]  # fmt: skip


@pytest.mark.parametrize(("table", "expected"), FAULTS, ids=range(len(FAULTS)))
def test_the_first_fault_is_named(table, expected):
  assert fault(table) == expected


def test_a_gradient_is_not_written_over():
  table = timetable("gpipe", TimetableShape(2, 2))
  tick, place, entry = next(one for one in table.backwards() if one[2].microbatch == 1)
  assert place.stage == 1
  wrong = changed(table, tick, 1, backward=dataclasses.replace(entry, gradient_slot=0))
  assert fault(wrong) == (
    "gradient of stage 1, microbatch 1 is written at tick 2 in slot 0, which that of stage 1, "
    "microbatch 0 needs until tick 3"
  )


def test_the_memory_bound():
  limits = SCHEDULES["1f1b"].limits(TimetableShape(4, 8))
  greedy = without_slots(timetable("gpipe", TimetableShape(4, 8)))
  assert fault(greedy) is None
  assert fault(greedy, limits) == (
    "stage 3 holds 2 gradients at tick 4, more than the 1 that the schedule allows"
  )
  assert fault(greedy, BufferLimits(limits.inputs, 8)) == (
    "stage 0 holds 8 inputs at tick 7, more than the 7 that the schedule allows"
  )
  far = changed(SLOTTED, 0, 0, forward=Forward(0, 0, slot=7))
  assert fault(far, limits) == (
    "input of stage 0, microbatch 0 at tick 0 in slot 7, but the schedule has slots 0 to 6"
  )


def test_a_slot_is_free_again_only_after_its_tick():
  # Stage 0 reads input 0 in tick 6's backward slot; input 6 is written in its forward slot before.
  wrong = changed(SLOTTED, 6, 0, forward=Forward(0, 6, slot=0))
  assert fault(wrong) == (
    "input of stage 0, microbatch 6 is written at tick 6 in slot 0, which that of stage 0, "
    "microbatch 0 needs until tick 6"
  )


small = st.sampled_from([(name, shape) for name, shape in TABLES if shape.forwards_per_stage <= 24])


@settings(max_examples=examples(300))
@given(small, st.data())
def test_two_entries_of_a_stage_cannot_change_places(chosen, data):
  table = timetable(*chosen)
  kind = data.draw(st.sampled_from(["forward", "backward"]))
  stage = data.draw(st.integers(0, table.shape.stages - 1))
  ticks = [tick for tick, row in enumerate(table.ticks) if getattr(row[stage], kind)]
  assume(len(ticks) > 1)
  first, second = sorted(data.draw(st.lists(st.sampled_from(ticks), min_size=2, max_size=2,
                                            unique=True)))  # fmt: skip
  late, early = getattr(table.ticks[second][stage], kind), getattr(table.ticks[first][stage], kind)
  wrong = changed(changed(table, first, stage, **{kind: late}), second, stage, **{kind: early})
  # A stage whose inputs wait may take them in another order; slots and other stages hold it.
  outcome = run(wrong, SCHEDULES[chosen[0]].limits(table.shape))
  assert outcome.fault is not None or obeys_the_rules(wrong)


@settings(max_examples=examples(300))
@given(small, st.data())
def test_an_entry_cannot_be_left_out_doubled_or_renamed(chosen, data):
  table = timetable(*chosen)
  tick = data.draw(st.integers(0, len(table.ticks) - 1))
  stage = data.draw(st.integers(0, table.shape.stages - 1))
  kind = data.draw(st.sampled_from(["forward", "backward"]))
  entry = getattr(table.ticks[tick][stage], kind)
  other = data.draw(st.sampled_from(list(table.forwards() if kind == "forward" else
                                         table.backwards())))[2]  # fmt: skip
  replacement = data.draw(st.sampled_from([None, other]))
  same = entry and replacement and (entry.repeat, entry.microbatch) == (
    replacement.repeat, replacement.microbatch,
  )  # fmt: skip
  assume((entry or replacement) and not same)
  assert fault(changed(table, tick, stage, **{kind: replacement})) is not None


@settings(max_examples=examples(200))
@given(small, st.data())
def test_idle_time_that_is_put_in_does_no_harm_and_is_counted(chosen, data):
  table = timetable(*chosen)
  at = data.draw(st.integers(0, len(table.ticks)))
  idle = tuple(Cell() for _ in range(table.shape.stages))
  longer = Timetable(table.shape, (*table.ticks[:at], idle, *table.ticks[at:]))
  assert fault(assign_slots(without_slots(longer))) is None
  assert bubble(longer) == bubble(table)  # A tick without work takes no time.


def obeys_the_rules(table: Timetable) -> bool:
  """The rules again, from the table of ticks alone, slots by overlap."""
  shape, forwarding_delay = table.shape, table.shape.forwarding_delay
  forward = {(place, one.microbatch): tick for tick, place, one in table.forwards()}
  backward = {(place, one.microbatch): tick for tick, place, one in table.backwards()}
  busy: dict[object, list[tuple[int, int]]] = {}
  for tick, place, one in table.backwards():
    work = (place, one.microbatch)
    above, below = shape.previous_chunk(place), shape.next_chunk(place)
    written = forward[work] if above is None else forward[above, one.microbatch] + forwarding_delay
    given_back = (
      forward[work] if below is None else backward[below, one.microbatch] + forwarding_delay
    )
    if not (written <= forward[work] <= tick and given_back <= tick):
      return False
    busy.setdefault(("input", place.stage, one.slot), []).append((written, tick))
    busy.setdefault(("gradient", place.stage, one.gradient_slot), []).append((given_back, tick))
  return all(
    before[1] < after[0]
    for spans_of_slot in busy.values()
    for before, after in itertools.pairwise(sorted(spans_of_slot))
  )


@pytest.mark.parametrize(("name", "shape"), TABLES[:: len(TABLES) // 60], ids=str)
def test_the_machine_agrees_with_the_rules_written_another_way(name, shape):
  assert obeys_the_rules(timetable(name, shape))


# --- cost ----------------------------------------------------------------------------------------


def test_the_table_of_one_operation_per_tick_is_worse_in_lockstep():
  # Forwards and backwards in turn, as without lockstep: a tick costs both wherever stages differ.
  gpipe = without_slots(timetable("gpipe", TimetableShape(2, 2)))
  assert bubble(gpipe) == Fraction(1, 3)
  f, b = (lambda n: Cell(Forward(0, n))), (lambda n: Cell(None, Backward(0, n)))
  classic = Timetable(
    TimetableShape(2, 3),
    (
      (f(0), Cell()),
      (f(1), f(0)),
      (Cell(), b(0)),
      (b(0), f(1)),
      (f(2), b(1)),
      (b(1), f(2)),
      (Cell(), b(2)),
      (b(2), Cell()),
    ),
  )
  assert fault(classic) is None
  assert bubble(classic) == 1 - Fraction(2 * 3 * 3, 2 * (1 + 1 + 2 + 3 + 3 + 3 + 2 + 2))
  assert bubble(classic) > bubble(timetable("1f1b", TimetableShape(2, 3)))


def test_ticks_on_the_clock():
  clock = tick_times(timetable("1f1b", TimetableShape(2, 2)))
  assert [(one.forward_start, one.backward_start, one.end) for one in clock] == [
    (0, 1, 1), (1, 2, 4), (4, 5, 7), (7, 7, 9),
  ]  # fmt: skip


def test_imbalance():
  assert imbalance([3, 3, 3]) == 0
  assert imbalance([3, 3, 6]) == Fraction(1, 2)


def test_a_table_without_anything():
  empty = Timetable(TimetableShape(2, 1), ())
  assert bubble(empty) == 0
  assert re.fullmatch("forward of stage 0, microbatch 0 is missing", str(fault(empty)))
