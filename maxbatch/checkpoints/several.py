"""Checkpoints of several processes: one that cannot write or read keeps no other waiting.

Orbax's processes wait for each other at every turn, also for one that has just failed.
"""

import pathlib
import socket
import sys
from collections.abc import Callable
from typing import TypeVar

import jax
import orbax.checkpoint as ocp

from maxbatch.hardware.agreement import gather

_Read = TypeVar("_Read")


class DamagedError(Exception):
  """A step's folder does not hold what was saved; the message says what is wrong."""


class Barrier:
  """Orbax's barrier in its own threads; with one process there is none to wait for."""

  def __init__(self) -> None:
    self.failure: BaseException | None = None
    """What has failed in a save of this process."""

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits for the other processes; raises again what this one has on its hands."""
    if failure := sys.exc_info()[1]:
      self.failure = failure
      raise failure
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def lone_reader(directory: pathlib.Path) -> ocp.CheckpointManager:
  """Reads the parts of this process's devices, with no other process."""
  own = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
  options = ocp.CheckpointManagerOptions(
    read_only=True, lightweight_initialize=True, multiprocessing_options=alone
  )
  return ocp.CheckpointManager(directory, options=options)


def together(read: Callable[[], _Read]) -> _Read:
  """What `read` returns, in which nothing waits for other processes.

  Raises:
    DamagedError: in all processes, if one has met damage.
  """
  results, damage = [], ""
  try:
    results.append(read())
  except DamagedError as error:
    damage = str(error)
  found = gather([socket.gethostname(), damage])
  for process, (host, reason) in enumerate(found):
    if reason:
      raise DamagedError(f"process {process} on {host}: {reason}" if len(found) > 1 else reason)
  return results[0]
