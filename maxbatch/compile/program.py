"""The training step as a compiled program, with what its compiler says about memory."""

import contextlib
import dataclasses
import math
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from maxbatch.command_line.screen import GIB
from maxbatch.compile.traced_flops import StepFlops, step_flops
from maxbatch.config.schema import CompileConfig, Config
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import LONG_ROW_TOKENS
from maxbatch.data.rows import Rows, RowSource
from maxbatch.errors import UserError
from maxbatch.estimate import hlo
from maxbatch.estimate.chips import GPU_DATA, PREALLOCATED, chip_for
from maxbatch.estimate.gpu_corrections import left_out
from maxbatch.hardware.compiler_flags import NO_FLAGS, CompilerFlags, bypassed, flags_of_program
from maxbatch.hardware.devices import Device, machine_bytes
from maxbatch.hardware.topologies import slice_named
from maxbatch.training.build import eval_batch_rows, step_rows, streams, traced_step
from maxbatch.training.evaluation import traced_eval
from maxbatch.training.state import TrainState, is_on_host
from maxbatch.training.step import Trainer

_TOO_LARGE = re.compile(
  r"memory required for [\w ]+\((?P<needed>[\d.]+)(?P<unit>[KMGT])\)|"
  r"Used (?P<used>[\d.]+)(?P<used_unit>[KMGT]) of "
)
_UNITS = {"K": 2**10, "M": 2**20, "G": GIB, "T": 2**40}


class DoesNotFitError(Exception):
  """The compiler found no way to run the step in a device's memory."""

  def __init__(self, needed_bytes: int):
    """Takes the bytes needed on one device, as far as the compiler says; 0 if it does not."""
    super().__init__(f"the step needs {gib(needed_bytes)} a device")
    self.needed_bytes = needed_bytes


@dataclasses.dataclass(frozen=True)
class StateBytes:
  """What one device holds between steps."""

  parameters: int
  """Those that train."""
  optimizer_state: int
  accumulators: int
  frozen_parameters: int = 0

  @property
  def total(self) -> int:
    """All of it."""
    return self.parameters + self.optimizer_state + self.accumulators + self.frozen_parameters


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
  """Bytes of one device while the step runs."""

  arguments: int
  """State and rows before the step."""
  outputs: int
  """State and metrics after it."""
  aliased: int
  """Outputs that take the place of arguments."""
  temporaries: int
  """Activations, gathered parameters and other values that live inside the step."""
  peak: int
  """At the worst moment."""
  host: int = 0
  """Host memory: what the step keeps there for this device."""
  left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
  """What a compiler for GPUs that are not here leaves out, by name; the peak has it."""


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
  """The step for one microbatch shape."""

  step: jax.stages.Compiled
  rows: Rows
  """The shapes it is fed."""
  memory: ProgramMemory
  flops: StepFlops
  """Matrix products of one device, as traced."""
  compile_seconds: float
  text: str
  """The optimized program."""
  streamed: bool = False
  """Whether it takes one microbatch of a step, instead of a loop over all."""


def compile_program(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource, micro_batch: int
) -> CompiledProgram:
  """Compiles exactly the step that training runs for phases of `micro_batch`.

  Raises:
    DoesNotFitError: the compiler refuses it for its memory.
  """
  rows = step_rows(plan, trainer, source, micro_batch)
  program = _program(config, trainer, rows, lambda: traced_step(trainer, rows))
  return dataclasses.replace(program, streamed=streams(config))


def compile_eval_program(
  config: Config, plan: BatchPlan, trainer: Trainer, source: RowSource
) -> CompiledProgram:
  """Compiles exactly the evaluation of a batch that a run has, beside which all of its state lies.

  Raises:
    DoesNotFitError: the compiler refuses it for its memory.
  """
  rows = eval_batch_rows(plan, trainer, source)
  program = _program(config, trainer, rows, lambda: traced_eval(trainer, rows))
  beside = state_bytes(trainer.abstract).total - held_bytes(trainer.abstract.parameters)
  memory = program.memory
  memory = dataclasses.replace(
    memory, arguments=memory.arguments + beside, peak=memory.peak + beside
  )
  # A batch for each dispatch.
  return dataclasses.replace(program, memory=memory, streamed=True)


def _program(
  config: Config, trainer: Trainer, rows: Rows, trace: Callable[[], jax.stages.Traced]
) -> CompiledProgram:
  began = time.perf_counter()
  traced = trace()
  flags = flags_of_program(trainer.compiler_flags, traced, trainer.mesh)
  step, text = compiled(traced, config.compile, flags)
  device = trainer.mesh.devices.flat[0]
  return CompiledProgram(
    step=step,
    rows=rows,
    memory=_with_left_out(memory_of(step, device.platform), text, device.device_kind),
    flops=step_flops(traced.jaxpr).divided(trainer.mesh.size),
    compile_seconds=time.perf_counter() - began,
    text=text,
  )


def compiled(
  traced: jax.stages.Traced, keys: CompileConfig, flags: CompilerFlags = NO_FLAGS
) -> tuple[jax.stages.Compiled, str]:
  """Returns a traced function, compiled for devices that are here or not, and its text.

  Raises:
    DoesNotFitError: the compiler refuses it for its memory.
  """
  try:
    if keys.compile_topology:
      return _compiled_elsewhere(traced.lower(), keys, flags)
    # What is saved must come from the compiler, not from the compilation cache.
    with bypassed() if keys.save_compiled_step else contextlib.nullcontext():
      step = traced.lower().compile(flags.options)
    return step, step.as_text() or ""
  except jax.errors.JaxRuntimeError as error:
    refuse_if_too_large(error)
    raise


def _compiled_elsewhere(
  lowered: jax.stages.Lowered, keys: CompileConfig, flags: CompilerFlags
) -> tuple[jax.stages.Compiled, str]:
  """Compiles for devices that are not here, with the text that the compiler writes to a folder.

  Asked for by as_text() instead, libtpu's text of some programs (gathers that a v6e leaves to its
  SparseCore) cannot be read back by jaxlib, and that for GPUs leaves out what is inside of asynchronous
  collectives, with their times.
  """
  gpu = slice_named(keys.compile_topology).gpu
  with tempfile.TemporaryDirectory() as folder, bypassed():
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True} | _estimating(gpu)
    step = lowered.compile(compiler_options=options | (flags.options or {}))
    name = "*gpu_after_optimizations.txt" if gpu else "*after_codegen.txt"
    text = max((file.read_text() for file in pathlib.Path(folder).glob(name)), key=len, default="")
  return step, text or step.as_text() or ""


def _estimating(gpu: str) -> dict[str, Any]:
  """Returns the options with which XLA writes its estimates for GPUs of a generation into the text."""
  # Of others it has no tables, and fails.
  has_tables = gpu and GPU_DATA[gpu]["has_tables"]
  written = {"xla_syntax_sugar_async_ops": False} if gpu else {}
  return written | ({"xla_gpu_collect_cost_model_stats": True} if has_tables else {})


def memory_of(step: jax.stages.Compiled, platform: str) -> ProgramMemory:
  """Returns what the compiler says of a step's memory.

  The peak is the compiler's on TPU and GPU. XLA's CPU compiler leaves temporaries out of it, so
  there it is the sum of all that lives. Theirs counts what is on hosts at that time too: what of the state is there
  always is taken off, and it is at most the sum.
  """
  known = step.memory_analysis()
  assert known is not None
  sizes = (known.argument_size_in_bytes, known.output_size_in_bytes, known.alias_size_in_bytes)
  total = sizes[0] + sizes[1] - sizes[2] + known.temp_size_in_bytes
  peak = known.peak_memory_in_bytes if platform != "cpu" else 0
  host = known.host_temp_size_in_bytes + known.host_argument_size_in_bytes
  if host:
    peak = min(peak - known.host_argument_size_in_bytes, total)
  return ProgramMemory(*sizes, known.temp_size_in_bytes, peak or total, host)


def _with_left_out(memory: ProgramMemory, text: str, device_kind: str) -> ProgramMemory:
  """Adds what XLA does not know before it runs on a GPU."""
  chip = chip_for(device_kind)
  if chip is None or not chip.is_gpu:
    return memory
  known = left_out(hlo.parse(text), memory.peak)
  return dataclasses.replace(memory, left_out=known, peak=memory.peak + sum(known.values()))


def state_bytes(abstract: TrainState) -> StateBytes:
  """Returns bytes of the state on one device."""
  accumulated = abstract.opt_state.acc_grads
  rest = abstract.opt_state._replace(acc_grads=())
  held = (held_bytes(part) for part in (abstract.params, rest, accumulated, abstract.frozen))
  return StateBytes(*held)


def held_bytes(tree: Any) -> int:
  """Returns bytes of abstract arrays on one device, without what its host keeps."""
  return sum(
    int(leaf.dtype.itemsize) * math.prod(leaf.sharding.shard_shape(leaf.shape))
    for leaf in jax.tree.leaves(tree)
    if not is_on_host(leaf)
  )


def refuse_if_too_large(error: Exception) -> None:
  """Raises DoesNotFitError if `error` says that the program is too large; else does nothing.

  Raises:
    DoesNotFitError: it is about memory, of a device that compiles or of one that runs.
  """
  if "RESOURCE_EXHAUSTED" in str(error):
    raise DoesNotFitError(_needed_bytes(str(error))) from error


def _needed_bytes(message: str) -> int:
  """Returns what the compiler says a device would need; 0 if it does not say."""
  result = _TOO_LARGE.search(message)
  if result is None:
    return 0
  number, unit = result["needed"] or result["used"], result["unit"] or result["used_unit"]
  return int(float(number) * _UNITS[unit])


_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def capacity_bytes(devices: Sequence[Device], device_memory_gb: float) -> int:
  """Returns memory that one device may use.

  device_memory_gb where it is set; else what a TPU's compiler lets programs have, what another
  device reports, or, for CPU devices, the memory of the machine, or what its container allows,
  divided by their number. Of GPUs that are not here, the share of their memory that jax takes.

  Raises:
    UserError: none of these is known.
  """
  if device_memory_gb:
    return int(device_memory_gb * GIB)
  first, local = devices[0], jax.local_devices()[0]
  if first.platform == "cpu":
    return machine_bytes() // jax.local_device_count()
  chip = chip_for(first.device_kind)
  if chip is not None and not (chip.is_gpu and local.device_kind == first.device_kind):
    return int(chip.usable_bytes / PREALLOCATED * _taken()) if chip.is_gpu else chip.usable_bytes
  reported = local.memory_stats() or {}
  if "bytes_limit" not in reported:
    raise UserError(
      f"{first.device_kind} does not say how much memory it has; set device_memory_gb, for example "
      "device_memory_gb=16"
    )
  return reported["bytes_limit"]


def _taken() -> float:
  """Returns the share of a GPU's memory that jax takes when it starts.

  Raises:
    UserError: the variable that says it is no share.
  """
  given = os.environ.get(_MEMORY_FRACTION, str(PREALLOCATED))
  try:
    share = float(given)
  except ValueError:
    share = 0.0
  if not 0 < share <= 1:
    raise UserError(
      f"{_MEMORY_FRACTION}={given} must be a fraction of a GPU's memory, above 0 and at most 1; for example "
      f"{_MEMORY_FRACTION}=0.92"
    )
  return share


def gib(size: float) -> str:
  """Returns bytes as GiB, or as they are where that would print as zero."""
  return f"{size / GIB:,.3f} GiB" if size >= GIB / 1000 or not size else f"{size:,.0f} bytes"


def memory_suggestions(config: Config) -> str:
  """Suggests keys that reduce the memory needed, with their values."""
  fsdp, length = config.mesh.ici_fsdp_parallelism, config.batch.max_target_length
  every = fsdp == -1  # The state is divided over all devices that there are.
  ways = [
    "more devices" if every else f"a larger ici_fsdp_parallelism (now {fsdp})",
    f"a smaller max_target_length (now {length})",
  ]
  if config.model.remat_policy not in ("full", "explore"):
    ways.insert(0, f"remat_policy=full (now {config.model.remat_policy})")
  if length >= LONG_ROW_TOKENS * (context := config.mesh.ici_context_parallelism) > 0:
    ways.append(f"ici_context_parallelism={2 * context}: devices share the tokens of rows")
  return f"what helps: {', '.join(ways)}"
