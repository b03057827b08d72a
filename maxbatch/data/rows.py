"""The rows a model is fed, one pytree from the loader to the loss, and the checksum of each row.

B rows of a microbatch over all devices, T tokens per row; with leading microbatch dim k while a whole step is
in one array.

The checksum of a row is h(id + 1) + Σ h(bits)·w mod 2³² over all its arrays, where h scatters numbers
one to one and w is an odd weight drawn from the array and the position. Rows of other samples have
other checksums if their tokens are the same, always; so has a row in which one number changed, since
odd numbers have an inverse mod 2³². The checksum of padding (id −1, zeros) is 0; that of a sample
whose tokens were lost never is. The same formula runs in numpy, where a row is read, and in jax,
where it is used.

The place of a row in the step's array says, by the plan, which sample it is; its checksum says which
sample was read, and with which tokens. So rows that were swapped, lost, repeated or changed between
the file and the device show in the very step that trains on them.

What every dataset offers: rows addressed by number, for training and for validation.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.batch.row_plan import row_of_step
from maxbatch.errors import RowsError
from maxbatch.hardware.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
  """The experts that tokens were sent to when they were sampled."""

  experts: jax.Array
  """int16[..., B, T, L, K], of every layer of the model, or [B, T, K] of one; −1 where none is known."""
  is_replayed: bool = dataclasses.field(default=False, metadata={"static": True})
  """Whether the tokens are sent to them again; else the router's choices are only compared."""


class Rows(NamedTuple):
  """Samples as arrays."""

  inputs: jax.Array
  """int32[..., B, T]: token ids."""
  targets: jax.Array
  """int32[..., B, T]: the token after each input."""
  weights: jax.Array
  """float32[..., B, T]: 1 where the target counts towards the loss, 0 for padding."""
  sample_ids: jax.Array
  """int32[..., B]: index of the sample in the stream, by the plan; dropout masks derive from it.
  −1 where a row only fills up a step."""
  segment_ids: jax.Array | None = None
  """int32[..., B, T]: tokens see only tokens of the same segment; None: the row is one segment."""
  positions: jax.Array | None = None
  """int32[..., B, T]: position inside the segment; None: 0 … T−1."""
  places: np.ndarray | None = None
  """int32[T]: where each token of a row was read, while devices that share rows have them in another
  order, which is known when a step is compiled; None: 0 … T−1."""
  checksums: jax.Array | None = None
  """uint32[..., B]: of each row as it was read, for its sample; None: the rows were checked on the
  host that has read them, or no loader made them."""
  routes: Routes | None = None
  """None: they were not sampled, or not from a mixture of experts."""

  def in_order(self, order_T: np.ndarray) -> "Rows":
    """Returns the rows (B, T) with their tokens in another order; what depends on a token's place in a row
    has to know of `places`."""
    arrays = {name: x for name in TOKEN_FIELDS if (x := self._asdict()[name]) is not None}
    moved = {name: whole_in_order(x, order_T) for name, x in arrays.items()}
    routes = self.routes
    if routes is not None:
      routes = dataclasses.replace(routes, experts=in_order(routes.experts, order_T))
    return self._replace(**moved, routes=routes, places=order_T)


def whole_in_order(x_BT: jax.Array, order_T: np.ndarray) -> jax.Array:
  """Returns `in_order` on devices that have whole rows, each of its own, and send none."""
  whole = functools.partial(constrain, axes=("batch", None))
  return whole(in_order(whole(x_BT), order_T))


_Runs = tuple[tuple[int, int], ...]
"""The first token and the end of those that stay together, one after the other."""


def in_order(x: jax.Array, order_T: np.ndarray, dim: int = 1) -> jax.Array:
  """Returns an array with its tokens, all of them, in another order: slices of those that stay together,
  which the compiler divides where a gather could not be.

  So is its gradient. Derived by jax it would be the sum of whole arrays of zeros, one for each slice.
  """
  return _runs_in_order(x, _runs(order_T), _runs(np.argsort(order_T)), dim)


def _runs(order_T: np.ndarray) -> _Runs:
  starts = np.flatnonzero(np.diff(order_T, prepend=-2) != 1)
  return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(order_T, starts[1:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _runs_in_order(x: jax.Array, runs: _Runs, back: _Runs, dim: int) -> jax.Array:
  del back
  return jnp.concatenate([jax.lax.slice_in_dim(x, *run, axis=dim) for run in runs], axis=dim)


_runs_in_order.defvjp(
  lambda x, runs, back, dim: (_runs_in_order(x, runs, back, dim), None),
  lambda runs, back, dim, _, d_x: (_runs_in_order(d_x, back, runs, dim),),
)


Numbers = TypeVar("Numbers", np.ndarray, jax.Array)

TOKEN_FIELDS = ("inputs", "targets", "weights", "segment_ids", "positions")
"""The arrays of a row, in the order in which they count; rows have all or the first three."""


def scattered(numbers: Numbers) -> Numbers:
  """Permutes 0 … 2³²−1: the finalizer of MurmurHash3."""
  numbers = (numbers ^ (numbers >> 16)) * np.uint32(0x85EBCA6B)
  numbers = (numbers ^ (numbers >> 13)) * np.uint32(0xC2B2AE35)
  return numbers ^ (numbers >> 16)


@functools.lru_cache(8)
def _weights_FT(length: int) -> np.ndarray:
  """Returns the weights of a row's numbers, by the index of their array in TOKEN_FIELDS."""
  places_TF = np.arange(length * len(TOKEN_FIELDS), dtype=np.uint32).reshape(length, -1)
  return scattered(np.ascontiguousarray(places_TF.T)) | np.uint32(1)


def row_checksums(arrays: Mapping[str, Numbers], sample_ids: Numbers) -> Numbers:
  """Returns the checksums uint32[..., R] of rows.

  Args:
    arrays: those of TOKEN_FIELDS that the rows have, [..., R, T] of 32 bits each.
    sample_ids: int32[..., R]; −1 for padding.
  """
  total: Any = scattered(sample_ids.view(np.uint32) + np.uint32(1))
  for number, name in enumerate(TOKEN_FIELDS):
    if name in arrays:
      bits = arrays[name].view(np.uint32)
      weights_T = _weights_FT(bits.shape[-1])[number]
      # Without h an even number of flipped signs adds up to 0: 2³¹ · odd is 2³¹.
      weighted = scattered(bits) * weights_T.reshape((1,) * (bits.ndim - 1) + weights_T.shape)
      total = total + weighted.sum(-1, dtype=np.uint32)
  return total


Arrays = dict[str, np.ndarray]
"""Rows on the host, with the field names of `maxbatch.data.rows.Rows`."""


class RowPart(NamedTuple):
  """The same tokens of every row: from T·first/of to T·end/of."""

  first: int = 0
  end: int = 1
  of: int = 1

  def tokens(self, length: int) -> slice:
    """Returns the tokens of rows of `length`."""
    return slice(length * self.first // self.of, length * self.end // self.of)

  def length_of_whole(self, length: int) -> int:
    """Returns the tokens of rows of which this part has `length`."""
    return length * self.of // (self.end - self.first)


WHOLE = RowPart()


class RowSource(Protocol):
  """Rows addressed by number. Pickled to worker processes, so it holds no tokens itself."""

  def __len__(self) -> int:
    """Returns the number of rows."""
    ...

  def rows(self, indices: np.ndarray) -> Arrays:
    """Returns the rows int[R] as new arrays: inputs, targets int32[R, T], weights float32[R, T],
    and segment_ids, positions int32[R, T] when the rows are packed.

    Of no indices it opens no file: a process that others read for asks for no more.
    """
    ...


@runtime_checkable
class DivisibleRows(RowSource, Protocol):
  """Rows of which a part can be read alone, as hosts do that share rows."""

  def part_of_rows(self, indices: np.ndarray, part: RowPart) -> Arrays:
    """Returns a part of the rows int[R], see `RowSource.rows`: what `rows` has there."""
    ...


def part_of_rows(source: RowSource, indices: np.ndarray, part: RowPart) -> Arrays:
  """Returns a part of the rows int[R] of any source, read whole where it has no `part_of_rows`."""
  if part == WHOLE:
    return source.rows(indices)
  if isinstance(source, DivisibleRows):
    return source.part_of_rows(indices, part)
  return {
    name: np.ascontiguousarray(array[:, part.tokens(array.shape[1])])
    for name, array in source.rows(indices).items()
  }


@dataclasses.dataclass(frozen=True)
class FirstRows:
  """The first `count` rows of a source, or all if it has fewer."""

  source: RowSource
  count: int

  def __len__(self) -> int:
    return min(self.count, len(self.source))

  def rows(self, indices: np.ndarray) -> Arrays:
    return self.source.rows(indices)

  def part_of_rows(self, indices: np.ndarray, part: RowPart) -> Arrays:
    return part_of_rows(self.source, indices, part)


@dataclasses.dataclass(frozen=True)
class SourceRows:
  """Rows of one source of a mixture."""

  name: str
  share: float
  """Share in the loss of the whole."""
  rows: RowSource


@dataclasses.dataclass(frozen=True)
class Dataset:
  """A named dataset, ready to read."""

  train: RowSource
  validation: RowSource | None
  """None: nothing is kept for validation."""
  fingerprint: str
  """Equal exactly when the training tokens are equal; a resume compares it."""
  description: str
  """What was found, in a line or two for the person who starts the run."""
  validation_fingerprint: str = ""
  """Likewise, of the validation tokens."""
  train_files: Mapping[str, int] = dataclasses.field(default_factory=dict)
  """Bytes of every file, by name: what a refused resume names beside fingerprints."""
  validation_files: Mapping[str, int] = dataclasses.field(default_factory=dict)
  tokenizer_version: str = ""
  """Version of the tokenizer that made the ids; changes with the contents of its vocabulary."""
  num_skipped_records: int = 0
  """Bad records among those to train on, which max_bad_records lets pass."""
  validation_by_source: tuple[SourceRows, ...] = ()
  """The validation rows of a mixture by source, where each has its own."""


NONE_WRONG = np.iinfo(np.int32).max


def first_wrong_row(rows: Rows) -> jax.Array | None:
  """Returns the place m·B + b of the first row that is not what was read for its sample, as int32.

  NONE_WRONG if all are right; None without checksums: the host that has read the rows checks them, if no
  other gets them (data/placement.py), or no loader made them, so that nothing is known of them.
  Microbatches (k, B, T) beyond the step's are zeros; rows may also be a batch (B, T).
  """
  if rows.checksums is None:
    return None
  arrays = {name: array for name in TOKEN_FIELDS if (array := rows._asdict()[name]) is not None}
  result = row_checksums(arrays, rows.sample_ids)
  places = jnp.arange(result.size, dtype=jnp.int32).reshape(result.shape)
  return jnp.min(jnp.where(result == rows.checksums, NONE_WRONG, places))


def check_rows(
  wrong: Sequence[int | None],
  where: str,
  first_sample: int,
  micro_batch: int,
  hosts: Callable[[int], str],
  saved: Callable[[], str],
) -> None:
  """Checks what the dispatches of a step found, or the batches of an evaluation.

  Args:
    wrong: `first_wrong_row` of each dispatch, one if fused, else one per microbatch; or the host's.
    where: `step 3` or `validation`, for the message.
    first_sample: of the step.
    micro_batch: rows of a microbatch.
    hosts: says of a column of a microbatch who read it and who uses it.
    saved: says what is saved.

  Raises:
    RowsError: a row is not what was read for its sample.
  """
  for dispatch, place in enumerate(wrong):
    if place is not None and place != NONE_WRONG:
      row, column = row_of_step(dispatch, place, micro_batch)
      raise RowsError(
        f"{where}: row {row} (sample {first_sample + row}), {hosts(column)}, is not what was read: "
        f"on the way it was swapped, lost, repeated or changed; {saved()}"
      )
