"""A run that does not get on ends, and says where its threads are."""

import queue
import subprocess
import sys
import threading

from processes import PATIENCE_SECONDS, environment

from maxbatch.errors import EXIT_PROCESS_FAILED
from maxbatch.hardware.ending import Watchdog


def test_it_ends_a_run_that_nobody_feeds():
  said: queue.SimpleQueue[str] = queue.SimpleQueue()
  with Watchdog(0.1, said.put):
    assert "for 0.1 s (hang_timeout_seconds)" in said.get(timeout=PATIENCE_SECONDS)
  assert said.empty()


def test_it_does_nothing_at_0_seconds():
  with Watchdog(0):
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_a_single_process_ends_with_its_stacks():
  program = (
    "import time\n"
    "from maxbatch.hardware.ending import Watchdog\n"
    "def stuck():\n"
    "  time.sleep(3600)\n"
    "with Watchdog(0.2):\n"
    "  stuck()\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    check=False,
    timeout=PATIENCE_SECONDS,
    env=environment(),
  )
  assert done.returncode == EXIT_PROCESS_FAILED
  assert "in stuck" in done.stderr
  assert done.stderr.endswith("this run has ended no step for 0.2 s (hang_timeout_seconds)\n")
