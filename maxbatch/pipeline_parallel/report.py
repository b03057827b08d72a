"""The report of the pipeline command: sizes, cost, alternatives and the timetable."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from maxbatch.command_line.screen import Table, section
from maxbatch.config.keys.model import hidden_width
from maxbatch.config.schema import Config, ModelConfig, attention_matrices
from maxbatch.core.keys import counted
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.drawings import text_diagram
from maxbatch.pipeline_parallel.layout import pipeline_of, with_least_bubble
from maxbatch.pipeline_parallel.schedule import SCHEDULES, Timetable, schedule_named
from maxbatch.pipeline_parallel.simulator import Outcome
from maxbatch.pipeline_parallel.sizes import Pipeline, bubble, imbalance, percent, predicted_bubble
from maxbatch.precision.formats import compute_format

NOT_MEASURED = (
  "Nothing here is measured. A backward is assumed to take twice as long as a forward; the bubble\n"
  "does not depend on that."
)
Row = tuple[str, ...]
_HEADINGS = (
  "pipeline_schedule",
  "repeats",
  "layers each",
  "microbatches",
  "bubble",
  "inputs kept",
  "layer activations",
)


@dataclasses.dataclass(frozen=True)
class PipelineReport:
  """A timetable with its sizes and its cost; `str` gives the text that the command prints."""

  config: Config
  plan: BatchPlan
  pipeline: Pipeline
  table: Timetable
  outcome: Outcome
  source: str
  """Where the timetable comes from: the name of a schedule or of a file."""
  residual_bytes: int | None = None
  """Bytes of one microbatch's residuals on one device; None unless pipeline_saved_activations=residuals."""

  def __str__(self) -> str:
    entries = "repeat.microbatch" if self.table.shape.repeats > 1 else "by microbatch"
    parts = [
      "\n".join([f"Pipeline  {self.source}", *self._sizes(), *self._costs()]),
      comparison(self.config, self.plan),
      self._choices(),
      f"Timetable, F forward, B backward, {entries}\n{text_diagram(self.table)}",
      NOT_MEASURED,
    ]
    return "\n\n".join(parts)

  def _sizes(self) -> Iterator[str]:
    pipeline, layout = self.pipeline, self.plan.topology
    model = self.config.model
    first = model.first_num_dense_layers
    beside = f"; first_num_dense_layers {first} on every stage, with the embedding" if first else ""
    yield _line(
      "stages",
      f"ici_pipeline_parallelism {layout.ici['stage']} × dcn_pipeline_parallelism "
      f"{layout.dcn['stage']} = {pipeline.stages}",
    )
    yield _line(
      "layers",
      f"{pipeline.stages} stages × num_pipeline_repeats {pipeline.repeats} × "
      f"num_layers_per_pipeline_stage {pipeline.layers} = {model.base_num_decoder_layers - first}{beside}",
    )
    each = (
      f"{counted(pipeline.rows, 'sample')} in each of {counted(layout.num_batch_groups, 'group')}"
    )
    yield _line("microbatches", f"{self._microbatches()}, of {each} of devices")

  def _microbatches(self) -> str:
    pipeline = self.pipeline
    chunks = f"num_pipeline_microbatches {pipeline.num_pipeline_microbatches}"
    if pipeline.timetables > 1:
      return (
        f"{chunks} in each of {pipeline.timetables} timetables per step (accumulation=streamed)"
      )
    steps = f"gradient_accumulation_steps {pipeline.num_microbatches}"
    return f"{chunks} × {steps} = {pipeline.shape.microbatches:,} per step"

  def _costs(self) -> Iterator[str]:
    pipeline = self.pipeline
    simulated, predicted = bubble(self.table), predicted_bubble(pipeline.shape)
    separate = predicted_bubble(pipeline.shape_of_one_microbatch)
    notes = []
    if simulated != predicted:
      notes.append(f"{percent(predicted)} in pipeline_schedule={pipeline.schedule}")
    if pipeline.num_microbatches > 1:
      notes.append(f"{percent(separate)} with a pipeline for each gradient accumulation step")
    each = "each with at most one forward and one backward per stage"
    yield _line("ticks", f"{len(self.table.ticks):,}, {each}")
    yield _line("bubble", "; ".join([f"{simulated} = {percent(simulated)} idle", *notes]))
    if len({phase.num_microbatches for phase in self.plan.phases}) > 1 and pipeline.timetables == 1:
      yield _line("", self._ramp())
    yield _line("inputs kept", self._buffer(self.outcome.inputs, self.outcome.input_slots))
    if self.residual_bytes is not None:
      yield from self._residuals(self.residual_bytes)
    yield _line("gradients", self._buffer(self.outcome.gradients, self.outcome.gradient_slots))
    yield _line("imbalance", _imbalance(self.config.model, pipeline))

  def _ramp(self) -> str:
    """Returns the bubble of the batch schedule's smallest and largest step."""
    counts = sorted({phase.num_microbatches for phase in self.plan.phases})
    shares = [percent(predicted_bubble(self.pipeline.shape_of(count))) for count in counts]
    return (
      f"over the batch schedule {shares[0]} (gradient_accumulation_steps {counts[0]}) to "
      f"{shares[-1]} (gradient_accumulation_steps {counts[-1]})"
    )

  def _buffer(self, held: Sequence[int], used: Sequence[int]) -> str:
    """Describes slots and bytes of a buffer: as one program runs everywhere, all have the most."""
    slots = max(used)
    capacity = slots * input_bytes(self.config, self.pipeline)
    return (
      f"{counted(slots, 'slot')} on every stage, {_mib(capacity)} a device; at most "
      f"{' '.join(map(str, held))} in use on stages 0 to {self.pipeline.stages - 1}"
    )

  def _residuals(self, each: int) -> Iterator[str]:
    """Yields bytes of the residuals, and of all that a stage keeps with and without them."""
    slots, alone = max(self.outcome.input_slots), input_bytes(self.config, self.pipeline)
    yield _line(
      "residuals",
      f"{counted(slots, 'slot')} on every stage, {_mib(slots * each)} a device, with "
      f"remat_policy={self.config.model.remat_policy}",
    )
    yield _line(
      "",
      f"a stage keeps {slots} × ({_mib(alone)} + {_mib(each)}) = {_mib(slots * (alone + each))}; "
      f"with pipeline_saved_activations=input {slots} × {_mib(alone)} = {_mib(slots * alone)}",
    )

  def _choices(self) -> str:
    head = ("num_pipeline_microbatches", "in a timetable", "samples each", "bubble", "inputs kept")
    rows = [self._choice(count) for count in self.pipeline.choices]
    title = f"Microbatches, for {self.pipeline.schedule}"
    return section(title, [*_lines(head, rows), *self.pipeline.open_choices])

  def _choice(self, num_pipeline_microbatches: int) -> Row:
    other = self.pipeline.with_num_pipeline_microbatches(num_pipeline_microbatches)
    capacity = _input_slots(other) * input_bytes(self.config, other)
    kept = f"{_input_slots(other):,} × {_mib(input_bytes(self.config, other))} = {_mib(capacity)}"
    idle = percent(predicted_bubble(other.shape))
    is_chosen = num_pipeline_microbatches == self.pipeline.num_pipeline_microbatches
    chosen = " (this)" if is_chosen else ""
    sizes = f"{other.shape.microbatches:,}", f"{other.rows:,}"
    return (f"{num_pipeline_microbatches:,}{chosen}", *sizes, idle, kept)


def comparison(config: Config, plan: BatchPlan) -> str:
  """Returns a table of all schedules for these sizes.

  The configured schedule has the configured repeats and layers per stage, the others the defaults.

  Raises:
    UserError: no schedule supports these sizes.
  """
  config = with_least_bubble(config, plan.topology)
  rows: list[Row] = []
  others: list[str] = []
  for name in SCHEDULES:
    try:
      other = pipeline_of(_with_schedule(config, name), plan.topology, plan)
      rows.append(_comparison_row(config, other))
    except UserError as error:
      others.append(f"{name}: {error}")
  if not rows:
    raise UserError("\n".join(dict.fromkeys(line.partition(": ")[2] for line in others)))
  return section("Schedules", [*_lines(_HEADINGS, rows), *others])


def input_bytes(config: Config, pipeline: Pipeline) -> int:
  """Returns bytes of the input of one stage for one microbatch, on one device: (rows, T, D)."""
  sizes = (pipeline.rows, config.batch.max_target_length, config.model.base_emb_dim)
  rows, length, width = sizes
  return rows * length * width * compute_format(config.precision).bytes


def _with_schedule(config: Config, name: str) -> Config:
  keys = config.pipeline
  if keys.pipeline_schedule == name:
    return config
  return dataclasses.replace(
    config,
    pipeline=dataclasses.replace(
      keys, pipeline_schedule=name, num_pipeline_repeats=-1, num_layers_per_pipeline_stage=-1
    ),
  )


def _comparison_row(config: Config, pipeline: Pipeline) -> Row:
  slots, chosen = _input_slots(pipeline), config.pipeline.pipeline_schedule == pipeline.schedule
  return (
    pipeline.schedule + (" (this)" if chosen else ""),
    f"{pipeline.repeats:,}",
    f"{pipeline.layers:,}",
    f"{pipeline.shape.microbatches:,}",
    percent(predicted_bubble(pipeline.shape)),
    f"{slots:,} × {_mib(input_bytes(config, pipeline))}",
    f"{slots * pipeline.layers:,}",
  )


def _input_slots(pipeline: Pipeline) -> int:
  return schedule_named(pipeline.schedule).limits(pipeline.shape).inputs


def _imbalance(model: ModelConfig, pipeline: Pipeline) -> str:
  """Describes the imbalance of products with weights; attention is equal on all stages."""
  head = model.base_emb_dim * model.vocab_size
  layers = pipeline.repeats * pipeline.layers * _layer_weights(model)
  alone = imbalance([layers] * (pipeline.stages - 1) + [layers + head])
  return (
    "0%: all stages have as many layers and compute an equal share of the logits; "
    f"{percent(alone)} if the last stage computed them alone"
  )


def _layer_weights(model: ModelConfig) -> int:
  attention = sum(math.prod(each) for each in attention_matrices(model))
  matrices = 2 if model.mlp_activation == "gelu" else 3
  return attention + round(model.base_emb_dim * matrices * hidden_width(model))


def _mib(size: int) -> str:
  mib = size / 2**20
  return f"{mib:,.0f} MiB" if mib >= 100 else f"{mib:.3g} MiB"


def _line(name: str, text: str) -> str:
  return f"  {name:<12}  {text}"


def _lines(head: Row, rows: Sequence[Row]) -> list[str]:
  return Table(head, rows, left=(0,)).lines(indent="")
