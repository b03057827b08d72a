"""One tick of one stage: a forward, the loss, a backward, and the exchange with its neighbours.

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
  underway: tuple[jax.Array, ...]
  """With delayed forwarding, what the tick before computed and this one sends: two (R, T, D)."""
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
    underway = (_blank(one.shape, one.dtype),) * 2 if self.hop > 1 else ()
    held = Held(
      inputs=_blank((room.inputs + 1, *one.shape), one.dtype),
      gradients=_blank((room.gradients + 1, *one.shape), one.dtype),
      underway=underway,
      d_layers=self._laid_out(zero_layers),
      d_rest=self._laid_out(zero_rest),
      sums=zero_sums(),
    )
    return lax.fori_loop(0, self.ticks.count, self._tick, held)

  def _tick(self, tick: jax.Array, held: Held) -> Held:
    row: StageRows = jax.tree.map(lambda x: x[tick, 0], self.ticks.stages)
    together: TickRows = jax.tree.map(lambda x: x[tick], self.ticks.together)
    x_RTD, y_RTD = _when(together.forward, lambda: self._forward(row.forward, together, held))
    held = held._replace(inputs=_put(held.inputs, row.forward.slot, x_RTD))
    held = lax.cond(
      together.loss,
      lambda held: self._loss(row.loss_slot, together.loss_microbatch, y_RTD, held),
      lambda held: held,
      held,
    )
    held, d_x_RTD = lax.cond(
      together.backward,
      lambda held: self._backward(row, together.unembedding, held),
      lambda held: (held, _blank(x_RTD.shape, x_RTD.dtype)),
      held,
    )
    return self._exchange(row, y_RTD, d_x_RTD, held)

  def _forward(self, work: Works, together: TickRows, held: Held) -> tuple[jax.Array, jax.Array]:
    """The input and the output of this stage's layers."""
    embedded_RTD = _when(together.embedding, lambda: self._embedded(work.microbatch))
    x_RTD = jnp.where(self._is_first(work), embedded_RTD, _read(held.inputs, work.slot))
    return x_RTD, self._apply(self._of_repeat(work.repeat), x_RTD, work)

  def _loss(self, slot: jax.Array, microbatch: jax.Array, y_RTD: jax.Array, held: Held) -> Held:
    """Loss and gradient of the last stage's output, every stage taking a share of the tokens."""
    rows = self.microbatch(microbatch)
    is_last = self.number == self.count - 1
    y_RTD = _padded(jnp.where(is_last, y_RTD, 0), self.count)
    y_RCD = lax.psum_scatter(y_RTD, "stage", scatter_dimension=1, tiled=True)
    targets_RC, weights_RC = self._share(rows.targets), self._share(rows.weights)

    def loss(rest: Leaves, y_RCD: jax.Array) -> jax.Array:
      return self.parts.loss(self.layers, rest, y_RCD, targets_RC, weights_RC)

    total, (d_rest, d_y_RCD) = jax.value_and_grad(loss, (0, 1))(self.rest, y_RCD)
    d_y_RTD = lax.all_gather(d_y_RCD, "stage", axis=1, tiled=True)[:, : rows.targets.shape[1]]
    return held._replace(
      gradients=_put(held.gradients, slot, d_y_RTD),
      d_rest=self._added(held.d_rest, d_rest),
      sums=Sums(held.sums.loss + total, held.sums.weight + weights_RC.sum()),
    )

  def _backward(self, row: StageRows, unembedding: jax.Array, held: Held) -> tuple[Held, jax.Array]:
    """Adds the gradients of this stage's layers; returns that of their input too."""
    work = row.backward

    def apply(layers: Leaves, x_RTD: jax.Array) -> jax.Array:
      return self._apply(layers, x_RTD, work)

    _, go_back = jax.vjp(apply, self._of_repeat(work.repeat), _read(held.inputs, work.slot))
    d_layers, d_x_RTD = go_back(_read(held.gradients, row.gradient_slot))
    # As in accumulate.py: reductions over fsdp are to stay inside the loop.
    d_layers = lax.optimization_barrier(d_layers)
    sums = {
      path: total.at[work.repeat].add(jnp.where(work.on, d_layers[path].astype(total.dtype), 0))
      for path, total in held.d_layers.items()
    }
    begins = work.on & self._is_first(work)
    d_rest = lax.cond(
      unembedding,
      lambda d_rest: self._unembedded(work, jnp.where(begins, d_x_RTD, 0), d_rest),
      lambda d_rest: d_rest,
      held.d_rest,
    )
    return held._replace(d_layers=self._laid_out(sums), d_rest=d_rest), d_x_RTD

  def _exchange(self, row: StageRows, y_RTD: jax.Array, d_x_RTD: jax.Array, held: Held) -> Held:
    """Sends outputs to the next stage and gradients to the one before, around the ring."""
    made = (y_RTD, d_x_RTD)
    sent = held.underway if self.hop > 1 else made
    onward = [(stage, (stage + 1) % self.count) for stage in range(self.count)]
    back = [(after, stage) for stage, after in onward]
    return held._replace(
      inputs=_put(held.inputs, row.input_arrives, lax.ppermute(sent[0], "stage", onward)),
      gradients=_put(held.gradients, row.gradient_arrives, lax.ppermute(sent[1], "stage", back)),
      underway=made if self.hop > 1 else (),
    )

  def _is_first(self, work: Works) -> jax.Array:
    return (self.number == 0) & (work.repeat == 0)

  def _embedded(self, microbatch: jax.Array) -> jax.Array:
    return self.parts.embed(self.layers, self.rest, self.microbatch(microbatch))

  def _unembedded(self, work: Works, d_x_RTD: jax.Array, d_rest: Leaves) -> Leaves:
    rows = self.microbatch(work.microbatch)
    _, go_back = jax.vjp(lambda rest: self.parts.embed(self.layers, rest, rows), self.rest)
    return self._added(d_rest, go_back(d_x_RTD)[0])

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


def _read(buffer: jax.Array, slot: jax.Array) -> jax.Array:
  return buffer[slot]


def _put(buffer: jax.Array, slot: jax.Array, value: jax.Array) -> jax.Array:
  return buffer.at[slot].set(value.astype(buffer.dtype))


def _when(condition: jax.Array, compute: Callable[[], Any]) -> Any:
  """`compute()`, or something of the same shape if the whole tick does without it."""

  def blank() -> Any:
    return jax.tree.map(lambda x: _blank(x.shape, x.dtype), jax.eval_shape(compute))

  return lax.cond(condition, compute, blank)
