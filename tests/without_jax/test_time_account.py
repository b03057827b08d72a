"""Where a run's time went: causes that add up, over starts that end, are killed, or never began to train."""

import json
import math
import random

import pytest
from written_runs import write_run

from maxbatch.run_folder.events import CAUSES, EventLog, Sessions, StepTimes, TimeAccount
from maxbatch.run_folder.history import read_history

STEPS = StepTimes(10, 20.0, 1.0)
FIRST = [
  {"event": "start", "time": 104.0, "began": 100.0, "step": 0},
  {"event": "compiled", "time": 112.0, "seconds": 7.0},
  {"event": "evaluated", "time": 114.0, "seconds": 1.5, "step": 0},
  {"event": "saved", "time": 130.0, "seconds": 0.5, "step": 5},
]
AGAIN = [
  {"event": "notice", "time": 151.0, "text": "ignoring a save"},
  {"event": "start", "time": 152.0, "began": 149.0, "last_seen": 135.0, "step": 5},
  {"event": "dropped", "time": 152.1, "steps": 2, "seconds": 4.0},
  {"event": "compiled", "time": 154.0, "seconds": 1.0},
  {"event": "copied", "time": 160.0, "seconds": 0.25, "step": 8},
  {"event": "text", "time": 170.0, "seconds": 2.0, "step": 10},
]
END = {"event": "end", "time": 171.0, "how": "finished", "step": 10}


def account(*events: dict, steps: StepTimes = STEPS, end: float | None = None) -> TimeAccount:
  sessions = Sessions()
  for event in events:
    sessions.add(event)
  return sessions.account(steps, end)


def test_every_second_of_a_killed_and_resumed_run_has_a_cause():
  result = account(*FIRST, *AGAIN, END)
  assert result.wall_seconds == 71
  assert result.step_seconds == 19
  assert result.lost == pytest.approx({
    "start": 5 + 4,
    "compile": 8,
    "data_wait": 1,
    "save": 0.5,
    "copy": 0.25,
    "evaluation": 3.5,
    "repeated": 4,
    "restart": 14,  # From 135, when a step was last written, to 149.
    "other": 11.75,
  })  # fmt: skip
  assert result.step_seconds + sum(result.lost.values()) == pytest.approx(71)
  assert result.goodput == pytest.approx(19 / 71)
  assert str(result) == (
    "Goodput: 26.8% of 71 s; lost (s): restart 14, other 11.8, start 9, compile 8, repeated 4, "
    "evaluation 3.5, data wait 1, save 0.5, copy 0.25"
  )


def test_a_start_that_is_killed_before_it_compiles_is_lost_time_too():
  killed = {"event": "start", "time": 145.0, "began": 140.0, "last_seen": 135.0, "step": 5}
  result = account(*FIRST, killed, *AGAIN, END)
  # Of the 14 seconds between, 5 belong to the start that was killed.
  assert result.lost["restart"] == 9
  assert result.lost["start"] == 14
  assert result.lost["other"] == pytest.approx(11.75)


def test_time_after_the_whole_budget_was_trained_is_not_counted():
  longer = {"event": "start", "time": 1005.0, "began": 1000.0, "last_seen": 170.0, "step": 10}
  compiled = {"event": "compiled", "time": 1006.0, "seconds": 1.0}
  result = account(*FIRST, *AGAIN, END, longer, compiled)
  assert result.wall_seconds == 77
  assert result.lost["restart"] == 14
  stopped = END | {"how": "stopped"}
  assert account(*FIRST, *AGAIN, stopped, longer, compiled).lost["restart"] == 14 + 829


def test_what_is_under_way_or_was_killed_is_counted_until_its_last_step(tmp_path):
  folder = write_run(tmp_path / "run", 40, ended=False)
  events = [*FIRST, {"event": "saved", "time": 135.0, "seconds": 0.5, "step": 20}]
  (folder / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in events))
  result = read_history(folder).time_account()
  # 20 steps of 0.5 s came after the last event.
  assert result.wall_seconds == pytest.approx(135 + 20 * 0.5 - 100)
  assert result.step_seconds == pytest.approx(40 * 0.49)


def test_a_log_goes_on_from_the_starts_before_it(tmp_path):
  (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in FIRST))
  with EventLog(tmp_path) as log:
    log.note("saved", step=6, seconds=2.0)
    result = log.account(STEPS)
  assert result
  assert (result.lost["save"], result.lost["start"]) == (2.5, 5)
  assert result.wall_seconds > 1e9
  record = result.record()
  seconds = {f"goodput/{cause}_seconds" for cause in CAUSES}
  assert record.keys() == {"goodput/share", "goodput/wall_seconds"} | seconds


def test_any_events_in_any_order_add_up():
  random.seed(0)
  for _ in range(300):
    events = [dict(random.choice([*FIRST, *AGAIN, END])) for _ in range(random.randrange(12))]
    for event in events:
      for key in set(event) & {"time", "began", "last_seen", "seconds", "step"}:
        wrong = [event[key], -3.0, math.nan, math.inf, 1e300, "x", None, True, 120]
        event[key] = random.choice(wrong)
    steps = StepTimes(3, random.choice([0.0, 5.0]), random.choice([0.0, 9.0]))
    result = account(*events, steps=steps)
    assert min([result.step_seconds, *result.lost.values()]) >= 0
    assert result.step_seconds + sum(result.lost.values()) == pytest.approx(result.wall_seconds)
    assert 0 <= result.goodput <= 1
