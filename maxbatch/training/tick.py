"""One tick of one stage: what neighbours sent, a forward, the loss, a backward.

R rows of a microbatch, T tokens, C tokens of a stage's share, D width of the residual stream.

All stages run this together. A stage without work computes along on what lies in a slot that nobody
uses, and its results are masked: waiting would take as long, and collectives inside the layers need
every device. Whether any stage has a forward, a loss or a backward is the same for all, so a whole
tick can do without one. Nothing is left out on one stage alone, and nothing is exchanged between
stages in a branch that others may not take.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.data.rows import Rows
from maxbatch.hardware.sharding import constrain
from maxbatch.pipeline_parallel.schedule import BufferLimits
from maxbatch.pipeline_parallel.tick_work import scope_of
from maxbatch.pipeline_parallel.timetable_arrays import (
  StageArrays,
  TickArrays,
  TimetableArrays,
  WorkArrays,
)
from maxbatch.training.loss import LossSums
from maxbatch.training.stage_parts import Leaves, ModelParts
from maxbatch.training.stage_residuals import StageInput
from maxbatch.training.stash import Arrays, Stash
from maxbatch.training.state import Measures, Sums, zero_sums


class StageState(NamedTuple):
  """What a stage keeps from tick to tick."""

  inputs: jax.Array
  """[slots, R, T, D]: inputs, until their backward."""
  gradients: jax.Array
  """[slots, R, T, D]: gradients of outputs, until their backward."""
  kept: Arrays
  """[slots, …]: what else is kept of a forward until its backward, in the slot of its input."""
  made: tuple[jax.Array, jax.Array]
  """Output and gradient of the tick before, (R, T, D) each."""
  sent: tuple[jax.Array, ...]
  """With delayed forwarding, the same of the neighbours, a tick older."""
  d_layers: Leaves
  """float32 sums of the layers' gradients: (repeats, layers, …)."""
  d_rest: Leaves
  """float32 sums of this stage's share of the other gradients."""
  sums: Sums
  """This stage's share of them."""


class ForwardResult(NamedTuple):
  """What a forward leaves behind."""

  x_RTD: jax.Array
  y_RTD: jax.Array
  kept: Arrays


@dataclasses.dataclass(frozen=True)
class PipelineStage:
  """What does not change from tick to tick.

  Attributes:
    parts: the model.
    layers: this stage's parameters: (repeats, layers, …).
    rest: the parameters that belong to no layer, which every stage has.
    number: of this stage, an int32 scalar.
    count: stages.
    hop: ticks to hand a result on, 1 or 2.
    microbatch: the rows of a microbatch by its number.
    ticks: the timetable; of what differs between stages only this one's column.
    stash: the way from a forward to its backward.
  """

  parts: ModelParts
  layers: Leaves
  rest: Leaves
  number: jax.Array
  count: int
  hop: int
  microbatch: Callable[[jax.Array], Rows]
  ticks: TimetableArrays
  stash: Stash

  def run(self, zero_layers: Leaves, zero_rest: Leaves, capacity: BufferLimits) -> StageState:
    """All ticks, from zeros of the gradients' shapes."""
    one = jax.eval_shape(lambda: self._embedded(jnp.int32(0)))
    made = (_blank(one.shape, one.dtype), _blank(one.shape, one.dtype))
    held = StageState(
      inputs=_blank((capacity.inputs + 1, *one.shape), one.dtype),
      gradients=_blank((capacity.gradients + 1, *one.shape), one.dtype),
      kept=self._nothing_kept(capacity.inputs + 1),
      made=made,
      sent=made if self.hop > 1 else (),
      d_layers=self._laid_out(zero_layers),
      d_rest=self._laid_out(zero_rest),
      sums=zero_sums(self.parts.model, Measures(self.parts.metrics)),
    )
    return lax.fori_loop(0, self.ticks.count, self._tick, held)

  def _tick(self, tick: jax.Array, held: StageState) -> StageState:
    row: StageArrays = jax.tree.map(lambda x: x[tick, 0], self.ticks.stages)
    together: TickArrays = jax.tree.map(lambda x: x[tick], self.ticks.together)
    held = self._received(row, held)
    # The buffers are read and written out here: XLA copies what goes through a branch as a whole.
    waiting_RTD = _read(held.inputs, row.forward.slot)
    blank_RTD = _blank_like(waiting_RTD)
    x_RTD, y_RTD, kept = self._either(
      "forward",
      together.forward,
      lambda: self._forward(row.forward, together.embedding, waiting_RTD),
      lambda: ForwardResult(blank_RTD, blank_RTD, self._nothing_kept()),
    )
    held = held._replace(
      inputs=_put(held.inputs, row.forward.slot, x_RTD),
      kept=jax.tree.map(lambda to, x: _put(to, row.forward.slot, x), held.kept, kept),
    )
    held, d_y_RTD = self._with_loss(together, y_RTD, held)
    held = held._replace(gradients=_put(held.gradients, row.loss_slot, d_y_RTD))
    held, d_x_RTD = self._with_backward(row.backward, row.gradient_slot, together, held)
    return held._replace(made=(y_RTD, d_x_RTD))

  def _received(self, row: StageArrays, held: StageState) -> StageState:
    """Puts away outputs of the stage before and gradients of the one behind, around a ring.

    At the beginning of a tick, not at the end of the one before: between a read of a buffer and the
    next write to it there is then always something that needs the one and that the other needs.
    XLA would otherwise copy the buffer, in every tick.
    """
    onward = [(stage, (stage + 1) % self.count) for stage in range(self.count)]
    back = [(after, stage) for stage, after in onward]
    y_RTD, d_x_RTD = held.made
    sent = (lax.ppermute(y_RTD, "stage", onward), lax.ppermute(d_x_RTD, "stage", back))
    input_RTD, gradient_RTD = held.sent if self.hop > 1 else sent
    return held._replace(
      inputs=_put(held.inputs, row.input_arrives, input_RTD),
      gradients=_put(held.gradients, row.gradient_arrives, gradient_RTD),
      sent=sent if self.hop > 1 else (),
    )

  def _forward(
    self, work: WorkArrays, embedding: jax.Array, waiting_RTD: jax.Array
  ) -> ForwardResult:
    """This stage's layers."""
    embedded_RTD = self._either(
      "embedding",
      embedding,
      lambda: self._embedded(work.microbatch),
      lambda: _blank_like(waiting_RTD),
    )
    x_RTD = jnp.where(self._is_first(work), embedded_RTD, waiting_RTD)
    return ForwardResult(x_RTD, *self.stash.forward(self._given(work, x_RTD)))

  def _with_loss(
    self, together: TickArrays, y_RTD: jax.Array, held: StageState
  ) -> tuple[StageState, jax.Array]:
    """Adds the loss of the last stage's output, if it has one; its gradient."""
    d_rest, sums, d_y_RTD = self._either(
      "loss",
      together.loss,
      lambda: self._loss(together.loss_microbatch, y_RTD, held.d_rest, held.sums),
      lambda: (held.d_rest, held.sums, _blank_like(y_RTD)),
    )
    return held._replace(d_rest=d_rest, sums=sums), d_y_RTD

  def _loss(
    self, microbatch: jax.Array, y_RTD: jax.Array, d_rest: Leaves, sums: Sums
  ) -> tuple[Leaves, Sums, jax.Array]:
    """Loss and gradient of the last stage's output, every stage taking a share of the tokens."""
    y_RCD, targets_RC, weights_RC = self._share(microbatch, y_RTD)

    def loss(some: Leaves, y_RCD: jax.Array) -> tuple[jax.Array, LossSums]:
      found = self.parts.loss(self.layers, self.rest | some, y_RCD, targets_RC, weights_RC)
      return found.loss, found

    some = _needed(lambda rest: loss(rest, y_RCD)[0], self.rest)
    (_, found), (new, d_y_RCD) = jax.value_and_grad(loss, (0, 1), has_aux=True)(some, y_RCD)
    d_y_RTD = lax.all_gather(d_y_RCD, "stage", axis=1, tiled=True)[:, : y_RTD.shape[1]]
    return self._added(d_rest, new), sums.add(found, weights_RC.sum()), d_y_RTD

  def _share(
    self, microbatch: jax.Array, y_RTD: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This stage's tokens of the last stage's output, their targets and their weights."""
    rows = self.microbatch(microbatch)
    # Everyone sends everyone its share; all but the last stage's is dropped. A sum over stages with
    # zeros from the others would move as much, and XLA's CPU compiler fails on one of bfloat16.
    shares_RSCD = lax.all_to_all(self._shares(y_RTD), "stage", split_axis=1, concat_axis=1)
    targets_RC = self._shares(rows.targets)[:, self.number]
    return shares_RSCD[:, -1], targets_RC, self._shares(rows.weights)[:, self.number]

  def _with_backward(
    self, work: WorkArrays, gradient_slot: jax.Array, together: TickArrays, held: StageState
  ) -> tuple[StageState, jax.Array]:
    """Adds the gradients of this stage's layers, if any stage has some; that of their input."""
    x_RTD = _read(held.inputs, work.slot)
    kept = tuple(_read(buffer, work.slot) for buffer in held.kept)
    d_y_RTD = _read(held.gradients, gradient_slot)
    d_layers, d_x_RTD = self._either(
      "backward",
      together.backward,
      lambda: self._backward(work, x_RTD, kept, d_y_RTD, held.d_layers),
      lambda: (held.d_layers, _blank_like(x_RTD)),
    )
    d_rest = self._either(
      "unembedding",
      together.unembedding,
      lambda: self._unembedded(work, d_x_RTD, held.d_rest),
      lambda: held.d_rest,
    )
    return held._replace(d_layers=d_layers, d_rest=d_rest), d_x_RTD

  def _backward(
    self,
    work: WorkArrays,
    x_RTD: jax.Array,
    kept: Arrays,
    d_y_RTD: jax.Array,
    d_layers: Leaves,
  ) -> tuple[Leaves, jax.Array]:
    """Back through this stage's layers."""
    new, d_x_RTD = self.stash.backward(self._given(work, x_RTD), kept, d_y_RTD)
    # As in accumulate.py: reductions over fsdp are to stay inside the loop.
    new = lax.optimization_barrier(new)
    sums = {
      path: total.at[work.repeat].add(_masked(work.on, new[path].astype(total.dtype)))
      for path, total in d_layers.items()
    }
    return sums, d_x_RTD

  def _unembedded(self, work: WorkArrays, d_x_RTD: jax.Array, d_rest: Leaves) -> Leaves:
    """Adds what the first stage's input owes to the embedding."""
    rows = self.microbatch(work.microbatch)

    def embed(some: Leaves) -> jax.Array:
      return self.parts.embed(self.layers, self.rest | some, rows)

    _, vjp_fn = jax.vjp(embed, _needed(embed, self.rest))
    begins = work.on & self._is_first(work)
    return self._added(d_rest, vjp_fn(_masked(begins, d_x_RTD))[0])

  def _is_first(self, work: WorkArrays) -> jax.Array:
    return (self.number == 0) & (work.repeat == 0)

  def _embedded(self, microbatch: jax.Array) -> jax.Array:
    return self.parts.embed(self.layers, self.rest, self.microbatch(microbatch))

  def _given(self, work: WorkArrays, x_RTD: jax.Array) -> StageInput:
    """What this stage's layers compute with in this work."""
    layers = self._of_repeat(work.repeat)
    each = next(iter(layers.values())).shape[0]
    first = (work.repeat * self.count + self.number) * each
    return StageInput(layers, x_RTD, self.microbatch(work.microbatch), first)

  def _of_repeat(self, repeat: jax.Array) -> Leaves:
    """The parameters of one repeat; with only one there is nothing to copy."""
    return {
      path: leaf[0] if leaf.shape[0] == 1 else leaf[repeat] for path, leaf in self.layers.items()
    }

  def _shares(self, x: jax.Array) -> jax.Array:
    """The tokens that each stage takes: (R, T, …) → (R, stages, C, …), zeros at the end."""
    missing = -x.shape[1] % self.count
    padded = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2))) if missing else x
    return padded.reshape(x.shape[0], self.count, -1, *x.shape[2:])

  def _added(self, totals: Leaves, new: Leaves) -> Leaves:
    """The sums with gradients of some of the parameters added."""
    new = lax.optimization_barrier(new)
    return totals | {path: totals[path] + g.astype(totals[path].dtype) for path, g in new.items()}

  def _either(
    self,
    work: str,
    condition: jax.Array,
    compute: Callable[[], Any],
    otherwise: Callable[[], Any],
  ) -> Any:
    """One of two branches, whose results lie in the same places: XLA's TPU compiler insists.

    Reports tell by the scope how often it is computed.
    """
    with jax.named_scope(scope_of(work)):
      return lax.cond(condition, lambda: self._placed(compute()), lambda: self._placed(otherwise()))

  def _placed(self, result: Any) -> Any:
    """Gradients of parameters, activations (R, T, D) and scalars, where they belong."""
    if result is None:
      return None
    if isinstance(result, dict):
      return self._laid_out(result)
    if isinstance(result, ForwardResult):
      x_RTD, y_RTD = self._placed(result.x_RTD), self._placed(result.y_RTD)
      return ForwardResult(x_RTD, y_RTD, self._kept_placed(result.kept))
    if isinstance(result, Sums):
      return jax.tree.map(lambda x: constrain(x, ()), result)
    if isinstance(result, tuple):
      return tuple(self._placed(each) for each in result)
    return constrain(result, ("batch", "length", "activation_embed") if result.ndim else ())

  def _nothing_kept(self, *slots: int) -> Arrays:
    """Of one microbatch, or of as many as there are slots."""
    blanks = [_blank((*slots, *one.shape), one.dtype) for one in self.stash.kept]
    return self._kept_placed(tuple(blanks))

  def _kept_placed(self, kept: Arrays) -> Arrays:
    """Where fsdp and tensor divide it, with a dim in front for slots or without."""
    each = zip(kept, self.stash.kept, strict=True)
    return tuple(constrain(x, (None,) * (x.ndim - len(one.axes)) + one.axes) for x, one in each)

  def _laid_out(self, gradients: Leaves) -> Leaves:
    """Divided over fsdp and tensor as the parameters are; the layers' have a dim in front."""
    axes = self.parts.model.axes()
    return {
      path: constrain(leaf, (None,) * (leaf.ndim - len(axes[path])) + axes[path])
      for path, leaf in gradients.items()
    }


def _needed(function: Callable[[Leaves], Any], rest: Leaves) -> Leaves:
  """The parameters that it depends on: gradients of the others are zero, and need no adding."""
  traced = jax.make_jaxpr(function)(rest).jaxpr
  read = {id(variable) for equation in traced.eqns for variable in equation.invars}
  given = zip(sorted(rest), traced.invars, strict=True)
  return {path: rest[path] for path, variable in given if id(variable) in read}


def _blank(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """What nobody will use, or not before it is written."""
  return jnp.zeros(shape, dtype)


def _blank_like(x_RTD: jax.Array) -> jax.Array:
  return _blank(x_RTD.shape, x_RTD.dtype)


def _masked(condition: jax.Array, value: jax.Array) -> jax.Array:
  """Zeros, whatever an idle stage computed, NaN too."""
  return jnp.where(condition, value, jnp.zeros_like(value))


def _read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
  return buffer[slot]


def _put(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
  return buffer.at[slot].set(value.astype(buffer.dtype))
