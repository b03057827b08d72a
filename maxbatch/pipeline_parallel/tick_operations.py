"""In how many ticks each operation runs, since not every tick runs all of them.

A tick of the program runs the operations that any stage needs in it and skips the others. So there
are fewer losses than forwards when there are repeats, and ticks with only a forward or only a
backward during warm-up and cool-down.
"""

import re
from collections.abc import Mapping

from maxbatch.pipeline_parallel.schedule import schedule_named
from maxbatch.pipeline_parallel.timetable import TimetableShape

EVERY_TICK = ""
"""What runs in every tick, in no operation's scope: the exchange and the buffers."""
OPERATIONS = ("forward", "embedding", "loss", "backward", "embedding_backward")
ONCE_PER_MICROBATCH = ("embedding", "loss", "embedding_backward")
"""Operations that run once per microbatch, however long the warm-up is."""
_SCOPE = "tick_"


def scope_name(operation: str) -> str:
  """The jax.named_scope of an operation, by which reports find it in the program."""
  return _SCOPE + operation


def operation_in_path(path: str) -> str:
  """The innermost operation in a path of scope names; EVERY_TICK if there is none."""
  names = [word for word in re.findall(rf"\b{_SCOPE}(\w+)", path) if word in OPERATIONS]
  return names[-1] if names else EVERY_TICK


def ticks_by_operation(schedule: str, shape: TimetableShape) -> Mapping[str, int]:
  """For each operation, the ticks in which any stage has it; all ticks under EVERY_TICK.

  Every stage runs its v·m forwards in consecutive ticks, h ticks after the previous stage. So
  v·m + h(p−1) ticks have a forward (if v·m ≥ h), and as many a backward.
  """
  busy = shape.forwards_per_stage + shape.warmup_ticks
  ticks = {EVERY_TICK: schedule_named(schedule).first_backward(shape) + busy}
  return ticks | {
    work: shape.microbatches if work in ONCE_PER_MICROBATCH else busy for work in OPERATIONS
  }
