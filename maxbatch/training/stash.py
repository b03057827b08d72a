"""What a stage keeps of a forward until its backward, beside its input (pipeline_stash).

R rows of a microbatch, T tokens, D width of the residual stream.

With `input` nothing: the backward computes the stage's layers once more. With `residuals` what
differentiation hands from the forward to the backward, which remat_policy decides; but nothing that
does not depend on the input: parameters are there anyway, and what is made of them or of the rows
alone (casts, gathered copies, rotations, masks of dropout) is made again for the backward, so that
it takes up no slot.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr

from maxbatch.training.model_parts import Leaves, ModelParts
from maxbatch.training.stage_residuals import Residual, StageInput, linearized, residuals

Arrays = tuple[jax.Array, ...]


class Stash(Protocol):
  """A way from a forward to its backward, the same on all stages."""

  @property
  def kept(self) -> tuple[Residual, ...]:
    """What is kept of one microbatch."""
    ...

  def forward(self, given: StageInput) -> tuple[jax.Array, Arrays]:
    """The output, and what is kept."""
    ...

  def backward(
    self, given: StageInput, arrays: Arrays, d_y_RTD: jax.Array
  ) -> tuple[Leaves, jax.Array]:
    """Gradients of the layers and of their input."""
    ...


def make_stash(name: str, parts: ModelParts, rest: Leaves, given: StageInput) -> Stash:
  """What `pipeline_stash=name` means for these layers.

  Args:
    name: input or residuals.
    parts: the model.
    rest: the parameters that belong to no layer.
    given: shapes of what the layers are given.
  """
  return Inputs(parts, rest) if name == "input" else _residuals(parts, rest, given)


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Keeps nothing: of inputs the ticks take care."""

  parts: ModelParts
  rest: Leaves
  kept = ()

  def forward(self, given: StageInput) -> tuple[jax.Array, Arrays]:
    """The output alone."""
    rows, first = given.rows, given.first
    return self.parts.apply_layers(given.layers, self.rest, given.x_RTD, rows, first), ()

  def backward(
    self, given: StageInput, arrays: Arrays, d_y_RTD: jax.Array
  ) -> tuple[Leaves, jax.Array]:
    """Through the layers once more, and back."""
    del arrays
    _, vjp_fn = linearized(self.parts, self.rest, given)
    return vjp_fn(d_y_RTD)


@dataclasses.dataclass(frozen=True)
class Residuals:
  """Keeps what differentiation hands on.

  Attributes:
    forth: from the leaves of what is given to the output and the leaves of `go_back`.
    again: from the same to those leaves of `go_back` that are made again.
    go_back: the structure of the way back, which is a function and a tree of arrays.
    places: for each leaf of `go_back`, where it is in `kept`; None: it is made again.
    kept: what is kept.
  """

  forward_fn: Callable[..., Sequence[jax.Array]]
  again: Callable[..., Sequence[jax.Array]]
  vjp_fn: Any
  places: tuple[int | None, ...]
  kept: tuple[Residual, ...]

  def forward(self, given: StageInput) -> tuple[jax.Array, Arrays]:
    """The output, and what the backward could only have from the layers."""
    y_RTD, *leaves = self.forward_fn(*jax.tree.leaves(given))
    found = dict(zip(self.places, leaves, strict=True))
    return y_RTD, tuple(found[place] for place in range(len(self.kept)))

  def backward(
    self, given: StageInput, arrays: Arrays, d_y_RTD: jax.Array
  ) -> tuple[Leaves, jax.Array]:
    """Back, by what was kept and what is made again."""
    again = iter(self.again(*jax.tree.leaves(given)))
    leaves = [next(again) if place is None else arrays[place] for place in self.places]
    return jax.tree.unflatten(self.vjp_fn, leaves)(d_y_RTD)


def _residuals(parts: ModelParts, rest: Leaves, given: StageInput) -> Residuals:
  traced, (_, vjp_fn) = jax.make_jaxpr(
    lambda given: linearized(parts, rest, given), return_shape=True
  )(given)
  x_at, count = len(given.layers), len(traced.jaxpr.outvars)
  stays = [at > 0 and _needs(traced.jaxpr, at, x_at) for at in range(count)]
  again, _ = dce_jaxpr(
    traced.jaxpr, [at > 0 and not stay for at, stay in enumerate(stays)], instantiate=True
  )
  places = _numbered(traced.jaxpr.outvars[1:], stays[1:])
  return Residuals(
    forward_fn=core.jaxpr_as_fun(traced),
    again=core.jaxpr_as_fun(core.ClosedJaxpr(again, traced.consts)),
    vjp_fn=jax.tree.structure(vjp_fn),
    places=places,
    kept=residuals(parts, rest, given, places),
  )


def _needs(jaxpr: core.Jaxpr, output: int, argument: int) -> bool:
  """Whether an output depends on an argument, and is not that argument itself."""
  if jaxpr.outvars[output] is jaxpr.invars[argument]:
    return False
  _, used = dce_jaxpr(jaxpr, [at == output for at in range(len(jaxpr.outvars))])
  return used[argument]


def _numbered(leaves: Sequence[Any], stays: Sequence[bool]) -> tuple[int | None, ...]:
  """A number for every leaf that stays, the same for the same; None for the others."""
  numbers: dict[int, int] = {}
  return tuple(
    numbers.setdefault(id(leaf), len(numbers)) if stay else None
    for leaf, stay in zip(leaves, stays, strict=True)
  )
