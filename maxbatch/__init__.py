"""maxbatch: a batch-size-first trainer for language models in JAX.

`import maxbatch as mb` offers its parts to models and loops that are not ours. Each is imported when
it is first used, so that what needs no jax, such as `mb.plan`, works without.
"""

import gc
import importlib
import os
import signal
import sys
import time
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from maxbatch.core.accumulate import (
    Accumulated,
    Squares,
    accumulate,
    divisor,
    objective,
    sum_denominators,
  )
  from maxbatch.core.check_split import Finding, SplitReport, check_split
  from maxbatch.core.confidence import Interval
  from maxbatch.core.make_plan import plan
  from maxbatch.core.microbatch_size import SizeChoice, choose_micro_batch_size
  from maxbatch.core.noise_scale import Estimate, NoiseScale
  from maxbatch.core.phases import Phase, Position
  from maxbatch.core.plan import BatchPlan, PlannedStep
  from maxbatch.core.schedule import RampupBatchManager, ScheduleInputs
  from maxbatch.core.terms import Loss, Max, Ratio, Stats, Sum, Terms, microbatches, sample_keys
  from maxbatch.core.topology import Topology
  from maxbatch.core.train_step import (
    StepOptimizer,
    StepResult,
    StepState,
    init_state,
    mean_gradient,
    step_optimizer,
    train_step,
  )
  from maxbatch.errors import UserError

__all__ = [
  "Accumulated",
  "BatchPlan",
  "Estimate",
  "Finding",
  "Interval",
  "Loss",
  "Max",
  "NoiseScale",
  "Phase",
  "PlannedStep",
  "Position",
  "RampupBatchManager",
  "Ratio",
  "ScheduleInputs",
  "SizeChoice",
  "SplitReport",
  "Squares",
  "Stats",
  "StepOptimizer",
  "StepResult",
  "StepState",
  "Sum",
  "Terms",
  "Topology",
  "UserError",
  "accumulate",
  "check_split",
  "choose_micro_batch_size",
  "divisor",
  "init_state",
  "mean_gradient",
  "microbatches",
  "objective",
  "plan",
  "sample_keys",
  "step_optimizer",
  "sum_denominators",
  "train_step",
]
IMPORTED_AT = time.time()
"""When this process began to read the files of maxbatch, in seconds since 1970."""

# What the package exports and where it is, once more for Python as for type checkers above.
_EXPORTS = {
  "Accumulated": "maxbatch.core.accumulate",
  "Squares": "maxbatch.core.accumulate",
  "accumulate": "maxbatch.core.accumulate",
  "divisor": "maxbatch.core.accumulate",
  "objective": "maxbatch.core.accumulate",
  "sum_denominators": "maxbatch.core.accumulate",
  "Finding": "maxbatch.core.check_split",
  "SplitReport": "maxbatch.core.check_split",
  "check_split": "maxbatch.core.check_split",
  "Interval": "maxbatch.core.confidence",
  "SizeChoice": "maxbatch.core.microbatch_size",
  "choose_micro_batch_size": "maxbatch.core.microbatch_size",
  "Estimate": "maxbatch.core.noise_scale",
  "NoiseScale": "maxbatch.core.noise_scale",
  "Loss": "maxbatch.core.terms",
  "Max": "maxbatch.core.terms",
  "Ratio": "maxbatch.core.terms",
  "Stats": "maxbatch.core.terms",
  "Sum": "maxbatch.core.terms",
  "Terms": "maxbatch.core.terms",
  "microbatches": "maxbatch.core.terms",
  "sample_keys": "maxbatch.core.terms",
  "StepOptimizer": "maxbatch.core.train_step",
  "StepResult": "maxbatch.core.train_step",
  "StepState": "maxbatch.core.train_step",
  "init_state": "maxbatch.core.train_step",
  "mean_gradient": "maxbatch.core.train_step",
  "step_optimizer": "maxbatch.core.train_step",
  "train_step": "maxbatch.core.train_step",
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
    result = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = result
    return result


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
