"""Keys of the batch, the mesh of devices that share it, and the pipeline that divides it."""

import dataclasses
from fractions import Fraction
from typing import Annotated, Literal

from maxbatch.config.declare import (
  CHANGEABLE,
  EXACT,
  FIXED,
  INT32,
  CountOrUnset,
  Exact,
  ExactOrUnset,
  Example,
  Name,
  Path,
  Positive,
  PositiveOrUnset,
  Range,
  Section,
  key,
)
from maxbatch.config.keys.read_when import (
  FILE_SCHEDULE,
  FUSED,
  HERE,
  LINEAR_RAMP,
  NO_PIPELINE,
  NOISE_SCHEDULE,
  PIPELINE,
  RAMP,
  RAMP_OR_SEESAW,
  RAMPUP,
  SCHEDULE_WITH_UNIT,
  TEXT,
)


@dataclasses.dataclass(frozen=True)
class Explore:
  """`explore`, or `{explore: {min: 1, max: 16}}`: the sizes that are tried."""

  min: Positive = 1
  max: PositiveOrUnset = -1


@dataclasses.dataclass(frozen=True)
class BatchConfig(Section, heading="the batch"):
  """The sizes from which BatchPlan derives every other size."""

  batch_size: PositiveOrUnset = key(-1, CHANGEABLE)
  """Global batch size: samples per optimizer step over all devices (with num_generations: prompts);
  -1: derived from the other sizes."""
  global_batch_to_train: PositiveOrUnset = key(-1, CHANGEABLE)
  """The same as batch_size, by MaxText's name."""
  tokens_per_step: CountOrUnset = key(-1, CHANGEABLE)
  """Global batch size in tokens, padding included; -1: derived."""
  per_device_batch_size: ExactOrUnset = key(Fraction(-1), CHANGEABLE)
  """Samples per device and microbatch; a fraction where devices share a sample; -1: derived, or 4
  if no other key determines it."""
  micro_batch_size: ExactOrUnset | Literal["none", "auto"] | Explore = key(Fraction(-1), CHANGEABLE)
  """As per_device_batch_size; or none: the whole batch at once; auto: the fastest that fits;
  explore, or {explore: {min: 1, max: 16}}: rank all (compile_only)."""
  gradient_accumulation_steps: PositiveOrUnset = key(-1, CHANGEABLE)
  """Microbatches per optimizer step; raise it for a larger batch in the same memory; -1: derived,
  or 1."""
  expansion_factor_real_data: Annotated[Fraction, Range(limit=INT32)] = key(
    Fraction(-1), CHANGEABLE, TEXT
  )
  """Samples loaded at once, as a multiple of global_batch_to_train; above 1, that many times fewer
  hosts read, and send the others their part; <= 0: 1."""
  loading_hosts: tuple[Annotated[int, Range(low=0, limit=INT32)], ...] = key((), CHANGEABLE, TEXT)
  """Hosts (process numbers, from 0) that read for all, for example [1, 3]; []: the first ones, as
  many as expansion_factor_real_data asks for."""
  eval_per_device_batch_size: Exact | Literal["auto"] | Explore = key(Fraction(0), CHANGEABLE, TEXT)
  """Samples per device and evaluation batch; 0: as in training; auto: the fastest that fits; explore,
  as for micro_batch_size: rank all (compile_only)."""
  max_target_length: Positive = key(128, FIXED)
  """Sequence length: tokens per sample."""
  accumulation: Literal["fused", "streamed"] = key("fused", CHANGEABLE)
  """fused: one dispatch per step, looping over the microbatches; streamed: one dispatch per
  microbatch, for steps too large to hold on the devices."""
  pad_batch: bool = key(False, CHANGEABLE, TEXT, NO_PIPELINE, FUSED)
  """Fill a step up with rows without weight where the batch does not divide over the devices; set by
  elastic where that takes less time on those that are left."""
  enable_rampup_batch_size: bool = key(False, CHANGEABLE)
  """Ramp the batch up from per_device_batch_size_start to the run's size over global_rampup_samples
  samples."""
  per_device_batch_size_start: Exact = key(Fraction(1), CHANGEABLE, RAMPUP)
  """First size of that ramp-up, in samples per device and microbatch."""
  per_device_batch_size_increment: Exact = key(Fraction(1), CHANGEABLE, RAMPUP)
  """Increment of that ramp-up, in samples per device and microbatch; each increment lasts the same
  number of samples."""
  global_rampup_samples: Annotated[int, Range(low=1, limit=EXACT)] = key(500, CHANGEABLE, RAMPUP)
  """Length of that ramp-up in samples."""
  batch_schedule: (
    Annotated[
      tuple[tuple[Annotated[int, Range(low=0, limit=EXACT)], ...], ...],
      Example("[[0, 32], [10000, 64]]"),
    ]
    | Literal["gns", "file"]
  ) = key((), CHANGEABLE)
  """Batch size over training, samples per step: [[0, 32], [10000, 64]]; gns: grows with the
  gradient noise scale; file: batch_schedule_file; []: constant."""
  batch_schedule_file: Path = key("", CHANGEABLE, FILE_SCHEDULE)
  """File for batch_schedule: file, in the format of batch_schedule.yml, which a run with
  batch_schedule: gns writes."""
  batch_schedule_type: Name = key("constant", CHANGEABLE)
  """Ramp-up to the run's batch size: constant (none), linear or doubling; seesaw: doubles where
  the learning rate would halve, which falls by √2 instead."""
  batch_schedule_unit: Literal["steps", "samples", "tokens"] = key(
    "samples", CHANGEABLE, TEXT, SCHEDULE_WITH_UNIT
  )
  """Unit of batch_schedule and batch_schedule_length: steps, samples or tokens; samples keep their
  meaning when the batch changes."""
  batch_schedule_length: CountOrUnset = key(-1, CHANGEABLE, RAMP)
  """Length of a linear or doubling ramp-up, in batch_schedule_unit; -1: not given."""
  batch_size_start: PositiveOrUnset = key(-1, CHANGEABLE, RAMP_OR_SEESAW)
  """First batch of a linear or doubling ramp-up or of seesaw, in samples per step; -1: not given."""
  batch_size_increment: PositiveOrUnset = key(-1, CHANGEABLE, LINEAR_RAMP)
  """Increment of a linear ramp-up, in samples per step; -1: the same as batch_size_start."""
  gns_max_batch_size: PositiveOrUnset = key(-1, CHANGEABLE, NOISE_SCHEDULE)
  """Largest batch that batch_schedule: gns may reach, in samples per step, a multiple of the
  microbatch; -1: 16 times batch_size."""


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section, heading="the mesh"):
  """The devices and how the mesh axes divide them: ici inside a slice, dcn between slices."""

  # Each has threads of its own; a host cannot start more.
  num_simulated_devices: Annotated[int, Range(low=0, limit=1024, also=-1)] = key(
    -1, CHANGEABLE, HERE
  )
  """Simulated CPU devices, shared equally by the processes; -1: this machine's accelerators, or 8
  if it has none; 0: its own devices, even a CPU."""
  ici_data_parallelism: PositiveOrUnset = key(-1, CHANGEABLE)
  """Data parallelism within a slice: replicas of the model, each with its part of the batch; one
  axis may be -1: all remaining devices."""
  ici_fsdp_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """FSDP within a slice: devices over which parameters, gradients and optimizer state are sharded;
  raise it to save memory."""
  ici_expert_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Expert parallelism within a slice: devices over which whole experts are divided, and the batch and
  other weights as by FSDP (docs/mixture_of_experts.md)."""
  ici_context_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Context parallelism within a slice: devices over which the tokens of a row are divided, and weights
  as by FSDP; for long rows (docs/long_rows.md)."""
  ici_tensor_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Tensor parallelism within a slice: devices over which each matrix product is sharded."""
  ici_pipeline_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Pipeline stages within a slice: groups of devices that each hold some of the layers."""
  dcn_data_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Data parallelism between slices, over the data center network."""
  dcn_fsdp_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """FSDP between slices, over the data center network."""
  dcn_expert_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Expert parallelism between slices, over the data center network; rarely fast."""
  dcn_context_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Context parallelism between slices, over the data center network; rarely fast."""
  dcn_tensor_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Tensor parallelism between slices, over the data center network; rarely fast."""
  dcn_pipeline_parallelism: PositiveOrUnset = key(1, CHANGEABLE)
  """Pipeline stages between slices, over the data center network."""


@dataclasses.dataclass(frozen=True)
class PipelineConfig(Section, heading="the pipeline"):
  """How microbatches pass through the stages of a pipeline, which are the mesh axis `stage`."""

  pipeline_schedule: Literal["none", "gpipe", "circular", "1f1b", "interleaved_1f1b", "auto"] = key(
    "none", CHANGEABLE
  )
  """Pipeline schedule: none, gpipe, circular, 1f1b, interleaved_1f1b, drawn by maxbatch pipeline;
  auto: the fastest that fits."""
  num_pipeline_microbatches: PositiveOrUnset = key(-1, CHANGEABLE, PIPELINE)
  """Chunks per microbatch, a multiple of the stages; more: a smaller bubble, smaller matrix
  products; -1: the fastest, measured at the start."""
  num_pipeline_repeats: PositiveOrUnset = key(-1, CHANGEABLE, PIPELINE)
  """Passes of each microbatch through the stages, each with other layers (circular,
  interleaved_1f1b); more: smaller bubble, more communication; -1: derived."""
  num_layers_per_pipeline_stage: PositiveOrUnset = key(-1, CHANGEABLE, PIPELINE)
  """Layers per stage and repeat; -1: 1 if the schedule has repeats, else the layers divided by the
  stages."""
  pipeline_delay_activation_forwarding: bool = key(False, CHANGEABLE, PIPELINE)
  """Send activations to the next stage one iteration later, overlapped with computation; doubles
  the bubble."""
  pipeline_saved_activations: Literal["input", "residuals", "auto"] = key(
    "input", CHANGEABLE, PIPELINE, old_names=("pipeline_stash",)
  )
  """What a stage keeps for its backward: input (recomputes layers; least memory), residuals
  (what remat_policy saves; less compute) or auto (the faster that fits)."""
