"""Pipelined gradients by the training code, beside the plain gradients of the same rows.

One program runs every timetable that fits its buffers, so few programs serve many cases.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import GPT2, config, in_microbatches, mesh, uneven_rows

from maxbatch.data.rows import Rows
from maxbatch.models.registry import Model, Parameters, build_model
from maxbatch.pipeline_parallel.schedule import BufferLimits, TimetableShape, timetable
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays, timetable_arrays
from maxbatch.precision.policy import policy_of
from maxbatch.training import partial_sums, stage_state, tick
from maxbatch.training.loss import loss_sum
from maxbatch.training.objective import LOSS
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.pipelined_step import pipelined_accumulate
from maxbatch.training.state import StateParts, Sums, abstract_state
from maxbatch.training.step import rows_shardings

LAYERS, ROWS, PASSES, CUTS = 12, 32, 2, 4
KEY = jax.random.key(7)
QUICKLY: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
"""Without what takes half of the compilation, and makes these small programs no faster."""


@dataclasses.dataclass(frozen=True)
class Case:
  """A program: the devices, how the layers divide over them, and the model."""

  stages: int = 2
  repeats: int = 1
  axes: tuple[int, int, int] = (1, 1, 1)
  """Devices along data, fsdp and tensor."""
  forwarding_delay: int = 1
  length: int = 9
  gpt2: bool = False
  stash: str = "input"
  dropout_rate: float = 0.1
  """Half of what a program takes to compile is random numbers."""
  keys: tuple[tuple[str, object], ...] = ()
  """Keys of the model that should change nothing."""

  @property
  def pipeline(self) -> Pipeline:
    groups = self.axes[0] * self.axes[1]
    layers = LAYERS // self.stages // self.repeats
    rows = ROWS // PASSES // CUTS // groups
    sizes = (self.stages, self.repeats, layers, CUTS, PASSES, PASSES, 1, rows)
    return Pipeline("", *sizes, (CUTS,), self.forwarding_delay, self.stash)

  @property
  def model(self) -> Model:
    return plain_model(self.gpt2, self.length, self.dropout_rate, self.keys)

  @property
  def capacity(self) -> BufferLimits:
    """As much as any schedule needs."""
    return BufferLimits(self.repeats * PASSES * CUTS, PASSES * CUTS)

  def ticks(self, schedule: str, microbatches: int) -> TimetableArrays:
    shape = TimetableShape(self.stages, microbatches, self.repeats, self.forwarding_delay)
    most = 2 * (PASSES * CUTS * self.repeats + self.forwarding_delay * self.stages)
    return timetable_arrays(timetable(schedule, shape), self.capacity, most)


@functools.cache
def plain_model(
  gpt2: bool, length: int, dropout_rate: float, more: tuple[tuple[str, object], ...] = ()
) -> Model:
  keys = {"base_num_decoder_layers": LAYERS, "base_emb_dim": 16, "head_dim": 4, "base_mlp_dim": 32}
  keys |= {"max_target_length": length, "dropout_rate": dropout_rate, "z_loss_multiplier": 1e-3}
  keys |= GPT2 if gpt2 else {}
  settings = config(**keys | dict(more))
  return build_model(settings.model, length, policy=policy_of(settings.precision))


@functools.cache
def parameters(gpt2: bool, length: int) -> Parameters:
  """Of a model of `plain_model`, on the host."""
  return jax.device_get(jax.jit(plain_model(gpt2, length, 0.0).init)(jax.random.key(0)))


def make_rows(case: Case, microbatches: int) -> Rows:
  """Uneven rows, those of one microbatch all padding; beyond `microbatches` only padding.

  With one group of devices; with more, `microbatches` must be whole passes.
  """
  rows = uneven_rows(ROWS, case.length)
  weights = np.array(rows.weights)
  weights[ROWS // PASSES // CUTS * microbatches :] = 0.0
  rows = rows._replace(weights=weights)  # pyright: ignore[reportArgumentType]
  if not case.gpt2:
    return rows
  place = np.arange(case.length, dtype=np.int32)[None] + 0 * rows.inputs
  return rows._replace(segment_ids=1 + (place >= 3).astype(np.int32), positions=place % 3)


def in_order_of_stages(case: Case, params: Parameters, *, back: bool = False) -> Parameters:
  """The layers stage by stage, a stage's layers repeat by repeat; or the other way round."""
  shape = case.repeats, case.stages, -1
  order = np.arange(LAYERS).reshape(shape).transpose(1, 0, 2).ravel()
  order = np.argsort(order) if back else order
  return params | {"layers": jax.tree.map(lambda x: x[order], params["layers"])}


@functools.cache
def program(case: Case) -> tuple[Any, Any]:
  """The compiled program, and how its parameters are laid out."""
  function, arguments = traceable(case)
  places = jax.tree.map(lambda x: x.sharding, arguments[0])
  return jax.jit(function).lower(*arguments).compile(compiler_options=QUICKLY), places


def traceable(case: Case):
  """Gradients as a function of (params, rows, ticks), and its abstract arguments."""
  devices = mesh(*case.axes, stage=case.stages)
  model = case.model
  rows = fed_rows(case, CUTS * PASSES)
  optimizer = make_optimizer(config().optimizer, model.axes(), 1)
  params = abstract_state(StateParts(model, optimizer), devices).params

  def gradients(params: Parameters, rows: Rows, ticks: TimetableArrays) -> tuple[Parameters, Sums]:
    zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
      parts = model, case.pipeline, devices
      accumulate = pipelined_accumulate(*parts, dropout_key=KEY, capacity=case.capacity)
      result = accumulate(params, rows, ticks, zeros=zeros)
      loss = result.terms[LOSS]
      return result.gradients, Sums(*partial_sums.joined((loss.numerator, loss.denominator)), {})

  name = "gpipe" if case.repeats == 1 else "circular"
  return gradients, (params, rows, case.ticks(name, CUTS * PASSES))


def fed_rows(case: Case, microbatches: int) -> Rows:
  rows = in_microbatches(make_rows(case, microbatches), PASSES, PASSES)
  return jax.device_put(rows, rows_shardings(rows, mesh(*case.axes, stage=case.stages)))


def pipelined(case: Case, schedule: str, microbatches: int) -> tuple[Parameters, Sums]:
  """Gradients in the order of the layers, and sums, on the host."""
  compiled, places = program(case)
  params = jax.device_put(in_order_of_stages(case, parameters(case.gpt2, case.length)), places)
  ticks = case.ticks(schedule, microbatches)
  result = jax.device_get(compiled(params, fed_rows(case, microbatches), ticks))
  return in_order_of_stages(case, result[0], back=True), result[1]


@functools.cache
def _plain(gpt2: bool, length: int, dropout_rate: float) -> Any:
  model = plain_model(gpt2, length, dropout_rate)
  return jax.jit(jax.value_and_grad(lambda p, rows: loss_sum(model, p, rows, KEY)))


def plain(case: Case, microbatches: int) -> tuple[float, Parameters]:
  """Loss and gradients of the same rows in one piece on one device, without the case's keys."""
  return _plain_gradients(case.gpt2, case.length, case.dropout_rate, microbatches)


@functools.cache
def _plain_gradients(
  gpt2: bool, length: int, dropout_rate: float, microbatches: int
) -> tuple[float, Parameters]:
  rows = make_rows(Case(gpt2=gpt2, length=length), microbatches)
  return jax.device_get(_plain(gpt2, length, dropout_rate)(parameters(gpt2, length), rows))


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
  """Puts NaN into everything that an idle stage could read, and what it writes too."""
  for module in (tick, stage_state):
    monkeypatch.setattr(module, "blank", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))

  def write(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
    return buffer.at[slot].set(
      jnp.where(slot == len(buffer) - 1, jnp.nan, value).astype(buffer.dtype)
    )

  monkeypatch.setattr(tick, "write", write)
