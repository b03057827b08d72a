"""How a run's layers and batch divide over a pipeline, and what to change where they do not."""

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction

from maxbatch.batch.from_config import is_rl, mesh_of, plan_batches
from maxbatch.config.load import Keys, assigned, suggested_fixes, without_effect
from maxbatch.config.schema import Config, PipelineConfig
from maxbatch.core.keys import counted
from maxbatch.core.plan import BatchPlan
from maxbatch.core.solve import divisors, nearest_divisors, nearest_multiples, samples_per_group
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.schedule import (
  WITH_REPEATS,
  Schedule,
  TimetableShape,
  schedule_named,
)
from maxbatch.pipeline_parallel.sizes import Pipeline

_OPEN: Keys = {
  "num_pipeline_microbatches": -1,
  "num_pipeline_repeats": -1,
  "num_layers_per_pipeline_stage": -1,
}
_NO_SIZE: Keys = {
  "batch_size": -1,
  "global_batch_to_train": -1,
  "tokens_per_step": -1,
  "micro_batch_size": -1,
}
_NO_RAMP: Keys = {
  "batch_schedule": (),
  "batch_schedule_type": "constant",
  "batch_schedule_length": -1,
  "batch_size_start": -1,
  "batch_size_increment": -1,
  "enable_rampup_batch_size": False,
}


_MOST_CELLS = 50_000
"""Forwards in a timetable, which is made and checked cell by cell before the run."""


class _MisfitError(Exception):
  """Something does not divide; `offers` are keys that may help, the nearest first."""

  def __init__(self, message: str, offers: Iterator[Keys]):
    super().__init__(message)
    self.offers = offers


def pipeline_of(config: Config, layout: Topology, plan: BatchPlan) -> Pipeline:
  """Returns the pipeline that the configuration describes on these devices.

  Raises:
    UserError: layers or samples do not divide as the schedule asks, with what does.
  """
  try:
    return _make_pipeline(config, plan)
  except _MisfitError as misfit:
    offers = suggested_fixes(
      config,
      list(misfit.offers),
      _accompanying_keys(config, layout),
      lambda other: _is_valid(other, layout),
    )
    nearest = f"; nearest: {' or '.join(offers)}" if offers else ""
    raise UserError(f"{misfit}{nearest}") from None


def _accompanying_keys(config: Config, layout: Topology) -> Iterator[Keys]:
  """Yields nothing, then open microbatches, the layers, a small batch, no ramp, other layers."""
  yield {}
  yield {"num_pipeline_microbatches": -1}
  yield _OPEN
  # Then every group of devices has as many samples in a microbatch as the stages need pipeline microbatches.
  least = Fraction(forwarding_delay(config.pipeline), layout.shape["tensor"])
  smallest: Keys = {**_OPEN, **_NO_SIZE, "per_device_batch_size": least}
  yield smallest
  yield {**smallest, **_NO_RAMP}
  layers, stages = _divided_layers(config), layout.shape["stage"]
  more = {"base_num_decoder_layers": -(-layers // stages) * stages + _first_layers(config)}
  yield {**smallest, **_NO_RAMP, **more}


def _first_layers(config: Config) -> int:
  """Returns the layers that every stage has, beside the embedding: they are unlike the others."""
  return config.model.first_num_dense_layers


def _compared_parts(config: Config) -> int:
  """Returns the parts of a microbatch that have a timetable each, to be compared."""
  return 2 if is_rl(config.rl) and config.noise.gns_from_microbatches else 1


def _divided_layers(config: Config) -> int:
  """Returns the layers that stages divide."""
  return config.model.base_num_decoder_layers - _first_layers(config)


def _is_valid(config: Config, layout: Topology) -> bool:
  try:
    without_effect(config)
    layout = mesh_of(config, layout.num_devices, layout.num_slices)
    _make_pipeline(config, plan_batches(config.batch, config.run, layout, config.optimizer))
  except (UserError, _MisfitError):
    return False
  return True


def allowed_repeats(config: Config, layout: Topology) -> tuple[int, ...]:
  """Returns the repeats that pipeline_schedule=auto chooses from, descending; 1 is 1f1b, more are
  interleaved_1f1b.

  gpipe and circular have the same bubbles, and keep the inputs of all microbatches.
  """
  keys, each = config.pipeline, Fraction(_divided_layers(config), layout.shape["stage"])
  if each.denominator > 1:
    return ()
  allowed = (
    repeats
    for repeats in reversed(divisors(int(each)))
    if keys.num_pipeline_repeats in (-1, repeats)
    and keys.num_layers_per_pipeline_stage in (-1, each / repeats)
  )
  return tuple(allowed)


def with_repeats(config: Config, repeats: int) -> Config:
  """Returns the configuration with a schedule of so many repeats in place of pipeline_schedule=auto."""
  name = "1f1b" if repeats == 1 else "interleaved_1f1b"
  keys = dataclasses.replace(config.pipeline, pipeline_schedule=name, num_pipeline_repeats=repeats)
  return dataclasses.replace(config, pipeline=keys)


def with_least_bubble(config: Config, layout: Topology) -> Config:
  """Returns the configuration with the schedule that is taken for pipeline_schedule=auto until it is chosen."""
  if config.pipeline.pipeline_schedule != "auto":
    return config
  if allowed := allowed_repeats(config, layout):
    return with_repeats(config, allowed[0])
  # What does not divide is then said of the keys as they are.
  keys = dataclasses.replace(config.pipeline, pipeline_schedule="interleaved_1f1b")
  return dataclasses.replace(config, pipeline=keys)


def _make_pipeline(config: Config, plan: BatchPlan) -> Pipeline:
  is_auto = config.pipeline.pipeline_schedule == "auto"
  repeats_choices = allowed_repeats(config, plan.topology) if is_auto else ()
  config = with_least_bubble(config, plan.topology)
  keys = config.pipeline
  schedule = schedule_named(keys.pipeline_schedule)
  stages = plan.topology.shape["stage"]
  if stages == 1:
    raise _MisfitError(
      f"a pipeline has at least 2 stages, but {_stages_given(plan.topology)} is 1 on "
      f"{counted(plan.topology.num_devices, 'device')}",
      _stage_offers(config),
    )
  repeats, layers = _layers(config, schedule, plan.topology)
  shape = TimetableShape(stages, 1, repeats, forwarding_delay(keys))
  num_pipeline_microbatches, choices = _num_pipeline_microbatches(config, schedule, plan, shape)
  num_microbatches, streamed = plan.num_microbatches, config.batch.accumulation == "streamed"
  known = max(point.num_microbatches for point in plan.schedule.points)
  # A batch that follows the noise scale grows up to the largest.
  most = 1 if streamed else max(known, plan.max_batch // plan.micro_batch_to_train)
  parts = _compared_parts(config)
  cells = most * num_pipeline_microbatches * stages * repeats
  if cells > _MOST_CELLS:
    raise UserError(
      f"{most} microbatches × num_pipeline_microbatches={num_pipeline_microbatches} in {stages} "
      f"stages and {repeats} repeats are a timetable of {cells:,} forwards, of which there can be "
      f"{_MOST_CELLS:,}; for example {_smaller_timetable(plan, known)}"
    )
  return Pipeline(
    schedule=keys.pipeline_schedule,
    stages=stages,
    repeats=repeats,
    layers=layers,
    num_pipeline_microbatches=num_pipeline_microbatches,
    num_microbatches=1 if streamed else num_microbatches,
    max_num_microbatches=most,
    timetables=num_microbatches * parts if streamed else 1,
    rows=samples_per_group(
      plan.micro_batch_to_train // parts, plan.topology, num_pipeline_microbatches
    ),
    choices=choices,
    forwarding_delay=shape.forwarding_delay,
    stash="input" if keys.pipeline_saved_activations == "auto" else keys.pipeline_saved_activations,
    stash_is_open=keys.pipeline_saved_activations == "auto",
    is_open=keys.num_pipeline_microbatches == -1 and len(choices) > 1,
    repeats_choices=repeats_choices,
  )


def _smaller_timetable(plan: BatchPlan, known: int) -> str:
  """Returns what has fewer forwards in a timetable."""
  if plan.max_batch > known * plan.micro_batch_to_train:
    return (
      f"gns_max_batch_size={known * plan.micro_batch_to_train}, or more samples in a microbatch"
    )
  return "accumulation=streamed, with a timetable for each microbatch, or fewer gradient accumulation steps"


def smallest_microbatch(mesh: Topology, forwarding_delay: int) -> int:
  """Returns the samples of the smallest microbatch of gradient accumulation in a pipeline: for each group of
  devices as many as fill its stages."""
  return mesh.num_batch_groups * forwarding_delay * mesh.shape.get("stage", 1)


def forwarding_delay(config: PipelineConfig) -> int:
  """Returns the ticks from computing a result to using it on the next stage."""
  return 2 if config.pipeline_delay_activation_forwarding else 1


def _stage_offers(config: Config) -> Iterator[Keys]:
  """Yields 2, 4 or 3 stages, with other layers if these do not divide, and devices for them."""
  layers, mesh = _divided_layers(config), config.mesh
  others = {
    "ici_data_parallelism": mesh.ici_data_parallelism,
    "ici_fsdp_parallelism": mesh.ici_fsdp_parallelism,
    "ici_tensor_parallelism": mesh.ici_tensor_parallelism,
  }
  opened = [] if -1 in others.values() else [{key: -1} for key in others if others[key] > 1]
  for beside in ({}, *opened):
    for count in (2, 4, 3):
      near = -(-layers // count) * count
      more = {"base_num_decoder_layers": near + _first_layers(config)} if near != layers else {}
      yield {"ici_pipeline_parallelism": count, **beside, **more}


def _stages_given(layout: Topology) -> str:
  ici, dcn = layout.ici["stage"], layout.dcn["stage"]
  return f"ici_pipeline_parallelism={ici} × dcn_pipeline_parallelism={dcn}"


def _layers(config: Config, schedule: Schedule, layout: Topology) -> tuple[int, int]:
  """Repeats, and layers of a stage in each: stages × repeats × layers is all layers."""
  stages = layout.shape["stage"]
  keys, total = config.pipeline, _divided_layers(config)
  repeats, layers = keys.num_pipeline_repeats, keys.num_layers_per_pipeline_stage
  if repeats > 1 and not schedule.allows_repeats:
    raise _MisfitError(
      f"pipeline_schedule={keys.pipeline_schedule} has no repeats, but "
      f"num_pipeline_repeats={repeats}",
      iter([_with_repeats(keys), {"num_pipeline_repeats": -1}]),
    )
  if not schedule.allows_repeats:
    repeats = 1
  elif repeats == layers == -1:
    layers = 1  # As in MaxText.
  known = stages * max(repeats, 1) * max(layers, 1)
  is_open = -1 in (repeats, layers)
  if total % known or (total != known and not is_open):
    rule = "must divide" if is_open else "must be"
    message = _layers_message(config, schedule, layout, f"{known}, which {rule}")
    raise _MisfitError(message, _layer_offers(config, layout, known))
  rest = total // known
  return rest if repeats == -1 else repeats, rest if layers == -1 else layers


def _with_repeats(config: PipelineConfig) -> Keys:
  name = config.pipeline_schedule
  return {"pipeline_schedule": WITH_REPEATS.get(name, name)}


def _layers_message(config: Config, schedule: Schedule, layout: Topology, product: str) -> str:
  keys, first = config.pipeline, _first_layers(config)
  given = [assigned({key: value}) for key, value in _given_layers(keys).items()]
  factors = " × ".join([_stages_given(layout), *given])
  once = (
    ""
    if schedule.allows_repeats
    else f" in the 1 repeat of pipeline_schedule={keys.pipeline_schedule}"
  )
  total = f"base_num_decoder_layers={config.model.base_num_decoder_layers}"
  return (
    f"{factors}{once} is {product} {total}{f' − first_num_dense_layers={first}' if first else ''}"
  )


def _given_layers(config: PipelineConfig) -> dict[str, int]:
  """Returns the keys that divide the layers, where they are set."""
  keys = {
    "num_pipeline_repeats": config.num_pipeline_repeats,
    "num_layers_per_pipeline_stage": config.num_layers_per_pipeline_stage,
  }
  return {key: value for key, value in keys.items() if value != -1}


def _layer_offers(config: Config, layout: Topology, known: int) -> Iterator[Keys]:
  """Yields one key changed so that the layers divide."""
  total, stages = _divided_layers(config), layout.shape["stage"]
  for key, value in _given_layers(config.pipeline).items():
    if total % stages == 0:
      for near in nearest_divisors(total // stages, Fraction(value)):
        yield {key: near}
  if config.pipeline.num_pipeline_repeats == -1:
    yield _with_repeats(config.pipeline)
  for near in nearest_multiples(known, Fraction(total)):
    yield {"base_num_decoder_layers": int(near) + _first_layers(config)}
  slices = layout.dcn["stage"]
  if total % slices == 0:
    for near in nearest_divisors(total // slices, Fraction(stages, slices)):
      yield {"ici_pipeline_parallelism": near}


def _num_pipeline_microbatches(
  config: Config, schedule: Schedule, plan: BatchPlan, shape: TimetableShape
) -> tuple[int, tuple[int, ...]]:
  """Returns num_pipeline_microbatches, and everything that it could be."""
  given = config.pipeline.num_pipeline_microbatches
  # A batch schedule may have other microbatches: the number must divide all of them.
  micro_batches, parts = (*plan.micro_batches, plan.micro_batch_to_train), _compared_parts(config)
  rows = math.gcd(*(samples_per_group(size // parts, plan.topology) for size in micro_batches))
  least = shape.forwarding_delay * shape.stages
  unit = least if schedule.microbatch_multiple(shape) > 1 else shape.stages
  choices = tuple(n for n in divisors(rows) if n >= least and (n - least) % unit == 0)
  if given == -1 and choices:
    return choices[0], choices
  if given in choices:
    return given, choices
  near = sorted(choices, key=lambda count: abs(count - given))
  alone: list[Keys] = [{"num_pipeline_microbatches": count} for count in near if given != -1]
  needed = given if given >= least and given % unit == 0 else least
  offers = iter([*alone, *_batch_offers(config, plan, needed * parts)])
  raise _MisfitError(_num_pipeline_microbatches_message(config, plan, shape, rows, unit), offers)


def _num_pipeline_microbatches_message(
  config: Config, plan: BatchPlan, shape: TimetableShape, rows: int, unit: int
) -> str:
  keys = config.pipeline
  given, least = keys.num_pipeline_microbatches, shape.forwarding_delay * shape.stages
  groups = counted(plan.topology.num_batch_groups, "group")
  of = (
    "half a microbatch, which gns_from_microbatches=true compares,"
    if _compared_parts(config) > 1
    else "one microbatch"
  )
  per_group = (
    f"the {counted(rows, 'sample')} of {of} in each of {groups} of devices "
    f"(micro_batch_to_train={plan.micro_batch_to_train})"
  )
  if len(plan.micro_batches) > 1:
    sizes = " and ".join(f"{size:,}" for size in plan.micro_batches)
    per_group = (
      f"the samples of each of {groups} of devices in all microbatches, of {sizes} samples"
    )
  multiple = f"a multiple of the {counted(shape.stages, 'stage')}"
  if unit > shape.stages:
    multiple = (
      f"a multiple of {unit}, twice the stages with pipeline_delay_activation_forwarding=true"
    )
  elif least > unit:
    multiple += f", and at least {least} with pipeline_delay_activation_forwarding=true"
  if given == -1:
    return f"num_pipeline_microbatches must divide {per_group} and be {multiple}; no number is both"
  if given % unit or given < least:
    return f"num_pipeline_microbatches={given} must be {multiple}"
  return f"num_pipeline_microbatches={given} must divide {per_group}"


def _batch_offers(config: Config, plan: BatchPlan, needed: int) -> Iterator[Keys]:
  """Yields batches whose microbatches have a multiple of `needed` samples in each group."""
  groups, batch = plan.topology.num_batch_groups, config.batch
  micro, total = plan.micro_batch_to_train, plan.global_batch_to_train
  if total % (needed * groups) == 0:
    most = total // (needed * groups)
    for num_microbatches in nearest_divisors(most, Fraction(plan.num_microbatches)):
      yield {"gradient_accumulation_steps": num_microbatches}
  key = "per_device_batch_size" if batch.micro_batch_size == -1 else "micro_batch_size"
  for samples in nearest_multiples(needed * groups, Fraction(micro)):
    if samples > 0:
      yield {key: plan.per_device(int(samples))}
  unit = needed * groups
  if isinstance(batch.batch_schedule, tuple) and batch.batch_schedule:
    phases = tuple((at, -(-size // unit) * unit) for at, size in batch.batch_schedule)
    yield {"batch_schedule": phases}
  sizes = (
    ("batch_size", batch.batch_size, 1),
    ("global_batch_to_train", batch.global_batch_to_train, 1),
    ("tokens_per_step", batch.tokens_per_step, batch.max_target_length),
  )
  given = [(name, scale) for name, value, scale in sizes if value != -1]
  if batch.batch_size_start != -1:
    start = -(-batch.batch_size_start // unit) * unit
    step = {} if batch.batch_size_increment == -1 else {"batch_size_increment": -1}
    yield {"batch_size_start": start, **step}
    for name, scale in given:  # A ramp ends above its start, in whole increments.
      yield {"batch_size_start": start, **step, name: max(2, -(-total // start)) * start * scale}
  step_unit = plan.num_microbatches * unit
  for name, scale in given:
    for samples in nearest_multiples(step_unit, Fraction(total)):
      yield {name: int(samples) * scale}
