"""What happens to all of several processes when something happens to one: real processes, real kills."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from damage import flip_bits
from processes import PATIENCE_SECONDS, REPOSITORY, small_run
from several_processes import Ended, records, start, wait

from maxbatch.checkpoints.find import completed_steps
from maxbatch.errors import EXIT_PROCESS_FAILED

FAULTY = [sys.executable, str(REPOSITORY / "scripts" / "faulty_train.py")]
SILENCE = "jax_distributed_heartbeat_timeout_seconds=20"


ALONE = ("metrics_writers=[jsonl]", "eval_fraction=0")
"""Of runs whose end alone is looked at."""


@pytest.fixture
def arguments(tmp_path):
  """Of a run that would take long, saves often and has a device, and half of all parameters, in each
  of two processes."""
  keys = "run_name=r num_simulated_devices=2 steps=5000 checkpoint_period=4 log_period=1000"
  keys += " ici_fsdp_parallelism=2"
  return [*small_run(tmp_path, tmp_path / "text.txt", tmp_path / "cache"), *keys.split()]


def saved(folder: pathlib.Path) -> list[int]:
  """The steps that are saved."""
  return completed_steps(folder / "r" / "checkpoints")


def after_save(processes: list[subprocess.Popen[str]], folder: pathlib.Path, step: int) -> None:
  """Waits until the run has saved this step or a later one."""
  deadline = time.monotonic() + PATIENCE_SECONDS
  while not saved(folder) or saved(folder)[-1] < step:
    assert all(process.poll() is None for process in processes), wait(processes)
    assert time.monotonic() < deadline
    time.sleep(0.1)


def logs(folder: pathlib.Path) -> list[str]:
  """What each process said."""
  return [path.read_text() for path in sorted((folder / "r" / "logs").iterdir())]


def codes(ended: list[Ended]) -> list[int]:
  return [process.exit_code for process in ended]


def test_a_killed_process_is_named_a_damaged_save_not_used_and_a_signal_to_one_stops_all(
  tmp_path, arguments
):
  begins = 0
  for victim, number in enumerate([signal.SIGKILL, signal.SIGSTOP]):
    reason = ["has ended without a word", "has given no sign of life for 20 s"][victim]
    processes = start(2, [*arguments, SILENCE])
    after_save(processes, tmp_path, begins + 4)
    os.kill(processes[victim].pid, number)
    other = 1 - victim
    processes[other].wait(PATIENCE_SECONDS)
    processes[victim].send_signal(signal.SIGCONT)
    ended = wait(processes)
    assert codes(ended)[other] == EXIT_PROCESS_FAILED, ended
    if number == signal.SIGSTOP:  # It has not gone on alone.
      assert codes(ended)[victim] == EXIT_PROCESS_FAILED, ended
    (line,) = ended[other].errors.splitlines()
    assert line.startswith(f"stopped: process {victim} on ")
    assert reason in line
    assert line in logs(tmp_path)[other]
    # With process 0 ends metrics.jsonl; the save under way may be lost with a process.
    assert records(tmp_path / "r")[-1]["step"] - saved(tmp_path)[-1] <= 8
    begins = saved(tmp_path)[-1]

  # What process 1 has written of it.
  flip_bits(tmp_path / "r" / "checkpoints" / str(begins), "ocdbt.process_1/d/*")
  damaged, begins = begins, saved(tmp_path)[-2]
  faulty = [*FAULTY, "clock is wrong", "1", "0"]
  processes = start(2, [*arguments, "generate_length=2"], command=faulty)
  after_save(processes, tmp_path, damaged + 4)
  processes[1].send_signal(signal.SIGTERM)
  ended = wait(processes)
  assert codes(ended) == [0, 0], ended
  assert f"checkpoint step {damaged} is damaged" in ended[0].output
  assert f"using step {begins} instead" in ended[0].output
  assert "the clock of process 1 on " in ended[0].output
  assert f"Resuming after step {begins} ({begins * 8:,} samples)" in ended[0].output
  assert f"Resuming after step {begins}" in logs(tmp_path)[1]
  last = records(tmp_path / "r")[-1]
  assert "eval/loss" in last
  assert [one["step"] for one in records(tmp_path / "r")] == list(range(int(last["step"]) + 1))
  assert saved(tmp_path)[-1] == last["step"]
  assert "a stop signal in process 1" in ended[0].output
  # Process 0 alone speaks; each has a log.
  assert "Batch plan" in ended[0].output
  assert (ended[1].output, ended[1].errors) == ("", "")
  for said in (ended[0].output, logs(tmp_path)[1]):
    assert f"Stopped after step {last['step']}:" in said


@pytest.mark.parametrize(
  ("fault", "said"),
  [
    ("loader crashes", "failed: ZeroDivisionError: a bug"),
    ("disk is full", " could not be written to "),
  ],
)
def test_an_error_in_one_process_ends_all_with_its_words(tmp_path, arguments, fault, said):
  number = 8 if fault == "disk is full" else 72
  ended = wait(start(2, [*arguments, *ALONE], command=[*FAULTY, fault, "1", str(number)]))
  assert codes(ended) == [EXIT_PROCESS_FAILED] * 2, ended
  assert "stopped: process 1 on " in ended[0].errors
  assert said in ended[0].errors
  if fault != "disk is full":  # Its log is on that disk.
    assert said.removeprefix("failed: ") in logs(tmp_path)[1]
  assert set(saved(tmp_path)) <= {4, 8}
  assert records(tmp_path / "r")[-1]["step"] >= 7


@pytest.mark.parametrize(
  ("fault", "number", "place"),
  [
    # What hangs is a thread, which a device waits for.
    ("step hangs", 9, r"training/loop.py:\d+ in (_?dispatch|_fetch)"),
    ("save hangs", 12, r"training/loop.py:\d+ in _save"),
  ],
)
def test_a_process_that_hangs_is_found_by_its_stack(tmp_path, arguments, fault, number, place):
  """The one whose step hangs is late to say so: process 0 waits for it, as it has the store."""
  keys = [*arguments, *ALONE, "async_checkpointing=false", "hang_timeout_seconds=30"]
  ended = wait(start(2, keys, command=[*FAULTY, fault, "1", str(number)]))
  assert codes(ended) == [EXIT_PROCESS_FAILED] * 2, ended
  assert "has ended no step for 30 s (hang_timeout_seconds)" in ended[0].errors
  assert re.search(rf"maxbatch/{place}: process (0, )?1$", ended[0].errors, re.M), ended
  first, second = logs(tmp_path)
  assert "in hang" in second
  assert all("Thread MainThread:" in log for log in (first, second))
  assert "in hang" not in first
