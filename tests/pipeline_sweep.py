"""Configurations of a pipeline at random, and what becomes of them."""

import dataclasses
import functools
import math
import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from pipelined import QUICKLY
from support import GPT2, configured, in_microbatches, mesh, uneven_rows

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.config.schema import Config
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.training.build import build_trainer, streams, traced_step
from maxbatch.training.evaluation import eval_function
from maxbatch.training.loss import loss_sum
from maxbatch.training.model_parts import stage_order
from maxbatch.training.state import TrainState, shardings
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings

Keys = dict[str, object]

MODEL = {
  "base_emb_dim": 16,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 16,
  "vocab_size": 264,
  "max_target_length": 16,
  "opt_type": "sgd",
}
AXES = tuple(f"ici_{name}_parallelism" for name in ("data", "fsdp", "tensor", "pipeline"))
LAYOUTS = [
  sizes
  for sizes in ((d, f, t, s) for s in (2, 3, 4) for d in (1, 2) for f in (1, 2) for t in (1, 2))
  if math.prod(sizes) <= 8
]
"""Devices along data, fsdp, tensor and stage."""
HAS_REPEATS = {"gpipe": False, "1f1b": False, "circular": True, "interleaved_1f1b": True}
BROKEN: dict[str, st.SearchStrategy[object]] = {
  "base_num_decoder_layers": st.integers(1, 16),
  "num_pipeline_microbatches": st.integers(1, 20),
  "num_pipeline_repeats": st.integers(1, 4),
  "num_layers_per_pipeline_stage": st.integers(1, 4),
  "pipeline_delay_activation_forwarding": st.sampled_from(["true", "false"]),
  "per_device_batch_size": st.sampled_from(["1/2", "2/3", "1", "3/2", "2", "3", "5", "8"]),
  "micro_batch_size": st.integers(1, 9),
  "gradient_accumulation_steps": st.integers(1, 5),
  "batch_size": st.integers(1, 200),
  "tokens_per_step": st.integers(1, 200).map(lambda rows: 16 * rows),
  "batch_schedule": st.sampled_from(["[[0, 12], [96, 64]]", "[[0, 24], [48, 20]]"]),
  "eval_per_device_batch_size": st.sampled_from(["1/4", "1", "3/2", "7"]),
  "ici_data_parallelism": st.sampled_from([-1, 1, 2, 3]),
  "ici_pipeline_parallelism": st.sampled_from([-1, 1, 2, 3, 4, 8]),
}
"""Keys with values that need not go with the others."""
_SYNONYMS = {
  "micro_batch_size": "per_device_batch_size",
  "per_device_batch_size": "micro_batch_size",
  "tokens_per_step": "batch_size",
  "batch_size": "tokens_per_step",
  "batch_schedule": "gradient_accumulation_steps",
}
_BATCHES = ("batch_schedule", "batch_schedule_type", "batch_schedule_length", "batch_size_start")
_BATCHES += ("batch_size_increment", "batch_size", "tokens_per_step")


@st.composite
def configurations(draw: st.DrawFn, schedules: tuple[str, ...] = tuple(HAS_REPEATS)) -> Keys:
  """Sizes that divide, said in one way or another."""
  layout = draw(st.sampled_from(LAYOUTS))
  schedule = draw(st.sampled_from(schedules))
  *_, stages = layout
  repeats = draw(st.integers(1, 3)) if HAS_REPEATS[schedule] else 1
  layers = draw(st.integers(1, 2))
  delayed = draw(st.booleans())
  least = 2 * stages if delayed else stages
  unit = least if schedule == "interleaved_1f1b" else stages
  num_pipeline_microbatches = least + unit * draw(st.integers(0, 1))

  def or_left_open(value: int) -> int:
    return draw(st.sampled_from([value, -1]))

  keys: Keys = dict(zip(AXES, layout, strict=True))
  keys |= {
    "num_simulated_devices": math.prod(layout),
    "pipeline_schedule": schedule,
    "base_num_decoder_layers": stages * repeats * layers,
    "num_layers_per_pipeline_stage": layers,
    "num_pipeline_repeats": or_left_open(repeats),
    "num_pipeline_microbatches": or_left_open(num_pipeline_microbatches),
    "pipeline_delay_activation_forwarding": str(delayed).lower(),
  }
  rows = num_pipeline_microbatches * draw(st.integers(1, 2))
  return MODEL | keys | draw(_batches(layout, rows)) | draw(_models())


@st.composite
def _batches(draw: st.DrawFn, layout: tuple[int, ...], rows: int) -> Keys:
  """Passes of so many rows in each group of devices, the same number in each step or not."""
  micro = rows * layout[0] * layout[1]
  passes = draw(st.integers(1, 3))
  per_device = str(Fraction(micro, math.prod(layout)))
  keys: Keys = {"accumulation": draw(st.sampled_from(["fused", "streamed"]))}
  keys["eval_per_device_batch_size"] = draw(
    st.integers(0, 9).map(lambda n: str(Fraction(n * layout[0] * layout[1], math.prod(layout))))
  )
  given = draw(st.sampled_from(["passes", "batch", "linear", "listed"]))
  if given == "passes":
    return keys | {"per_device_batch_size": per_device, "gradient_accumulation_steps": passes}
  keys |= {"micro_batch_size": per_device, "batch_size": micro * passes}
  if given == "listed":
    keys["batch_schedule"] = f"[[0, {micro}], [{2 * micro}, {micro * passes}]]"
  if given == "linear" and passes > 1:
    keys |= {"batch_schedule_type": "linear", "batch_schedule_length": 4 * micro}
    keys |= {"batch_size_start": micro, "batch_size_increment": micro}
  return keys


@st.composite
def _models(draw: st.DrawFn) -> Keys:
  """What a model computes, and how."""
  keys: Keys = {
    "max_target_length": draw(st.sampled_from([16, 13])),
    "base_num_kv_heads": draw(st.sampled_from([2, 1])),
    "vocab_size": draw(st.sampled_from([264, 265])),
    "base_emb_dim": draw(st.sampled_from([16, 15])),
    "dropout_rate": draw(st.sampled_from([0.0, 0.1])),
    "packing": draw(st.sampled_from(["true", "false"])),
    "remat_policy": draw(st.sampled_from(["none", "minimal", "full"])),
    "scan_layers": draw(st.sampled_from(["true", "false"])),
    "dtype": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
    "num_vocab_tiling": draw(st.sampled_from([0, 1, 3])),
    "z_loss_multiplier": draw(st.sampled_from([0.0, 1e-3])),
    "sliding_window_size": draw(st.sampled_from([0, 5])),
  }
  if draw(st.booleans()):
    keys |= GPT2 | {"base_num_kv_heads": 2}
  return keys


def _size_of(name: str) -> str:
  """The size that a key gives; a batch schedule ends in the run's batch."""
  if name in ("micro_batch_size", "per_device_batch_size"):
    return "pass"
  return "batch" if name in (*_BATCHES, "gradient_accumulation_steps") else name


@st.composite
def broken(draw: st.DrawFn) -> Keys:
  """Sizes that divide, and then a few others in their places."""
  keys = draw(configurations())
  names = draw(st.lists(st.sampled_from(sorted(BROKEN)), max_size=3, unique_by=_size_of))
  if "batch_schedule" in names:
    keys = {key: value for key, value in keys.items() if key not in _BATCHES}
  for name in names:
    # Two names of one size are for other tests.
    keys.pop(_SYNONYMS.get(name, ""), None)
    keys[name] = draw(BROKEN[name])
  return keys


# --- what is planned ------------------------------------------------------------------------------


def configuration(keys: Keys) -> Config:
  return configured(*(f"{key}={value}" for key, value in keys.items()))


def planned(config: Config) -> tuple[BatchPlan, Pipeline]:
  """As `train` plans."""
  layout = topology(config.mesh, config.mesh.num_simulated_devices)
  plan = plan_batches(config.batch, config.run, layout)
  return plan, pipeline_of(config, layout, plan)


def reached(keys: Keys) -> tuple[int, str]:
  """How many of three parts accept it, and why the next does not."""
  config, done, result = configuration(keys), 0, None
  parts = (
    lambda _: topology(config.mesh, config.mesh.num_simulated_devices),
    lambda layout: plan_batches(config.batch, config.run, layout),
    lambda plan: pipeline_of(config, _layout(plan), plan),
  )
  try:
    for part in parts:
      result = part(result)
      done += 1
  except UserError as error:
    return done, str(error)
  return done, ""


def _layout(plan: Any) -> Topology:
  return plan.topology


_OFFERS = re.compile(r"nearest:|for example|change one of them:")
_KEY = re.compile(r"([a-z_]+)=(\[\[.*?\]\]|\[\]|[^\s,;()\[]+)")
_PART_OF = "the last batch of "
"""What follows is not the value of the whole key."""
_TOGETHER = (" ", ", ", " with ")


def offered(message: str) -> list[Keys]:
  """The alternatives that a message offers, each one key or more."""
  result = _OFFERS.search(message)
  if result is None:
    return []
  text, alternatives, end = message[result.end() :], [], None
  for match in _KEY.finditer(text):
    if text[: match.start()].endswith(_PART_OF):
      continue
    if end is None or text[end : match.start()] not in _TOGETHER:
      alternatives.append({})
    alternatives[-1][match[1]] = match[2]
    end = match.end()
  return alternatives


# --- what is run ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
  """A configuration made ready to compute one step, and an evaluation."""

  config: Config
  plan: BatchPlan
  trainer: Trainer
  stage: Phase
  """Of the batch schedule; the first of its steps is run."""

  @property
  def passes(self) -> int:
    return self.stage.num_microbatches

  @property
  def rows(self) -> Rows:
    return batch(self.config, self.stage.batch)

  @functools.cached_property
  def params(self) -> Any:
    """Parameters on the host, in the model's order of layers."""
    random = np.random.default_rng(0)

    def one(leaf: Any) -> np.ndarray:
      return random.normal(0.05, 0.15, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(one, self.trainer.model.shapes())

  def placed(self, trainer: Trainer) -> TrainState:
    """The state of a trainer with these parameters."""
    params = self.params
    if trainer.pipeline:
      order = stage_order(trainer.pipeline)
      params = params | {"layers": jax.tree.map(lambda x: x[order], params["layers"])}
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), trainer.abstract)
    # A streamed step is told by its number how many passes it takes.
    at = np.int32(self.stage.first.step)
    state = zeros._replace(params=params, opt_state=zeros.opt_state._replace(gradient_step=at))
    return jax.device_put(state, shardings(trainer.abstract))

  def step(self, trainer: Trainer) -> StepMetrics:
    """Of one whole step."""
    streamed = streams(self.config)
    fed = in_microbatches(self.rows, self.passes, self.passes if streamed else self.capacity)
    pieces = [jax.tree.map(lambda x, k=k: x[k : k + 1], fed) for k in range(self.passes)]
    pieces = pieces if streamed else [fed]
    compiled = traced_step(trainer, pieces[0]).lower().compile(QUICKLY)
    state, metrics = self.placed(trainer), None
    for piece in pieces:
      rows = jax.device_put(piece, rows_shardings(piece, trainer.mesh))
      state, metrics = compiled(state, rows, trainer.microbatches(self.passes), np.float32(0.1))
    assert metrics is not None
    return jax.device_get(metrics)

  @property
  def capacity(self) -> int:
    return self.plan.microbatch_capacity


def prepared(config: Config, *, smallest: bool = False) -> Run:
  """A run's largest step, or its smallest, of the batch's microbatch."""
  plan, _ = planned(config)
  devices = jax.devices()[: plan.topology.num_devices]
  trainer = build_trainer(config, plan, devices)
  stages = [one for one in plan.phases if one.micro_batch == plan.phases[-1].micro_batch]
  stage = (min if smallest else max)(stages, key=lambda one: one.num_microbatches)
  return Run(config, plan, trainer, stage)


def batch(config: Config, count: int) -> Rows:
  """Uneven rows, with packing in segments of 5 tokens."""
  length = config.batch.max_target_length
  rows = uneven_rows(count, length)
  if not config.data.packing:
    return rows
  place = np.arange(length, dtype=np.int32)[None] + 0 * rows.inputs
  return rows._replace(segment_ids=1 + place // 5, positions=place % 5)


def without_pipeline(run: Run) -> StepMetrics:
  """The same step with pipeline_schedule=none, on one device."""
  return run.step(dataclasses.replace(run.trainer, pipeline=None, mesh=mesh()))


def evaluated(run: Run, trainer: Trainer) -> float:
  """Loss of one evaluation batch."""
  rows = batch(run.config, run.plan.eval_batch)
  lowered = eval_function(trainer, rows).lower(trainer.abstract.params, rows)
  compiled = lowered.compile(compiler_options=QUICKLY)
  rows = jax.device_put(rows, compiled.input_shardings[0][1])
  return float(compiled(run.placed(trainer).params, rows).loss)


def evaluated_plainly(run: Run) -> float:
  """Without a pipeline, on one device."""
  params = jax.tree.map(jnp.asarray, run.params)
  rows = batch(run.config, run.plan.eval_batch)
  return float(jax.jit(functools.partial(loss_sum, run.trainer.model))(params, rows, None))
