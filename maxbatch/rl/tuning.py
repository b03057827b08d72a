"""micro_batch_size auto and explore of reinforcement learning: a step with the rollout of the same size."""

import pathlib
from collections.abc import Sequence

from maxbatch.batch.rl_plan import in_samples, plan_rl
from maxbatch.compile.compile_step import placeholder_rows, try_report
from maxbatch.compile.report import CompileReport
from maxbatch.compile.step_identity import lowered_hash
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.hardware.devices import Device, Target
from maxbatch.rl.candidates import rl_sizes_of
from maxbatch.rl.rollout_program import RolloutCompiler, RolloutPlace
from maxbatch.rl.trainer import build_policy_trainer
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
