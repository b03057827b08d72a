"""The microbatch of reinforcement learning, a step with the rollout of the same size: chosen by auto and
explore; where it is given, held to device_memory_gb."""

import bisect
import dataclasses
import pathlib
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.batch.rl_plan import in_samples, plan_rl
from maxbatch.batch.rl_sizes import GivenCompletions, given_completions
from maxbatch.command_line.screen import GIB
from maxbatch.compile.compile_step import placeholder_rows, try_report
from maxbatch.compile.program import (
  DoesNotFitError,
  compile_program,
  gib,
  memory_suggestions,
  state_bytes,
)
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_identity import lowered_hash
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import broadcast_one_to_all
from maxbatch.hardware.devices import Device, Target
from maxbatch.rl.candidates import rl_sizes_of
from maxbatch.rl.rollout_program import RolloutCompiler, RolloutPlace
from maxbatch.rl.trainer import build_policy_trainer
from maxbatch.tuning.candidates import is_open
from maxbatch.tuning.microbatch_size import choose_from, chooses, what_it_depends_on
from maxbatch.tuning.search import Prober, ProbeSize


def choose_rl(
  config: Config, place: Target, probe: ProbeSize, folder: pathlib.Path, *, retune: bool = False
) -> Config:
  """Chooses the size, as `choose` does (tuning/microbatch_size.py), of a configuration that counts prompts."""
  if not chooses(config):
    return config
  sizes = rl_sizes_of(config, place.layout)
  depends_on = what_it_depends_on(config, place, sizes, _lowered) | {"rl": to_flat_dict(config.rl)}
  return choose_from(
    config,
    sizes,
    depends_on,
    probe,
    folder,
    lambda size, why: f"micro_batch_size auto: {size.words} ({why})",
    retune=retune,
  )


def check_given_size(config: Config, place: Target) -> None:
  """Holds a run whose microbatch is given to device_memory_gb, its rollout counted.

  Raises:
    UserError: it needs more; names the nearest size that fits.
  """
  limit = int(config.compile.device_memory_gb * GIB)
  if not limit or is_open(config.batch) or config.compile.compiled_step:
    return
  needed = _needed_bytes(config, place, limit)
  if needed <= limit:
    return
  plan = plan_rl(config, place.layout)
  size, given = plan.micro_batch, given_completions(config.batch, plan.topology)
  open_batch = dataclasses.replace(
    config.batch, micro_batch_size="auto", per_device_batch_size=-1, gradient_accumulation_steps=-1
  )
  free = dataclasses.replace(config, batch=open_batch)
  smaller = [one for one in rl_sizes_of(free, place.layout) if one.micro_batch < size]
  # A larger microbatch needs more memory.
  fitting = bisect.bisect_right(
    smaller, limit, key=lambda one: _needed_bytes(one.applied_to(free), place, limit)
  )
  offer = f"no smaller one fits; {memory_suggestions(config)}"
  if fitting:
    offer = f"the nearest that fits is {_assigned(given, smaller[fitting - 1].micro_batch)}"
  # Who does not say how much was missing, has been given a byte more than there is.
  amount = gib(needed) if needed > limit + 1 else "more memory"
  raise UserError(
    f"{_assigned(given, size)}: with microbatches of {size:,} completions step and rollout need {amount} "
    f"a device, and device_memory_gb={config.compile.device_memory_gb:g}; {offer}"
  )


def _needed_bytes(config: Config, place: Target, limit: int) -> int:
  """Compiles step and rollout; returns the bytes that a device needs, more than `limit` if the compiler
  refuses."""
  plan = plan_rl(config, place.layout)
  trained = in_samples(config, plan)
  trainer = build_policy_trainer(trained, plan, place.devices)
  rows = placeholder_rows(trained)
  try:
    step = compile_program(trained, plan.batch_plan, trainer, rows, plan.micro_batch)
    rollout, _ = RolloutCompiler(RolloutPlace(plan, place.rollout)).compiled(trained, trainer)
  except DoesNotFitError as error:
    return max(error.needed_bytes, limit + 1)
  return broadcast_one_to_all(rollout.largest(step.memory, state_bytes(trainer.abstract).total))


def _assigned(given: GivenCompletions, size: int) -> str:
  """Returns the keys that give a microbatch, with the values of one of `size` completions."""
  micro, number = given.micro_batch, given.num_microbatches
  keys = [micro.assigned(Fraction(size))] if micro else []
  if number and not number.word:
    keys.append(number.assigned(given.batch.size / size))
  return " ".join(keys) or f"micro_batch_size={size}"


class RLProber(Prober):
  """Finds what one size needs and takes where the configuration counts prompts: with its rollout."""

  def __init__(self, config: Config, place: Target):
    """Args: the run, and its devices."""
    super().__init__(config, place.devices, place.layout)
    self._rollout = place.rollout

  def _compiled(self, config: Config) -> CompileReport:
    plan = plan_rl(config, self._layout)
    place = RolloutPlace(plan, self._rollout)
    return rl_report_or_refusal(in_samples(config, plan), self._devices, place)


def rl_report_or_refusal(
  config: Config, devices: Sequence[Device], place: RolloutPlace
) -> CompileReport:
  """Compiles and reports, as `report_or_refusal` does (compile/compile_step.py), a step with its rollout.

  Args:
    config: the run, its sizes counted in completions (`in_samples`).
    devices: where it is to train.
    place: its sizes, and where it is to sample.

  Raises:
    DoesNotFitError: the compiler refuses either program, or it runs out of memory while it is timed.
    UserError: a device's memory is not known.
  """
  plan, trainer = place.plan, build_policy_trainer(config, place.plan, devices)
  sampler = RolloutCompiler(place)
  return try_report(config, plan.batch_plan, trainer, devices, plan.micro_batch, sampler)


def _lowered(config: Config, place: Target) -> str:
  """Hashes the run's step."""
  plan = plan_rl(config, place.layout)
  trained = in_samples(config, plan)
  trainer = build_policy_trainer(trained, plan, place.devices)
  return lowered_hash(
    trained, plan.batch_plan, trainer, placeholder_rows(trained), plan.micro_batch
  )
