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

from maxbatch.pipeline.parts import Leaves, Parts
from maxbatch.pipeline.rows_of_ticks import StageRows, TickRows, Ticks, Works
from maxbatch.pipeline.schedule import Limits
from maxbatch.rows import Rows
from maxbatch.sharding import constrain
from maxbatch.state import Sums, zero_sums


class Held(NamedTuple):
  """What a stage keeps from tick to tick."""

  inputs: jax.Array
  """[slots, R, T, D]: inputs, until their backward."""
  gradients: jax.Array
  """[slots, R, T, D]: gradients of outputs, until their backward."""
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


@dataclasses.dataclass(frozen=True)
class Stage:
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
  """

  parts: Parts
  layers: Leaves
  rest: Leaves
  number: jax.Array
  count: int
  hop: int
  microbatch: Callable[[jax.Array], Rows]
  ticks: Ticks

  def run(self, zero_layers: Leaves, zero_rest: Leaves, room: Limits) -> Held:
    """All ticks, from zeros of the gradients' shapes."""
    one = jax.eval_shape(lambda: self._embedded(jnp.int32(0)))
    made = (_blank(one.shape, one.dtype), _blank(one.shape, one.dtype))
    held = Held(
      inputs=_blank((room.inputs + 1, *one.shape), one.dtype),
      gradients=_blank((room.gradients + 1, *one.shape), one.dtype),
      made=made,
      sent=made if self.hop > 1 else (),
      d_layers=self._laid_out(zero_layers),
      d_rest=self._laid_out(zero_rest),
      sums=zero_sums(),
    )
    return lax.fori_loop(0, self.ticks.count, self._tick, held)

  def _tick(self, tick: jax.Array, held: Held) -> Held:
    row: StageRows = jax.tree.map(lambda x: x[tick, 0], self.ticks.stages)
    together: TickRows = jax.tree.map(lambda x: x[tick], self.ticks.together)
    held = self._received(row, held)
    # The buffers are read and written out here: XLA copies what goes through a branch as a whole.
    waiting_RTD = _read(held.inputs, row.forward.slot)
    x_RTD, y_RTD = _when(
      together.forward, lambda: self._forward(row.forward, together.embedding, waiting_RTD)
    )
    held = held._replace(inputs=_put(held.inputs, row.forward.slot, x_RTD))
    held, d_y_RTD = self._with_loss(together, y_RTD, held)
    held = held._replace(gradients=_put(held.gradients, row.loss_slot, d_y_RTD))
    held, d_x_RTD = self._with_backward(row.backward, row.gradient_slot, together, held)
    return held._replace(made=(y_RTD, d_x_RTD))

  def _received(self, row: StageRows, held: Held) -> Held:
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
    self, work: Works, embedding: jax.Array, waiting_RTD: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """The input and the output of this stage's layers."""
    embedded_RTD = _when(embedding, lambda: self._embedded(work.microbatch))
    x_RTD = jnp.where(self._is_first(work), embedded_RTD, waiting_RTD)
    return x_RTD, self._apply(self._of_repeat(work.repeat), x_RTD, work)

  def _with_loss(self, together: TickRows, y_RTD: jax.Array, held: Held) -> tuple[Held, jax.Array]:
    """Adds the loss of the last stage's output, if it has one; its gradient."""
    d_rest, sums, d_y_RTD = lax.cond(
      together.loss,
      lambda d_rest, sums: self._loss(together.loss_microbatch, y_RTD, d_rest, sums),
      lambda d_rest, sums: (d_rest, sums, _blank(y_RTD.shape, y_RTD.dtype)),
      held.d_rest,
      held.sums,
    )
    return held._replace(d_rest=d_rest, sums=sums), d_y_RTD

  def _loss(
    self, microbatch: jax.Array, y_RTD: jax.Array, d_rest: Leaves, sums: Sums
  ) -> tuple[Leaves, Sums, jax.Array]:
    """Loss and gradient of the last stage's output, every stage taking a share of the tokens."""
    rows = self.microbatch(microbatch)
    y_RTD = _padded(_masked(self.number == self.count - 1, y_RTD), self.count)
    y_RCD = lax.psum_scatter(y_RTD, "stage", scatter_dimension=1, tiled=True)
    targets_RC, weights_RC = self._share(rows.targets), self._share(rows.weights)

    def loss(rest: Leaves, y_RCD: jax.Array) -> jax.Array:
      return self.parts.loss(self.layers, rest, y_RCD, targets_RC, weights_RC)

    total, (new, d_y_RCD) = jax.value_and_grad(loss, (0, 1))(self.rest, y_RCD)
    d_y_RTD = lax.all_gather(d_y_RCD, "stage", axis=1, tiled=True)[:, : rows.targets.shape[1]]
    sums = Sums(sums.loss + total, sums.weight + weights_RC.sum())
    return self._added(d_rest, new), sums, d_y_RTD

  def _with_backward(
    self, work: Works, gradient_slot: jax.Array, together: TickRows, held: Held
  ) -> tuple[Held, jax.Array]:
    """Adds the gradients of this stage's layers, if any stage has some; that of their input."""
    x_RTD = _read(held.inputs, work.slot)
    d_y_RTD = _read(held.gradients, gradient_slot)
    d_layers, d_x_RTD = lax.cond(
      together.backward,
      lambda d_layers: self._backward(work, x_RTD, d_y_RTD, d_layers),
      lambda d_layers: (d_layers, _blank(x_RTD.shape, x_RTD.dtype)),
      held.d_layers,
    )
    d_rest = lax.cond(
      together.unembedding,
      lambda d_rest: self._unembedded(work, d_x_RTD, d_rest),
      lambda d_rest: d_rest,
      held.d_rest,
    )
    return held._replace(d_layers=d_layers, d_rest=d_rest), d_x_RTD

  def _backward(
    self, work: Works, x_RTD: jax.Array, d_y_RTD: jax.Array, d_layers: Leaves
  ) -> tuple[Leaves, jax.Array]:
    """Through this stage's layers once more, and back."""

    def apply(layers: Leaves, x_RTD: jax.Array) -> jax.Array:
      return self._apply(layers, x_RTD, work)

    _, go_back = jax.vjp(apply, self._of_repeat(work.repeat), x_RTD)
    new, d_x_RTD = go_back(d_y_RTD)
    # As in accumulate.py: reductions over fsdp are to stay inside the loop.
    new = lax.optimization_barrier(new)
    sums = {
      path: total.at[work.repeat].add(_masked(work.on, new[path].astype(total.dtype)))
      for path, total in d_layers.items()
    }
    return self._laid_out(sums), d_x_RTD

  def _unembedded(self, work: Works, d_x_RTD: jax.Array, d_rest: Leaves) -> Leaves:
    """Adds what the first stage's input owes to the embedding."""
    rows = self.microbatch(work.microbatch)
    _, go_back = jax.vjp(lambda rest: self.parts.embed(self.layers, rest, rows), self.rest)
    begins = work.on & self._is_first(work)
    return self._added(d_rest, go_back(_masked(begins, d_x_RTD))[0])

  def _is_first(self, work: Works) -> jax.Array:
    return (self.number == 0) & (work.repeat == 0)

  def _embedded(self, microbatch: jax.Array) -> jax.Array:
    return self.parts.embed(self.layers, self.rest, self.microbatch(microbatch))

  def _apply(self, layers: Leaves, x_RTD: jax.Array, work: Works) -> jax.Array:
    """One repeat's layers on the microbatch of this work."""
    each = next(iter(layers.values())).shape[0]
    first = (work.repeat * self.count + self.number) * each
    rows = self.microbatch(work.microbatch)
    return self.parts.apply_layers(layers, self.rest, x_RTD, rows, first)

  def _of_repeat(self, repeat: jax.Array) -> Leaves:
    """The parameters of one repeat; with only one there is nothing to copy."""
    return {
      path: leaf[0] if leaf.shape[0] == 1 else leaf[repeat] for path, leaf in self.layers.items()
    }

  def _share(self, x_RT: jax.Array) -> jax.Array:
    """This stage's tokens: (R, T) → (R, C)."""
    padded = _padded(x_RT, self.count)
    return padded.reshape(padded.shape[0], self.count, -1)[:, self.number]

  def _added(self, totals: Leaves, new: Leaves) -> Leaves:
    new = lax.optimization_barrier(new)
    return self._laid_out(
      {path: total + new[path].astype(total.dtype) for path, total in totals.items()}
    )

  def _laid_out(self, gradients: Leaves) -> Leaves:
    """Divided over fsdp and tensor as the parameters are; the layers' have a dim in front."""
    axes = self.parts.model.axes()
    return {
      path: constrain(leaf, (None,) * (leaf.ndim - len(axes[path])) + axes[path])
      for path, leaf in gradients.items()
    }


def _padded(x: jax.Array, multiple: int) -> jax.Array:
  """Zeros at the end of dim 1, up to a multiple."""
  missing = -x.shape[1] % multiple
  return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2))) if missing else x


def _blank(shape: tuple[int, ...], dtype: Any) -> jax.Array:
  """What nobody will use, or not before it is written."""
  return jnp.zeros(shape, dtype)


def _masked(condition: jax.Array, value: jax.Array) -> jax.Array:
  """Zeros, whatever an idle stage computed, NaN too."""
  return jnp.where(condition, value, jnp.zeros_like(value))


def _read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
  return buffer[slot]


def _put(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
  return buffer.at[slot].set(value.astype(buffer.dtype))


def _when(condition: jax.Array, compute: Callable[[], Any]) -> Any:
  """`compute()`, or something of the same shape if the whole tick does without it."""

  def blank() -> Any:
    return jax.tree.map(lambda x: _blank(x.shape, x.dtype), jax.eval_shape(compute))

  return lax.cond(condition, compute, blank)
