"""The compiled steps of a run: out of a file, from an earlier start, or from the compiler.

jax's cache (cache.py) finds a program by its text, for which each start has to trace and lower the step.
Beside it the programs themselves are kept here, found by what their text follows from: keys, shapes,
devices, settings, versions, and the code of maxbatch, flax and optax, byte by byte. The next start with
the same ones traces no step. Where other code may have a part in it, it is traced: with a plug-in, and in
a process that is no command of maxbatch's, whose program may have replaced anything.
"""

import contextlib
import functools
import hashlib
import json
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

import flax
import jax
import optax

import maxbatch
from maxbatch.compile import step_file
from maxbatch.compile.cache import STEPS
from maxbatch.compile.compile_step import check_device_memory
from maxbatch.compile.step_identity import environment, header, library_versions
from maxbatch.config.load import to_flat_dict
from maxbatch.config.registry import names_plugin
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.data.rows import RowSource
from maxbatch.errors import UserError
from maxbatch.hardware.compiler_flags import bypassed
from maxbatch.hardware.devices import machine_bytes
from maxbatch.hardware.heap import keep_temporaries
from maxbatch.hardware.sharding import num_processes
from maxbatch.training.build import compiled_step, step_rows, streams
from maxbatch.training.optimizer import without_rate
from maxbatch.training.step import Step, Trainer

_KEPT = 8
"""Programs of earlier starts that this process keeps, as maxbatch/training/build.py its own."""


def step_compiler(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource
) -> Callable[[int], Step]:
  """Returns what gives a microbatch's compiled step: the file compiled_step, an earlier start, or the
  compiler.

  Raises:
    UserError: the file is damaged or was made for another run, or a step needs more memory than
      device_memory_gb.
  """
  devices = trainer.mesh.local_devices
  share = machine_bytes() // num_processes(trainer.mesh)  # Perhaps all of this machine.
  if config.compile.compiled_step:
    made_from = header(config, plan, trainer, source)
    steps = step_file.load(config.compile.compiled_step, made_from)
    for step in steps.values():
      keep_temporaries(step, devices, share)
    return steps.__getitem__
  # Before there are threads that trace: at each of 600 files they would take the interpreter's lock.
  code = None if _must_trace(config, trainer) else _code()

  def compiled(micro_batch: int) -> Step:
    make = functools.partial(_compiled, config, plan, trainer, source, micro_batch)
    if code is None:
      step = make()
    else:
      step = _kept_or_made(code, identity(config, plan, trainer, source, micro_batch), make)
    keep_temporaries(step, devices, share)
    check_device_memory(config, plan, step, micro_batch, trainer.mesh.devices.flat[0].platform)
    return step

  return compiled


def _compiled(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource, micro_batch: int
) -> jax.stages.Compiled:
  # What is saved must come from the compiler, not from the compilation cache.
  with bypassed() if config.compile.save_compiled_step else contextlib.nullcontext():
    step = compiled_step(config, plan, trainer, source, micro_batch)
  return cast(jax.stages.Compiled, step)


def _kept_or_made(
  code: str, identity: Mapping[str, object], make: Callable[[], jax.stages.Compiled]
) -> jax.stages.Compiled:
  """Returns the step that an earlier start has kept; without one makes it, and keeps it for later ones."""
  folder = jax.config.values["jax_compilation_cache_dir"]
  text = json.dumps([code, identity], sort_keys=True)
  # What has an address for a name is another thing at every start.
  if not folder or " at 0x" in text:
    return make()
  place = Path(folder) / STEPS / hashlib.sha256(text.encode()).hexdigest()
  kept = _kept(place)
  if kept:
    return kept
  step = make()
  if not place.exists():
    threading.Thread(target=_keep, args=(place, step), name="keep-step").start()
  return step


@functools.lru_cache(_KEPT)
def _kept(place: Path) -> jax.stages.Compiled | None:
  """Returns the step that an earlier start has kept; None without one, or if it is damaged."""
  if not place.exists():
    return None
  try:
    (step,) = step_file.load(str(place), None).values()
    return step
  except UserError:
    with contextlib.suppress(OSError):
      place.unlink()
    return None


def _keep(place: Path, step: jax.stages.Compiled) -> None:
  """Writes a step for later starts. It is no fault if it cannot be: XLA's for CPUs saves no program that
  it has loaded, and a disk may be full."""
  with contextlib.suppress(UserError):
    step_file.save(str(place), {}, {0: step})


def _must_trace(config: Config, trainer: Trainer) -> bool:
  """Returns whether the step of this run must be traced, whatever is kept."""
  # Several processes would wait for each other as they compile, if one of them found a program.
  several = num_processes(trainer.mesh) > 1
  return (
    several or bool(config.compile.save_compiled_step) or names_plugin(config) or not _is_command()
  )


def identity(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource, micro_batch: int
) -> dict[str, object]:
  """Returns all that a step's program follows from beside its code, in values that JSON holds.

  The keys of where a run lives, of its data and of its checkpoints are not among them: building and
  tracing a step reads none of these but `metrics`, and of the data only the shapes of the rows.
  """
  optimizer = without_rate(config.optimizer)
  parts = config.model, config.precision, optimizer, config.batch, config.mesh, config.pipeline
  keys = [to_flat_dict(part) for part in (*parts, config.noise, config.rl)]
  phases = [[phase.first.step, phase.num_microbatches] for phase in plan.phases]
  rows = step_rows(plan, trainer, source, micro_batch)
  return {
    "keys": keys,
    "metrics": list(config.run.metrics),
    "loss": repr(trainer.loss),
    "pipeline": repr(trainer.pipeline),
    "microbatches": phases if streams(config) else None,
    "rows": [str(jax.tree.structure(rows)), *map(repr, jax.tree.leaves(rows))],
    "devices": [device.id for device in trainer.mesh.devices.flat],
    "environment": environment(plan, trainer),
    "versions": {"python": platform.python_version(), **library_versions()},
    "settings": sorted(
      f"{name}={value!r}" for name, value in jax.config.values.items() if "cache" not in name
    ),
  }


def _is_command() -> bool:
  """Returns whether this process is a command of maxbatch's, and nobody's program that imports it."""
  spec = getattr(sys.modules["__main__"], "__spec__", None)
  return spec is not None and spec.name.startswith("maxbatch.")


@functools.cache
def _code() -> str | None:
  """Hashes the code of which steps are traced, and its tables; None if one file is newer than the imports."""
  digest = hashlib.sha256()
  for package in (maxbatch, flax, optax):
    folder = Path(package.__path__[0])
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
      if file.stat().st_mtime >= maxbatch.IMPORTED_AT:
        return None
      digest.update(f"{package.__name__}/{file.relative_to(folder)} ".encode())
      digest.update(hashlib.sha256(file.read_bytes()).digest())
  return digest.hexdigest()
