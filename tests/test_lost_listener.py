"""Whoever listens may go away, by a closed pipe, a full disk or a terminal: the run is not lost."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from typing import Any

import preloaded
import pytest
from processes import ONE_DEVICE, PATIENCE_SECONDS, environment
from test_interrupted import arguments, records

from maxbatch.command_line.signals import StopSignals

UNTIL_STOPPED = 1_000_000


def command(folder: pathlib.Path, steps: int) -> list[str]:
  return [sys.executable, "-m", "maxbatch.train", *run_keys(folder, steps)]


def run_keys(folder: pathlib.Path, steps: int) -> list[str]:
  keys = "checkpoint_period=1000000 log_period=1 metrics_writers=[jsonl]"
  return [*arguments(folder, steps), ONE_DEVICE, *keys.split()]


def started(arguments: list[str], stdout: Any) -> subprocess.Popen[str]:
  return preloaded.started(arguments, stdout=stdout)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
  """Exit code, and what was written to standard error."""
  assert process.stderr is not None
  with process, process.stderr:
    errors = process.stderr.read()
    return process.wait(PATIENCE_SECONDS), errors


def saved(folder: pathlib.Path) -> list[int]:
  """The steps of the checkpoints, the newest of which is that of the last record."""
  steps = sorted(int(path.name) for path in (folder / "first_run" / "checkpoints").iterdir())
  assert steps[-1] == records(folder)[-1]["step"]
  return steps


def read_until(process: subprocess.Popen[str], word: str) -> None:
  assert process.stdout is not None
  assert any(word in line for line in process.stdout)


def read_and_leave(process: subprocess.Popen[str], word: str) -> None:
  read_until(process, word)
  assert process.stdout is not None
  process.stdout.close()


def recorded_until(process: subprocess.Popen[str], folder: pathlib.Path, step: int) -> None:
  """Waits until this step is recorded."""
  deadline = time.monotonic() + PATIENCE_SECONDS
  file = folder / "first_run" / "metrics.jsonl"
  while f'"step": {step},' not in (file.read_text() if file.exists() else ""):
    assert process.poll() is None, ended(process)
    assert time.monotonic() < deadline
    time.sleep(0.05)


def test_a_run_goes_on_without_a_reader_and_a_signal_saves(tmp_path):
  # As Ctrl-C does with `| tee log`: it ends tee, then the step is finished and saved.
  process = started(command(tmp_path, UNTIL_STOPPED), subprocess.PIPE)
  read_and_leave(process, "Batch plan")
  recorded_until(process, tmp_path, 3)
  process.send_signal(signal.SIGINT)
  exit_code, errors = ended(process)
  assert exit_code == 0, errors
  assert "Traceback" not in errors
  assert "standard output" in errors
  assert "Broken pipe" in errors
  assert saved(tmp_path)


def test_a_run_goes_on_when_its_output_is_full(tmp_path):
  with open("/dev/full", "w") as full:
    exit_code, errors = ended(started(command(tmp_path, 4), full))
  assert exit_code == 0, errors
  assert "No space left on device" in errors
  assert saved(tmp_path) == [4]


def without(closed: str, arguments: list[str]) -> list[str]:
  """A command that is started without these of its streams."""
  redirections = " ".join(f"{number}>&-" for number in closed.split())
  return ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *arguments]


def test_a_run_goes_on_without_output(tmp_path):
  shell = without("0 1 2", command(tmp_path, 4))
  exit_code, errors = ended(started(shell, subprocess.DEVNULL))
  assert exit_code == 0, errors
  assert saved(tmp_path) == [4]
  assert [one["step"] for one in records(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("closed", ["1", "2", "0 1 2"])
def test_no_file_gets_the_number_of_a_stream_that_was_closed(tmp_path, closed):
  """XLA would write its warnings to it."""
  code = (
    "import os, sys\n"
    "from maxbatch.command_line.run import EnduringStreams\n"
    "with EnduringStreams():\n"
    "  file = open(sys.argv[1], 'w')\n"
    "  print('said')\n"
    "  print('said', file=sys.stderr)\n"
    "  file.write(str(file.fileno()))\n"
  )
  shell = without(closed, [sys.executable, "-c", code, str(tmp_path / "file")])
  done = subprocess.run(shell, capture_output=True, text=True, check=False, env=environment())
  assert (done.returncode, done.stdout + done.stderr) == (0, "said\n" * (closed in "12"))
  assert int((tmp_path / "file").read_text()) > 2


def test_error_lines_without_a_reader_change_no_exit_code(tmp_path):
  process = started(command(tmp_path, 0), subprocess.DEVNULL)
  assert process.stderr is not None
  process.stderr.close()
  assert process.wait(PATIENCE_SECONDS) == 2


TRAIN = """
from maxbatch import train
train.leave_together(train.main(sys.argv[1:]))
"""
LEAD_A_SESSION = f"""
import os, sys
os.setsid()
os.close(os.open(os.ttyname(1), os.O_RDWR))  # The first one opened controls the session.
{TRAIN}
"""
AS_NOHUP_DOES = f"""
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
{TRAIN}
"""


def test_a_terminal_that_goes_away_saves_the_run(tmp_path):
  ours, theirs = os.openpty()
  termios.tcsetwinsize(theirs, (24, 200))
  run = [sys.executable, "-c", LEAD_A_SESSION, *run_keys(tmp_path, UNTIL_STOPPED)]
  process = preloaded.started(run, stdout=theirs, stderr=theirs)
  os.close(theirs)
  shown = b""
  while not re.search(rb"step [1-9]", shown):  # The live line shows a few of the steps.
    shown += os.read(ours, 1 << 16)
  os.close(ours)  # Now the kernel sends SIGHUP, and every write fails.
  assert process.wait(PATIENCE_SECONDS) == 0
  assert saved(tmp_path)


def test_a_hangup_that_is_ignored_is_none(tmp_path):
  run = [sys.executable, "-c", AS_NOHUP_DOES, *run_keys(tmp_path, 300)]
  process = started(run, subprocess.PIPE)
  for word in ("Batch plan", "step 3/"):  # Before the loop, and in it.
    read_until(process, word)
    process.send_signal(signal.SIGHUP)
  read_and_leave(process, "step 300/300")
  exit_code, errors = ended(process)
  assert exit_code == 0, errors
  assert saved(tmp_path) == [300]


def test_a_terminal_may_hang_up_more_than_once():
  with StopSignals() as stop:
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
      if number == signal.SIGTERM:
        with pytest.raises(KeyboardInterrupt):
          os.kill(os.getpid(), number)
      else:
        os.kill(os.getpid(), number)
    assert stop.requested


def test_a_signal_in_the_midst_of_printing_raises_nothing():
  """A handler that prints would re-enter the buffer that the main thread writes to."""
  code = (
    "import os, signal, sys, time\n"
    "from maxbatch.command_line.signals import StopSignals\n"
    "with StopSignals() as stop:\n"
    "  sys.stdout.write('x' * 1_000_000)\n"  # More than a pipe holds: it waits for its reader.
    "  sys.stdout.flush()\n"
    "  assert stop.requested\n"
  )
  process = started([sys.executable, "-c", code], subprocess.PIPE)
  assert process.stdout is not None
  assert process.stdout.read(1000) == "x" * 1000
  process.send_signal(signal.SIGTERM)
  timer = threading.Timer(60, process.kill)
  timer.start()
  read_until(process, "SIGTERM: finishing the step and saving")
  timer.cancel()
  exit_code, errors = ended(process)
  assert (exit_code, errors) == (0, "")


def test_what_only_prints_fails_when_its_output_is_full():
  with open("/dev/full", "w") as full:
    plan = [sys.executable, "-m", "maxbatch.plan", "config=base"]
    exit_code, errors = ended(started(plan, full))
  assert exit_code == 2
  assert errors == "error: cannot write to standard output (No space left on device)\n"
