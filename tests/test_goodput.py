"""Seconds lost by cause over a run that was killed and resumed, against this process's own clock."""

import signal
import sys
import time

import pytest
from preloaded import started
from processes import ONE_DEVICE, small_run
from several_processes import wait

from maxbatch.run_folder.history import read_history
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.run_report.page import page

SAVED, KILLED, STEPS = 3, 6, 8
RUN = """
import os, pathlib, signal, sys, time
from maxbatch import train
from maxbatch.data.loader import ChainedLoader
waited, steps = ChainedLoader.waited_seconds, []
def slower(loader):
  steps.append(0)
  time.sleep(0.1)
  while len(steps) == int(sys.argv[1]):
    if pathlib.Path(sys.argv[2]).exists():
      os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
  return waited(loader)
ChainedLoader.waited_seconds = slower
sys.exit(train.main(sys.argv[3:]))
"""


def test_the_seconds_of_a_killed_and_resumed_run_add_up_to_its_wall_time(tmp_path):
  folder = tmp_path / "first_run"
  keys = [*small_run(tmp_path, tmp_path / "text.txt", tmp_path), f"steps={STEPS}", ONE_DEVICE]
  keys += [f"checkpoint_period={SAVED}", f"eval_interval={SAVED}"]

  def run(killed_in: int) -> tuple[int, str, float, float]:
    saved, began = folder / "checkpoints" / str(SAVED), time.time()
    [done] = wait([started([sys.executable, "-c", RUN, f"{killed_in}", f"{saved}", *keys])])
    return done.exit_code, done.output + done.errors, began, time.time()

  code, said, began, killed = run(KILLED)
  assert code == -signal.SIGKILL, said
  repeated = [one["step_seconds"] for one in read_metrics(folder) if one["step"] > SAVED]
  assert len(repeated) == KILLED - SAVED - 1
  before = read_history(folder).time_account()
  assert before.lost["restart"] == before.lost["repeated"] == 0
  time.sleep(1.0)
  code, said, resumed, ended = run(0)
  assert code == 0, said
  account, records = read_history(folder).time_account(), read_metrics(folder)
  lost = account.lost
  assert account.step_seconds + sum(lost.values()) == pytest.approx(account.wall_seconds)
  counted = sum(one["step_seconds"] - one["data_wait_seconds"] for one in records[1:])
  assert account.step_seconds == pytest.approx(counted)
  assert len(records) == STEPS + 1
  assert lost["repeated"] == pytest.approx(sum(repeated))
  # Clocks of processes tick each hundredth of a second.
  assert resumed - killed - 0.05 < lost["restart"] < resumed - began - before.wall_seconds + 1.0
  assert account.wall_seconds <= ended - began + 0.05
  assert lost["other"] < 0.2 * account.wall_seconds
  assert min(lost[cause] for cause in ("start", "compile", "save", "evaluation")) > 0
  at_resume, at_end = (line for line in said.splitlines() if line.startswith("Goodput: "))
  assert f"restart {lost['restart']:.3g}" in at_resume
  assert at_end.startswith(f"Goodput: {account.goodput:.0%}"[:-2])
  last = records[-1]
  assert last["goodput/restart_seconds"] == pytest.approx(lost["restart"])
  assert last["goodput/share"] == pytest.approx(account.goodput, rel=0.1)
  assert "steps that were trained again" in page([read_history(folder)])
