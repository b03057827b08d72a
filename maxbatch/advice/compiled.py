"""The same exactly: the compile command tries every microbatch of the advised batch, in a process.

That process has jax, which the advice itself does without.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from maxbatch.advice.advice import Advice
from maxbatch.advice.ramp import whole_steps
from maxbatch.advice.words import DAY, percent, span, wrapped
from maxbatch.config.load import load_config
from maxbatch.errors import UserError
from maxbatch.run_folder.paths import RunFolder


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The fastest microbatch that the compiler found to fit."""

  micro_batch_size: str
  step_seconds: float
  utilisation: float


def compile_sizes(file: str, advice: Advice) -> Compiled:
  """Compiles the advised batch with every microbatch, held constant; minutes.

  Args:
    file: the configuration, written.
    advice: on a place.

  Raises:
    UserError: there is no place, or compiling failed, with what it has said above.
  """
  if advice.asked.place is None:
    raise UserError(
      "--explore compiles for a slice, and none is named; for example compile_topology=v5e-256"
    )
  samples, length = advice.sizes.samples, advice.asked.length
  keys = [f"{key}={value}" for key, value in advice.asked.place.keys.items()]
  keys += ["compile_only=true", "micro_batch_size=explore", "batch_schedule=[]"]
  # Whole steps of the constant batch: a rest would leave only the microbatches that divide it.
  whole = whole_steps([(0, samples)], advice.asked.tokens / length)
  keys += ["learning_rate_batch_coupling=auto", f"total_tokens={whole * length}"]
  command = [sys.executable, "-m", "maxbatch.train", f"config={file}", *keys]
  done = subprocess.run(command, check=False)
  if done.returncode:
    raise UserError(
      f"--explore: compiling ended with {done.returncode}, as it says above; the advice in {file} "
      "keeps its estimated times"
    )
  run = RunFolder.of(load_config([f"config={file}"]).run)
  return _read(run.exploration, samples)


def _read(path: Path, samples: int) -> Compiled:
  """Returns the fastest size that divides a batch of so many samples."""
  fitting = json.loads(path.read_text(encoding="utf-8"))["fitting"]
  for one in fitting:
    if one["global_batch_to_train"] == samples and "step_seconds" in one:
      return Compiled(one["micro_batch_size"], one["step_seconds"], one["utilisation"])
  raise UserError(f"{path}: no microbatch of {samples:,} samples has an estimate of its time")


def compiled_summary(compiled: Compiled, advice: Advice) -> str:
  """Returns what compiling changes."""
  here = advice.here
  assert here
  estimated = here.split.step.step_seconds
  days = here.steps * compiled.step_seconds / DAY
  sentence = (
    f"micro_batch_size={compiled.micro_batch_size}, {compiled.step_seconds:.3g} s a step at a "
    f"utilisation of {percent(compiled.utilisation)}; estimated without compiling: "
    f"micro_batch_size={here.split.keys['micro_batch_size']}, {estimated:.3g} s. At a constant batch "
    f"the run takes {span(days)}. What is written has the compiled microbatch."
  )
  return "\n".join(["Compiled", *wrapped(sentence)])
