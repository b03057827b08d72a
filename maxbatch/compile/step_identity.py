"""What a compiled step was made from: the header of its file.

A program is recognized by a hash of what jax lowers for the compiler, its StableHLO. Every key and
every line of code that changes the program changes that text, and nothing else does, so no list of
keys or source files has to be kept. What makes machine code of the text is compared by name:
devices, versions, settings and flags. The configuration is recorded to say which keys differ.

Tracing and lowering a step takes 0.5 s for the default model, 0.9 s for gpt2-small on a v5e-16 and
0.7 s for llama2-7b on a v5e-256 (1.1 s with scan_layers=false), on 2 cores.
"""

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from maxbatch.compile.cache import processor
from maxbatch.config.declare import declared
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import (
  CheckpointConfig,
  CompileConfig,
  Config,
  DistributedConfig,
  RunConfig,
)
from maxbatch.core.plan import BatchPlan
from maxbatch.data.rows import RowSource
from maxbatch.training.build import step_rows, streams, traced_step
from maxbatch.training.step import Trainer

LOWERED = "lowered"
"""Part of the header: the hash of each program, by its microbatch."""
ENVIRONMENT = "environment"
"""Part of the header: what turns lowered programs into machine code."""
SIZES, CONFIGURATION, LIBRARIES = "sizes", "configuration", "libraries"
"""Parts of the header that explain why a lowered program is another one."""

_NOT_RECORDED = (RunConfig, CheckpointConfig, CompileConfig, DistributedConfig)
"""Sections that reach a program through its sizes at most, which are recorded themselves."""
_LIBRARIES = ("maxbatch", "flax", "optax")
_JAX_SETTINGS = (
  # These change what is lowered too, and are here to be named.
  "jax_enable_x64",
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
  # These change only what the compiler makes of it; jax 0.12 has no efforts any more.
  "jax_disable_most_optimizations",
  "jax_exec_time_optimization_effort",
  "jax_memory_fitting_effort",
  "jax_optimization_level",
  "jax_memory_fitting_level",
)
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FLAGS_WITHOUT_EFFECT = ("--xla_dump", "--xla_force_host_platform_device_count")
_TRACEBACK_LIMIT = "jax_traceback_in_locations_limit"


def header(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource
) -> dict[str, Mapping[str, object]]:
  """Returns what this run's compiled steps are made from, in values that JSON holds.

  Args:
    config: the run's keys, those of the batch already chosen.
    plan: the plan that is run: after a resume, the one from there on.
  """
  hashes = {
    str(each): lowered_hash(config, plan, trainer, source, each) for each in plan.micro_batches
  }
  left_out = {key for section in _NOT_RECORDED for key in declared(section)}
  return {
    LOWERED: hashes,
    ENVIRONMENT: environment(plan, trainer),
    SIZES: {
      "micro_batch_to_train": list(plan.micro_batches),
      "microbatch_capacity": None if streams(config) else plan.microbatch_capacity,
    },
    CONFIGURATION: {k: value for k, value in to_flat_dict(config).items() if k not in left_out},
    LIBRARIES: library_versions(),
  }


def environment(plan: BatchPlan, trainer: Trainer) -> dict[str, object]:
  """Returns the devices, versions, settings and flags that turn lowered programs into machine code."""
  return {
    **_devices(plan, trainer),
    **compiler_environment(trainer.mesh.devices.flat[0]),
    "compiler_flags": str(trainer.compiler_flags),
  }


def lowered_hash(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource, micro_batch: int
) -> str:
  """Hashes the lowered step for one microbatch, and the structure of its arguments and results.

  The same in every process and folder: the text has no source locations, and the kernels that it
  embeds are lowered without theirs.
  """
  rows = step_rows(plan, trainer, source, micro_batch)
  return traced_hash(lambda: traced_step(trainer, rows))


def traced_hash(trace: Callable[[], jax.stages.Traced]) -> str:
  """Hashes what is traced when it is lowered, and the structure of its arguments and results."""
  with _without_locations():
    lowered = trace().lower()
  digest = hashlib.sha256(lowered.as_text().encode())
  digest.update(f"{lowered.in_tree}{lowered.out_tree}".encode())
  return digest.hexdigest()


@contextlib.contextmanager
def _without_locations() -> Iterator[None]:
  """Lowers programs without file names inside this context: a kernel's bytecode would hold them,
  and so depend on where Python packages are installed."""
  before = jax.config.values[_TRACEBACK_LIMIT]
  jax.config.update(_TRACEBACK_LIMIT, 0)
  try:
    yield
  finally:
    jax.config.update(_TRACEBACK_LIMIT, before)


_CUDA_PLUGIN = "jax-cuda13-plugin"


def compiler_environment(device: Any) -> dict[str, object]:
  """Returns versions, settings and flags that change what a compiler makes of the same text.

  Args:
    device: a jax device, which knows its compiler.
  """
  on_tpu = device.platform == "tpu"
  return {
    "jax": _version("jax"),
    "jaxlib": _version("jaxlib"),
    "libtpu": _version("libtpu") if on_tpu else None,
    **({_CUDA_PLUGIN: _version(_CUDA_PLUGIN)} if device.platform == "gpu" else {}),
    "compiler": device.client.platform_version,
    **{name: _setting(name) for name in _JAX_SETTINGS if name in jax.config.values},
    **{name: _flags(os.environ.get(name, "")) for name in _FLAG_VARIABLES},
  }


def library_versions() -> dict[str, str | None]:
  """Returns the versions of what a step is traced with, besides jax."""
  return {package: _version(package) for package in _LIBRARIES}


def _version(package: str) -> str | None:
  """Returns the installed version; None if there is none."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _devices(plan: BatchPlan, trainer: Trainer) -> dict[str, object]:
  devices = list(trainer.mesh.devices.flat)
  return {
    "platform": devices[0].platform,
    "device_kind": devices[0].device_kind,
    "cpu": processor() if devices[0].platform == "cpu" else None,
    "num_devices": len(devices),
    "num_processes": len({device.process_index for device in devices}),
    "mesh": str(plan.topology),
    # The devices' order on the mesh follows from it, and is no part of the text.
    "mesh_between_slices": list(plan.topology.dcn.values()),
  }


def _setting(name: str) -> object:
  """Returns a setting as JSON holds it: levels are enumerations."""
  value = jax.config.values[name]
  return value if isinstance(value, bool | int | float | str | None) else str(value)


def _flags(text: str) -> str:
  """Returns a variable's flags in order, without those that change no program."""
  return " ".join(sorted(f for f in text.split() if not f.startswith(_FLAGS_WITHOUT_EFFECT)))
