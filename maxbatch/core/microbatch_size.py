"""Chooses a microbatch by what the compiler says of its memory, and by the clock."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxbatch.errors import UserError

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class SizeTrial:
  """What is known of one size."""

  size: int
  peak_bytes: int | None
  """Memory of one device, as compiled; None: the compiler does not say, or has given up."""
  seconds: float | None = None
  """Median of its runs; None: it was not run, as it does not fit."""
  samples_per_second: float = 0.0


@dataclasses.dataclass(frozen=True)
class SizeChoice:
  """The size that was chosen, and all that were tried."""

  size: int
  tried: tuple[SizeTrial, ...]
  memory_bytes: int | None
  """What a device has, or may use; None: not known."""

  def __str__(self) -> str:
    limit = "" if self.memory_bytes is None else f" of {self.memory_bytes / _MIB:,.1f}"
    lines = [f"{'size':>8} {'MiB' + limit:>24} {'ms':>10} {'samples/s':>12}"]
    for one in self.tried:
      memory = "?" if one.peak_bytes is None else f"{one.peak_bytes / _MIB:,.1f}"
      clock = (
        ("does not fit", "")
        if one.seconds is None
        else (f"{one.seconds * 1e3:,.2f}", f"{one.samples_per_second:,.1f}")
      )
      mark = " <" if one.size == self.size else ""
      lines.append(f"{one.size:>8} {memory:>24} {clock[0]:>10} {clock[1]:>12}{mark}".rstrip())
    return "\n".join(lines)


def choose_micro_batch_size(
  make_step: Callable[[int], tuple[Any, Sequence[Any]]],
  sizes: Sequence[int],
  *,
  memory_bytes: int | None = None,
  samples: Callable[[int], float] = float,
  repeats: int = 5,
) -> SizeChoice:
  """Returns the size with most samples per second among those that fit.

  Every size is compiled. What needs more memory than there is is never run.

  Args:
    make_step: from a size to a jitted, lowered or compiled function and its positional arguments. It
      is called again for every run of a function that donates them.
    sizes: to choose from.
    memory_bytes: that one device may use; None: what the device says it has, if it does.
    samples: from a size to the samples of a call; the size itself unless a call is a whole batch.
    repeats: timed runs of a size, after one that is not timed.

  Raises:
    UserError: no size fits.
  """
  if memory_bytes is None:
    memory_bytes = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
  tried = []
  for size in sizes:
    one = _compiled(make_step, size, memory_bytes)
    if isinstance(one, SizeTrial):
      tried.append(one)
      continue
    compiled, arguments, peak_bytes = one
    seconds = _seconds(compiled, arguments, lambda size=size: make_step(size)[1], repeats)
    speed = samples(size) / seconds if seconds else 0.0
    tried.append(SizeTrial(size, peak_bytes, seconds, speed))
  fitting = [one for one in tried if one.seconds is not None]
  if not fitting:
    least = min((one.peak_bytes for one in tried if one.peak_bytes is not None), default=None)
    needs = "" if least is None else f": {least / _MIB:,.1f} MiB is the least that one needs"
    raise UserError(f"none of sizes={list(sizes)} fits into memory_bytes={memory_bytes}{needs}")
  best = max(fitting, key=lambda one: one.samples_per_second)
  return SizeChoice(best.size, tuple(tried), memory_bytes)


def _compiled(
  make_step: Callable[[int], tuple[Any, Sequence[Any]]], size: int, memory_bytes: int | None
) -> SizeTrial | tuple[Any, Sequence[Any], int | None]:
  """Returns the function of a size, its arguments and its memory; the trial if it does not fit."""
  try:
    step, arguments = make_step(size)
    lowered = step.lower(*arguments) if hasattr(step, "lower") else step
    compiled = lowered.compile() if hasattr(lowered, "compile") else lowered
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return SizeTrial(size, None)
  peak_bytes = program_bytes(compiled)
  if memory_bytes is not None and peak_bytes is not None and peak_bytes > memory_bytes:
    return SizeTrial(size, peak_bytes)
  return compiled, arguments, peak_bytes


def program_bytes(compiled: Any) -> int | None:
  """Returns the memory of one device that a compiled program needs; None: it is not known."""
  result = compiled.memory_analysis()
  if result is None:
    return None
  kept = result.argument_size_in_bytes + result.output_size_in_bytes - result.alias_size_in_bytes
  return int(kept + result.temp_size_in_bytes + result.generated_code_size_in_bytes)


def _seconds(
  compiled: Any, arguments: Sequence[Any], fresh: Callable[[], Sequence[Any]], repeats: int
) -> float | None:
  """Returns the median time of a run; None: the device runs out of memory."""
  clocks = []
  try:
    jax.block_until_ready(compiled(*arguments))
    for _ in range(repeats):
      if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(arguments)):
        arguments = fresh()
      jax.block_until_ready(arguments)
      began = time.perf_counter()
      jax.block_until_ready(compiled(*arguments))
      clocks.append(time.perf_counter() - began)
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return None
  return statistics.median(clocks)
