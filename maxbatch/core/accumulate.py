"""Gradients of many microbatches as one sum, reduced over the replicas once.

k microbatches, B rows of a microbatch over all replicas.

A plain loop under jit would sum gradients between devices after every microbatch. Here a shard_map
takes over the mesh axis of the replicas: each adds up its own microbatches, and one reduction after
the loop joins them. All other axes stay with the compiler. The number of microbatches is data, so
another number runs the same program.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from maxbatch.core.terms import (
  Loss,
  Ratio,
  Stats,
  Terms,
  joined,
  over_replicas,
  parts_over_replicas,
  safe_ratio,
  term_weights,
  zeros_of,
)

_MOST_TERMS = 64
"""Of a loss: what they are weighted by is given to its gradient in an array (W,) of that length, before they
are known."""


class Squares(NamedTuple):
  """Squared norms of parts of a step's gradient, from which the noise scale is estimated.

  float32 sums, in the shape that `squared_norm` gives. A part's divisor is its share of the step's.
  """

  of_microbatches: jax.Array
  """Σ ‖gradient of one microbatch on one replica‖², of numerators."""
  divisors: jax.Array
  """Σ (divisor of one microbatch on one replica)², a scalar."""
  of_replicas: jax.Array
  """Σ ‖gradient of one replica's microbatches of a dispatch together‖²."""
  replica_divisors: jax.Array
  """Σ (divisor of one replica's microbatches of a dispatch)², a scalar."""


class Accumulated(NamedTuple):
  """Sums over the microbatches of one dispatch, and over all replicas."""

  gradients: Any
  """float32, like the parameters: ∇ Σ numerators. Divide by the step's `divisor`."""
  terms: Terms
  stats: Stats
  squares: Squares | None = None
  """None unless they are asked for."""


class Accumulate(Protocol):
  """From parameters and microbatches to sums; a pipeline is another function of this signature."""

  def __call__(
    self,
    params: Any,
    rows: Any,
    num_microbatches: Any,
    keys: jax.Array | None = None,
    *,
    zeros: Any = None,
    denominators: Any = None,
  ) -> Accumulated:
    """Returns the sums over the first `num_microbatches` microbatches.

    Args:
      params: what the gradient is taken by, a pytree. Of a `Max` in it microbatches' gradients are not
        added up: the step's is the largest of them.
      rows: a pytree of arrays (k, B, …).
      num_microbatches: int32 scalar, at most k, and k where that is 1; later rows are never read.
        (A pipeline takes its timetable.)
      keys: one random key for each row (k, B); None: nothing is drawn.
      zeros: float32 zeros like the parameters, in which the sums may be formed: donated ones save
        the memory of a second set.
      denominators: of the step's terms, by name, where this is one dispatch of several
        (`sum_denominators`). Needed only if terms have denominators of their own.

    Raises:
      ValueError: a denominator is missing.
    """
    ...


def divisor(terms: Terms) -> jax.Array:
  """Returns what a step's summed gradient is divided by: the first term's denominator."""
  return _first(terms).denominator.sum()


def objective(terms: Terms) -> jax.Array:
  """Returns the value that a step minimizes: Σ coefficient · numerator / denominator."""
  sums = [(term, term.numerator.sum(), term.denominator.sum()) for term in terms.values()]
  values = [term.coefficient * safe_ratio(*both) for term, *both in sums]
  return jnp.stack(values).sum()


def accumulate(
  loss: Callable[..., tuple[Terms, Stats]],
  mesh: Mesh | None = None,
  *,
  constants: Any = None,
  replicas: str = "data",
  layout: Callable[[Any], Any] = lambda gradients: gradients,
  summand: Callable[[Any], Any] = lambda gradients: gradients,
  squared_norm: Callable[[Any], jax.Array] | None = None,
  divides: Callable[[Any], Sequence[bool]] | None = None,
) -> Accumulate:
  """Returns the function that sums a loss and its gradient over microbatches.

  Its gradient is that of the whole step's objective, Σ coefficient · numerator / denominator, times
  `divisor(terms)`: raw sums, which several dispatches may add up before they are divided once.

  Args:
    loss: terms and statistics of some rows.
    mesh: the devices; None: as many as the arrays are on, without replicas.
    constants: arrays that the loss reads besides, as frozen parameters; it is given them as a fourth
      argument. None: there are none. (A shard_map cannot look up arrays of the mesh around it.)
    replicas: the mesh axis along which rows are divided and parameters are not.
    layout: constrains the sharding of gradients, which are carried through the loop.
    summand: from a microbatch's gradients to what they add to the sums, a pytree like `zeros`.
    squared_norm: of a gradient, in any shape whose entries add up to it; given, `squares` are too.
    divides: from the sums, pytrees like `zeros`, to whether the replicas divide each leaf among themselves,
      along its first dim; None: each replica has all of them.
  """

  def run(
    params: Any,
    rows: Any,
    num_microbatches: Any,
    keys: jax.Array | None = None,
    *,
    zeros: Any = None,
    denominators: Any = None,
  ) -> Accumulated:
    if zeros is None:
      zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    counted = jnp.asarray(num_microbatches)
    is_divided = divides(zeros) if divides else None
    local = functools.partial(_sums, loss, layout, summand, squared_norm, is_divided)
    others = constants, params, counted, zeros, denominators
    places: Any = None
    if is_divided is not None:
      of_each = [PartitionSpec(replicas) if each else PartitionSpec() for each in is_divided]
      gradients = jax.tree.unflatten(jax.tree.structure(zeros), of_each)
      rest: Any = PartitionSpec()
      places = Accumulated(gradients, rest, rest, rest)
    return _on_replicas(local, mesh, replicas, (rows, keys), *others, places=places)

  return run


def sum_denominators(
  loss: Callable[..., tuple[Terms, Stats]],
  mesh: Mesh | None = None,
  *,
  constants: Any = None,
  replicas: str = "data",
) -> Callable[..., dict[str, jax.Array]]:
  """Returns the function that sums the terms' denominators over microbatches, without running the model.

  A streamed step must know those of all its dispatches before the first one: add them up.

  Args:
    loss: terms and statistics of some rows.
    mesh: as for `accumulate`.
    constants: as for `accumulate`.
    replicas: as for `accumulate`.

  The function takes what `accumulate`'s does, and returns a float32 scalar for each term, by name.
  """
  return sum_forward(loss, denominators_of, mesh, constants=constants, replicas=replicas)


def sum_forward(
  loss: Callable[..., tuple[Terms, Stats]],
  select: Callable[[Terms, Stats], Any],
  mesh: Mesh | None = None,
  *,
  constants: Any = None,
  replicas: str = "data",
) -> Callable[..., Any]:
  """Returns the function that sums a part of what a loss hands out over microbatches, without a backward.

  The compiler drops what that part does not need. For what a step must know of all its rows before the
  first backward: where a term is a product of sums over the whole step, the sum that it is multiplied by.

  Args:
    loss: terms and statistics of some rows.
    select: from these to a pytree of arrays, each a sum over the rows.
    mesh: as for `accumulate`.
    constants: as for `accumulate`.
    replicas: as for `accumulate`.

  The function takes (params, rows, num_microbatches, keys=None) as `accumulate`'s does.
  """

  def run(params: Any, rows: Any, num_microbatches: Any, keys: jax.Array | None = None) -> Any:
    local = functools.partial(_selected, loss, select)
    others = constants, params, jnp.asarray(num_microbatches)
    return _on_replicas(local, mesh, replicas, (rows, keys), *others)

  return run


def denominators_of(terms: Terms, stats: Stats) -> dict[str, jax.Array]:
  """Returns the terms' denominators, by name."""
  del stats
  return {name: term.denominator.sum() for name, term in terms.items()}


def _on_replicas(
  local: Callable[..., Any],
  mesh: Mesh | None,
  replicas: str,
  batch: Any,
  *others: Any,
  places: Any = None,
) -> Any:
  """Returns `local(axis, batch, *others)`, run on each replica with its rows of `batch` (k, B, …).

  `places` are the PartitionSpecs of what it returns; None: every replica has the whole.
  """
  if mesh is None or mesh.shape.get(replicas, 1) == 1:
    return local(None, batch, *others)
  whole = PartitionSpec()
  return jax.shard_map(
    functools.partial(local, replicas),
    mesh=mesh,
    in_specs=(PartitionSpec(None, replicas), *(whole for _ in others)),
    out_specs=whole if places is None else places,
    axis_names={replicas},
    check_vma=False,
  )(batch, *others)


def _sums(
  loss: Callable[..., tuple[Terms, Stats]],
  layout: Callable[[Any], Any],
  summand: Callable[[Any], Any],
  squared_norm: Callable[[Any], jax.Array] | None,
  is_divided: Sequence[bool] | None,
  axis: str | None,
  batch: tuple[Any, jax.Array | None],
  constants: Any,
  params: Any,
  num_microbatches: jax.Array,
  zeros: Any,
  denominators: Any,
) -> Accumulated:
  """Returns the sums over all replicas, of which this is one of those along `axis`."""

  def microbatch(index: jax.Array) -> tuple[Any, jax.Array | None]:
    return jax.tree.map(lambda x: x[index], batch)

  gradient = _Gradient(_with_constants(loss, constants))
  weights_W = jnp.zeros(_MOST_TERMS)
  _, shapes = jax.eval_shape(lambda: gradient(params, *microbatch(jnp.int32(0)), weights_W))
  if gradient.num_divisors > 1:
    if denominators is None:
      whole = axis, batch, constants, params, num_microbatches
      denominators = _selected(loss, denominators_of, *whole)
    weights = jnp.stack(list(term_weights(shapes[0], denominators).values()))
    weights_W = weights_W.at[: len(weights)].set(weights)

  def add(index: jax.Array, carry: Any) -> Any:
    gradients, sums, squares = carry
    new, (terms, stats) = gradient(params, *microbatch(index), weights_W)
    # Without the barrier XLA moves reductions over fsdp behind the loop, and the loop then carries
    # whole gradients on every device: for Llama-2-7B on 256 TPUs 2 of 5.7 GiB.
    new = jax.lax.optimization_barrier(summand(new))
    gradients = joined(gradients, new)
    if squared_norm is not None:
      of_each, divisors_k = squares
      squares = of_each + squared_norm(new), divisors_k.at[index].set(_first(terms).denominator)
    return layout(gradients), joined(sums, (terms, stats)), squares

  k = jax.tree.leaves(batch)[0].shape[0]
  carry = layout(zeros), zeros_of(shapes), _no_squares(squared_norm, zeros, k, shapes[0])
  # No loop around a single microbatch: the TPU compiler otherwise computes parts of it twice.
  gradients, (terms, stats), of_parts = (
    add(jnp.int32(0), carry) if k == 1 else jax.lax.fori_loop(0, num_microbatches, add, carry)
  )
  squares = None
  if squared_norm is not None:
    of_each, divisors_k = of_parts
    divisors_k = divisors_k.reshape(k, -1).sum(1)
    of_replica, divisor = squared_norm(gradients), divisors_k.sum()
    squares = Squares(of_each, (divisors_k**2).sum(), of_replica, divisor**2)
  result = Accumulated(gradients, terms, stats, squares)
  if axis is None:
    return result
  if is_divided is None:
    return over_replicas(result, axis)
  others = result._replace(gradients=())
  gradients, others = parts_over_replicas(gradients, is_divided, others, axis)
  return others._replace(gradients=gradients)


class _Gradient:
  """The gradient of a microbatch's weighted numerators, with terms and statistics beside it."""

  def __init__(self, loss: Loss):
    self._loss = loss
    self.num_divisors = 1
    """Different denominators among the terms, known once it is traced."""
    # Traced once, for the shapes and for the loop: what it is given there comes from the same arrays.
    self._gradient = jax.jit(jax.grad(self._weighted, has_aux=True), inline=True)

  def __call__(
    self, params: Any, rows: Any, keys_B: Any, weights_W: jax.Array
  ) -> tuple[Any, tuple[Terms, Stats]]:
    return self._gradient(params, rows, keys_B, weights_W)

  def _weighted(
    self, params: Any, rows: Any, keys_B: Any, weights_W: jax.Array
  ) -> tuple[jax.Array, tuple[Terms, Stats]]:
    """Returns Σ weight · numerator; weights are the coefficients where there is one divisor."""
    terms, stats = self._loss(params, rows, keys_B)
    if len(terms) > _MOST_TERMS:
      raise ValueError(f"a loss of {len(terms)} terms; at most {_MOST_TERMS} are weighted")
    self.num_divisors = len({id(term.denominator) for term in terms.values()})
    numerators = [
      _scaled(term.numerator.sum(), term.coefficient if self.num_divisors == 1 else weights_W[at])
      for at, term in enumerate(terms.values())
    ]
    return sum(numerators[1:], numerators[0]), (OrderedDict(terms), dict(stats))


def _scaled(x: jax.Array, weight: jax.Array | float) -> jax.Array:
  return x if isinstance(weight, float) and weight == 1.0 else x * weight


def _first(terms: Terms) -> Ratio:
  return next(iter(terms.values()))


def _with_constants(loss: Callable[..., tuple[Terms, Stats]], constants: Any) -> Loss:
  return loss if constants is None else lambda *of_rows: loss(*of_rows, constants)


def _selected(
  loss: Callable[..., tuple[Terms, Stats]],
  select: Callable[[Terms, Stats], Any],
  axis: str | None,
  batch: tuple[Any, jax.Array | None],
  constants: Any,
  params: Any,
  num_microbatches: jax.Array,
) -> Any:
  """Returns what `select` takes of the whole dispatch, before the first backward.

  Denominators do not depend on the parameters, so the compiler drops the model from their loop.
  """

  # Traced once, for the shapes and for the loop.
  @functools.partial(jax.jit, inline=True)
  def of_microbatch(constants: Any, params: Any, batch: Any, index: jax.Array) -> Any:
    return select(
      *_with_constants(loss, constants)(params, *jax.tree.map(lambda x: x[index], batch))
    )

  given = constants, params, batch

  def add(index: jax.Array, total: Any) -> Any:
    return joined(total, of_microbatch(*given, index))

  zeros = zeros_of(jax.eval_shape(of_microbatch, *given, jnp.int32(0)))
  total = jax.lax.fori_loop(0, num_microbatches, add, zeros)
  return total if axis is None else over_replicas(total, axis)


def _no_squares(
  squared_norm: Callable[[Any], jax.Array] | None, zeros: Any, k: int, shapes: Terms
) -> tuple[jax.Array, jax.Array] | None:
  """Returns zeros for the sum of squares, and for the divisors of k microbatches."""
  if squared_norm is None:
    return None
  shape = jax.eval_shape(squared_norm, zeros).shape
  return jnp.zeros(shape), jnp.zeros((k, *_first(shapes).denominator.shape))
