"""What a stage keeps of a forward until its backward, beside its input (pipeline_stash).

R rows of a microbatch, T tokens, D width of the residual stream.

- input: nothing more. The backward recomputes the stage's layers.
- residuals: the residuals of the vjp, as remat_policy decides, if they depend on the input. What
  depends on parameters or rows alone (casts, gathered copies, rotations, masks of dropout) is
  recomputed for the backward and takes up no slot.

"Stash" is PipeDream's word.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from maxbatch.training.model_parts import FlatParams, ModelParts
from maxbatch.training.stage_residuals import Residual, StageInput, layers_vjp, stage_residuals

Arrays = tuple[jax.Array, ...]


class Stash(Protocol):
  """How a forward and its backward are computed, and what is kept between them."""

  @property
  def residuals(self) -> tuple[Residual, ...]:
    """The residuals that are kept of one microbatch."""
    ...

  def forward(self, stage_input: StageInput) -> tuple[jax.Array, Arrays]:
    """The output, and the residuals."""
    ...

  def backward(
    self, stage_input: StageInput, arrays: Arrays, d_y_RTD: jax.Array
  ) -> tuple[FlatParams, jax.Array]:
    """Gradients of the layers' parameters and of their input."""
    ...


def make_stash(name: str, parts: ModelParts, rest: FlatParams, stage_input: StageInput) -> Stash:
  """The stash of `pipeline_stash=name` for these layers.

  Args:
    name: input or residuals.
    parts: the model.
    rest: parameters outside of the layers.
    stage_input: shapes of the input of a model chunk.
  """
  return (
    InputStash(parts, rest) if name == "input" else _make_residual_stash(parts, rest, stage_input)
  )


@dataclasses.dataclass(frozen=True)
class InputStash:
  """Keeps no residuals; the input itself is in the buffers of tick.py."""

  parts: ModelParts
  rest: FlatParams
  residuals = ()

  def forward(self, stage_input: StageInput) -> tuple[jax.Array, Arrays]:
    """The output, without residuals."""
    rows, first = stage_input.rows, stage_input.first_layer
    return self.parts.apply_layers(
      stage_input.layers, self.rest, stage_input.x_RTD, rows, first
    ), ()

  def backward(
    self, stage_input: StageInput, arrays: Arrays, d_y_RTD: jax.Array
  ) -> tuple[FlatParams, jax.Array]:
    """Recomputes the layers, then runs their vjp."""
    del arrays
    _, vjp_fn = layers_vjp(self.parts, self.rest, stage_input)
    return vjp_fn(d_y_RTD)


@dataclasses.dataclass(frozen=True)
class ResidualStash:
  """Keeps the residuals that depend on the input.

  Attributes:
    forward_fn: from the leaves of a StageInput to the output and the leaves of the vjp.
    recompute_fn: from the leaves of a StageInput to the leaves of the vjp that are recomputed.
    vjp_fn: the tree structure of the vjp, which is a function and a tree of arrays.
    residual_indices: for each leaf of the vjp its index in `residuals`; None if recomputed.
    residuals: what is kept of one microbatch.
  """

  forward_fn: Callable[..., Sequence[jax.Array]]
  recompute_fn: Callable[..., Sequence[jax.Array]]
  vjp_fn: Any
  residual_indices: tuple[int | None, ...]
  residuals: tuple[Residual, ...]

  def forward(self, stage_input: StageInput) -> tuple[jax.Array, Arrays]:
    """The output, and the residuals that depend on the input."""
    y_RTD, *leaves = self.forward_fn(*jax.tree.leaves(stage_input))
    by_index = dict(zip(self.residual_indices, leaves, strict=True))
    return y_RTD, tuple(by_index[index] for index in range(len(self.residuals)))

  def backward(
    self, stage_input: StageInput, arrays: Arrays, d_y_RTD: jax.Array
  ) -> tuple[FlatParams, jax.Array]:
    """Runs the vjp with the residuals and with the leaves that are recomputed."""
    recomputed = iter(self.recompute_fn(*jax.tree.leaves(stage_input)))
    leaves = [
      next(recomputed) if index is None else arrays[index] for index in self.residual_indices
    ]
    return jax.tree.unflatten(self.vjp_fn, leaves)(d_y_RTD)


def _make_residual_stash(
  parts: ModelParts, rest: FlatParams, stage_input: StageInput
) -> ResidualStash:
  traced, (_, vjp_fn) = jax.make_jaxpr(
    lambda stage_input: layers_vjp(parts, rest, stage_input), return_shape=True
  )(stage_input)
  x_index, count = len(stage_input.layers), len(traced.jaxpr.outvars)
  is_saved = [at > 0 and _depends_on(traced.jaxpr, at, x_index) for at in range(count)]
  recomputed, _ = dce_jaxpr(
    traced.jaxpr, [at > 0 and not saved for at, saved in enumerate(is_saved)], instantiate=True
  )
  residual_indices = _unique_indices(traced.jaxpr.outvars[1:], is_saved[1:])
  return ResidualStash(
    forward_fn=core.jaxpr_as_fun(traced),
    recompute_fn=core.jaxpr_as_fun(core.ClosedJaxpr(recomputed, traced.consts)),
    vjp_fn=jax.tree.structure(vjp_fn),
    residual_indices=residual_indices,
    residuals=stage_residuals(parts, rest, stage_input, residual_indices),
  )


def _depends_on(jaxpr: core.Jaxpr, output: int, argument: int) -> bool:
  """Whether an output depends on an argument and is not the argument itself."""
  if jaxpr.outvars[output] is jaxpr.invars[argument]:
    return False
  _, used = dce_jaxpr(jaxpr, [at == output for at in range(len(jaxpr.outvars))])
  return used[argument]


def _unique_indices(leaves: Sequence[Any], is_saved: Sequence[bool]) -> tuple[int | None, ...]:
  """An index for every saved leaf, equal for identical leaves; None for the others."""
  numbers: dict[int, int] = {}
  return tuple(
    numbers.setdefault(id(leaf), len(numbers)) if saved else None
    for leaf, saved in zip(leaves, is_saved, strict=True)
  )
