"""maxbatch.train with a fault in it: python scripts/faulty_train.py FAULT PROCESS NUMBER [key=value …].

The fault is in one process, when it reads sample NUMBER or one after it, or saves step NUMBER, or
computes that step.
"""

import errno
import itertools
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.checkpoints.checkpointer import Checkpointer
from maxbatch.data.reading import ReadOrder
from maxbatch.hardware.peers import Peers
from maxbatch.hardware.processes import leave_together
from maxbatch.train import main
from maxbatch.training import loop

HANGING_SECONDS = 3600
LATE_SECONDS = 4


def hang() -> None:
  """Waits longer than any test."""
  time.sleep(HANGING_SECONDS)


def refuse() -> None:
  """What a file system says of a file it cannot read."""
  raise OSError(errno.EIO, os.strerror(errno.EIO), "/data/shard-00007.bin")


def crash() -> None:
  """A mistake of a program."""
  raise ZeroDivisionError("a bug")


def fill_disk() -> None:
  """From now on this process's files stay small, as on a disk without space for more."""
  resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def set_clock() -> None:
  """This process believes it is an hour later."""
  now = time.time
  time.time = lambda: now() + 3600


READING = {"loader refuses": refuse, "loader crashes": crash}

SAVING = {"save crashes": crash, "save hangs": hang, "disk is full": fill_disk}


def read_with(fault: Any, number: int) -> None:
  """Samples from `number` on cannot be had."""
  read = ReadOrder.__call__

  def faulty(order: ReadOrder, sample_ids: np.ndarray) -> Any:
    if order.seed is not None and sample_ids.max() >= number:
      fault()
    return read(order, sample_ids)

  mock.patch.object(ReadOrder, "__call__", faulty).start()


def save_with(fault: Any, number: int) -> None:
  """This process does not come back from the save of step `number`, or fails in it."""
  save = Checkpointer.save

  def faulty(checkpointer: Checkpointer, state: Any, position: Any, *rest: Any) -> None:
    if position.step == number:
      fault()
    save(checkpointer, state, position, *rest)

  mock.patch.object(Checkpointer, "save", faulty).start()


def step_with(fault: Callable[[], None], number: int) -> None:
  """From step `number` on this process's devices wait for an input that `fault` keeps from them."""
  stop_flags, steps = loop.stop_flags, itertools.count(1)

  def faulty(mesh: Mesh, heard: bool = False) -> Any:
    flags = stop_flags(mesh, heard)
    if flags is not None and next(steps) >= number:
      shape = jax.ShapeDtypeStruct((1,), np.int32)
      wait = jax.jit(lambda flag: jax.pure_callback(lambda _: fault(), shape, flag))
      parts = [wait(shard.data) for shard in flags.addressable_shards]
      flags = jax.make_array_from_single_device_arrays(flags.shape, flags.sharding, parts)
    return flags

  mock.patch.object(loop, "stop_flags", faulty).start()


def ask_late() -> None:
  """This process says where it is when process 0 knows that of all others."""
  collect = Peers.collect

  def late(peers: Peers, name: str, *rest: Any) -> dict[int, Any]:
    if name == "place":
      collect(peers, name, *rest)
      time.sleep(LATE_SECONDS)
    return collect(peers, name, *rest)

  mock.patch.object(Peers, "collect", late).start()


def answer_late() -> None:
  """This process says where it is a second late, as on a busy host."""
  collect = Peers.collect

  def late(peers: Peers, name: str, *rest: Any) -> dict[int, Any]:
    if name == "place":
      time.sleep(1)
    return collect(peers, name, *rest)

  mock.patch.object(Peers, "collect", late).start()


if __name__ == "__main__":
  fault, process, number, *arguments = sys.argv[1:]
  if f"process_id={process}" in arguments:
    if fault in READING:
      read_with(READING[fault], int(number))
    elif fault in SAVING:
      save_with(SAVING[fault], int(number))
      answer_late()
    elif fault == "step hangs":
      step_with(hang, int(number))
      ask_late()
    elif fault == "clock is wrong":
      set_clock()
    else:
      raise SystemExit(f"{pathlib.Path(__file__).name} knows no fault {fault!r}")
  leave_together(main(arguments))
