"""Sums of a loss over the rows of a batch in any arrangement, and what they may differ by.

N rows, k microbatches, B rows of a microbatch, L leaves of the parameters.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.core.accumulate import Accumulated, accumulate, divisor
from maxbatch.core.terms import Loss, Max, Ratio, Stat, Stats, Sum, Terms

_ROUNDING = 64 * 2.0**-23
"""What float32 sums in another order may differ by, as a share of the magnitudes in them."""
_LOW_ROUNDING = 8
"""Likewise for a shorter format that the loss computes in, in its epsilons."""
_PERTURBATION = 2.0**-22
"""Relative change of the parameters that shows how rounding grows on its way through a model."""
_SPREADS = 4
"""What splits may differ by, in differences that such a change makes."""
_REPLICAS, _TOKENS = "data", "context"
_SIZE = "size of "


class Arrangement(NamedTuple):
  """Which rows are in which place."""

  index_kB: np.ndarray
  """Indices of the rows; −1 is a row of zeros."""
  num_microbatches: int = 1
  """Those that are read."""
  keys_kB: np.ndarray | None = None
  """Indices of the keys, where they do not go with their rows."""


class Probe:
  """A loss with parameters and N rows, summed in any arrangement."""

  def __init__(self, loss: Loss, params: Any, rows: Any, keys_N: jax.Array):
    self.loss, self.num_rows = loss, len(keys_N)
    self.params = jax.device_get(params)
    cut = jax.tree.map(lambda x: np.asarray(x)[: self.num_rows], rows)
    self._rows = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), cut)
    self._keys = jnp.concatenate([keys_N, keys_N[:1]])
    self._run = self._program()

  @property
  def every_row(self) -> Arrangement:
    """The batch in one piece."""
    return Arrangement(np.arange(self.num_rows)[None])

  def only(self, name: str) -> "Probe":
    """Returns the probe of one of the loss's terms, without statistics."""

    def one_term(params: Any, rows: Any, keys_B: Any) -> Any:
      terms, _ = self.loss(params, rows, keys_B)
      term = terms[name]
      return {name: Ratio(term.numerator, term.denominator)}, {}

    every_N = np.arange(self.num_rows)
    return Probe(one_term, self.params, *self.take(every_N))

  def take(self, index: np.ndarray, keys_index: np.ndarray | None = None) -> tuple[Any, jax.Array]:
    """Returns the rows and keys of some indices."""
    keys = self._keys[jnp.asarray(index if keys_index is None else keys_index)]
    return jax.tree.map(lambda x: x[index], self._rows), keys

  def sums(self, arrangement: Arrangement, params: Any = None) -> Accumulated:
    """Returns the sums over an arrangement of the rows, on the host."""
    return self._fetch(self._run, arrangement, self.params if params is None else params)

  def traced_anew(self) -> Accumulated:
    """Returns the sums of the batch in one piece by a program of its own."""
    return self._fetch(self._program(), self.every_row, self.params)

  def on(self, devices: Any) -> Accumulated:
    """Returns the sums of the batch in one piece over replicas, one on each device."""
    mesh = Mesh(np.array(devices), (_REPLICAS,))
    return self._fetch(self._program(mesh), self.every_row, self.params)

  @property
  def shares_rows(self) -> bool:
    """Whether rows have arrays whose second dim, their tokens, two devices can divide."""
    return any(x.ndim > 1 and x.shape[1] % 2 == 0 for x in jax.tree.leaves(self._rows))

  def over_tokens(self, devices: Any) -> Accumulated:
    """Returns the sums of the batch in one piece, of which each of two devices has half of each row."""
    mesh = Mesh(np.array(devices), (_TOKENS,))

    def program(params: Any, rows: Any, *others: Any) -> Accumulated:
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return self._program()(params, jax.tree.map(divided, rows), *others)

    def divided(x_kBT: jax.Array) -> jax.Array:
      is_even = x_kBT.ndim > 2 and x_kBT.shape[2] % 2 == 0
      place = PartitionSpec(None, None, _TOKENS) if is_even else PartitionSpec()
      return jax.lax.with_sharding_constraint(x_kBT, NamedSharding(mesh, place))

    return self._fetch(jax.jit(program), self.every_row, self.params)

  def program(self) -> str:
    """Returns the program of the batch in one piece, as traced."""
    rows, keys = self.take(self.every_row.index_kB)
    return str(self._run.trace(self.params, rows, np.int32(1), keys).jaxpr)

  def _program(self, mesh: Mesh | None = None) -> Any:
    # A function of its own, or jax would take its trace of the loss from before.
    def loss(params: Any, rows: Any, keys_B: Any) -> Any:
      terms, stats = self.loss(params, rows, keys_B)
      return terms, {**stats, **_sizes(terms, stats)}

    return jax.jit(accumulate(loss, mesh, replicas=_REPLICAS, squared_norm=leaf_squares))

  def _fetch(self, program: Any, arrangement: Arrangement, params: Any) -> Accumulated:
    index_kB, k, keys_kB = arrangement
    rows, keys = self.take(index_kB, keys_kB)
    return jax.device_get(program(params, rows, np.int32(k), keys))


def _sizes(terms: Terms, stats: Stats) -> Stats:
  """Returns the magnitudes of what some rows add to each value, as statistics of their own."""
  of_terms = {_SIZE + _term(name): Sum(abs(term.numerator.sum())) for name, term in terms.items()}
  return of_terms | {_SIZE + _stat(name): _size(stat) for name, stat in stats.items()}


def _size(stat: Stat) -> Stat:
  if isinstance(stat, Max):
    return Max(jnp.where(jnp.isfinite(stat.largest), abs(stat.largest), 0))
  return Sum(abs(stat.numerator if isinstance(stat, Ratio) else stat.total))


def _term(name: str) -> str:
  return f'term "{name}"'


def _stat(name: str) -> str:
  return f'statistic "{name}"'


class Results(NamedTuple):
  """What a step makes of its sums."""

  values: dict[str, np.ndarray]
  """Values of terms and statistics: `term "loss"`, `statistic "entropy"`."""
  gradients: list[np.ndarray]
  """Gradients of the objective, by leaf."""


def results(sums: Accumulated) -> Results:
  """Returns terms, statistics and gradient of a step with these sums."""
  by = float(divisor(sums.terms))
  gradients = [np.asarray(g, np.float64) / (by or 1.0) for g in jax.tree.leaves(sums.gradients)]
  terms = {
    _term(name): np.asarray(quotient(term.numerator.sum(), term.denominator.sum()))
    for name, term in sums.terms.items()
  }
  own = {name: stat for name, stat in sums.stats.items() if not name.startswith(_SIZE)}
  stats = {_stat(name): _value(stat) for name, stat in own.items()}
  return Results(terms | stats, gradients)


def norm(x: np.ndarray) -> float:
  """Returns the Euclidean norm; infinity if something is not finite."""
  return float(np.linalg.norm(x)) if np.isfinite(x).all() else float("inf")


def difference(one: np.ndarray, other: np.ndarray) -> float:
  """Returns the norm of the difference; entries that are equal, infinities too, do not differ."""
  with np.errstate(invalid="ignore"):
    return norm(np.where(one == other, 0.0, np.subtract(one, other, dtype=np.float64)))


def perturbed(params: Any, by: float) -> Any:
  """Returns the parameters, each larger or smaller by this share."""
  random = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: (x * (1 + by * random.choice([-1.0, 1.0], x.shape))).astype(x.dtype), params
  )


class Tolerances(NamedTuple):
  """What results may differ by, absolutely, and still be rounding."""

  share: float
  """Share of the magnitude of what is summed."""
  values: dict[str, float]
  gradients: list[float]


def tolerances(probe: Probe, whole: Accumulated, singles: Accumulated) -> Tolerances:
  """Returns what rounding explains.

  Sums round in proportion to what they are formed of, the rows; a model may make rounding larger,
  which shows where its parameters are changed by as much.

  Args:
    probe: the loss and its rows.
    whole: the sums of the batch in one piece.
    singles: the sums of its rows one by one.
  """
  reference = results(whole)
  moved = (perturbed(probe.params, by) for by in (_PERTURBATION, -_PERTURBATION))
  changed = [results(probe.sums(probe.every_row, params)) for params in moved]
  share, magnitudes = _rounding(probe), _magnitudes(singles)
  values = {
    what: share * max(magnitudes[what], norm(value[np.isfinite(value)]))
    + _SPREADS * max(difference(one.values[what], value) for one in changed)
    for what, value in reference.values.items()
  }
  of_rows_L = _row_norms(singles, probe.num_rows)
  norms = [norm(g) for g in reference.gradients]
  # A gradient that is 0 but for rounding has that of the others' magnitude.
  least = share / 16 * float(np.linalg.norm(norms))
  gradients = [
    share * max(norms[at], of_rows_L[at])
    + _SPREADS * max(difference(one.gradients[at], g) for one in changed)
    + least
    for at, g in enumerate(reference.gradients)
  ]
  return Tolerances(share, values, gradients)


def leaf_squares(gradients: Any) -> jax.Array:
  """Returns the squared norm of every leaf, float32[L]."""
  return jnp.stack([jnp.square(g.astype(jnp.float32)).sum() for g in jax.tree.leaves(gradients)])


def _row_norms(singles: Accumulated, num_rows: int) -> np.ndarray:
  """Returns Σ ‖gradient of a row‖ at most, by leaf, of the divided gradient; 0 if not finite."""
  assert singles.squares is not None
  squares_L = np.asarray(singles.squares.of_microbatches, np.float64) * num_rows
  norms_L = np.sqrt(squares_L) / (abs(float(divisor(singles.terms))) or 1.0)
  return np.where(np.isfinite(norms_L), norms_L, 0.0)


def _magnitudes(singles: Accumulated) -> dict[str, float]:
  """Returns what each value would be if all rows contributed to it with one sign."""
  sizes = {name: _value(singles.stats[_SIZE + name]) for name in results(singles).values}
  for name, term in singles.terms.items():
    sizes[_term(name)] = quotient(sizes[_term(name)], abs(term.denominator.sum()))
  for name, stat in singles.stats.items():
    if isinstance(stat, Ratio):
      sizes[_stat(name)] = quotient(sizes[_stat(name)], abs(stat.denominator))
  return {name: norm(size[np.isfinite(size)]) for name, size in sizes.items()}


def _value(stat: Stat) -> np.ndarray:
  if isinstance(stat, Ratio):
    return np.asarray(quotient(np.asarray(stat.numerator), np.asarray(stat.denominator)))
  return np.asarray(stat.largest if isinstance(stat, Max) else stat.total)


def quotient(numerator: Any, denominator: Any) -> Any:
  """Returns numerator / denominator, 0 where that is 0, in numpy."""
  is_empty = denominator == 0
  return np.where(is_empty, 0.0, numerator / np.where(is_empty, 1.0, denominator))


def _rounding(probe: Probe) -> float:
  """Returns the relative rounding of the loss's sums, by the shortest format in its program."""
  program = probe.program()
  short = [jnp.finfo(jnp.bfloat16).eps] if re.search(r"\bbf16\[", program) else []
  short += [jnp.finfo(jnp.float16).eps] if re.search(r"\bf16\[", program) else []
  return _ROUNDING + _LOW_ROUNDING * float(max(short, default=0.0))
