"""The C library's heap, from which XLA's CPU devices take the temporaries of a step: one piece, at every step.

glibc gets a piece of that size from the system and gives it back once it is freed. So each step touches
fresh pages, which the system fills with zeros first: a sixth of the time of a step on two cores. Told to
keep what is freed, it hands the same pages out again. That costs memory, as any thread of XLA's may keep
temporaries of each size, so it is done only where the machine has plenty.

Threads have heaps of 64 MiB each, and what is larger comes from the system, whatever it is told. One heap for
all keeps that too, but the threads that compile, and those of several devices, wait for one another there: a
first start on 8 devices took half as long again, and some of its steps twice as long. So one device has it,
and for several the compiler divides the temporaries into pieces of a heap's size.
"""

import ctypes
import math
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jax.extend import core

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""Of glibc's malloc.h."""
_OFF = -1
_HEAP_BYTES = 64 * 2**20
"""Of a thread's heap; it may have several."""
_PIECE_BYTES = 60 * 2**20
"""The rest of a heap is for what else the thread holds."""
_COPIES = 2
"""Of a step's temporaries, beside those in use, that one heap keeps at most."""
_SHARE = 1 / 8
"""Of the machine's memory, that what is kept may be."""


def share_one_heap(arguments: Collection[str]) -> None:
  """Tells the C library to serve all threads from one heap, before there are any, where a command is given one
  simulated device."""
  if "num_simulated_devices=1" in arguments:
    _tell(_ARENA_MAX, 1)


def in_pieces(traced: core.ClosedJaxpr, devices: Sequence[Any]) -> tuple[tuple[str, str], ...]:
  """Returns the compiler's flags that divide a step's temporaries into pieces which heaps keep.

  None where one heap has all, and where an array is larger than a piece: it would not be kept, and XLA warns of it.

  Args:
    traced: the step. Of an array between its operations each device has its part, of an input perhaps all.
    devices: all that run it.

  Source: XLA's xla_multiheap_size_constraint_per_heap (heap_simulator.cc).
  """
  if len(devices) == 1 or devices[0].platform != "cpu":
    return ()
  sizes = [*map(_bytes, traced.in_avals), *_sizes(traced.jaxpr, len(devices))]
  if max(sizes) > _PIECE_BYTES:
    return ()
  return (("xla_multiheap_size_constraint_per_heap", str(_PIECE_BYTES)),)


def _sizes(jaxpr: core.Jaxpr, ways: int) -> Iterator[float]:
  """Yields a device's bytes of the arrays that `ways` devices share."""
  for equation in jaxpr.eqns:
    yield from (_bytes(each.aval) / ways for each in equation.outvars)
    within = 1 if equation.primitive.name == "shard_map" else ways
    for inner in core.jaxprs_in_params(equation.params):
      yield from _sizes(inner, within)


def _bytes(aval: Any) -> int:
  return math.prod(aval.shape) * aval.dtype.itemsize if hasattr(aval, "dtype") else 0


def keep_temporaries(program: Any, devices: Sequence[Any], machine_bytes: int) -> bool:
  """Tells the C library to keep what is freed, if that is little of the machine's memory.

  Args:
    program: a jax.stages.Compiled, whose temporaries are to be kept. On several devices what comes `in_pieces`.
    devices: of this process, on which it runs.
    machine_bytes: this process's share of the machine's memory.

  Returns: Whether it is told: the devices are CPUs, the temporaries small enough, the library glibc.
  """
  if not devices or devices[0].platform != "cpu":
    return False
  size = program.memory_analysis().temp_size_in_bytes
  copies = _COPIES if len(devices) == 1 else _num_threads(devices)
  if copies * size > _SHARE * machine_bytes:
    return False
  # A heap that is empty is given back unless the next one is to begin with as much.
  options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _OFF), (_TOP_PAD, _HEAP_BYTES))
  return all(_tell(*option) for option in options)


def _num_threads(devices: Sequence[Any]) -> int:
  """Returns how many threads XLA has for the devices, by the variable that hardware/devices.py sets."""
  return max(len(devices), int(os.environ.get("NPROC") or os.cpu_count() or 1))


def _tell(option: int, value: int) -> bool:
  """Sets an option of the heap, unless the user has: GLIBC_TUNABLES=glibc.malloc…, MALLOC_…"""
  if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
    return False
  if any(name.startswith("MALLOC_") for name in os.environ):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Of glibc alone.
  return mallopt is not None and bool(mallopt(option, value))
