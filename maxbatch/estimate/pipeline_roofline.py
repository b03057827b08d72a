"""A step of a pipeline, estimated without compiling it: a stage's layers as a model of their own.

A stage has its share of the layers, and the embedding and the output matrix whole, on a mesh without stages: what
step_roofline.py says of that model is a full tick's time, of which m microbatches in v repeats take (v · m + h(p − 1))
/ v, with p stages and a forwarding delay of h ticks. Each stage forms the loss of 1/p of the tokens. No rate is fitted
to pipelines; docs/pipeline.md compares the estimates with what was compiled.
"""

import dataclasses
from collections.abc import Mapping
from fractions import Fraction

from maxbatch.core.topology import Topology
from maxbatch.estimate.chips import Chip
from maxbatch.estimate.step_roofline import (
  StepBytes,
  StepRoofline,
  memory_work,
  state_bytes,
  step_rates,
  step_roofline,
)
from maxbatch.estimate.step_time import RooflineSeconds
from maxbatch.estimate.step_work import RematPolicy, StepWork
from maxbatch.pipeline_parallel.schedule import TimetableShape, schedule_named

_LAYERS = ("attention", "mlp", "norm", "other")
"""Parts that are of the layers."""
_AGAIN: Mapping[RematPolicy, Fraction] = {
  "none": Fraction(4, 3),
  "minimal": Fraction(4, 3),
  "full": Fraction(5, 4),
}
"""A tick's work with pipeline_saved_activations=input over that with residuals: another forward."""


@dataclasses.dataclass(frozen=True)
class Stages:
  """How layers are divided over the stages of a pipeline, and what these keep."""

  schedule: str
  in_slice: int
  slices: int
  """Slices over which they lie: stages are `in_slice` × `slices`."""
  repeats: int
  forwarding_delay: int
  stash: str
  """pipeline_saved_activations; auto: residuals where they fit."""
  num_first_layers: int = 0
  """Layers that every stage has."""
  streamed: bool = False
  """Whether every microbatch of gradient accumulation has a timetable of its own."""

  @property
  def count(self) -> int:
    """Stages."""
    return self.in_slice * self.slices

  @property
  def fewest_microbatches(self) -> int:
    """Parts of a microbatch of gradient accumulation: the fewest that fill the stages."""
    return self.forwarding_delay * self.count

  def of_work(self, work: StepWork) -> StepWork:
    """Returns the work of one stage."""
    first = self.num_first_layers
    layers = (work.model.base_num_decoder_layers - first) // self.count + first
    return dataclasses.replace(
      work, model=dataclasses.replace(work.model, base_num_decoder_layers=layers)
    )


def pipeline_roofline(
  work: StepWork,
  chip: Chip,
  mesh: Topology,
  per_device: Fraction,
  num_microbatches: int,
  remat: RematPolicy,
  stages: Stages,
) -> StepRoofline:
  """Returns a step, estimated.

  Args:
    mesh: all devices, with those along `stage`.
    per_device: samples of a microbatch of gradient accumulation on one device; the stages divide it into
      their fewest microbatches, so that it is also what a device of a stage has of each of these, h of them
      for each stage.
    num_microbatches: of gradient accumulation.
  """
  if stages.stash == "auto":
    given = work, chip, mesh, per_device, num_microbatches, remat
    kept, again = (
      pipeline_roofline(*given, dataclasses.replace(stages, stash=stash))
      for stash in ("residuals", "input")
    )
    return kept if kept.fits else again
  of_stage, alone = stages.of_work(work), _without_stages(mesh)
  size = per_device / stages.forwarding_delay
  p, v = stages.count, stages.repeats
  timetables = num_microbatches if stages.streamed else 1
  pieces = num_microbatches * stages.fewest_microbatches
  shape = TimetableShape(p, pieces // timetables, v, stages.forwarding_delay)
  one = step_roofline(of_stage, chip, alone, size, 1, remat, step_rates(chip))
  held = memory_work(of_stage, chip, alone, size, remat)
  ticks = timetables * (shape.forwards_per_stage + shape.warmup_ticks) / v
  again = float(_AGAIN[remat]) if stages.stash == "input" else 1.0
  replicas = one.rest_seconds - one.parts["optimizer"]
  parts = {part: ticks * again * one.parts[part] for part in _LAYERS} | {
    "head": pieces * one.parts["head"] / p,
    "embedding": pieces * one.parts["embedding"],
    "collectives": ticks * one.parts["collectives"] + replicas,
    "optimizer": one.parts["optimizer"],
  }
  if stages.forwarding_delay == 1:
    # Nothing runs beside an exchange, of an output and a gradient in a tick.
    bandwidth = chip.dcn_bandwidth if stages.slices > 1 else chip.ici_bandwidth
    parts["collectives"] += ticks * v * 2 * held["stream"] / bandwidth
  seconds = sum(parts.values())
  scale = seconds / one.limits.total
  limits = RooflineSeconds(
    *(scale * x for x in (one.limits.compute, one.limits.memory, one.limits.interconnect))
  )
  tokens = pieces * float(size * work.length) * alone.num_devices
  peak = mesh.num_devices * chip.peak_flops
  return dataclasses.replace(
    one,
    step_seconds=seconds,
    microbatch_seconds=(seconds - one.rest_seconds) / num_microbatches,
    rest_seconds=one.rest_seconds,
    utilisation=tokens * work.model_flops_per_token / seconds / peak,
    tokens_per_second=tokens / seconds,
    bytes=_bytes(of_stage, alone, held, one, stages, shape),
    limited_by=limits.limit,
    parts=parts,
    limits=limits,
  )


def _bytes(
  of_stage: StepWork,
  alone: Topology,
  held: Mapping[str, float],
  one: StepRoofline,
  stages: Stages,
  shape: TimetableShape,
) -> StepBytes:
  """Returns what a device of a stage holds: slots for inputs and gradients, and for residuals of a chunk, or those of
  one microbatch, with a copy of the stage's weights as they are computed with."""
  slots = schedule_named(stages.schedule).limits(shape)
  chunk = held["residuals"] / stages.repeats
  buffers = (slots.inputs + slots.gradients + 2) * held["stream"]
  buffers += chunk * (1 if stages.stash == "input" else slots.inputs + 1)
  others = sum(one.rates.memory[kind] * x for kind, x in held.items() if kind != "residuals")
  layers = of_stage.model.base_num_decoder_layers * of_stage.layer_parameters
  is_cast = of_stage.compute_bytes < of_stage.weight_bytes
  casts = (
    layers * of_stage.compute_bytes / alone.num_devices * alone.shape["data"] if is_cast else 0
  )
  return StepBytes(state_bytes(of_stage, alone), round(buffers + others + casts))


def _without_stages(mesh: Topology) -> Topology:
  """Returns the mesh of one stage."""
  return Topology(
    *({axis: n for axis, n in sizes.items() if axis != "stage"} for sizes in (mesh.ici, mesh.dcn))
  )
