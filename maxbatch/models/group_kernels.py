"""Kernels for TPUs: products of rows, in the order of their groups, with the matrix of each group.

The design is that of megablox (Gale et al. 2022; jax.experimental.pallas.ops.tpu.megablox). A kernel visits
tiles of rows group by group. A tile with rows of several groups is visited for each of them, and the rows of
the others are masked. jax's own is not used for its table of visits: it makes the table anew for every
product, by scatters, which the compiler sends to SparseCores on v5p and v6e, in instructions that jaxlib
0.10.2 cannot read. Here the table is made by comparisons.

S rows, in tiles of M; E groups, D and F widths of a matrix, V visits.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxbatch.estimate.chips import CHIPS, Chip, chip_for

if TYPE_CHECKING:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_ROWS = 16
"""Rows of the smallest tile, of bfloat16."""
_ROW_TILES = (512, 256, 128)
BLOCK_BYTES = 32 * 2**20
"""Of vector memory, which a kernel's blocks may take."""
_LITTLE_MEMORY = {"TPU v4": 12 * 2**20}
"""The same for chips that have little of it."""


class Visits(NamedTuple):
  """The tiles of rows in the order in which a kernel visits them."""

  start_E: jax.Array
  """int32[E + 1]: the first row of each group, and the end of the last."""
  group_V: jax.Array
  """int32"""
  tile_V: jax.Array
  """int32"""


class Tiles(NamedTuple):
  """Sizes of the blocks that a kernel multiplies at once."""

  rows: int
  contracted: int
  width: int


def visits(rows_E: jax.Array, rows: int, tile: int, *, of_empty: bool) -> tuple[Visits, jax.Array]:
  """Returns the visits and how many of them there are, at most rows / tile + E − 1.

  Args:
    rows_E: int32, of each group.
    rows: a multiple of `tile`; there may be more than all groups have.
    of_empty: whether a group without rows is visited, once.
  """
  E, last = len(rows_E), rows // tile - 1
  end_E = jnp.cumsum(rows_E)
  start_E = end_E - rows_E
  first_E = jnp.minimum(start_E // tile, last)
  number_E = jnp.where(rows_E > 0, (end_E - 1) // tile - first_E + 1, int(of_empty))
  visited_E = jnp.cumsum(number_E)
  visit_V1 = jnp.arange(rows // tile + E - 1)[:, None]
  is_of_VE = (visit_V1 >= (visited_E - number_E)[None]) & (visit_V1 < visited_E[None])

  def of_group(x_E: jax.Array) -> jax.Array:
    return jnp.where(is_of_VE, x_E[None], 0).sum(1, dtype=jnp.int32)

  tile_V = visit_V1[:, 0] - of_group(visited_E - number_E - first_E)
  starts = jnp.concatenate([jnp.zeros(1, jnp.int32), end_E.astype(jnp.int32)])
  return Visits(starts, of_group(jnp.arange(E)), tile_V), visited_E[-1]


def product(
  x_SD: jax.Array,
  matrix_EDF: jax.Array,
  rows_E: jax.Array,
  *,
  is_turned: bool = False,
  share: float = 1.0,
  interpret: bool = False,
) -> jax.Array:
  """Returns each row multiplied by the matrix of its group: (S, F). Rows after those of all groups are
  anything.

  Args:
    is_turned: whether matrices are (E, F, D).
    share: of the rows, the expected one in any group, for the kernel's estimate of its cost.
    interpret: runs it without a TPU.
  """
  # Imported where a kernel is traced: no start without one waits for it.
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  S, D = x_SD.shape
  E, F = matrix_EDF.shape[0], matrix_EDF.shape[1 if is_turned else 2]
  tiles = product_tiles(S, share * S, E, D, F, x_SD.dtype.itemsize)
  M, x_SD = tiles.rows, _filled(x_SD, tiles.rows)
  plan, number = visits(rows_E, len(x_SD), M, of_empty=False)
  steps = D // tiles.contracted
  contracted = ((1,), (1 if is_turned else 0,)), ((), ())

  def kernel(plan: Any, x: Any, matrix: Any, out: Any, sum_MF: Any) -> None:
    visit, step = pl.program_id(1), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
      sum_MF[...] = jnp.zeros_like(sum_MF)

    sum_MF[...] += lax.dot_general(
      x[...], matrix[...], contracted, preferred_element_type=jnp.float32
    )

    @pl.when(step == steps - 1)
    def _() -> None:
      # Other rows of the tile are those of the groups before, which are kept, or after, still to come.
      is_own = _is_of_group(plan, visit, sum_MF.shape)
      out[...] = jnp.where(is_own, sum_MF[...], out[...].astype(jnp.float32)).astype(out.dtype)

  def of_rows(_: Any, visit: Any, step: Any, plan: Any) -> Any:
    return plan.tile_V[visit], step

  def of_matrix(column: Any, visit: Any, step: Any, plan: Any) -> Any:
    return plan.group_V[visit], *((column, step) if is_turned else (step, column))

  sizes = (tiles.width, tiles.contracted) if is_turned else (tiles.contracted, tiles.width)
  return pl.pallas_call(
    kernel,
    name="gmm",
    out_shape=jax.ShapeDtypeStruct((len(x_SD), F), x_SD.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      in_specs=[
        pl.BlockSpec((M, tiles.contracted), of_rows),
        pl.BlockSpec((None, *sizes), of_matrix),
      ],
      out_specs=pl.BlockSpec(
        (M, tiles.width), lambda column, visit, _, plan: (plan.tile_V[visit], column)
      ),
      grid=(pl.cdiv(F, tiles.width), number, steps),
      scratch_shapes=[pltpu.VMEM((M, tiles.width), jnp.float32)],
    ),
    compiler_params=_compiler_params(),
    cost_estimate=_cost(share * S * D * F, x_SD, matrix_EDF),
    interpret=interpret,
  )(plan, x_SD, matrix_EDF)[:S]


def gradient(
  x_SD: jax.Array,
  d_SF: jax.Array,
  rows_E: jax.Array,
  *,
  share: float = 1.0,
  interpret: bool = False,
) -> jax.Array:
  """Returns the gradients of the matrices of all groups: (E, D, F), zeros for those without rows.

  Args:
    d_SF: the gradient of the product; anything in rows of no group.
    share: as of `product`.
    interpret: as of `product`.
  """
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  (S, D), E, F = x_SD.shape, len(rows_E), d_SF.shape[1]
  tiles = gradient_tiles(S, share * S, E, D, F, x_SD.dtype.itemsize)
  M, x_SD, d_SF = tiles.rows, _filled(x_SD, tiles.rows), _filled(d_SF, tiles.rows)
  plan, number = visits(rows_E, len(x_SD), M, of_empty=True)

  def kernel(plan: Any, x: Any, d: Any, out: Any, sum_DF: Any) -> None:
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    group = plan.group_V[visit]

    @pl.when((visit == 0) | (plan.group_V[jnp.maximum(visit - 1, 0)] != group))
    def _() -> None:
      sum_DF[...] = jnp.zeros_like(sum_DF)

    own_MD = jnp.where(_is_of_group(plan, visit, x.shape), x[...].astype(jnp.float32), 0)
    own_MF = jnp.where(_is_of_group(plan, visit, d.shape), d[...].astype(jnp.float32), 0)
    sum_DF[...] += lax.dot_general(
      own_MD.astype(x.dtype), own_MF.astype(d.dtype), (((0,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )  # fmt: skip

    @pl.when((visit == last) | (plan.group_V[jnp.minimum(visit + 1, last)] != group))
    def _() -> None:
      out[...] = sum_DF[...].astype(out.dtype)

  return pl.pallas_call(
    kernel,
    name="tgmm",
    out_shape=jax.ShapeDtypeStruct((E, D, F), x_SD.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      in_specs=[
        pl.BlockSpec((M, tiles.contracted), lambda _, row, visit, plan: (plan.tile_V[visit], row)),
        pl.BlockSpec((M, tiles.width), lambda column, _, visit, plan: (plan.tile_V[visit], column)),
      ],
      out_specs=pl.BlockSpec(
        (None, tiles.contracted, tiles.width),
        lambda column, row, visit, plan: (plan.group_V[visit], row, column),
      ),
      grid=(pl.cdiv(F, tiles.width), pl.cdiv(D, tiles.contracted), number),
      scratch_shapes=[pltpu.VMEM((tiles.contracted, tiles.width), jnp.float32)],
    ),
    compiler_params=_compiler_params(),
    cost_estimate=_cost(share * S * D * F, x_SD, d_SF),
    interpret=interpret,
  )(plan, x_SD, d_SF)


def _filled(x_SD: jax.Array, tile: int) -> jax.Array:
  """Returns zeros after the rows, up to whole tiles."""
  rest = -len(x_SD) % tile
  return jnp.pad(x_SD, ((0, rest), (0, 0))) if rest else x_SD


def _is_of_group(plan: Any, visit: Any, shape: tuple[int, ...]) -> jax.Array:
  """Returns which rows of a visited tile are of the visit's group: bool of the shape (M, …)."""
  group = plan.group_V[visit]
  row = lax.broadcasted_iota(jnp.int32, shape, 0) + plan.tile_V[visit] * shape[0]
  return (row >= plan.start_E[group]) & (row < plan.start_E[group + 1])


def _row_tiles(rows: int) -> Iterable[int]:
  """Returns the tiles of rows there may be, the largest first."""
  return [M for M in _ROW_TILES if rows >= M] or [-(-rows // _ROWS) * _ROWS]


def _parts(size: int) -> list[int]:
  """Returns the whole, and its parts that are whole lanes, the largest first."""
  parts = (size // n for n in range(2, size // _LANES + 1) if size % n == 0)
  return [size, *(part for part in parts if part % _LANES == 0)]


def _widths(size: int) -> list[int]:
  """Returns widths of blocks that need not divide a result's width, the largest first."""
  return sorted({*_parts(size), *(n for n in (512, 256, 128) if n < size)}, reverse=True)


def _chip() -> Chip:
  """Returns the chip that the kernel is for; a v5e if there is none."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return chip_for("" if device is None else device.device_kind) or CHIPS["v5e"]


def _fastest(
  candidates: Iterable[Tiles],
  held: Callable[[Tiles], int],
  busy: Callable[[Tiles], float],
  read: Callable[[Tiles], float],
) -> Tiles:
  """Returns the blocks for which products, or reading what they need, take the least time.

  Args:
    held: bytes in vector memory.
    busy: FLOPs.
    read: bytes from main memory.
  """
  chip, tiles = _chip(), list(candidates)
  room = min(BLOCK_BYTES, _LITTLE_MEMORY.get(chip.device_kind, BLOCK_BYTES))

  def seconds(one: Tiles) -> tuple[float, float]:
    each = busy(one) / chip.peak_flops, read(one) / chip.hbm_bandwidth
    return max(each), sum(each)

  fitting = [one for one in tiles if held(one) <= room]
  return min(fitting, key=seconds) if fitting else min(tiles, key=held)


def product_tiles(S: int, used: float, E: int, D: int, F: int, itemsize: int) -> Tiles:
  """Returns the blocks of `product`, for S rows of which so many are expected in any group.

  Rows are read for each block of F. A group's matrix is read once, if a block has all of D, else for each
  visit.
  """

  def held(t: Tiles) -> int:
    M, d, f = t
    return 2 * itemsize * (M * d + d * f + M * f) + 8 * M * f

  def matrices(t: Tiles) -> float:
    return E if t.contracted == D else used / t.rows + E - 1

  return _fastest(
    (Tiles(M, d, f) for M in _row_tiles(S) for d in _parts(D) for f in _widths(F)),
    held,
    lambda t: 2 * D * F * (used + t.rows * (E - 1)),
    lambda t: itemsize * (used * (D * math.ceil(F / t.width) + F) + matrices(t) * D * F),
  )


def gradient_tiles(S: int, used: float, E: int, D: int, F: int, itemsize: int) -> Tiles:
  """Returns the blocks of `gradient`: rows of either side are read for each block of the other's width."""

  def held(t: Tiles) -> int:
    M, d, f = t
    return 2 * itemsize * (M * d + M * f + d * f) + 8 * d * f + 4 * M * (d + f)

  def rows(t: Tiles) -> float:
    return used * (D * math.ceil(F / t.width) + F * math.ceil(D / t.contracted))

  return _fastest(
    (Tiles(M, d, f) for M in _row_tiles(S) for d in _widths(D) for f in _widths(F)),
    held,
    lambda t: 2 * D * F * (used + t.rows * (E - 1)),
    lambda t: itemsize * (rows(t) + E * D * F),
  )


def _compiler_params() -> "pltpu.CompilerParams":
  from jax.experimental.pallas import tpu as pltpu

  order = ("parallel", "arbitrary", "arbitrary")
  # What the compiler makes of the blocks takes some room, too.
  limit = None if _chip().device_kind in _LITTLE_MEMORY else 3 * BLOCK_BYTES // 2
  return pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=limit)


def _cost(multiplications: float, *read: jax.Array) -> "pl.CostEstimate":
  from jax.experimental import pallas as pl

  size = sum(x.size * x.dtype.itemsize for x in read)
  return pl.CostEstimate(flops=round(2 * multiplications), transcendentals=0, bytes_accessed=size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def grouped(
  x_SD: jax.Array,
  matrix_EDF: jax.Array,
  rows_E: jax.Array,
  is_turned: bool = False,
  share: float = 1.0,
  interpret: bool = False,
) -> jax.Array:
  """Returns `product`, with gradients by kernels too."""
  of = functools.partial(product, share=share, interpret=interpret)
  return of(x_SD, matrix_EDF, rows_E, is_turned=is_turned)


def _backward(is_turned: bool, share: float, interpret: bool, kept: Any, d_SF: jax.Array) -> Any:
  x_SD, matrix_EDF, rows_E = kept
  settings = {"share": share, "interpret": interpret}
  d_x_SD = product(d_SF, matrix_EDF, rows_E, is_turned=not is_turned, **settings)
  sides = (d_SF, x_SD) if is_turned else (x_SD, d_SF)
  return d_x_SD, gradient(*sides, rows_E, **settings).astype(matrix_EDF.dtype), None


def _forward(
  x_SD: jax.Array,
  matrix_EDF: jax.Array,
  rows_E: jax.Array,
  is_turned: bool,
  share: float,
  interpret: bool,
) -> Any:
  of = functools.partial(product, is_turned=is_turned, share=share, interpret=interpret)
  return of(x_SD, matrix_EDF, rows_E), (x_SD, matrix_EDF, rows_E)


grouped.defvjp(_forward, _backward)
