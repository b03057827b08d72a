"""What a terminal shows, and what a file or a pipe gets instead."""

import re
from unittest.mock import Mock

from terminals import on_terminal

from maxbatch.run_folder.metrics import Record
from maxbatch.run_folder.progress import Progress


def record(step: int, **more: float) -> Record:
  return {
    "step": step,
    "loss": 2.5,
    "learning_rate": 3e-3,
    "global_batch_to_train": 32,
    "tokens_per_second": 12345.6,
  } | more


def run(steps: int, log_period: int, *, start: int = 0) -> None:
  with Progress(start, steps, log_period) as progress:
    for step in range(start + 1, steps + 1):
      progress.show(record(step))


def test_a_pipe_gets_plain_lines_every_period_and_at_the_end(capsys):
  run(7, 3)
  out, err = capsys.readouterr()
  assert re.sub(r"eta \d\d:\d\d", "eta 00:00", out) == (
    "step 3/7  loss 2.500  lr 3.00e-03  batch 32  12,346 tokens/s  eta 00:00\n"
    "step 6/7  loss 2.500  lr 3.00e-03  batch 32  12,346 tokens/s  eta 00:00\n"
    "step 7/7  loss 2.500  lr 3.00e-03  batch 32  12,346 tokens/s  eta 00:00\n"
  )
  assert err == ""


def test_the_rate_is_that_of_all_steps_since_the_last_line(capsys):
  with Progress(0, 7, 3) as progress:
    for step, (seconds, tokens) in enumerate(
      [(9.0, 100), (2.0, 100), (1.0, 400), (1.0, 100), (3.0, 100), (2.0, 1000), (2.0, 30)], 1
    ):
      more = {
        "step_seconds": seconds,
        "data_wait_seconds": 0.0,
        "tokens_per_second": tokens / seconds,
      }
      progress.show(record(step, **more, **({"eval/loss": 2.0} if step == 5 else {})))
  rates = re.findall(r"step (\d).* (\S+) tokens/s", capsys.readouterr().out)
  assert rates == [("3", "50"), ("5", "50"), ("6", "500"), ("7", "15")]


def test_a_pipe_gets_every_evaluation(capsys):
  with Progress(0, 9, 5) as progress:
    progress.show({"step": 0, "eval/loss": 5.5})
    progress.show(record(1))
    progress.show(record(2, **{"eval/loss": 4.25}))
    progress.say("Saved")
  lines = capsys.readouterr().out.splitlines()
  assert lines[0] == "step 0/9  eval 5.500"
  assert lines[1].startswith("step 2/9  loss 2.500  eval 4.250  lr 3.00e-03")
  assert lines[2:] == ["Saved"]


def test_the_time_left_counts_the_steps_of_this_run_only(capsys, monkeypatch):
  now = iter([100.0, 120.0])
  monkeypatch.setattr("time.perf_counter", lambda: next(now))
  with Progress(90, 110, 100) as progress:
    progress.show(record(100))
  # Ten steps took 20 s, and ten are left.
  assert capsys.readouterr().out.endswith("eta 00:20\n")


def test_a_terminal_gets_one_live_line(monkeypatch):
  terminal = on_terminal(monkeypatch)
  run(7, 3)
  text = terminal.getvalue()
  assert "\r" in text
  assert text.count("\n") == 1
  last = text.rstrip("\n").rpartition("\r")[2]
  assert "7/7" in last
  assert "loss 2.500  lr 3.00e-03  batch 32  12,346 tokens/s" in last


def test_a_resumed_bar_begins_where_the_run_does(monkeypatch):
  terminal = on_terminal(monkeypatch)
  with Progress(90, 100, 10):
    pass
  assert "90/100" in terminal.getvalue()


def test_the_time_left_counts_no_preparation(capsys, monkeypatch):
  now = iter([0.0, 300.0, 302.0])
  monkeypatch.setattr("time.perf_counter", lambda: next(now))
  with Progress(0, 11, 1) as progress:
    progress.begin()
    progress.show(record(1))
  assert "eta 00:20" in capsys.readouterr().out


def test_the_time_left_on_a_terminal_counts_no_preparation(monkeypatch):
  terminal, clock = on_terminal(monkeypatch), Mock(return_value=0.0)
  monkeypatch.setattr("tqdm.std.time", clock)
  with Progress(0, 11, 1) as progress:
    clock.return_value = 300.0
    progress.begin()
    clock.return_value = 302.0
    progress.show(record(1))
  assert "[00:02<00:20" in terminal.getvalue()


def test_lines_beside_the_bar_stay_whole(monkeypatch):
  terminal = on_terminal(monkeypatch)
  with Progress(0, 4, 1) as progress:
    progress.show(record(1, **{"eval/loss": 4.25}))
    progress.say("Saved")
  lines = [line.rpartition("\r")[2] for line in terminal.getvalue().split("\n")]
  assert any(line.startswith("step 1/4  loss 2.500  eval 4.250") for line in lines)
  assert "Saved" in lines


def test_the_wait_for_data_is_a_share_of_the_time_of_the_steps():
  with Progress(0, 2, 1) as progress:
    progress.show({"step": 0, "eval/loss": 5.5})
    assert progress.data_wait() == ""
    progress.show(record(1, step_seconds=3.0, data_wait_seconds=0.25))
    progress.show(record(2, step_seconds=5.0, data_wait_seconds=0.15))
  assert progress.data_wait() == "Waited for data: 5.00% of the time of 2 steps (0.4 of 8 s)"
