"""From a configuration to everything that run, validate_only and compile_only need, in one way.

What a run needs at the very least of a device's memory is refused before anything is allocated.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from maxbatch.batch.from_config import is_rl, sparse_experts
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.checkpoints.formats import format_named
from maxbatch.command_line.screen import for_screen
from maxbatch.compile import cache
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.compile.program import capacity_bytes, gib
from maxbatch.compile.step_file import check_saves
from maxbatch.config.keys.model import hidden_width
from maxbatch.config.load import without_effect
from maxbatch.config.schema import Config, attention_width
from maxbatch.core.keys import counted, text
from maxbatch.core.phases import Position
from maxbatch.core.plan import BatchPlan
from maxbatch.data.rows import Dataset
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import one_process_at_a_time, sync_errors
from maxbatch.hardware.devices import Device, Target, describe_devices
from maxbatch.hardware.processes import is_first_process
from maxbatch.hardware.topologies import slice_named
from maxbatch.models.registry import parameter_counts
from maxbatch.modes.initialization import Initialization, find_initialization, saving_frozen
from maxbatch.modes.method import Method, Passed, Purpose, ResolvedRun
from maxbatch.modes.start import check_same_run
from maxbatch.modes.summary import copies_kept, description
from maxbatch.precision.formats import compute_format
from maxbatch.run_folder.metrics import each_record
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.build import build_trainer, lost_updates, streams, undivided_parameters
from maxbatch.training.state import TrainState
from maxbatch.training.step import Trainer
from maxbatch.tuning.candidates import offer_of_auto


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A run on its devices, with its parts made, and nothing compiled, initialized or written yet."""

  resolved: ResolvedRun
  trainer: Trainer
  initialization: Initialization
  dataset: Dataset
  """What it trains on; of one that is only compiled, the shapes."""
  description: str = ""
  """The same in words."""

  @property
  def config(self) -> Config:
    """The resolved configuration."""
    return self.resolved.config

  @property
  def plan(self) -> BatchPlan:
    """Its sizes, from the run's first step."""
    return self.resolved.plan


def purpose_of(config: Config, arguments: Sequence[str] = ()) -> Purpose:
  """Returns what the keys ask for: to train, or only to check or compile; names those without effect, and
  offers to choose the microbatch where no key gives it.

  Args:
    config: the run.
    arguments: as they were given, for the command that is offered; empty: none is.

  Raises:
    UserError: keys that exclude each other, a run on devices that are not here, keys without
      effect, or a file that a compiled step would replace.
  """
  keys = config.compile
  if keys.compile_topology:  # Nothing is offered for what is no slice.
    slice_named(keys.compile_topology, keys.compile_topology_num_slices)
  lines = list(without_effect(config))
  if arguments and (offer := offer_of_auto(config, arguments)):
    lines.append(f"Auto  {offer}")
  if is_first_process(config.distributed):
    print(for_screen("".join(f"{line}\n" for line in lines)), end="", flush=True)
  if keys.validate_only and keys.compile_only:
    raise UserError(
      "validate_only=true and compile_only=true: only one can be set; validate_only=true takes "
      "seconds, so begin with it"
    )
  instead = keys.validate_only or keys.compile_only
  if keys.compile_topology and not instead:
    raise UserError(
      f"compile_topology={keys.compile_topology} names devices that this machine does not have, "
      "so nothing can run on them; compile for them with compile_only=true, or check with validate_only=true"
    )
  if keys.compiled_step and (instead or keys.save_compiled_step):
    other = "save_compiled_step" if keys.save_compiled_step else "compile_only or validate_only"
    raise UserError(
      f"compiled_step={keys.compiled_step} runs what was compiled before, and {other} asks for "
      'compiling; keep one of them, for example with compiled_step=""'
    )
  # Before anything is compiled, and before the run's folder is there.
  if keys.save_compiled_step:
    check_saves(keys.save_compiled_step)
  if config.checkpoint.enable_checkpointing:
    format_named(config.checkpoint.checkpoint_format)
  if keys.validate_only:
    return Purpose.VALIDATE
  return Purpose.COMPILE if keys.compile_only else Purpose.RUN


def check_replaces_nothing(config: Config) -> None:
  """Checks that a run which begins anew, without checkpoints, has a folder of its own.

  Raises:
    UserError: the folder has the steps of another run.
  """
  folder = RunFolder.of(config.run)
  if config.checkpoint.enable_checkpointing:
    return
  if any(record["step"] > 0 for record in each_record(folder.path)):
    raise UserError(
      f"enable_checkpointing=false run_name={folder.path.name}: a run without checkpoints begins "
      f"at step 0, and would replace {folder.metrics.name} and {folder.config.name} of the run in "
      f"{folder.path}; choose another name, for example run_name={folder.free_name()}, or go on "
      "with that run: enable_checkpointing=true"
    )


def prepare(
  config: Config,
  target: Target,
  method: Method,
  purpose: Purpose,
  *,
  retune: bool = False,
  passed: Passed = lambda check: None,
) -> Prepared:
  """Resolves, initializes and builds a run, and checks its memory and its data.

  Args:
    purpose: what it is prepared for. Only compiled, it has no data, and the compiler counts its
      memory; only validated, nothing is compiled and no array is put on a device.

  Raises:
    UserError: something in the configuration or the input does not work.
  """
  validates, compiles = purpose is Purpose.VALIDATE, purpose is Purpose.COMPILE
  if not validates:
    cache.enable(config.compile.jax_cache_dir)
  resolved = method.resolve(config, target, purpose, retune=retune)
  initialization = Initialization() if compiles else _initialization(resolved)
  resolved = dataclasses.replace(resolved, begins=initialization.position)
  config, plan, ahead = resolved.config, resolved.plan, resolved.plan_ahead
  lines = [line.removeprefix("  ") for line in str(ahead).splitlines()[1:]]
  phases = f"{counted(len(ahead.phases), 'phase')}, {counted(ahead.steps, 'step')}"
  sparse = [] if is_rl(config.rl) else sparse_experts(config.model, ahead)
  for check in (*resolved.checks, ("batch plan", phases, [*resolved.notes, *lines, *sparse])):
    passed(check)
  if not validates:
    shown = "\n".join([str(ahead), *sparse])
    print(f"{for_screen(shown)}\n", flush=True)
  make = functools.partial(_trainer, resolved, initialization, keep=not validates)
  trainer, state = _without_arrays(make) if validates else _with_state(make())
  if compiles:
    shapes = Dataset(placeholder_rows(config), None, "", "")
    return Prepared(resolved, trainer, initialization, shapes)
  _say_parts(resolved, trainer, passed)
  begins = initialization.check(config, trainer)
  if begins:
    passed(("initial state", begins[0], begins[1:]))
  with sync_errors():
    extra = resolved.training.extra_bytes(trainer)
    memory = check_memory(config, plan, state, target.devices, extra)
  passed(("memory", memory, ()))
  if config.distributed.elastic:
    with sync_errors():
      passed(("copies", copies_kept(trainer), ()))
  passed(("learning rate", _rates(config, plan), ()))
  with one_process_at_a_time():
    training = resolved.training
    dataset = training.examine(trainer, passed) if validates else training.dataset()
  check_same_run(config, plan, dataset)
  about = description(resolved, trainer, dataset.description, begins)
  return Prepared(resolved, trainer, initialization, dataset, about)


def build(resolved: ResolvedRun, *, keep: bool = True) -> Trainer:
  """Returns the model, optimizer and mesh of a run, which hold no array yet (see `build_trainer`)."""
  training = resolved.training
  return build_trainer(
    resolved.config,
    resolved.plan,
    resolved.target.devices,
    keep=keep,
    loss=training.loss,
    num_saved_policies=training.num_saved_policies,
  )


def _trainer(resolved: ResolvedRun, initialization: Initialization, *, keep: bool) -> Trainer:
  return saving_frozen(build(resolved, keep=keep), resolved.saved, initialization)


def _with_state(trainer: Trainer) -> tuple[Trainer, TrainState]:
  return trainer, trainer.abstract


def _without_arrays(make: Callable[[], Trainer]) -> tuple[Trainer, TrainState]:
  """Returns trainer and state by tracing alone: even a random key would compile a program."""
  made: list[tuple[Trainer, TrainState]] = []
  jax.eval_shape(lambda: made.append(_with_state(make())))
  return made[0]


def _initialization(resolved: ResolvedRun) -> Initialization:
  """Returns what the run begins with, where it has no checkpoint of its own.

  Raises:
    UserError: it is to take place here, and there is nothing of the kind.
  """
  if resolved.initialization:
    return resolved.initialization
  keys = resolved.config.checkpoint
  try:
    return Initialization() if resolved.saved else find_initialization(keys, resolved.folder)
  except UserError as error:
    if not resolved.config.compile.compile_topology:
      raise
    unseen = bool(keys.load_parameters_path)
    return Initialization(unseen=unseen, note=f"is not looked at: {error}")


def _say_parts(resolved: ResolvedRun, trainer: Trainer, passed: Passed) -> None:
  where = describe_devices(resolved.target.devices)
  problems = undivided_parameters(trainer)
  if resolved.config.optimizer.shard_optimizer_over_data and not trainer.over_data:
    problems = [*problems, "shard_optimizer_over_data=true has no effect: data has one device"]
  passed(("mesh", f"{resolved.plan.topology} on {where}", problems))
  if trainer.pipeline:
    passed(("pipeline", str(trainer.pipeline), trainer.pipeline.open_choices))
  name = resolved.config.model.model_name
  model = f"{name}: {parameter_counts(trainer.model)}"
  passed(("model", model, lost_updates(trainer.model)))


def _rates(config: Config, plan: BatchPlan) -> str:
  rate = learning_rate(config.optimizer, plan, config.run.schedule_unit)
  last = plan.phases[-1]
  before_end = last.after(last.num_steps - 1)
  return (
    f"{config.optimizer.lr_schedule_type}: {rate(Position(0, 0)):.3g} at the first step, "
    f"{max(map(rate.highest, plan.phases)):.3g} at most, {rate(before_end):.3g} at the last"
  )


_ALWAYS = ("parameters", "optimizer state", "accumulators")
"""What every run has, be it nothing."""
_ROW_BYTES_PER_TOKEN = 12
"""Inputs, targets and weights; packed rows have more."""


def check_memory(
  config: Config,
  plan: BatchPlan,
  state: TrainState,
  devices: Sequence[Device],
  beside: Mapping[str, int] = MappingProxyType({}),
) -> str:
  """Checks that the run fits, and says what every device holds between steps.

  Args:
    devices: those of the run; simulated ones share the memory of the machine.
    beside: bytes that each holds besides, by name.

  Raises:
    UserError: state, rows of a dispatch or activations of a layer are more than a device has.
  """
  accumulators = bytes_per_device(state.opt_state.acc_grads)
  sizes = {
    "parameters": bytes_per_device(state.params),
    "frozen parameters": bytes_per_device(state.frozen),
    "optimizer state": bytes_per_device(state.opt_state) - accumulators,
    "accumulators": accumulators,
    **beside,
  }
  said = {name: size for name, size in sizes.items() if size or name in _ALWAYS}
  parts = ", ".join(f"{name} {gib(size)}" for name, size in said.items())
  total, capacity = sum(sizes.values()), _capacity(config, devices)
  if total > capacity:
    raise UserError(
      f"{_given(config, capacity)} is less than the {gib(total)} that every device holds before it "
      f"computes anything ({parts}); for example {_offer(config, plan, total, capacity)}"
    )
  _check_batch(config, plan, capacity - total, capacity)
  return f"{gib(total)} per device between steps: {parts}"


def bytes_per_device(tree: Any) -> int:
  """Returns the bytes of the abstract arrays' parts on one device."""
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * item_bytes(x) for x in leaves)


def item_bytes(leaf: jax.ShapeDtypeStruct) -> int:
  """Returns the bytes of one element."""
  return np.dtype(leaf.dtype).itemsize


def _capacity(config: Config, devices: Sequence[Device]) -> float:
  try:
    return capacity_bytes(devices, config.compile.device_memory_gb)
  except UserError:
    return math.inf  # A kind of device that does not say: it will when the step is compiled.


def _given(config: Config, capacity: float) -> str:
  if config.compile.device_memory_gb:
    return f"device_memory_gb={config.compile.device_memory_gb:g}"
  return f"A device's memory of {gib(capacity)}"


def _offer(config: Config, plan: BatchPlan, total: int, capacity: float) -> str:
  """Returns keys with which each device holds a part that fits, of what is now whole on several."""
  data, fsdp = plan.topology.ici["data"], plan.topology.ici["fsdp"]
  parts = [n for n in range(2, data + 1) if data % n == 0 and total / n <= capacity]
  if not parts:
    return "a smaller model, or more devices"
  keys = f"ici_fsdp_parallelism={fsdp * parts[0]}"
  is_open = config.mesh.ici_data_parallelism == -1
  return keys if is_open else f"ici_data_parallelism={data // parts[0]} {keys}"


def _check_batch(config: Config, plan: BatchPlan, free: float, capacity: float) -> None:
  """Checks the rows of a dispatch, and what one layer of one microbatch reads and writes."""
  model = config.model
  widest = max(model.base_emb_dim, hidden_width(model), attention_width(model))
  width = widest * compute_format(config.precision).bytes / plan.topology.shape["tensor"]
  chunks = plan.topology.shape["stage"]
  sizes = [
    (max(plan.micro_batches), "per_device_batch_size"),
    (plan.eval_batch, "eval_per_device_batch_size"),
  ]
  # Reinforcement learning evaluates by sampling.
  for micro_batch, key in sizes[:1] if is_rl(config.rl) else sizes:
    tokens = plan.device_tokens(micro_batch)
    rows = tokens if key.startswith("eval") else plan.dispatched_tokens(streams(config))
    needed = float(rows * _ROW_BYTES_PER_TOKEN + tokens * width / chunks)
    if needed > free:
      size = plan.per_device(micro_batch)
      fitting = math.floor(size * Fraction(free) / Fraction(needed))
      smaller = f"at most {fitting} fit" if fitting else "fewer gradient accumulation steps may"
      raise UserError(
        f"{key}={text(size)}: a device needs at least {gib(needed)} for the rows of "
        f"{plan.num_microbatches:,} gradient accumulation steps and for what one layer "
        f"computes, besides the state, and has {gib(capacity)}; {smaller}"
      )
