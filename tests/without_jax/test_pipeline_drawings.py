"""A timetable as text, picture, trace and CSV, and a CSV read back."""

import itertools
import json

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.csv_file import COLUMNS, from_csv, to_csv
from maxbatch.pipeline_parallel.drawings import chrome_trace, text_diagram, timetable_chart
from maxbatch.pipeline_parallel.schedule import (
  SCHEDULES,
  Timetable,
  TimetableShape,
  assign_slots,
  timetable,
)
from maxbatch.pipeline_parallel.simulator import run
from maxbatch.pipeline_parallel.sizes import bubble
from maxbatch.plots.chart import Bars

ONE = timetable("1f1b", TimetableShape(3, 4))
SEVERAL = timetable("interleaved_1f1b", TimetableShape(2, 4, 2))
SHAPES = [
  (name, TimetableShape(p, m * p * h, v, h))
  for name, p, m, v, h in itertools.product(SCHEDULES, (1, 2, 3), (1, 2), (1, 2), (1, 2))
  if v == 1 or SCHEDULES[name].allows_repeats
]

GRID = """\
tick       0 1 2 3 4 5 6 7
stage 0  F 0 1 2 3 · · · ·
         B · · · · 0 1 2 3
stage 1  F · 0 1 2 3 · · ·
         B · · · 0 1 2 3 ·
stage 2  F · · 0 1 2 3 · ·
         B · · 0 1 2 3 · ·"""
GRID_OF_SEVERAL = """\
tick         0   1   2   3   4   5   6   7   8   9  10  11
stage 0  F 0.0 0.1 1.0 1.1 0.2 0.3 1.2 1.3   ·   ·   ·   ·
         B   ·   ·   ·   · 1.0 1.1 0.0 0.1 1.2 1.3 0.2 0.3
stage 1  F   · 0.0 0.1 1.0 1.1 0.2 0.3 1.2 1.3   ·   ·   ·
         B   ·   ·   · 1.0 1.1 0.0 0.1 1.2 1.3 0.2 0.3   ·"""


def test_grid():
  assert text_diagram(ONE) == GRID
  assert text_diagram(SEVERAL) == GRID_OF_SEVERAL
  assert text_diagram(timetable("gpipe", TimetableShape(2, 2, forwarding_delay=2))) == (
    "tick       0 1 2 3 4 5 6 7\n"
    "stage 0  F 0 1 · · · · · ·\n"
    "         B · · · · · · 0 1\n"
    "stage 1  F · · 0 1 · · · ·\n"
    "         B · · · · 0 1 · ·"
  )


def test_a_long_grid_is_broken_and_a_very_long_one_says_what_is_left_out():
  blocks = text_diagram(timetable("1f1b", TimetableShape(2, 60))).split("\n\n")
  assert [block.split("\n")[0].split()[1] for block in blocks] == ["0", "30", "60"]
  blocks = text_diagram(timetable("1f1b", TimetableShape(2, 300))).split("\n\n")
  assert len(blocks) == 5
  assert blocks[2] == "… ticks 44 to 263: --csv, --plot and --trace write them all …"
  assert blocks[3].split()[1] == "264"
  assert blocks[4].split("\n")[0].split()[-1] == "301"
  assert max(len(line) for block in blocks for line in block.split("\n")) <= 100


def bars_of(table: Timetable) -> list[Bars]:
  [panel] = timetable_chart(table, "a < b").panels
  return [mark for mark in panel.marks if isinstance(mark, Bars)]


@pytest.mark.parametrize("table", [ONE, SEVERAL], ids=["one", "several"])
def test_the_picture_has_every_entry_once_where_it_is(table):
  shape, bars = table.shape, bars_of(table)
  stages = [f"stage {stage}" for stage in range(shape.stages)]
  assert timetable_chart(table, "").row_names == stages
  places = [place for each in bars for place in zip(each.names, each.begins, strict=True)]
  assert len(places) == len(set(places)) == 2 * shape.forwards_per_stage * shape.stages
  for each in bars:
    width = 1 if each.label.startswith("forward") else 2
    assert each.lengths == [width] * (shape.microbatches * shape.stages)
  ends = [b + w for each in bars for b, w in zip(each.begins, each.lengths, strict=True)]
  used = sum(sum(each.lengths) for each in bars)
  # What is not covered is idle.
  assert 1 - used / (max(ends) * shape.stages) == pytest.approx(float(bubble(table)))


def test_every_box_of_the_picture_is_labelled_and_later_repeats_are_paler():
  bars = bars_of(SEVERAL)
  words = [word for each in bars for word in each.words]
  for word in itertools.starmap("{}.{}".format, itertools.product(range(2), range(4))):
    assert words.count(word) == 2 * SEVERAL.shape.stages
  assert {each.label: each.opacity for each in bars} == {
    "forward, repeat 0": 1.0,
    "backward, repeat 0": 1.0,
    "forward, repeat 1": 0.7,
    "backward, repeat 1": 0.7,
  }


def test_trace_has_no_overlap_and_every_entry():
  trace = json.loads(chrome_trace(SEVERAL, "title"))
  events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
  assert len(events) == 2 * SEVERAL.shape.forwards_per_stage * SEVERAL.shape.stages
  for stage in range(2):
    lane = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == stage)
    assert all(ts + dur <= after for (ts, dur), (after, _) in itertools.pairwise(lane))
  last = max(event["ts"] + event["dur"] for event in events)
  # 9 ticks have a forward and 9 a backward.
  assert last == 9 * 1000 + 9 * 2000
  first_backward = next(event for event in events if event["cat"] == "backward")
  assert first_backward == {
    "name": "B 0", "cat": "backward", "ph": "X", "pid": 0, "tid": 1, "ts": 4000, "dur": 2000,
    "args": {"tick": 3, "repeat": 1, "microbatch": 0},
  }  # fmt: skip
  names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
  assert names == ["title", "stage 0", "stage 1"]


# --- CSV -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), SHAPES, ids=str)
def test_csv_gives_the_same_table_back(name, shape):
  table = timetable(name, shape)
  assert from_csv(to_csv(table), shape, "a.csv") == table


def rewritten(text: str, columns: list[str], *, idle: bool = True) -> str:
  """The CSV with these columns, in this order, with or without idle rows."""
  head, *rows = [line.split(",") for line in text.splitlines()]
  kept = [[row[head.index(column)] for column in columns] for row in rows if idle or any(row[2:])]
  return "\n".join(",".join(row) for row in [columns, *kept])


@settings(max_examples=examples(40))
@given(st.sampled_from(SHAPES), st.permutations(COLUMNS), st.booleans())
def test_the_order_of_columns_and_idle_rows_do_not_matter(chosen, columns, idle):
  table = timetable(*chosen)
  text = rewritten(to_csv(table), list(columns), idle=idle)
  assert from_csv(text, table.shape, "a.csv") == table


@pytest.mark.parametrize(("name", "shape"), SHAPES[::7], ids=str)
def test_without_slots_they_are_assigned_anew(name, shape):
  table = timetable(name, shape)
  bare = [column for column in COLUMNS if not column.endswith("_slot")]
  read = from_csv(rewritten(to_csv(table), bare), shape, "a.csv")
  assert not read.has_slots
  assert run(read).fault is None
  assert assign_slots(read) == table


def test_a_text_editor_s_marks_do_no_harm():
  text = "\ufeff" + to_csv(ONE).replace("\n", "\r\n").replace(",", ", ") + "\r\n\r\n"
  assert from_csv(text, ONE.shape, "a.csv") == ONE


HEAD = "tick,stage,forward_repeat,forward_microbatch,backward_repeat,backward_microbatch"
SLOTS = "forward_slot,backward_slot,gradient_slot"
WRONG = {
  "tick,stage,forward\n": (
    "a.csv:1: unknown column 'forward'. Did you mean forward_slot? Known: tick, stage, "
    "forward_repeat, forward_microbatch, forward_slot, backward_repeat, backward_microbatch, "
    "backward_slot, gradient_slot"
  ),
  "": (
    "a.csv:1: the first line lacks the columns tick, stage, forward_repeat, forward_microbatch, "
    "backward_repeat, backward_microbatch; it must name all columns, or all but forward_slot, "
    "backward_slot, gradient_slot"
  ),
  f"{HEAD},forward_slot\n": (
    "a.csv:1: the first line lacks the columns backward_slot, gradient_slot; it must name all "
    "columns, or all but forward_slot, backward_slot, gradient_slot"
  ),
  f"{HEAD},tick\n": "a.csv:1: the column tick appears twice; keep one",
  f"{HEAD}\n0,0,0,0,,\n0,0,,,,\n": (
    "a.csv:3: tick 0 of stage 0 has a row already; keep one of the two"
  ),
  f"{HEAD}\n0,3,0,0,,\n": (
    "a.csv:2: stage=3 must be 0 to 2, since the configuration has 3 stages; for example 2"
  ),
  f"{HEAD}\n24,0,0,0,,\n": (
    "a.csv:2: tick=24 must be below 24, which is enough for every forward and backward in turn; "
    "leave out idle ticks"
  ),
  f"{HEAD}\n0,0,0,0\n": "a.csv:2: 4 cells, but the first line names 6 columns; give as many",
  f"{HEAD}\n0,0,0,-1,,\n": (
    "a.csv:2: forward_microbatch=-1 must be a whole number, at least 0, or empty; for example 0"
  ),
  f"{HEAD}\n0,0,0,1.5,,\n": (
    "a.csv:2: forward_microbatch=1.5 must be a whole number, at least 0, or empty; for example 0"
  ),
  f"{HEAD}\n,0,0,1,,\n": (
    "a.csv:2: the row has no tick or no stage; every row needs both, counted from 0, for example "
    "0,0"
  ),
  f"{HEAD}\n0,0,,1,,\n": "a.csv:2: forward_microbatch without forward_repeat; fill all or none",
  f"{HEAD},{SLOTS}\n0,0,,,0,1,,1,\n": (
    "a.csv:2: backward_repeat, backward_microbatch, backward_slot without gradient_slot; fill all "
    "or none"
  ),
  f"{HEAD},{SLOTS}\n0,0,,,,,1,,\n": (
    "a.csv:2: forward_slot without forward_repeat, forward_microbatch; fill all or none"
  ),
}  # fmt: skip


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_what_is_no_table(text):
  with pytest.raises(UserError) as caught:
    from_csv(text, ONE.shape, "a.csv")
  assert str(caught.value) == WRONG[text]


def test_an_empty_table_is_a_table():
  assert from_csv(HEAD, ONE.shape, "a.csv") == Timetable(ONE.shape, ())


@settings(max_examples=examples(200))
@given(st.data())
def test_a_changed_cell_is_refused_or_the_table_still_runs(data):
  lines = to_csv(SEVERAL).splitlines()
  line = data.draw(st.integers(1, len(lines) - 1))
  cells = lines[line].split(",")
  column = data.draw(st.integers(0, len(cells) - 1))
  cells[column] = data.draw(st.sampled_from(["", "0", "1", "2", "3", "9", "x", "-1", '"']))
  text = "\n".join([*lines[:line], ",".join(cells), *lines[line + 1 :]])
  try:
    table = from_csv(text, SEVERAL.shape, "a.csv")
  except UserError:
    return
  if COLUMNS[column].endswith(("repeat", "microbatch")) and table != SEVERAL:
    assert run(table).fault is not None
