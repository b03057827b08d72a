"""The plan of a configuration: its keys and devices, handed to the core's arithmetic as numbers.

A resumed run has a batch too: what it keeps, and whether it can go on with the sizes given now.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

from maxbatch.batch.learning_rate import seesaw
from maxbatch.batch.schedule_file import read_changes
from maxbatch.config.find import shown, user_path
from maxbatch.config.keys.batch import Explore
from maxbatch.config.registry import registered
from maxbatch.config.schema import (
  BatchConfig,
  Config,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  RLConfig,
  RunConfig,
  context_strategy,
)
from maxbatch.core.keys import BatchKeys, GivenSizes, text
from maxbatch.core.make_plan import derive, plan
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.schedule import (
  SCHEDULES,
  SEESAW,
  Build,
  PhaseStarts,
  ScheduleInputs,
  constant,
  schedule_name,
)
from maxbatch.core.solve import fitting_micro_batch, nearest_batches, nearest_multiples, solve
from maxbatch.core.topology import AXES, Topology, fill
from maxbatch.errors import UserError

FEWEST_EXPERT_TOKENS = 512
"""Switch-C's: steps of 2^20 tokens, each to one of 2,048 experts (Fedus et al. 2021, section 5.6)."""


def is_rl(config: RLConfig) -> bool:
  """Returns whether a configuration is one of reinforcement learning."""
  return config.num_generations != -1


def check_supervised(config: RLConfig) -> None:
  """Checks, for commands that train on text, that the sizes count samples and not prompts.

  Raises:
    UserError: the configuration is one of reinforcement learning.
  """
  if is_rl(config):
    raise UserError(
      f"num_generations={config.num_generations} makes this a configuration of reinforcement "
      "learning, whose batch_size counts prompts, and this command trains on text; for example "
      "num_generations=-1, or another config"
    )


def training_devices(
  config: RLConfig, num_devices: int, num_parts: int = 1, part: str = "slices"
) -> int:
  """Returns how many of all devices train.

  Args:
    config: says how many only sample.
    num_devices: all that there are.
    num_parts: slices, or processes, each of which has as many that sample.
    part: which of the two.

  Raises:
    UserError: those that only sample leave none, or slices or processes of different sizes.
  """
  rollout, each = config.rollout_devices, num_devices // num_parts
  if rollout < num_devices and rollout % num_parts == 0:
    return num_devices - rollout
  fitting = min(max(round(rollout / num_parts), 1), each - 1) * num_parts
  offer = f"rollout_devices={fitting}, or " if fitting > 0 else ""
  equally = f", and take equally many from each of the {num_parts} {part}" if num_parts > 1 else ""
  raise UserError(
    f"rollout_devices={rollout} must leave some of the {num_devices} devices to train{equally}; "
    f"for example {offer}rollout_devices=0: all devices sample and train in turn"
  )


def rollout_topology(config: RLConfig) -> Topology | None:
  """Returns the mesh of the devices that only sample; None: there are none.

  Raises:
    UserError: the product of its axes is not rollout_devices.
  """
  if not config.rollout_devices:
    return None
  axes = {"data": config.rollout_data_parallelism, "fsdp": config.rollout_fsdp_parallelism}
  if config.rollout_expert_parallelism != 1:
    axes["expert"] = config.rollout_expert_parallelism
  axes["tensor"] = config.rollout_tensor_parallelism
  given = {f"rollout_{axis}_parallelism": size for axis, size in axes.items()}
  sizes = fill(given, config.rollout_devices, "rollout devices")
  return Topology.of(**dict(zip(axes, sizes.values(), strict=True)))


_DEFAULT_MAX_GROWTH = 16
"""batch_schedule=gns grows the batch up to this multiple of the first, unless configured."""


def topology(mesh: MeshConfig, num_devices: int, num_slices: int = 1) -> Topology:
  """Returns the mesh of `num_devices` devices in `num_slices` equal slices.

  Raises:
    UserError: the product of the axes is not the number of devices, or the slices are not equal.
  """
  if num_devices % num_slices:
    raise UserError(
      f"{num_devices} devices in {num_slices} slices: all slices must have the same number of "
      f"devices; for example {num_devices // num_slices * num_slices} devices"
    )
  keys = dataclasses.asdict(mesh)

  def sizes(prefix: str, total: int, what: str) -> dict[str, int]:
    names = {axis.name: f"{prefix}_{axis.key}_parallelism" for axis in AXES}
    left_out = [axis.name for axis in AXES if axis.is_optional and keys[names[axis.name]] == 1]
    there = {name: key for name, key in names.items() if name not in left_out}
    filled = fill({key: keys[key] for key in there.values()}, total, what)
    return dict(zip(there, filled.values(), strict=True))

  return Topology(
    ici=sizes("ici", num_devices // num_slices, "devices of a slice"),
    dcn=sizes("dcn", num_slices, "slices"),
  )


def mesh_of(config: Config, num_devices: int, num_slices: int = 1) -> Topology:
  """Returns the `topology` of a configuration, whose model it can divide.

  Raises:
    UserError: it is none, or does not divide the experts, or the tokens of rows.
  """
  result, experts = topology(config.mesh, num_devices, num_slices), config.model.num_experts
  _check_context(config, result)
  ways = result.shape.get("expert", 1)
  if experts % ways:
    ici, dcn = result.ici["expert"], result.dcn["expert"]
    fitting = math.gcd(experts, ici)
    rest = f"ici_data_parallelism={result.ici['data'] * (ici // fitting)}"
    if dcn > 1:
      rest += f" dcn_expert_parallelism=1 dcn_data_parallelism={result.dcn['data'] * dcn}"
    raise UserError(
      f"num_experts={experts} must be a multiple of the devices over which whole experts are divided, "
      f"ici_expert_parallelism={ici} × dcn_expert_parallelism={dcn} = {ways}; for example "
      f"ici_expert_parallelism={fitting} {rest}"
    )
  return result


def sparse_experts(model: ModelConfig, plan: BatchPlan) -> list[str]:
  """Returns a sentence if experts see too few tokens of a step of the plan; none if not."""
  batch = min([each.batch for each in plan.phases if not each.is_cut], default=1)
  each = plan.tokens(batch) * model.num_experts_per_tok / model.num_experts
  if model.num_experts == 1 or each >= FEWEST_EXPERT_TOKENS:
    return []
  enough = math.ceil(FEWEST_EXPERT_TOKENS * batch / each)
  return [
    f"an expert sees {each:,.4g} tokens of a step ({plan.tokens(batch):,} tokens · "
    f"num_experts_per_tok={model.num_experts_per_tok} / num_experts={model.num_experts}), below Switch-C's "
    f"{FEWEST_EXPERT_TOKENS}, the fewest published that we know of, which {enough:,} samples a step give"
  ]


def _check_context(config: Config, mesh: Topology) -> None:
  """Refuses rows whose tokens, or heads, the devices that share them cannot divide evenly."""
  ways, length = mesh.shape.get("context", 1), config.batch.max_target_length
  if ways == 1:
    return
  ici, dcn, tensor = mesh.ici["context"], mesh.dcn["context"], mesh.shape["tensor"]
  keys = f"(ici_context_parallelism={ici} × dcn_context_parallelism={dcn})"
  strategy, heads = context_strategy(config.model, tensor, ways), config.model.base_num_query_heads
  if strategy == "ulysses" and heads % (tensor * ways):
    raise UserError(
      f"context_parallel_strategy=ulysses: base_num_query_heads={heads} must be a multiple of tensor "
      f"{tensor} × the {ways} devices that share the tokens of a row {keys}; use "
      "context_parallel_strategy=ring, all_gather or auto"
    )
  in_halves = strategy != "ulysses" and config.model.context_parallel_load_balance
  unit = 2 * ways if in_halves else ways
  if length % unit:
    near = " or ".join(str(size) for size in nearest_multiples(unit, Fraction(length)))
    halves = "2 (context_parallel_load_balance=true) × " if in_halves else ""
    other = "" if length % ways else ", or context_parallel_load_balance=false"
    raise UserError(
      f"max_target_length={length} must be a multiple of {halves}the {ways} devices that share the tokens of "
      f"a row {keys}; nearest: max_target_length={near}{other}"
    )


def plan_batches(
  batch: BatchConfig, run: RunConfig, topology: Topology, optimizer: OptimizerConfig | None = None
) -> BatchPlan:
  """Derives every size from the configuration and the devices, and checks every phase.

  Args:
    batch: sizes and schedule.
    run: the budget, and the unit of the learning rate's schedule.
    topology: the devices.
    optimizer: says the learning rate's schedule, which batch_schedule_type=seesaw follows.

  Raises:
    UserError: sizes contradict each other or are not whole; the message suggests sizes that work.
  """
  keys = dataclasses.replace(
    batch_keys(batch),
    steps=run.steps,
    total_samples=run.total_samples,
    total_tokens=run.total_tokens,
  )
  follow = functools.partial(seesaw, optimizer, run.schedule_unit)
  plan = derive(keys, topology, functools.partial(_phase_starts, batch, follow))
  most = batch.gns_max_batch_size
  most = _DEFAULT_MAX_GROWTH * plan.global_batch_to_train if most == -1 else most
  most = most if follows_noise_scale(batch) else 0
  return dataclasses.replace(plan, max_batch=most, loading_hosts=batch.loading_hosts)


def given_sizes(batch: BatchConfig) -> GivenSizes:
  """Returns the three sizes of a step as the configuration gives them.

  Raises:
    UserError: two keys give one size different values.
  """
  return batch_keys(batch).given_sizes()


def eval_plan(
  batch: BatchConfig, run: RunConfig, topology: Topology, per_device: Fraction
) -> BatchPlan:
  """Returns an evaluation with so many samples per device as a plan of one step, whose microbatches are its
  batches; of eval_samples=-1, which counts no samples, one batch.

  Raises:
    UserError: the devices cannot share so many samples.
  """
  count = max(1, math.ceil(run.eval_samples / (per_device * topology.num_devices)))
  return plan(
    micro_batch_size=per_device,
    gradient_accumulation_steps=count,
    steps=1,
    max_target_length=batch.max_target_length,
    mesh=topology,
  )


def follows_noise_scale(batch: BatchConfig) -> bool:
  """Returns whether the batch follows the gradient noise scale during the run."""
  return schedule_name(batch_keys(batch)) == "gns"


def batch_keys(batch: BatchConfig) -> BatchKeys:
  """Returns the sizes and the schedule as plain numbers, without a budget."""
  micro = batch.micro_batch_size
  none, evaluated = micro == "none", batch.eval_per_device_batch_size
  # auto and explore give no size: tuning/candidates.py lists the sizes to choose from.
  return BatchKeys(
    batch_size=batch.batch_size,
    global_batch_to_train=batch.global_batch_to_train,
    tokens_per_step=batch.tokens_per_step,
    per_device_batch_size=batch.per_device_batch_size,
    micro_batch_size="none" if none else micro if isinstance(micro, Fraction) else -1,
    gradient_accumulation_steps=batch.gradient_accumulation_steps,
    max_target_length=batch.max_target_length,
    expansion_factor_real_data=batch.expansion_factor_real_data,
    eval_per_device_batch_size=evaluated if isinstance(evaluated, Fraction) else 0,
    pad_batch=batch.pad_batch,
    batch_schedule=batch.batch_schedule,
    batch_schedule_type=shown(batch.batch_schedule_type),
    batch_schedule_unit=batch.batch_schedule_unit,
    batch_schedule_length=batch.batch_schedule_length,
    batch_size_start=batch.batch_size_start,
    batch_size_increment=batch.batch_size_increment,
    enable_rampup_batch_size=batch.enable_rampup_batch_size,
    per_device_batch_size_start=batch.per_device_batch_size_start,
    per_device_batch_size_increment=batch.per_device_batch_size_increment,
    global_rampup_samples=batch.global_rampup_samples,
  )


def _phase_starts(batch: BatchConfig, follow: Build, inputs: ScheduleInputs) -> PhaseStarts:
  """Makes the phases of the schedule that the keys select: registered, a plug-in's or a run's."""
  name, most = schedule_name(inputs.keys), batch.gns_max_batch_size
  if name == "gns":
    _check_growth(inputs, most)
    # The first batch alone; noise/controller.py decides on the later ones during the run.
    return constant(inputs)
  if name == "file":
    return _from_file(batch.batch_schedule_file, inputs.sizes.batch)
  known = {**SCHEDULES, SEESAW: follow}
  name = batch.batch_schedule_type if name == inputs.keys.batch_schedule_type else name
  return registered("batch_schedule_type", name, known, batch.plugins)(inputs)


def _check_growth(inputs: ScheduleInputs, most: int) -> None:
  """Checks gns_max_batch_size; -1 is not given."""
  batch, micro = inputs.sizes.batch, inputs.sizes.micro_batch
  if inputs.sizes.padding:
    near = [f"batch_size={size}" for size in nearest_batches(batch, inputs.topology)]
    raise UserError(
      f"pad_batch=true: batch_schedule=gns takes multiples of the microbatch, and batch_size={batch} is "
      f"none; nearest: {' or '.join(near)}"
    )
  if most != -1 and most < batch:
    raise UserError(
      f"gns_max_batch_size={most} must be at least batch_size={batch}, with which "
      f"batch_schedule=gns begins; for example gns_max_batch_size={_DEFAULT_MAX_GROWTH * batch}"
    )
  if most != -1 and most % micro:
    near = [size for size in nearest_multiples(micro, Fraction(most)) if size >= batch]
    offers = " or ".join(f"gns_max_batch_size={text(size)}" for size in near)
    raise UserError(
      f"gns_max_batch_size={most} must be a multiple of the microbatch of {micro} samples, which "
      f"every batch of batch_schedule=gns is; nearest: {offers}"
    )


def _from_file(file: str, batch: int) -> PhaseStarts:
  """Reads the phases that another run or a person wrote.

  Raises:
    UserError: the file cannot be read, or begins with another batch than the run's.
  """
  if not file:
    raise UserError(
      "batch_schedule=file needs batch_schedule_file, the schedule that a run with "
      "batch_schedule=gns wrote; for example batch_schedule_file=runs/steered/batch_schedule.yml"
    )
  changes = read_changes(user_path(file))
  if changes[0].batch != batch:
    raise UserError(
      f"batch_schedule_file={file} begins with {changes[0].batch} samples and batch_size is "
      f"{batch}; to follow the file, batch_size={changes[0].batch}"
    )
  return [(Fraction(change.samples), Fraction(change.batch)) for change in changes]


def keep_batch(
  config: BatchConfig, topology: Topology, saved: Mapping[str, Any], changed: Collection[str]
) -> BatchConfig:
  """Returns the sizes of a run that is resumed, perhaps on other devices: its batch stays.

  Unless a key gives the batch, or one in `changed` the size or number of microbatches, of which the
  start that wrote the checkpoint had other values. The microbatch of a device stays too, if no key
  gives it and it divides the batch. `saved` is `BatchPlan.as_dict` of the checkpoint.

  Raises:
    UserError: the batch does not divide over these devices, or not as the keys ask.
  """
  given, batch = given_sizes(config), saved.get("global_batch_to_train")
  divisions = (given.per_device, given.num_microbatches)
  is_given = given.batch or any(size and size.key in changed for size in divisions)
  # A microbatch that is to be chosen has no size yet, and its choice must not change the batch.
  is_open = config.micro_batch_size == "auto" or isinstance(config.micro_batch_size, Explore)
  if is_given or batch is None:
    return config
  try:
    if not is_open and solve(given, topology).batch == batch:
      return config
    kept = dataclasses.replace(config, batch_size=batch)
    if is_open and given.num_microbatches:
      # Batch and number of microbatches give the size that was to be chosen.
      kept = dataclasses.replace(kept, micro_batch_size=Fraction(-1))
    solve(given_sizes(kept), topology)
  except UserError as error:
    raise UserError(
      f"this run trains with {batch} samples per step, which it keeps unless a key such as "
      f"batch_size gives another batch: {error}"
    ) from None
  if is_open or any(divisions):
    return kept
  devices, groups = topology.num_devices, topology.num_batch_groups
  rows = max(1, math.floor(Fraction(saved["per_device_batch_size"]) * devices / groups))
  # The size of a device's microbatch, or the largest smaller one that divides the batch.
  per_device = Fraction(fitting_micro_batch(rows * groups, batch, topology), devices)
  return dataclasses.replace(kept, per_device_batch_size=per_device)


def resumed_plan(
  plan: BatchPlan, saved: Mapping[str, Any], position: Position, *, steered: bool
) -> BatchPlan:
  """Returns the plan from a checkpoint on, whose own was `saved`, by `BatchPlan.as_dict`.

  Where the noise scale decides on the batch (`steered`) what it had decided stays.
  """
  if steered:
    plan = plan.with_schedule([(int(at), batch) for at, batch in saved["batch_schedule"]])
  return plan.starting_at(position)
