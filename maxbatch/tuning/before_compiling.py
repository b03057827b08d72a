"""What is known of candidates before any is compiled: a policy's products and bytes, as traced, and which size is
estimated to be the fastest."""

import dataclasses
from collections.abc import Sequence

from maxbatch.batch.from_config import is_rl, mesh_of, plan_batches
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.compile.traced_flops import named_bytes, step_flops
from maxbatch.config.schema import Config
from maxbatch.estimate.chips import chip_for
from maxbatch.estimate.step_roofline import step_roofline
from maxbatch.estimate.step_work import step_work
from maxbatch.hardware.devices import Target
from maxbatch.models.remat import NAMED, POLICIES
from maxbatch.training.build import build_trainer, step_rows, traced_step
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.grid_search import Grid, PolicyWork


def grid_of(candidates: Sequence[Candidate], config: Config, place: Target) -> Grid | None:
  """Returns the candidates as a grid that is searched, where there are other keys beside the size; None: all
  of them are tried.

  It begins with the policy of least memory, with which the most sizes fit.
  """
  variants = {(one.remat_policy, one.compiler_flags) for one in candidates}
  if len(variants) == 1:
    return None
  last = [one for one in candidates if one.remat_policy == candidates[-1].remat_policy]
  first = [one for one in last if one.compiler_flags == candidates[0].compiler_flags]
  policies = dict.fromkeys(one.remat_policy for one in candidates if one.remat_policy)
  is_plain = config.pipeline.pipeline_schedule == "none" and not is_rl(config.rl)
  if not is_plain:
    return Grid(candidates, {}, first[0])
  work = {one: _policy_work(first[0], one, config, place) for one in policies}
  return Grid(candidates, work, _estimated_fastest(first, config, place))


def _policy_work(candidate: Candidate, policy: str, config: Config, place: Target) -> PolicyWork:
  """Traces the step of one candidate with a policy, in about a second."""
  config = dataclasses.replace(candidate, remat_policy=policy).applied_to(config)
  # One body for all layers: what a tensor is worth does not depend on how they are compiled.
  model = dataclasses.replace(config.model, scan_layers=True)
  config = dataclasses.replace(config, model=model)
  layout = mesh_of(config, len(place.devices), place.layout.num_slices)
  plan = plan_batches(config.batch, config.run, layout, config.optimizer)
  trainer = build_trainer(config, plan, place.devices)
  rows = step_rows(plan, trainer, placeholder_rows(config), plan.micro_batch_to_train)
  jaxpr = traced_step(trainer, rows).jaxpr
  sizes, kept = named_bytes(jaxpr.jaxpr), POLICIES.get(policy)
  names = {*sizes} - {NAMED[0]} if kept is None else {*kept.on_device}
  held = sum(size for name, size in sizes.items() if name in names) * model.base_num_decoder_layers
  samples = plan.micro_batch_to_train
  return PolicyWork(step_flops(jaxpr).total / samples, held / samples)


def _estimated_fastest(sizes: Sequence[Candidate], config: Config, place: Target) -> Candidate:
  """Returns the size that is estimated to be the fastest of those that fit; the first where nothing is known."""
  chip = chip_for(place.devices[0].device_kind)
  best, most = sizes[0], 0.0
  if chip is None:
    return best
  for one in sizes:
    of = one.applied_to(config)
    layout = mesh_of(of, len(place.devices), place.layout.num_slices)
    step = step_roofline(step_work(of), chip, layout, one.per_device, one.num_microbatches, "full")
    if step.fits and one.batch / step.step_seconds > most:
      best, most = one, one.batch / step.step_seconds
  return best
