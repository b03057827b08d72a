"""What a run writes of itself beside its metrics: its events, and the page for people."""

import contextlib
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from maxbatch.compile.step_identity import library_versions
from maxbatch.core.plan import Position
from maxbatch.errors import TrainingDivergedError
from maxbatch.hardware.devices import Device, describe_devices
from maxbatch.run_folder.events import END, NOTICE, START, VERIFIED, EventLog, NoEventLog
from maxbatch.run_report.background import BackgroundReport

_LIBRARIES = ("jax", "jaxlib", "numpy", "grain", "orbax-checkpoint")


class RunLog:
  """Of one start, in process 0; in others it writes nothing."""

  def __init__(self, folder: Path, *, write_report: bool):
    """Events that cannot be written are left out."""
    first, self.events = jax.process_index() == 0, NoEventLog()
    if first:
      with contextlib.suppress(OSError):  # What can be written there, the metrics say.
        self.events = EventLog(folder)
    self.page = BackgroundReport(folder, self.say, enabled=first and write_report)
    self._has_begun = False

  def say(self, line: str) -> None:
    """Prints what deserves a person's attention, and keeps it."""
    print(line, flush=True)
    self.events.note(NOTICE, text=line)

  def verified(self, step: int) -> None:
    """Takes note that a checkpoint reads back as it was saved."""
    self.events.note(VERIFIED, step=step)

  def begin(self, position: Position, devices: Sequence[Device], about: str) -> None:
    """Takes note of the start: from where, with which command, on what."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES} | library_versions()
    self._has_begun = True
    self.events.note(
      START,
      step=position.step,
      samples=position.samples,
      command=sys.orig_argv,
      folder=os.getcwd(),
      process=os.getpid(),
      host=socket.gethostname(),
      num_processes=jax.process_count(),
      devices=describe_devices(devices),
      about=about,
      versions=", ".join(
        f"{name} {version}"
        for name, version in {"python": platform.python_version(), **versions}.items()
        if version
      ),
    )

  def end(self, how: str, step: int | None = None, text: str = "") -> None:
    """Takes note of the end, the first time: finished, stopped, diverged or failed."""
    if self._has_begun:
      self.events.note(END, how=how, step=step, text=text)
    self._has_begun = False


@contextlib.contextmanager
def open_run_log(folder: Path, *, write_report: bool) -> Iterator[RunLog]:
  """A context in which a run is logged, and at whose end its page is written, however it ends."""
  log = RunLog(folder, write_report=write_report)
  with log.events:
    try:
      yield log
    except KeyboardInterrupt:
      log.end("stopped", text="at once, by a signal")
      raise
    except BaseException as error:
      log.end("diverged" if isinstance(error, TrainingDivergedError) else "failed", text=str(error))
      log.page.finish()
      raise
