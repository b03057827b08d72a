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
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.core.terms import joined
from maxbatch.data.rows import Rows
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
  LossProbes,
  ModelParts,
  StageSums,
  stage_sums,
  trained,
)
from maxbatch.training.objective import LOSS
from maxbatch.training.stage_noise import FromLoss, LossSquares, StageNoise, used_params
from maxbatch.training.stage_state import (
  Buffers,
  ForwardResult,
  StageLayout,
  StageState,
  Totals,
  add_at,
  added,
  blank,
  blank_like,
  joined_rows,
  joined_tokens,
  mask,
  split_rows,
  split_tokens,
  write,
)
from maxbatch.training.stash import Arrays, NoStash, OutputGradients, StageInput, Stash


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
    noise: what squares the gradients of microbatches; None: nothing does.
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
  noise: StageNoise | None = None

  @property
  def layout(self) -> StageLayout:
    """How the stage's devices divide what is computed."""
    return StageLayout(self.parts.model, self.stash.residuals)

  def run(self, zero_layers: FlatParams, zero_rest: FlatParams) -> StageState:
    """Runs all ticks; the arguments are zeros in which the gradients are summed, if there are any."""
    like, slots = jax.eval_shape(lambda: self._embed(jnp.int32(0))), self.capacity
    chunks = self.pipeline.repeats, self.pipeline.layers
    blank_RTD, buffers = blank(like.shape, like.dtype), None
    if slots:
      buffers = Buffers(
        blank((slots.inputs + 1, *like.shape), like.dtype),
        blank((slots.gradients + 1, *like.shape), like.dtype),
        self.layout.blank_residuals(slots.inputs + 1),
      )
    outgoing = (blank_RTD, blank_RTD) if slots else (blank_RTD,)
    state = StageState(
      buffers=buffers,
      outgoing=outgoing,
      received=outgoing if self.pipeline.forwarding_delay > 1 else (),
      d_layers=self.layout.constrain_like_params(zero_layers),
      d_rest=self.layout.constrain_like_params(zero_rest),
      sums=self.parts.zero_loss,
      own=self.own,
      squares=self.noise.zeros(like, chunks) if self.noise else None,
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
      lambda: self._no_forward(blank_like(waiting_RTD)),
    )
    state = state._replace(own=state.own.add(own, row.forward.is_active))
    state, d_y_RTD = self._add_loss(all_stages, y_RTD, state)
    if state.buffers is None:
      return state._replace(outgoing=(y_RTD,))
    # Buffers are read and written outside of the branches: XLA would copy a whole buffer that goes
    # through a branch.
    buffers, slot = state.buffers, row.forward.slot
    buffers = Buffers(
      write(buffers.inputs, slot, x_RTD),
      write(buffers.gradients, row.loss_slot, d_y_RTD),
      jax.tree.map(lambda to, x: write(to, slot, x), buffers.residuals, residuals),
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
    inputs = write(inputs, row.input_arrival_slot, arrived[0])
    gradients = write(gradients, row.gradient_arrival_slot, arrived[1])
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
      lambda: blank_like(waiting_RTD),
    )
    x_RTD = jnp.where(self._is_first(entry), embedded_RTD, waiting_RTD)
    outputs, residuals = self.stash.forward(self._stage_input(entry, x_RTD))
    own = stage_sums(self.parts.model, outputs) if any(self.own) else NO_SUMS
    return ForwardResult(x_RTD if self.capacity else None, outputs.hidden_BTD, residuals, own)

  def _no_forward(self, x_RTD: jax.Array) -> ForwardResult:
    kept_RTD = x_RTD if self.capacity else None
    return ForwardResult(kept_RTD, x_RTD, self.layout.blank_residuals(), self.own)

  def _add_loss(
    self, all_stages: TickArrays, y_RTD: jax.Array, state: StageState
  ) -> tuple[StageState, Any]:
    """Adds the loss of the last stage's output, if this tick has one; returns its gradient, if the
    timetable has backwards."""
    squares, noise, microbatch = state.squares, self.noise, all_stages.loss_microbatch
    d_rest, sums, d_y_RTD, new = self._cond(
      "loss",
      all_stages.loss,
      lambda: self._loss(microbatch, y_RTD, state),
      lambda: (
        *(state.d_rest, state.sums, blank_like(y_RTD) if self.capacity else None),
        noise.no_loss(squares, y_RTD) if noise and squares else None,
      ),
    )
    if noise and squares:
      squares = noise.store(squares, new, all_stages.loss, microbatch)
    return state._replace(d_rest=d_rest, sums=sums, squares=squares), d_y_RTD

  def _loss(
    self, microbatch: jax.Array, y_RTD: jax.Array, state: StageState
  ) -> tuple[FlatParams, StageSums, jax.Array | None, LossSquares | None]:
    """Returns loss and gradient of the last stage's output; each stage computes some tokens, or some rows
    where these are measured."""
    d_rest, sums, squares, noise = state.d_rest, state.sums, None, self.noise
    by_row = noise is not None and noise.of_rows
    y_RCD, cut = self._row_share(y_RTD) if by_row else self._token_share(y_RTD)
    given = self.microbatch(microbatch), cut, self.index == 0, self.scale

    def loss(
      used: FlatParams, y_RCD: jax.Array, probes: LossProbes | None
    ) -> tuple[jax.Array, StageSums]:
      result = self.parts.loss(self.layers, self.rest | used, y_RCD, *given, probes)
      return result.terms[LOSS].numerator, result

    if self.capacity is None:
      return d_rest, joined(sums, loss({}, y_RCD, None)[1]), None, None
    trains, probes = (
      trained(self.parts.model, self.rest),
      noise.loss_probes(y_RCD) if noise else None,
    )
    used = used_params(lambda rest: loss(rest, y_RCD, None)[0], trains)
    gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (_, result), (new, d_y_RCD, measured) = gradient(used, y_RCD, probes)

    def whole(x_RCD: jax.Array) -> jax.Array:
      if by_row:
        return joined_rows(lax.all_gather(x_RCD, "stage"), len(y_RTD))
      return joined_tokens(lax.all_gather(x_RCD, "stage", axis=1), y_RTD.shape[1])

    d_y_RTD, new = whole(d_y_RCD), self._summands(new)
    if noise and state.squares:
      of_rows, at_tokens = measured or LossProbes({}, None)
      divisor, rows = result.terms[LOSS].denominator, self._rows(microbatch)
      at_tokens = None if at_tokens is None else whole(at_tokens)
      squares = noise.add_loss(state.squares, new, divisor, rows, (of_rows, at_tokens))
    return added(d_rest, new), joined(sums, result), d_y_RTD, squares

  def _token_share(self, y_RTD: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns this stage's tokens of the last stage's output, and what takes them of other arrays."""
    # Every stage sends every stage a share, and only the last stage's shares are used. A sum over
    # stages with zeros would move as much, and XLA's CPU compiler fails on such a sum of bfloat16.
    split = functools.partial(split_tokens, shares=self.pipeline.stages)
    shares_RSCD = lax.all_to_all(split(y_RTD), "stage", split_axis=1, concat_axis=1)
    return shares_RSCD[:, -1], lambda x_RT: split(x_RT)[:, self.index]

  def _row_share(self, y_RTD: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns this stage's rows of the last stage's output, likewise."""
    split = functools.partial(split_rows, shares=self.pipeline.stages)
    shares_SRTD = lax.all_to_all(split(y_RTD), "stage", split_axis=0, concat_axis=0)
    return shares_SRTD[-1], lambda x: split(x)[self.index]

  def _add_backward(
    self, row: StageArrays, all_stages: TickArrays, buffers: Buffers, state: StageState
  ) -> tuple[StageState, jax.Array]:
    """Adds the gradients of this stage's layers, if this tick has a backward.

    Returns the state and the gradient of the layers' input.
    """
    entry, squares = row.backward, state.squares
    x_RTD = buffers.inputs[entry.slot]
    residuals = tuple(buffer[entry.slot] for buffer in buffers.residuals)
    d_y_RTD = buffers.gradients[row.gradient_slot]
    of_layers = squares.of_layers if squares else None
    (d_layers, of_layers), d_x_RTD = self._cond(
      "backward",
      all_stages.backward,
      lambda: self._backward(entry, x_RTD, residuals, d_y_RTD, (state.d_layers, of_layers)),
      lambda: ((state.d_layers, of_layers), blank_like(x_RTD)),
    )
    noise, of_loss = self.noise, FromLoss(None, None)
    if noise and squares:
      of_loss = noise.from_loss(squares, entry.microbatch)
    of_rest = squares.of_rest if squares else None
    d_rest, of_rest = self._cond(
      "embedding_backward",
      all_stages.embedding_backward,
      lambda: self._embedding_backward(entry, d_x_RTD, of_loss, (state.d_rest, of_rest)),
      lambda: (state.d_rest, of_rest),
    )
    if squares:
      squares = squares._replace(of_layers=of_layers, of_rest=of_rest)
    return state._replace(d_layers=d_layers, d_rest=d_rest, squares=squares), d_x_RTD

  def _backward(
    self,
    entry: PassArrays,
    x_RTD: jax.Array,
    residuals: Arrays,
    d_y_RTD: jax.Array,
    totals: Totals,
  ) -> tuple[Totals, jax.Array]:
    """Adds the gradients of this stage's layers; returns them and that of their input."""
    summand = self.parts.model.policy.summand

    def add(totals: Totals, layer: jax.Array, new: FlatParams, of_rows: FlatParams) -> Totals:
      # As in accumulate.py: keeps reductions over fsdp inside the loop.
      new, at = lax.optimization_barrier(new), (entry.repeat, layer)
      masked = {path: mask(entry.is_active, summand(g)) for path, g in new.items()}
      sums, squares = totals
      sums = {path: add_at(total, at, masked[path]) for path, total in sums.items()}
      if self.noise and squares:
        of_rows = {path: mask(entry.is_active, x) for path, x in of_rows.items()}
        number = self._first_layer(entry) + layer
        squares = self.noise.add_layer(squares, masked, of_rows, at, number)
      return self.layout.constrain((sums, squares))

    gradients = OutputGradients(d_y_RTD, self.term_gradients)
    given = self._stage_input(entry, x_RTD), residuals, gradients
    return cast(Stash, self.stash).backward(*given, totals, add)

  def _embedding_backward(
    self, entry: PassArrays, d_x_RTD: jax.Array, of_loss: FromLoss, totals: Totals
  ) -> Totals:
    """Returns the backward of the embedding, added on the first stage in the first repeat."""
    rows = self._rows(entry.microbatch)

    def embed(used: FlatParams) -> jax.Array:
      return self.parts.embed(self.layers, self.rest | used, rows)

    used, noise = used_params(embed, trained(self.parts.model, self.rest)), self.noise
    d_rest, squares = totals
    if not (noise and squares):
      _, vjp_fn = jax.vjp(embed, used)
      begins = entry.is_active & self._is_first(entry)
      return added(d_rest, self._summands(vjp_fn(mask(begins, d_x_RTD))[0])), None
    vjp_fn, begins = noise.embedding_vjp(used, rows), entry.is_active & self._is_first(entry)
    d_x_RTD, of_loss = jax.tree.map(lambda x: mask(begins, x), (d_x_RTD, of_loss))
    new, of_rows = vjp_fn(d_x_RTD, of_loss)
    new = self._summands(new)
    return added(d_rest, new), noise.add_embedding(squares, new, of_rows, d_x_RTD, of_loss)

  def _is_first(self, entry: PassArrays) -> jax.Array:
    return (self.index == 0) & (entry.repeat == 0)

  def _embed(self, microbatch: jax.Array) -> jax.Array:
    return self.parts.embed(self.layers, self.rest, self._rows(microbatch))

  def _rows(self, microbatch: jax.Array) -> Rows:
    return self.parts.objective.rows(self.microbatch(microbatch))

  def _stage_input(self, entry: PassArrays, x_RTD: jax.Array) -> StageInput:
    """Returns the input of this stage's layers in this forward or backward."""
    first = self._first_layer(entry) + self.parts.num_first_layers
    rows = self._rows(entry.microbatch)
    return StageInput(self.layers, entry.repeat, x_RTD, rows, first)

  def _first_layer(self, entry: PassArrays) -> jax.Array:
    """Returns the number of the first of this stage's layers, among those that stages divide."""
    return (entry.repeat * self.pipeline.stages + self.index) * self.pipeline.layers

  def _summands(self, new: FlatParams) -> FlatParams:
    """Returns what gradients of some of the parameters add to the sums."""
    new = lax.optimization_barrier(new)
    return {path: self.parts.model.policy.summand(g) for path, g in new.items()}

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
        condition,
        lambda: self.layout.constrain(compute()),
        lambda: self.layout.constrain(otherwise()),
      )
