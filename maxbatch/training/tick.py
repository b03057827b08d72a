"""One tick of one stage: receive from the neighbours, a forward, the loss, a backward.

R rows of a microbatch, T tokens, C tokens of a stage's share, D width of the residual stream.

All stages run the same program in lockstep. An idle stage computes on the unused slot of its
buffers and its results are masked: waiting would take as long, and collectives inside the layers
need every device. A tick skips the forward, the loss or the backward only if no stage has one, so
all stages take the same branches and no collective runs in a branch that another stage skips.

An evaluation has no backwards, and no buffers for them: its timetable uses an input as it arrives.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.core.terms import joined
from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import constrain
from maxbatch.pipeline_parallel.schedule import BufferLimits
from maxbatch.pipeline_parallel.sizes import Pipeline, scope_name
from maxbatch.pipeline_parallel.timetable_arrays import (
  PassArrays,
  StageArrays,
  TickArrays,
  TimetableArrays,
)
from maxbatch.training.model_parts import (
  NO_SUMS,
  FlatParams,
  ModelParts,
  StageSums,
  joined_tokens,
  split_tokens,
  stage_sums,
  trained,
  used_params,
)
from maxbatch.training.objective import LOSS
from maxbatch.training.stash import Arrays, NoStash, OutputGradients, StageInput, Stash


class Buffers(NamedTuple):
  """What a stage keeps for its backwards."""

  inputs: jax.Array
  """[slots, R, T, D]: inputs until their backward."""
  gradients: jax.Array
  """[slots, R, T, D]: gradients of outputs until their backward."""
  residuals: Arrays
  """[slots, …]: residuals of a forward until its backward, in the same slot as its input."""


class StageState(NamedTuple):
  """The state of a stage between ticks."""

  buffers: Buffers | None
  """None in an evaluation."""
  outgoing: tuple[jax.Array, ...]
  """Output and, in training, input gradient of the previous tick, (R, T, D) each, still to be sent."""
  received: tuple[jax.Array, ...]
  """With delayed forwarding, what the neighbours sent in the previous tick; else empty."""
  d_layers: FlatParams
  """float32 sums of the gradients of this stage's layers that train: (repeats, layers, …)."""
  d_rest: FlatParams
  """float32 sums of this stage's share of the gradients of all other parameters that train."""
  sums: StageSums
  """This stage's share of the loss."""
  own: StageSums
  """What its layers hand out."""


class ForwardResult(NamedTuple):
  """The input and output of a stage's layers, the residuals to stash, and what the layers hand out."""

  x_RTD: Any
  """None in an evaluation, which keeps nothing for a backward."""
  y_RTD: jax.Array
  residuals: Arrays
  own: StageSums


@dataclasses.dataclass(frozen=True)
class PipelineStage:
  """A pipeline stage: what stays the same in all ticks.

  Attributes:
    parts: the model.
    pipeline: how layers and batch are divided.
    index: of this stage, an int32 scalar.
    layers: parameters of this stage's layers: (repeats, layers, …).
    rest: parameters outside of the layers, which every stage has.
    microbatch: a function from the number of a microbatch to what the step is fed of it.
    ticks: the timetable; of arrays [ticks, stages] only this stage's column.
    stash: what is kept of a forward until its backward.
    capacity: slots of the buffers; None in an evaluation, without backwards and buffers.
    scale: by which gradients are multiplied, a float32 scalar; None: by nothing.
    own: zeros of what the layers hand out; empty where that is not summed.
    term_gradients: the objective's gradient by the numerators of their terms.
  """

  parts: ModelParts
  pipeline: Pipeline
  index: jax.Array
  layers: FlatParams
  rest: FlatParams
  microbatch: Callable[[jax.Array], Any]
  ticks: TimetableArrays
  stash: Stash | NoStash
  capacity: BufferLimits | None = None
  scale: jax.Array | None = None
  own: StageSums = NO_SUMS
  term_gradients: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

  def run(self, zero_layers: FlatParams, zero_rest: FlatParams) -> StageState:
    """Runs all ticks; the arguments are zeros in which the gradients are summed, if there are any."""
    like, slots = jax.eval_shape(lambda: self._embed(jnp.int32(0))), self.capacity
    blank_RTD, buffers = _blank(like.shape, like.dtype), None
    if slots:
      buffers = Buffers(
        _blank((slots.inputs + 1, *like.shape), like.dtype),
        _blank((slots.gradients + 1, *like.shape), like.dtype),
        self._blank_residuals(slots.inputs + 1),
      )
    outgoing = (blank_RTD, blank_RTD) if slots else (blank_RTD,)
    state = StageState(
      buffers=buffers,
      outgoing=outgoing,
      received=outgoing if self.pipeline.forwarding_delay > 1 else (),
      d_layers=self._constrain_like_params(zero_layers),
      d_rest=self._constrain_like_params(zero_rest),
      sums=self.parts.zero_loss,
      own=self.own,
    )
    return lax.fori_loop(0, self.ticks.num_ticks, self._tick, state)

  def _tick(self, tick: jax.Array, state: StageState) -> StageState:
    row: StageArrays = jax.tree.map(lambda x: x[tick, 0], self.ticks.stages)
    all_stages: TickArrays = jax.tree.map(lambda x: x[tick], self.ticks.all_stages)
    state, waiting_RTD = self._receive(row, state)
    x_RTD, y_RTD, residuals, own = self._cond(
      "forward",
      all_stages.forward,
      lambda: self._forward(row.forward, all_stages.embedding, waiting_RTD),
      lambda: self._no_forward(_blank_like(waiting_RTD)),
    )
    state = state._replace(own=state.own.add(own, row.forward.is_active))
    state, d_y_RTD = self._add_loss(all_stages, y_RTD, state)
    if state.buffers is None:
      return state._replace(outgoing=(y_RTD,))
    # Buffers are read and written outside of the branches: XLA would copy a whole buffer that goes
    # through a branch.
    buffers, slot = state.buffers, row.forward.slot
    buffers = Buffers(
      _write(buffers.inputs, slot, x_RTD),
      _write(buffers.gradients, row.loss_slot, d_y_RTD),
      jax.tree.map(lambda to, x: _write(to, slot, x), buffers.residuals, residuals),
    )
    state, d_x_RTD = self._add_backward(row, all_stages, buffers, state)
    return state._replace(buffers=buffers, outgoing=(y_RTD, d_x_RTD))

  def _receive(self, row: StageArrays, state: StageState) -> tuple[StageState, jax.Array]:
    """Stores the previous stage's output and the next stage's gradient, sent around a ring.

    Returns the state and the input of this tick's forward.

    This begins a tick and does not end the previous one, so that every write to a buffer depends on
    the read before it. Otherwise XLA copies the buffer in every tick.
    """
    onward = [(stage, (stage + 1) % self.pipeline.stages) for stage in range(self.pipeline.stages)]
    backward = [(next_stage, stage) for stage, next_stage in onward]
    each = zip(state.outgoing, (onward, backward), strict=False)
    sent = tuple(lax.ppermute(x_RTD, "stage", ring) for x_RTD, ring in each)
    arrived = state.received if self.pipeline.forwarding_delay > 1 else sent
    state = state._replace(received=sent if self.pipeline.forwarding_delay > 1 else ())
    if state.buffers is None:
      return state, arrived[0]
    inputs, gradients, residuals = state.buffers
    inputs = _write(inputs, row.input_arrival_slot, arrived[0])
    gradients = _write(gradients, row.gradient_arrival_slot, arrived[1])
    state = state._replace(buffers=Buffers(inputs, gradients, residuals))
    return state, inputs[row.forward.slot]

  def _forward(
    self, entry: PassArrays, embedding: jax.Array, waiting_RTD: jax.Array
  ) -> ForwardResult:
    """Runs the embedding, on the first stage in the first repeat, and this stage's layers."""
    embedded_RTD = self._cond(
      "embedding",
      embedding,
      lambda: self._embed(entry.microbatch),
      lambda: _blank_like(waiting_RTD),
    )
    x_RTD = jnp.where(self._is_first(entry), embedded_RTD, waiting_RTD)
    outputs, residuals = self.stash.forward(self._stage_input(entry, x_RTD))
    own = stage_sums(self.parts.model, outputs) if any(self.own) else NO_SUMS
    return ForwardResult(x_RTD if self.capacity else None, outputs.hidden_BTD, residuals, own)

  def _no_forward(self, x_RTD: jax.Array) -> ForwardResult:
    return ForwardResult(x_RTD if self.capacity else None, x_RTD, self._blank_residuals(), self.own)

  def _add_loss(
    self, all_stages: TickArrays, y_RTD: jax.Array, state: StageState
  ) -> tuple[StageState, Any]:
    """Adds the loss of the last stage's output, if this tick has one; returns its gradient, if the
    timetable has backwards."""
    d_rest, sums, d_y_RTD = self._cond(
      "loss",
      all_stages.loss,
      lambda: self._loss(all_stages.loss_microbatch, y_RTD, state.d_rest, state.sums),
      lambda: (state.d_rest, state.sums, _blank_like(y_RTD) if self.capacity else None),
    )
    return state._replace(d_rest=d_rest, sums=sums), d_y_RTD

  def _loss(
    self, microbatch: jax.Array, y_RTD: jax.Array, d_rest: FlatParams, sums: StageSums
  ) -> tuple[FlatParams, StageSums, jax.Array | None]:
    """Returns loss and gradient of the last stage's output; each stage computes some tokens."""
    y_RCD, cut = self._token_share(y_RTD)
    given = self.microbatch(microbatch), cut, self.index == 0, self.scale

    def loss(used: FlatParams, y_RCD: jax.Array) -> tuple[jax.Array, StageSums]:
      result = self.parts.loss(self.layers, self.rest | used, y_RCD, *given)
      return result.terms[LOSS].numerator, result

    if self.capacity is None:
      return d_rest, joined(sums, loss({}, y_RCD)[1]), None
    used = used_params(lambda rest: loss(rest, y_RCD)[0], trained(self.parts.model, self.rest))
    (_, result), (new, d_y_RCD) = jax.value_and_grad(loss, (0, 1), has_aux=True)(used, y_RCD)
    d_y_RTD = joined_tokens(lax.all_gather(d_y_RCD, "stage", axis=1), y_RTD.shape[1])
    return self._add_gradients(d_rest, new), joined(sums, result), d_y_RTD

  def _token_share(self, y_RTD: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns this stage's tokens of the last stage's output, and what takes them of other arrays."""
    # Every stage sends every stage a share, and only the last stage's shares are used. A sum over
    # stages with zeros would move as much, and XLA's CPU compiler fails on such a sum of bfloat16.
    split = functools.partial(split_tokens, shares=self.pipeline.stages)
    shares_RSCD = lax.all_to_all(split(y_RTD), "stage", split_axis=1, concat_axis=1)
    return shares_RSCD[:, -1], lambda x_RT: split(x_RT)[:, self.index]

  def _add_backward(
    self, row: StageArrays, all_stages: TickArrays, buffers: Buffers, state: StageState
  ) -> tuple[StageState, jax.Array]:
    """Adds the gradients of this stage's layers, if this tick has a backward.

    Returns the state and the gradient of the layers' input.
    """
    entry = row.backward
    x_RTD = buffers.inputs[entry.slot]
    residuals = tuple(buffer[entry.slot] for buffer in buffers.residuals)
    d_y_RTD = buffers.gradients[row.gradient_slot]
    d_layers, d_x_RTD = self._cond(
      "backward",
      all_stages.backward,
      lambda: self._backward(entry, x_RTD, residuals, d_y_RTD, state.d_layers),
      lambda: (state.d_layers, _blank_like(x_RTD)),
    )
    d_rest = self._cond(
      "embedding_backward",
      all_stages.embedding_backward,
      lambda: self._embedding_backward(entry, d_x_RTD, state.d_rest),
      lambda: state.d_rest,
    )
    return state._replace(d_layers=d_layers, d_rest=d_rest), d_x_RTD

  def _backward(
    self,
    entry: PassArrays,
    x_RTD: jax.Array,
    residuals: Arrays,
    d_y_RTD: jax.Array,
    d_layers: FlatParams,
  ) -> tuple[FlatParams, jax.Array]:
    """Adds the gradients of this stage's layers; returns them and that of their input."""
    summand = self.parts.model.policy.summand

    def add(totals: FlatParams, layer: jax.Array, new: FlatParams) -> FlatParams:
      # As in accumulate.py: keeps reductions over fsdp inside the loop.
      new, at = lax.optimization_barrier(new), (entry.repeat, layer)
      masked = {path: _mask(entry.is_active, summand(g)) for path, g in new.items()}
      sums = {path: _add_at(total, at, masked[path]) for path, total in totals.items()}
      return self._constrain_like_params(sums)

    gradients = OutputGradients(d_y_RTD, self.term_gradients)
    given = self._stage_input(entry, x_RTD), residuals, gradients
    return cast(Stash, self.stash).backward(*given, d_layers, add)

  def _embedding_backward(
    self, entry: PassArrays, d_x_RTD: jax.Array, d_rest: FlatParams
  ) -> FlatParams:
    """Returns the backward of the embedding, added on the first stage in the first repeat."""
    rows = self._rows(entry.microbatch)

    def embed(used: FlatParams) -> jax.Array:
      return self.parts.embed(self.layers, self.rest | used, rows)

    _, vjp_fn = jax.vjp(embed, used_params(embed, trained(self.parts.model, self.rest)))
    begins = entry.is_active & self._is_first(entry)
    return self._add_gradients(d_rest, vjp_fn(_mask(begins, d_x_RTD))[0])

  def _is_first(self, entry: PassArrays) -> jax.Array:
    return (self.index == 0) & (entry.repeat == 0)

  def _embed(self, microbatch: jax.Array) -> jax.Array:
    return self.parts.embed(self.layers, self.rest, self._rows(microbatch))

  def _rows(self, microbatch: jax.Array) -> Rows:
    return self.parts.objective.rows(self.microbatch(microbatch))

  def _stage_input(self, entry: PassArrays, x_RTD: jax.Array) -> StageInput:
    """Returns the input of this stage's layers in this forward or backward."""
    first = (entry.repeat * self.pipeline.stages + self.index) * self.pipeline.layers
    first += self.parts.num_first_layers
    rows = self._rows(entry.microbatch)
    return StageInput(self.layers, entry.repeat, x_RTD, rows, first)

  def _add_gradients(self, totals: FlatParams, new: FlatParams) -> FlatParams:
    """Adds gradients of some of the parameters to the sums."""
    new = lax.optimization_barrier(new)
    summand = self.parts.model.policy.summand
    return totals | {path: totals[path] + summand(g) for path, g in new.items()}

  def _cond(
    self,
    operation: str,
    condition: jax.Array,
    compute: Callable[[], Any],
    otherwise: Callable[[], Any],
  ) -> Any:
    """Calls lax.cond with equal shardings in both branches, which XLA's TPU compiler requires.

    The scope tells reports which operation this is, and so how often it runs.
    """
    with jax.named_scope(scope_name(operation)):
      return lax.cond(
        condition, lambda: self._constrain(compute()), lambda: self._constrain(otherwise())
      )

  def _constrain(self, result: Any) -> Any:
    """Constrains the sharding of gradients of parameters, activations (R, T, D) and scalars."""
    if result is None:
      return None
    if isinstance(result, dict):
      return self._constrain_like_params(result)
    if isinstance(result, ForwardResult):
      x_RTD, y_RTD, own = (self._constrain(x) for x in (result.x_RTD, result.y_RTD, result.own))
      return ForwardResult(x_RTD, y_RTD, self._constrain_residuals(result.residuals), own)
    if isinstance(result, StageSums):
      return jax.tree.map(lambda x: constrain(x, (None,) * x.ndim), result)
    if isinstance(result, tuple):
      return tuple(self._constrain(each) for each in result)
    return constrain(result, ("batch", "length", "activation_embed") if result.ndim else ())

  def _blank_residuals(self, *slots: int) -> Arrays:
    """Returns zeros for one microbatch's residuals, or buffers with a slot dimension in front."""
    blanks = [_blank((*slots, *like.shape), like.dtype) for like in self.stash.residuals]
    return self._constrain_residuals(tuple(blanks))

  def _constrain_residuals(self, residuals: Arrays) -> Arrays:
    """Divides residuals over fsdp and tensor, with or without a slot dimension in front."""
    each = zip(residuals, self.stash.residuals, strict=True)
    return tuple(constrain(x, (None,) * (x.ndim - len(like.axes)) + like.axes) for x, like in each)

  def _constrain_like_params(self, gradients: FlatParams) -> FlatParams:
    """Divides gradients as the parameters are; those of layers have a repeat dim in front."""
    axes = self.parts.model.axes()
    return {
      path: constrain(leaf, (None,) * (leaf.ndim - len(axes[path])) + axes[path])
      for path, leaf in gradients.items()
    }


def _blank(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """Returns an array whose values are never used, or only after they are written."""
  return jnp.zeros(shape, dtype)


def _blank_like(x_RTD: jax.Array) -> jax.Array:
  return _blank(x_RTD.shape, x_RTD.dtype)


def _mask(condition: jax.Array, value: jax.Array) -> jax.Array:
  """Returns the value, or zeros on an idle stage, even where it computed NaN."""
  return jnp.where(condition, value, jnp.zeros_like(value))


def _add_at(total: jax.Array, place: tuple[jax.Array, jax.Array], value: jax.Array) -> jax.Array:
  """Returns total.at[place].add(value), as reads and writes of slices: no scatter."""
  starts, new = (*place, *(0,) * value.ndim), value[None, None].astype(total.dtype)
  return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, new.shape) + new, starts)


def _write(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
  """Writes to a slot that there is: .at[slot].set also reads it, in case there is none."""
  return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), slot, 0)
