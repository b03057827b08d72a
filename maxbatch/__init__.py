"""maxbatch: a batch-size-first trainer for language models in JAX.

`import maxbatch as mb` offers its parts to models and loops that are not ours. Each is imported when
it is first used, so that what needs no jax, such as `mb.plan`, works without.
"""

import gc
import importlib
import os
import signal
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from maxbatch.core.make_plan import plan
  from maxbatch.core.phases import Phase, Position
  from maxbatch.core.plan import BatchPlan, PlannedStep
  from maxbatch.core.schedule import RampupBatchManager, ScheduleInputs
  from maxbatch.core.topology import Topology
  from maxbatch.errors import UserError

__all__ = [
  "BatchPlan",
  "Phase",
  "PlannedStep",
  "Position",
  "RampupBatchManager",
  "ScheduleInputs",
  "Topology",
  "UserError",
  "plan",
]
# What the package exports and where it is, once more for Python as for type checkers above.
_EXPORTS = {
  "plan": "maxbatch.core.make_plan",
  "BatchPlan": "maxbatch.core.plan",
  "PlannedStep": "maxbatch.core.plan",
  "Position": "maxbatch.core.phases",
  "Phase": "maxbatch.core.phases",
  "RampupBatchManager": "maxbatch.core.schedule",
  "ScheduleInputs": "maxbatch.core.schedule",
  "Topology": "maxbatch.core.topology",
  "UserError": "maxbatch.errors",
}


if not TYPE_CHECKING:  # Who checks types finds a misspelled name.

  def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
      raise AttributeError(f"module {__name__} has no attribute {name}")
    found = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})


class _Package(types.ModuleType):
  """Keeps `maxbatch.plan` the function when the command's module of that name is imported."""

  def __setattr__(self, name: str, value: object) -> None:
    if name not in _EXPORTS or not isinstance(value, types.ModuleType):
      super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _leave(number: int, frame: types.FrameType | None) -> None:
  """Ends the process with a word instead of the traceback of whatever is being imported."""
  del frame
  os.write(2, b"interrupted\n")
  os._exit(128 + number)


# So it stands while Python looks for the module of `python -m maxbatch.train`, whose imports take
# seconds; from then on command_line/signals.py sees to signals. Importing maxbatch changes nothing.
if sys.argv[:1] == ["-m"]:
  # Imports and traces make objects by the million, which stay. Looking through them for garbage as
  # often as Python does took a fifth of the time to import all, and a tenth of that to trace a step.
  gc.set_threshold(100_000, 20, 20)
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
