"""What a loss is handed, rows with a random key each, and what it hands to the step: terms that are minimized,
and statistics that are reported.

A loss is `loss(params, rows, keys) -> (terms, stats)`. It sees some rows of a step, and the step adds
up what it says of them: a term and a `Ratio` by numerator and denominator, a `Sum` by its value, a
`Max` by the larger one. A mean is formed once, of the whole step, so nothing depends on how the rows
were divided into microbatches, replicas or dispatches.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ratio:
  """Σ numerator / Σ denominator over all rows of a step.

  As a term, its entries are added up: numerator and denominator may have any shape. As a statistic
  both keep their shape, and the ratio is formed entry by entry.
  """

  numerator: jax.Array
  denominator: jax.Array
  """Must not depend on the parameters, and must be that of these rows alone (their tokens, say)."""
  coefficient: float = dataclasses.field(default=1.0, metadata={"static": True})
  """The weight of a term in the objective; of no effect in a statistic."""

  def value(self) -> jax.Array:
    """Returns the ratio; 0 where there was nothing to divide by."""
    return safe_ratio(self.numerator, self.denominator)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
  """Σ value over all rows of a step, of floats or integers, entry by entry."""

  total: Any
  """An array, or a pytree of them."""

  def value(self) -> Any:
    """Returns the sum."""
    return self.total


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
  """The largest value of all rows of a step, entry by entry."""

  largest: Any
  """An array, or a pytree of them."""

  def value(self) -> Any:
    """Returns the maximum."""
    return self.largest


Stat = Ratio | Sum | Max
Terms = Mapping[str, Ratio]
"""By name; the objective is Σ coefficient · numerator / denominator. The gradient's sum is kept as what the
first term's denominator divides."""
Stats = Mapping[str, Stat]


class Loss(Protocol):
  """Terms and statistics of some rows, as sums over them."""

  def __call__(self, params: Any, rows: Any, keys_B: jax.Array | None, /) -> tuple[Terms, Stats]:
    """Returns what these rows contribute.

    Args:
      params: whatever the gradient is taken by, a pytree of float arrays.
      rows: a pytree of arrays (B, …).
      keys_B: one random key for each row, of its sample; None: nothing is drawn.
    """
    ...


def sample_keys(key: jax.Array, sample_ids: Any) -> jax.Array:
  """Returns one random key for each row, from the run's key and the index of the row's sample.

  What is drawn with it belongs to the sample, however the batch is divided.

  Args:
    key: of the run; another one for each step, where samples come again.
    sample_ids: integers of any shape, which that of the keys is too.
  """
  fold = functools.partial(jax.random.fold_in, key)
  for _ in range(np.ndim(sample_ids)):
    fold = jax.vmap(fold)
  return fold(sample_ids)


def microbatches(
  rows: Any,
  micro_batch_size: int,
  *,
  capacity: int | None = None,
  mesh: Mesh | None = None,
  replicas: str = "data",
) -> tuple[Any, np.int32]:
  """Returns a batch in microbatches of equal size, (k, B, …), and how many of them hold rows.

  What is missing of the last ones is rows of zeros, to which a loss must give no weight. Every
  replica has rows that follow one another in the batch, in the same order for any number of
  microbatches, so that a batch that is already divided over replicas stays where it is.

  Args:
    rows: a pytree of arrays (N, …).
    micro_batch_size: B, the rows of a microbatch on all replicas together.
    capacity: k, the most microbatches a step will have: up to there one program; None: these rows'.
    mesh: the devices on which the rows are placed; None: they stay numpy arrays.
    replicas: the mesh axis that rows are divided over.

  Raises:
    ValueError: more rows than the capacity holds, or the size does not divide over the replicas.
  """
  num_replicas = 1 if mesh is None else mesh.shape.get(replicas, 1)
  if micro_batch_size < 1 or micro_batch_size % num_replicas:
    raise ValueError(
      f"micro_batch_size={micro_batch_size} must be a multiple of the {num_replicas} replicas along "
      f"{replicas}; for example {math.ceil(max(micro_batch_size, 1) / num_replicas) * num_replicas}"
    )
  num_rows = len(jax.tree.leaves(rows)[0])
  num_microbatches = math.ceil(num_rows / micro_batch_size)
  k = num_microbatches if capacity is None else capacity
  if num_microbatches > k:
    raise ValueError(
      f"{num_rows} rows are {num_microbatches} microbatches of {micro_batch_size}, more than "
      f"capacity={k}; for example capacity={num_microbatches}"
    )
  shape_RkB = num_replicas, num_microbatches, micro_batch_size // num_replicas

  def cut(x: Any) -> np.ndarray:
    x_N = np.asarray(x)
    micro = np.zeros((k, micro_batch_size, *x_N.shape[1:]), x_N.dtype)
    padded_N = np.zeros((math.prod(shape_RkB), *x_N.shape[1:]), x_N.dtype)
    padded_N[:num_rows] = x_N
    ordered = padded_N.reshape(*shape_RkB, *x_N.shape[1:]).swapaxes(0, 1)
    micro[:num_microbatches] = ordered.reshape(-1, *micro.shape[1:])
    return micro

  cut_rows = jax.tree.map(cut, rows)
  if mesh is not None:
    over = NamedSharding(mesh, PartitionSpec(None, replicas if replicas in mesh.shape else None))
    cut_rows = jax.device_put(cut_rows, over)
  return cut_rows, np.int32(num_microbatches)


def safe_ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
  """Returns the quotient; 0 where the denominator is 0."""
  is_empty = denominator == 0
  return jnp.where(is_empty, 0.0, numerator / jnp.where(is_empty, 1.0, denominator))


def term_weights(terms: Terms, denominators: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns what each numerator counts, so that the sum divided by the first denominator is the
  gradient of the objective.

  Args:
    terms: terms, or their shapes.
    denominators: of the whole step.

  Raises:
    ValueError: one is missing.
  """
  if missing := [name for name in terms if name not in denominators]:
    raise ValueError(
      f"terms with denominators of their own in one dispatch of several need those of the whole step, "
      f"and that of {', '.join(missing)} is missing: add up `sum_denominators` of all dispatches"
    )
  first = denominators[next(iter(terms))]
  of_first = jnp.where(first == 0, 1.0, first)
  return {
    name: term.coefficient * safe_ratio(of_first, denominators[name])
    for name, term in terms.items()
  }


def map_stats(
  add: Callable[..., Any], largest: Callable[..., Any], stats: Any, *others: Any
) -> Any:
  """Applies `add` to the arrays that are summed and `largest` to those of a `Max`, in any pytree."""

  def join(one: Any, *more: Any) -> Any:
    return jax.tree.map(largest if isinstance(one, Max) else add, one, *more)

  return jax.tree.map(join, stats, *others, is_leaf=_is_max)


def zeros_of(stats: Tree) -> Tree:
  """Returns what joins with `stats` (arrays or their shapes) without changing them.

  Sums of floats are formed in float32.
  """

  def lowest(x: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.integer):
      return jnp.full(x.shape, jnp.iinfo(x.dtype).min, x.dtype)
    return jnp.full(x.shape, -jnp.inf, x.dtype)

  def zero(x: Any) -> jax.Array:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.zeros(x.shape, jnp.float32 if is_float else x.dtype)

  return map_stats(zero, lowest, stats)


def joined(total: Tree, new: Tree) -> Tree:
  """Returns terms or statistics of the rows of both, each by its own rule."""
  return map_stats(lambda a, b: a + b.astype(a.dtype), jnp.maximum, total, new)


def over_replicas(stats: Tree, axes: str | tuple[str, ...]) -> Tree:
  """Returns terms, statistics or gradients of all replicas, inside a shard_map over the mesh `axes`.

  All that is summed is one operand list of one reduction, in whatever way each array is divided.
  """
  leaves, structure = jax.tree.flatten(stats, is_leaf=_is_max)
  summed = iter(jax.lax.psum([x for x in leaves if not _is_max(x)], axes))
  whole = [Max(jax.lax.pmax(x.largest, axes)) if _is_max(x) else next(summed) for x in leaves]
  return jax.tree.unflatten(structure, whole)


def parts_over_replicas(
  gradients: Any, is_divided: Sequence[bool], others: Tree, axis: str
) -> tuple[Any, Tree]:
  """Returns the gradients of all replicas, and what `over_replicas` makes of the others, inside a shard_map.

  Args:
    gradients: of one replica.
    is_divided: of each leaf, whether a replica gets its part of the sum along the first dim, or the whole.
    others: terms and statistics.
    axis: the mesh axis of the replicas.
  """
  leaves, structure = jax.tree.flatten(gradients)
  both = [*zip(leaves, is_divided, strict=True)]
  whole, others = over_replicas(([x for x, divided in both if not divided], others), axis)
  summed = iter(whole)
  each = [
    jax.lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True) if divided else next(summed)
    for x, divided in both
  ]
  return jax.tree.unflatten(structure, each), others


def _is_max(x: Any) -> bool:
  return isinstance(x, Max)
