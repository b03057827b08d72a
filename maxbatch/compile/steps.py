"""The compiled steps of a run: out of a file, or from the compiler, and into a file."""

import contextlib
from collections.abc import Callable, Mapping
from typing import cast

import jax

from maxbatch.batch.plan import BatchPlan
from maxbatch.compile import step_file
from maxbatch.compile.compile_step import check_device_memory
from maxbatch.compile.step_identity import header
from maxbatch.config.schema import Config
from maxbatch.data.dataset import RowSource
from maxbatch.hardware.compilation_cache import bypassed
from maxbatch.training.build import compiled_step
from maxbatch.training.step import Step, Trainer


def save_steps(
  config: Config,
  plan: BatchPlan,
  trainer: Trainer,
  source: RowSource,
  steps: Mapping[int, Step],
) -> None:
  """Writes compiled steps, by microbatch, to the file that save_compiled_step names.

  Raises:
    UserError: it cannot be written.
  """
  if jax.process_index() != 0:
    return
  path = config.compile.save_compiled_step
  programs = {size: cast(jax.stages.Compiled, step) for size, step in steps.items()}
  step_file.save(path, header(config, plan, trainer, source), programs)
  print(f"The compiled step is in {path}; compiled_step={path} runs it", flush=True)


def step_compiler(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource
) -> Callable[[int], Step]:
  """From a microbatch to its compiled step: out of the file compiled_step, or by compiling.

  Raises:
    UserError: the file is damaged or was made for another run, or a step needs more memory than
      device_memory_gb.
  """
  if config.compile.compiled_step:
    made_from = header(config, plan, trainer, source)
    return step_file.load(config.compile.compiled_step, made_from).__getitem__

  def compiled(micro_batch: int) -> Step:
    # What is saved must come from the compiler, not from the compilation cache.
    with bypassed() if config.compile.save_compiled_step else contextlib.nullcontext():
      step = compiled_step(config, plan, trainer, source, micro_batch)
    platform = trainer.mesh.devices.flat[0].platform
    check_device_memory(config, plan, cast(jax.stages.Compiled, step), micro_batch, platform)
    return step

  return compiled
