"""The sampler of a run of reinforcement learning: compiled, and measured or estimated."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from maxbatch.batch.rl_plan import RLPlan
from maxbatch.compile.program import ProgramMemory, compiled, held_bytes, memory_of
from maxbatch.compile.traced_flops import StepFlops, step_flops
from maxbatch.config.schema import Config
from maxbatch.estimate import hlo
from maxbatch.estimate.chips import Chip, chip_for
from maxbatch.estimate.costs import program_costs
from maxbatch.estimate.step_time import connected, seconds_of
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.devices import Device
from maxbatch.hardware.sharding import make_mesh
from maxbatch.models.registry import Parameters, placed
from maxbatch.rl.policies import Mover
from maxbatch.rl.rollout_report import PolicyBytes, RolloutReport, RolloutTime
from maxbatch.rl.sampled import rollout_sampler
from maxbatch.sampling.sampler import Sampler, abstract_texts, traced_prefill, traced_write
from maxbatch.training.state import shardings
from maxbatch.training.step import Trainer

_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class RolloutPlace:
  """The sizes of a run, and the devices that only sample; none: those that train do it in turn."""

  plan: RLPlan
  devices: Sequence[Device] = ()

  def mesh(self, trainer: Trainer) -> Mesh:
    """Returns the mesh over which the policy lies that samples."""
    rollout = self.plan.topology.rollout
    return make_mesh(rollout, self.devices) if rollout else trainer.mesh

  def policy(self, trainer: Trainer) -> Parameters:
    """Returns shapes, dtypes and shardings of the policy that samples."""
    if not self.devices:
      return trainer.abstract.parameters
    return placed(trainer.model, self.mesh(trainer))


@dataclasses.dataclass(frozen=True)
class RolloutProgram:
  """Both programs of the sampler, for one microbatch."""

  prefill: jax.stages.Compiled
  """Reads all prompts, and chooses the first token of each completion."""
  write: jax.stages.Compiled
  """Goes on token by token, until all completions have ended."""
  memory: ProgramMemory
  """Memory of the program that needs more."""
  kept_bytes: int
  """Keys, values and texts on one device, between the programs."""
  texts: tuple[str, str]
  """Both, optimized."""
  flops: tuple[StepFlops, StepFlops]
  """Matrix products of one device, as traced; the second's `per_microbatch` are those of a token."""
  compile_seconds: float


def traced_rollout(
  config: Config, trainer: Trainer, place: RolloutPlace
) -> tuple[Sampler, jax.stages.Traced]:
  """Returns the sampler and the first of its programs, traced for a microbatch of the run."""
  sampler = rollout_sampler(config, trainer.model, place.mesh(trainer))
  plan = place.plan
  policy = place.policy(trainer)
  return sampler, traced_prefill(sampler, policy, plan.micro_batch, plan.max_prompt_length)


def compile_rollout(config: Config, trainer: Trainer, place: RolloutPlace) -> RolloutProgram:
  """Compiles exactly what a run samples a microbatch with.

  Raises:
    DoesNotFitError: the compiler refuses it for its memory.
  """
  began, plan = time.perf_counter(), place.plan
  sampler, begins = traced_rollout(config, trainer, place)
  prefill, prefill_text = compiled(begins, config.compile)
  cache = jax.tree.map(
    lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
    begins.out_info[1],
    prefill.output_shardings[1],
  )
  policy, shape = place.policy(trainer), (plan.micro_batch, plan.max_prompt_length)
  goes_on = traced_write(sampler, policy, *shape, cache)
  write, write_text = compiled(goes_on, config.compile)
  mesh = place.mesh(trainer)
  platform = mesh.devices.flat[0].platform
  memory = [memory_of(each, platform) for each in (prefill, write)]
  texts = abstract_texts(sampler, *shape)
  kept = jax.tree.leaves((texts, cache))
  flops = [step_flops(each.jaxpr).divided(mesh.size) for each in (begins, goes_on)]
  return RolloutProgram(
    prefill=prefill,
    write=write,
    memory=max(memory, key=lambda each: each.peak),
    kept_bytes=sum(_shard_bytes(leaf) for leaf in kept),
    texts=(prefill_text, write_text),
    flops=(flops[0], flops[1]),
    compile_seconds=time.perf_counter() - began,
  )


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
  assert leaf.sharding is not None
  return int(np.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize)


def _bytes_in_flight(config: Config, trainer: Trainer, place: RolloutPlace) -> int:
  """Returns the most that a device that trains holds of what trains on its way to the rollout devices."""
  params = trainer.abstract.params
  if not place.devices:
    return 0
  mover = Mover(trainer.mesh, place.policy(trainer))
  if mover.num_parts == 1:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
  program, _ = compiled(mover.program.trace(params, 0), config.compile)
  memory = memory_of(program, trainer.mesh.devices.flat[0].platform)
  return max(0, memory.peak - memory.arguments)


def measure_rollout(
  config: Config,
  trainer: Trainer,
  place: RolloutPlace,
  program: RolloutProgram,
  clock: Callable[[], float] = time.perf_counter,
) -> RolloutTime:
  """Times a rollout of prompts and completions as long as they can be, by a policy of its own.

  In several processes all must call it together.
  """
  plan = place.plan
  sampler = rollout_sampler(config, trainer.model, place.mesh(trainer))
  where = shardings(place.policy(trainer))
  policy = jax.jit(trainer.model.init, out_shardings=where)(jax.random.key(0))
  texts, state = jax.tree.map(
    lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
    abstract_texts(sampler, plan.micro_batch, plan.max_prompt_length),
  )
  until = np.int32(sampler.max_new_tokens)

  def run() -> float:
    began = clock()
    begun, cache = program.prefill(policy, texts, state)
    jax.block_until_ready(program.write(policy, texts, begun, cache, until))
    return clock() - began

  run()  # The first run of a program loads it.
  seconds = broadcast_one_to_all(statistics.median(run() for _ in range(_REPEATS)))
  for leaf in jax.tree.leaves((policy, texts, state)):
    if not leaf.is_deleted():
      leaf.delete()
  return RolloutTime(seconds, "measured")


def estimate_rollout(
  plan: RLPlan, program: RolloutProgram, chip: Chip, per_slice: int | None
) -> RolloutTime:
  """Estimates the time by the compiler's cycles and a chip's figures: a lower bound, as of a step.

  Args:
    plan: the run's sizes.
    program: compiled for the chip.
    chip: one device.
    per_slice: devices of a slice, where there are several.
  """
  first, rest = (program_costs(hlo.parse(text)) for text in program.texts)
  # The loop over tokens ends when all completions have, which cannot be read as a number.
  once = [one for one in rest if one.unread_loops or one.in_microbatch_loop]
  beside = [one for one in rest if not (one.unread_loops or one.in_microbatch_loop)]
  prefill = seconds_of(first, chip, per_slice) + seconds_of(beside, chip, per_slice)
  tokens = plan.max_completion_length - 1
  return RolloutTime(prefill + tokens * seconds_of(once, chip, per_slice), "estimate", prefill)


def rollout_report(
  program: RolloutProgram,
  plan: RLPlan,
  sampling: PolicyBytes,
  training: PolicyBytes,
  in_flight: int,
  time: RolloutTime | None,
) -> RolloutReport:
  """Puts together what is known of a rollout.

  Args:
    program: the compiled sampler.
    plan: the run's sizes.
    sampling: of the policy on a device that samples.
    training: the same on a device that trains.
    in_flight: of what is trained, on a device that trains, on its way to another.
    time: of a microbatch.
  """
  apart = plan.topology.rollout_devices > 0
  in_training = training.copies(plan.num_policies_in_training)
  return RolloutReport(
    plan=plan,
    sampling=program.memory,
    policy=sampling.total,
    snapshots=sampling.copies(plan.num_snapshots) if apart else in_training,
    snapshots_in_training=in_training,
    kept=program.kept_bytes,
    in_flight=in_flight if apart else 0,
    compile_seconds=program.compile_seconds,
    time=time,
  )


@dataclasses.dataclass(frozen=True)
class RolloutCompiler:
  """Compiles and times the rollouts of a run beside its step (`Sampler` in compile_step.py)."""

  place: RolloutPlace

  def compiled(
    self, config: Config, trainer: Trainer
  ) -> tuple[RolloutReport, Callable[[], RolloutReport]]:
    """Returns what is known without running it, and what also measures its time when called."""
    place = self.place
    program = compile_rollout(config, trainer, place)
    topology = place.plan.topology.training
    network = config.compile.compile_topology_network_gbps
    chip = chip_for(trainer.mesh.devices.flat[0].device_kind, network)
    per_slice = connected(topology, chip)
    state, parts = trainer.abstract, trainer.model.split(place.policy(trainer))
    report = rollout_report(
      program,
      place.plan,
      sampling=PolicyBytes(*map(held_bytes, parts)),
      training=PolicyBytes(held_bytes(state.params), held_bytes(state.frozen)),
      in_flight=_bytes_in_flight(config, trainer, place),
      time=estimate_rollout(place.plan, program, chip, per_slice) if chip else None,
    )

    def timed() -> RolloutReport:
      time = measure_rollout(config, trainer, place, program)
      return dataclasses.replace(report, time=time)

    return report, timed
