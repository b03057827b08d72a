"""The C library's heap, from which XLA's CPU devices take the temporaries of a step: one piece, at every step.

glibc gets a piece of that size from the system and gives it back once it is freed. So each step touches
fresh pages, which the system fills with zeros first: a sixth of the time of a step on two cores. Told to
keep what is freed, it hands the same pages out again. That costs memory, as steps overlap and smaller pieces
come to lie between, so it is done only where the machine has plenty.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

from maxbatch.hardware.accelerators import may_be_here

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Of glibc's malloc.h."""
_OFF = -1
_COPIES = 2
"""Of a step's temporaries, beside those in use, that are kept at most."""
_SHARE = 1 / 8
"""Of the machine's memory, that these may be."""


def share_one_heap() -> None:
  """Tells the C library to serve all threads of a process without accelerators from one heap.

  To be called before there are any: others get heaps of 64 MiB, and what is larger comes from the system,
  whatever `keep_temporaries` says.
  """
  asked = os.environ.get("JAX_PLATFORMS", "")
  if asked == "cpu" or not (asked or may_be_here()):
    _tell(_ARENA_MAX, 1)


def keep_temporaries(program: Any, devices: Sequence[Any], machine_bytes: int) -> bool:
  """Tells the C library to keep what is freed, if that is little of the machine's memory.

  Args:
    program: a jax.stages.Compiled, whose temporaries are to be kept.
    devices: of this process, on which it runs.
    machine_bytes: this process's share of the machine's memory.

  Returns: Whether it is told: the devices are CPUs, the temporaries small enough, the library glibc.
  """
  if not devices or devices[0].platform != "cpu":
    return False
  memory = program.memory_analysis()
  if _COPIES * memory.temp_size_in_bytes * len(devices) > _SHARE * machine_bytes:
    return False
  return _tell(_MMAP_MAX, 0) and _tell(_TRIM_THRESHOLD, _OFF)


def _tell(option: int, value: int) -> bool:
  """Sets an option of the heap, unless the user has: GLIBC_TUNABLES=glibc.malloc…, MALLOC_…"""
  if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
    return False
  if any(name.startswith("MALLOC_") for name in os.environ):
    return False
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # Of glibc alone.
  return mallopt is not None and bool(mallopt(option, value))
