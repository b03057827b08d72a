"""What the pipeline command says: the sizes, the cost, the alternatives, and the timetable."""

import dataclasses
from collections.abc import Iterator, Sequence

from maxbatch.batch.plan import BatchPlan
from maxbatch.batch.solve import counted
from maxbatch.batch.topology import AXES
from maxbatch.config.schema import Config, ModelConfig
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.cost import bubble, imbalance, percent, predicted_bubble
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.schedule import SCHEDULES, schedule_named
from maxbatch.pipeline_parallel.simulator import Outcome
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.text_grid import text_grid
from maxbatch.pipeline_parallel.timetable import Timetable

_BYTES = {"float32": 4, "bfloat16": 2}
NOT_MEASURED = (
  "Nothing here is measured; a backward is taken to last twice as long as a forward, which the\n"
  "bubble does not depend on."
)
Row = tuple[str, ...]
_HEAD = (
  "pipeline_schedule",
  "repeats",
  "layers each",
  "microbatches",
  "bubble",
  "inputs kept",
  "layers in full",
)


@dataclasses.dataclass(frozen=True)
class PipelineReport:
  """A timetable with what it is for and what it costs."""

  config: Config
  plan: BatchPlan
  pipeline: Pipeline
  table: Timetable
  outcome: Outcome
  source: str
  """Where the timetable is from: a schedule's name or a file."""
  residual_bytes: int | None = None
  """Of one microbatch on one device, where pipeline_stash=residuals."""

  def __str__(self) -> str:
    parts = [
      "\n".join([f"Pipeline  {self.source}", *self._sizes(), *self._costs()]),
      comparison(self.config, self.plan),
      self._choices(),
      f"Timetable, F forward, B backward, {_entries(self.table)}\n{text_grid(self.table)}",
      NOT_MEASURED,
    ]
    return "\n\n".join(parts)

  def _sizes(self) -> Iterator[str]:
    one, layout, at = self.pipeline, self.plan.topology, AXES.index("stage")
    total = self.config.model.base_num_decoder_layers
    yield _line(
      "stages",
      f"ici_pipeline_parallelism {layout.ici[at]} × dcn_pipeline_parallelism {layout.dcn[at]} "
      f"= {one.stages}",
    )
    yield _line(
      "layers",
      f"{one.stages} stages × num_pipeline_repeats {one.repeats} × "
      f"num_layers_per_pipeline_stage {one.layers} = {total}",
    )
    each = f"{counted(one.rows, 'sample')} in each of {counted(layout.num_batch_groups, 'group')}"
    yield _line("microbatches", f"{self._microbatches()}, of {each} of devices")

  def _microbatches(self) -> str:
    one = self.pipeline
    num_pipeline_microbatches = f"num_pipeline_microbatches {one.num_pipeline_microbatches}"
    if one.timetables > 1:
      return f"{num_pipeline_microbatches} in each of {one.timetables} timetables per step (accumulation=streamed)"
    num_microbatches, number = (
      f"gradient_accumulation_steps {one.num_microbatches}",
      one.shape.microbatches,
    )
    return f"{num_pipeline_microbatches} × {num_microbatches} = {number:,} per step"

  def _costs(self) -> Iterator[str]:
    one = self.pipeline
    idle, planned = bubble(self.table), predicted_bubble(one.shape)
    apart = predicted_bubble(one.shape_of_one_microbatch)
    notes = [] if idle == planned else [f"{percent(planned)} in pipeline_schedule={one.schedule}"]
    if one.num_microbatches > 1:
      notes.append(f"{percent(apart)} if every pass had a pipeline of its own")
    yield _line("ticks", f"{len(self.table.ticks):,}, each a forward and a backward slot")
    yield _line("bubble", "; ".join([f"{idle} = {percent(idle)} idle", *notes]))
    if len({stage.num_microbatches for stage in self.plan.phases}) > 1 and one.timetables == 1:
      yield _line("", self._ramp())
    yield _line("inputs kept", self._held(self.outcome.inputs, self.outcome.input_slots))
    if self.residual_bytes is not None:
      yield from self._residuals(self.residual_bytes)
    yield _line("gradients", self._held(self.outcome.gradients, self.outcome.gradient_slots))
    yield _line("imbalance", _imbalance(self.config.model, one))

  def _ramp(self) -> str:
    """The bubble while the batch is another than the run's."""
    counts = sorted({stage.num_microbatches for stage in self.plan.phases})
    shares = [percent(predicted_bubble(self.pipeline.shape_of(count))) for count in counts]
    return (
      f"over the batch schedule {shares[0]} (steps of {counted(counts[0], 'pass', 'passes')}) to "
      f"{shares[-1]} ({counted(counts[-1], 'pass', 'passes')})"
    )

  def _held(self, held: Sequence[int], used: Sequence[int]) -> str:
    """One program runs on all stages, so every stage has as many slots as the fullest."""
    slots = max(used)
    capacity = slots * input_bytes(self.config, self.pipeline)
    return (
      f"{counted(slots, 'slot')} on every stage, {_mib(capacity)} a device; at most "
      f"{' '.join(map(str, held))} in use on stages 0 to {self.pipeline.stages - 1}"
    )

  def _residuals(self, each: int) -> Iterator[str]:
    """With the inputs, all that a stage keeps until its backwards; and without, by the other key."""
    slots, alone = max(self.outcome.input_slots), input_bytes(self.config, self.pipeline)
    yield _line(
      "residuals",
      f"{counted(slots, 'slot')} on every stage, {_mib(slots * each)} a device, with "
      f"remat_policy={self.config.model.remat_policy}",
    )
    yield _line(
      "",
      f"a stage keeps {slots} × ({_mib(alone)} + {_mib(each)}) = {_mib(slots * (alone + each))}; "
      f"with pipeline_stash=input {slots} × {_mib(alone)} = {_mib(slots * alone)}",
    )

  def _choices(self) -> str:
    head = ("num_pipeline_microbatches", "in a timetable", "samples each", "bubble", "inputs kept")
    rows = [
      self._choice(num_pipeline_microbatches) for num_pipeline_microbatches in self.pipeline.choices
    ]
    open_line = [f"  {self.pipeline.choice}"] if self.pipeline.choice else []
    title = f"Microbatches, for {self.pipeline.schedule}"
    return "\n".join([title, *_table([head, *rows]), *open_line])

  def _choice(self, num_pipeline_microbatches: int) -> Row:
    other = self.pipeline.with_num_pipeline_microbatches(num_pipeline_microbatches)
    capacity = _slots(other) * input_bytes(self.config, other)
    kept = f"{_slots(other):,} × {_mib(input_bytes(self.config, other))} = {_mib(capacity)}"
    idle = percent(predicted_bubble(other.shape))
    chosen = (
      " (this)" if num_pipeline_microbatches == self.pipeline.num_pipeline_microbatches else ""
    )
    return (
      f"{num_pipeline_microbatches:,}{chosen}",
      f"{other.shape.microbatches:,}",
      f"{other.rows:,}",
      idle,
      kept,
    )


def comparison(config: Config, plan: BatchPlan) -> str:
  """Every schedule on these sizes; those that are not chosen divide the layers by default.

  Raises:
    UserError: none of them works.
  """
  rows: list[Row] = []
  others: list[str] = []
  for name in SCHEDULES:
    try:
      rows.append(_compared(config, pipeline_of(_with_schedule(config, name), plan.topology, plan)))
    except UserError as error:
      others.append(f"{name}: {error}")
  if not rows:
    raise UserError("\n".join(dict.fromkeys(line.partition(": ")[2] for line in others)))
  return "\n".join(["Schedules", *_table([_HEAD, *rows]), *(f"  {line}" for line in others)])


def input_bytes(config: Config, pipeline: Pipeline) -> int:
  """Bytes of the input of one stage for one microbatch, on one device: (rows, T, D)."""
  sizes = (pipeline.rows, config.batch.max_target_length, config.model.base_emb_dim)
  rows, length, width = sizes
  return rows * length * width * _BYTES[config.model.dtype]


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


def _compared(config: Config, one: Pipeline) -> Row:
  slots, chosen = _slots(one), config.pipeline.pipeline_schedule == one.schedule
  return (
    one.schedule + (" (this)" if chosen else ""),
    f"{one.repeats:,}",
    f"{one.layers:,}",
    f"{one.shape.microbatches:,}",
    percent(predicted_bubble(one.shape)),
    f"{slots:,} × {_mib(input_bytes(config, one))}",
    f"{slots * one.layers:,}",
  )


def _slots(one: Pipeline) -> int:
  return schedule_named(one.schedule).limits(one.shape).inputs


def _imbalance(model: ModelConfig, one: Pipeline) -> str:
  """Of multiplications by weights; attention's scores would be equal on all stages too."""
  head = model.base_emb_dim * model.vocab_size
  layers = one.repeats * one.layers * _layer_weights(model)
  alone = imbalance([layers] * (one.stages - 1) + [layers + head])
  return (
    "0%: equal layers, and the output matrix is to be divided over the stages; "
    f"{percent(alone)} if the last stage had it alone"
  )


def _layer_weights(model: ModelConfig) -> int:
  heads = 2 * model.base_num_query_heads + 2 * model.base_num_kv_heads
  matrices = 3 if model.mlp_activation == "swiglu" else 2
  return model.base_emb_dim * (heads * model.head_dim + matrices * model.base_mlp_dim)


def _entries(table: Timetable) -> str:
  return "repeat.microbatch" if table.shape.repeats > 1 else "by microbatch"


def _mib(size: int) -> str:
  mib = size / 2**20
  return f"{mib:,.0f} MiB" if mib >= 100 else f"{mib:.3g} MiB"


def _line(name: str, text: str) -> str:
  return f"  {name:<12}  {text}"


def _table(rows: Sequence[Row]) -> list[str]:
  widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
  return [
    "  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
    for row in rows
  ]
