"""How often each work of a tick is done: what makes two ticks cost differently.

A tick of the program does what any stage needs in it, and leaves out the rest. So a timetable has
fewer losses than forwards when microbatches come round several times, and ticks of only a forward
or only a backward while the stages fill and empty.
"""

import re
from collections.abc import Mapping

from maxbatch.pipeline_parallel.schedule import schedule_named
from maxbatch.pipeline_parallel.timetable import TimetableShape

ALWAYS = ""
"""What is done in every tick: exchange, buffers."""
WORKS = ("forward", "embedding", "loss", "backward", "unembedding")
BY_MICROBATCH = ("embedding", "loss", "unembedding")
"""Those done once for each microbatch, however long the stages take to fill."""
_SCOPE = "tick_"


def scope_of(work: str) -> str:
  """The name under which the program does a work."""
  return _SCOPE + work


def work_in(path: str) -> str:
  """The work that a path of such names leads to, the innermost; ALWAYS if to none."""
  named = [word for word in re.findall(rf"\b{_SCOPE}(\w+)", path) if word in WORKS]
  return named[-1] if named else ALWAYS


def ticks_with(schedule: str, shape: TimetableShape) -> Mapping[str, int]:
  """Ticks of a timetable in which any stage has each of the works; all ticks under ALWAYS.

  Every stage takes its forwards one after another, each stage `hop` ticks after the one before, so
  there are work + delay ticks with one (v·m ≥ h), and as many with a backward.
  """
  busy = shape.work + shape.delay
  ticks = {ALWAYS: schedule_named(schedule).first_backward(shape) + busy}
  return ticks | {work: shape.microbatches if work in BY_MICROBATCH else busy for work in WORKS}
