"""The report of a run that is under way, written by a process of its own.

So the run imports nothing that draws, its devices wait for nothing, and whatever goes wrong with a
page is a warning. A report is begun only where that takes a small share of the time.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from maxbatch.run_folder.paths import RunFolder

_SHARE = 1 / 50
"""Largest share of the time in which a report is being written, besides the last one."""
_PATIENCE_SECONDS = 120.0
_NICENESS = 10


class BackgroundReport:
  """Writes a run's page now and then; one at a time."""

  def __init__(self, folder: Path, report: Callable[[str], None], *, enabled: bool = True):
    """Takes as `report` a function that receives a line if a page could not be written."""
    self._folder, self._report, self._enabled = folder.absolute(), report, enabled
    self._process: subprocess.Popen[bytes] | None = None
    self._began, self._not_before = 0.0, 0.0

  def update(self) -> None:
    """Begins to write the page, unless it is being written or was written a moment ago."""
    self._collect(wait=False)
    if self._process is None and time.monotonic() >= self._not_before:
      self._begin()

  def finish(self) -> bool:
    """Writes the page with all that is known now, and waits for it; whether it was."""
    self._collect(wait=True)
    self._begin()
    return self._collect(wait=True)

  def _begin(self) -> None:
    if not self._enabled:
      return
    self._began = time.monotonic()
    command = [sys.executable, "-m", "maxbatch.report", str(self._folder)]
    try:
      # Apart from the terminal, whose Ctrl-C is for the run.
      self._process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
      )
    except OSError as error:
      self._failed(error.strerror or str(error))
      return
    with contextlib.suppress(OSError):
      os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

  def _collect(self, *, wait: bool) -> bool:
    """Takes note of a process that has ended; whether it wrote the page."""
    process = self._process
    if process is None:
      return False
    try:
      code = process.wait(_PATIENCE_SECONDS) if wait else process.poll()
    except subprocess.TimeoutExpired:
      process.kill()
      code = process.wait()
    if code is None:
      return False
    seconds = time.monotonic() - self._began
    self._process, self._not_before = None, self._began + seconds / _SHARE
    _, said = process.communicate()  # A few lines: they have waited in the pipe.
    if code:
      lines = said.decode(errors="replace").splitlines()
      self._failed(lines[-1] if lines else f"exit code {code}")
    return code == 0

  def _failed(self, why: str) -> None:
    self._enabled = False
    path = RunFolder(self._folder).report
    self._report(
      f"warning: {path} could not be written ({why}); the run goes on without it, and "
      f"maxbatch report {self._folder} tries again"
    )
