"""Brings rows from the processes that read them to the devices that use them.

Where every process reads the rows of its own devices, `jax.make_array_from_callback` joins them into
global arrays without sending anything; of rows that devices share, each process reads the tokens of its
devices. Where some read for all, each of their devices gets the rows
that it uses and those that it sends, and one compiled program of collective permutes does the rest.
All processes must dispatch it in the same order as their other programs, so it is left to the
thread that dispatches those: `stage` can run in any thread, what it returns cannot.

Rows that are sent take checksums along for the step to check; others are checked right here.

B rows of a microbatch, b of a block, T tokens per row, C the capacity of a step's array in
microbatches, K those that are sent; W the 32-bit numbers of a row: all its arrays, one after the
other.
"""

import bisect
import collections
import dataclasses
import functools
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.batch.host_loads import Redistribution, Rounds, redistribution
from maxbatch.batch.row_plan import columns_of_blocks
from maxbatch.data.rows import TOKEN_FIELDS, WHOLE, Arrays, RowPart, Rows, row_checksums
from maxbatch.errors import RowsError

CHECKSUMS = "checksums"

Staged = Callable[[], Rows]
"""Dispatches what is left to do, and returns the rows."""


_PLACING = threading.Lock()
"""Held on GPUs while rows are put on devices, and while a program runs for the first time."""
_LATELY = collections.deque[Callable[[], jax.Array | None]](maxlen=64)
"""Arrays that were put there lately, as weak references: their copies may be under way."""


def alone_at_first(program: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a compiled program whose first run, on GPUs, is waited for while no rows are put on devices.

  cuDNN loads the kernels of attention at the first run by capturing the stream of all programs. A copy that
  another thread begins meanwhile joins what is captured, and the run ends with "capturing stream has
  unjoined work" (jax 0.11.2, cuDNN 9.19): 6 of 9 runs did, on an H100.
  """
  if jax.default_backend() != "gpu":
    return program
  has_run = False

  @functools.wraps(program, updated=())
  def run(*inputs: Any) -> Any:
    nonlocal has_run
    if has_run:
      return program(*inputs)
    with _PLACING:
      jax.block_until_ready([array for each in _LATELY if (array := each()) is not None])
      _LATELY.clear()
      result = jax.block_until_ready(program(*inputs))
      has_run = True
    return result

  return run


class WrongRowError(RowsError):
  """A row is not what was read for its sample."""

  def __init__(self, place: int):
    """Takes the `place` m·B + b of the first such row."""
    super().__init__(f"row {place} is not what was read")
    self.place = place


@dataclasses.dataclass(frozen=True)
class RowPlacement:
  """Makes global arrays of the rows that processes have read."""

  sharding: NamedSharding
  """Of the tokens; may divide rows, and each row's tokens."""
  row_dim: int
  """The dimension of the rows, of size `num_rows`: 1 after that of microbatches, or 0."""
  num_rows: int
  loading: tuple[int, ...] = ()
  """The processes that read for all; none: each for itself."""
  process_of: Callable[[Any], int] = lambda device: device.process_index

  @functools.cached_property
  def plan(self) -> Redistribution:
    """The process that reads each block, and those that it sends it to."""
    shape = (1,) * self.row_dim + (self.num_rows,)
    indices = self._of_rank(len(shape)).devices_indices_map(shape)
    devices = self._mesh.devices.reshape(-1)
    columns = [range(*indices[d][self.row_dim].indices(self.num_rows)) for d in devices]
    blocks = [one.start // len(one) for one in columns]
    return redistribution(list(map(self.process_of, devices)), blocks, self.loading)

  @property
  def sends(self) -> bool:
    """Whether rows are handed from one process to another."""
    return bool(self.plan.rounds)

  @property
  def _mesh(self) -> Mesh:
    assert isinstance(self.sharding.mesh, Mesh)
    return self.sharding.mesh

  def columns(self, process: int) -> np.ndarray:
    """Returns which of the rows a process reads, int64[R] ascending."""
    return columns_of_blocks(self.plan.blocks_read.get(process, ()), self._block_size)

  def part(self, process: int) -> RowPart:
    """Returns which tokens of each row a process reads: those of its devices, or all if rows are sent."""
    return WHOLE if self.sends else self._parts.get(process, WHOLE)

  @functools.cached_property
  def _parts(self) -> Mapping[int, RowPart]:
    """Those of the processes whose devices have a part of rows."""
    dim, mesh = self.row_dim + 1, self._mesh
    names = self.sharding.spec[dim] if len(self.sharding.spec) > dim else None
    ways = math.prod(
      mesh.shape[name] for name in ((names,) if isinstance(names, str) else names or ())
    )
    shape = (1,) * self.row_dim + (self.num_rows, ways)
    ends: dict[int, list[int]] = {}
    for device, index in self._of_rank(len(shape)).devices_indices_map(shape).items():
      ends.setdefault(self.process_of(device), []).extend(index[dim].indices(ways)[:2])
    return {
      process: RowPart(min(each), max(each), ways)
      for process, each in ends.items()
      if max(each) - min(each) < ways
    }

  def microbatches(self, used: int, capacity: int) -> int:
    """Returns how many microbatches a process reads: as many as are used, or all if none is sent.

    A power of two, so that few programs are compiled when the batch grows.
    """
    return min(capacity, 1 << (used - 1).bit_length()) if self.plan.rounds else capacity

  def hosts(self, column: int) -> str:
    """Returns who reads the rows of this column, and who uses them, for messages."""
    block = column // self._block_size
    readers, users = (
      f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(map(str, hosts))}"
      for hosts in (self.plan.readers[block], self.plan.users(block))
    )
    return f"read by {readers} and used by {users}"

  def stage(self, read: Mapping[int, Arrays], ids: np.ndarray) -> Staged:
    """Puts rows on the devices of this process.

    Args:
      read: by process, its `part` of its rows [K, R, …] in the order of `columns`: those of this process.
      ids: int32[C, B]: the sample of every row of the global array, −1 where there is none.

    Raises:
      WrongRowError: a row of this process, which nobody else needs, is not what was read for its sample.
    """
    if jax.default_backend() != "gpu":
      return self._stage(read, ids)
    with _PLACING:
      return self._stage(read, ids)

  def _stage(self, read: Mapping[int, Arrays], ids: np.ndarray) -> Staged:
    size = self._block_size
    placed = self._global(ids.shape, lambda block, _: ids[:, block * size : (block + 1) * size])
    one = next(iter(read.values()))
    names = [name for name in TOKEN_FIELDS if name in one]
    if self.sends:
      names.append(CHECKSUMS)
    else:
      self._check(read, ids)
    if self.plan.rounds:
      records = {process: _packed(names, arrays) for process, arrays in read.items()}
      sent = self._slots(records)
      fields = tuple((name, one[name].dtype.str, one[name].shape[2:]) for name in names)
      program = _redistribution(
        self.sharding, self.row_dim, self.plan.rounds, self.plan.copies, len(ids), fields
      )
      return lambda: Rows(**program(sent), sample_ids=placed)
    arrays: dict[str, Any] = {
      name: self._joined({p: rows[name] for p, rows in read.items()}) for name in names
    }
    return lambda: Rows(**arrays, sample_ids=placed)

  def _check(self, read: Mapping[int, Arrays], ids: np.ndarray) -> None:
    for process, arrays in read.items():
      columns = self.columns(process)
      # One microbatch after the other: the products of a step's numbers would take its memory again.
      for microbatch, ids_B in enumerate(ids[:, columns]):
        rows = {name: array[microbatch] for name, array in arrays.items()}
        wrong = row_checksums(rows, ids_B) != rows[CHECKSUMS]
        if wrong.any():
          raise WrongRowError(microbatch * self.num_rows + int(columns[wrong.argmax()]))

  @functools.cached_property
  def _block_size(self) -> int:
    return self.num_rows // len(self.plan.readers)

  def _block(self, block: int, process: int, rows: np.ndarray) -> np.ndarray:
    """Returns a block [K, b, …] of the rows [K, R, …] that a process has read."""
    first = bisect.bisect_left(self.plan.blocks_read[process], block) * self._block_size
    return rows[:, first : first + self._block_size]

  def _joined(self, read: Mapping[int, np.ndarray]) -> jax.Array:
    """Joins the rows [C, R, …], or parts of them, that each process has read into one global array."""
    process, one = next(iter(read.items()))
    capacity, _, *trail = one.shape
    trail = [self.part(process).length_of_whole(size) for size in trail]

    def own(block: int, index: tuple[slice, ...]) -> np.ndarray:
      for process in self.plan.readers[block]:
        if process in read:
          rows = self._block(block, process, read[process])
          if not index:
            return rows
          has, (start, stop, _) = self.part(process).tokens(trail[0]), index[0].indices(trail[0])
          if has.start <= start and stop <= has.stop:
            return rows[:, :, start - has.start : stop - has.start]
      raise ValueError(f"no process has read block {block} of these tokens: {index}")

    return self._global((capacity, self.num_rows, *trail), own)

  def _global(
    self, shape: tuple[int, ...], own: Callable[[int, tuple[slice, ...]], np.ndarray]
  ) -> jax.Array:
    """Returns the array [C, B, …], or [B, …] without microbatches.

    Args:
      own: from the number of a block, and the index of its tokens if it has any, to [C, b, …].
    """
    dim = self.row_dim

    def local(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None
      rows = own((index[dim].start or 0) // self._block_size, index[dim + 1 :])
      return rows if dim else rows[0]

    shape = shape[1 - dim :]
    return _noted(jax.make_array_from_callback(shape, self._of_rank(len(shape)), local))

  def _slots(self, records: Mapping[int, np.ndarray]) -> jax.Array:
    """Returns what each device keeps and sends: int32[D, slots, K, b, W] of records [K, R, W]."""
    mesh, plan = self._mesh, self.plan
    K, _, W = next(iter(records.values())).shape
    shape = (mesh.size, len(plan.rounds) + 1, K, self._block_size, W)

    def local(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None
      device = index[0].start or 0
      slots = np.zeros(shape[1:], np.int32)
      for slot, block in enumerate(plan.slots[device]):
        if block is not None:
          process = plan.processes[device]
          slots[slot] = self._block(block, process, records[process])
      return slots[None]

    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return _noted(jax.make_array_from_callback(shape, place, local))

  def _of_rank(self, rank: int) -> NamedSharding:
    return NamedSharding(self.sharding.mesh, PartitionSpec(*self.sharding.spec[:rank]))


def _noted(array: jax.Array) -> jax.Array:
  _LATELY.append(weakref.ref(array))
  return array


def _packed(names: Sequence[str], arrays: Arrays) -> np.ndarray:
  """Packs all numbers of each row into one record: int32[K, R, W]."""

  def numbers(array: np.ndarray) -> np.ndarray:
    return array.view(np.int32).reshape(*array.shape[:2], math.prod(array.shape[2:]))

  return np.concatenate([numbers(arrays[name]) for name in names], axis=-1)


@functools.cache
def _redistribution(
  sharding: NamedSharding,
  row_dim: int,
  rounds: Rounds,
  copies: Rounds,
  capacity: int,
  fields: tuple[tuple[str, str, tuple[int, ...]], ...],
) -> jax.stages.Wrapped:
  """Returns the program from what devices keep and send, int32[D, slots, K, b, W], to named arrays.

  It holds collective permutes alone, one a round.
  """
  mesh, axes = sharding.mesh, sharding.mesh.axis_names

  def unpacked(records: jax.Array) -> dict[str, jax.Array]:
    result, first = {}, 0
    for name, dtype, trail in fields:
      end = first + math.prod(trail)
      column = records[..., first:end].reshape(*records.shape[:-1], *trail)
      result[name], first = column.view(np.dtype(dtype)), end
    return result

  def local(slots: jax.Array) -> dict[str, jax.Array]:
    # A device keeps a block or receives one, never both; where nothing is received are zeros.
    records = slots[0, 0]
    for slot, pairs in enumerate(rounds, 1):
      records = records + jax.lax.ppermute(slots[0, slot], axes, pairs)
    for pairs in copies:
      records = records + jax.lax.ppermute(records, axes, pairs)
    padding = [(0, capacity - records.shape[0]), *((0, 0),) * 2]
    records = jnp.pad(records, padding)
    return unpacked(records if row_dim else records[0])

  whole = PartitionSpec(*sharding.spec[: row_dim + 1])
  mapped = jax.shard_map(
    local, mesh=mesh, in_specs=PartitionSpec(axes), out_specs=whole, check_vma=False
  )
  places = {
    name: NamedSharding(mesh, PartitionSpec(*sharding.spec[: row_dim + 1 + len(trail)]))
    for name, _, trail in fields
  }
  return jax.jit(mapped, out_shardings=places)
