"""One number per array that differs when the array does.

The elements are read as unsigned integers of at most 32 bits. Of their low and of their high 16 bits v,
the fingerprint has three sums mod 2³²: Σ v, Σ v·s and Σ v·(s >> 17), where s is a number drawn one to
one from the element's flat index.

Any change of one or two elements shows, always. Let d and e be by how much their v changes, of which at
least one is not 0. The first sum stays only if e = −d, since |d + e| < 2¹⁷; the second then only if
2³² divides d times the difference of the two s; d has at most 15 factors 2, so 2¹⁷ divides this
difference; by the third sum 2³² would divide d times a number below 2¹⁵ that is not 0. (The index is
taken mod 2³²: of larger arrays, elements so far apart have one s.) More changes go unseen as seldom as
in other sums of so many bits, since s is scattered.

Sums do not depend on their order, so neither does the fingerprint on how the array is divided over
devices. Versions 1 and 2 are one sum of 32 bits, Σ v·w or Σ h(v)·w over all bits v, with odd weights
w: version 1 does not see an even number of flipped signs, and 2 no equal change of two equal elements
wherever their weights add up to 0, as those of some pairs do in any larger array.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from maxbatch.data.rows import scattered
from maxbatch.errors import UserError

VERSION = 3
"""Version of the formula; checkpoints that do not name one were written with version 1."""
VERSIONS = (1, 2, VERSION)

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_AT_ONCE = 2**17
"""Elements of which numpy holds several copies, in the processor's cache."""

_Bits = TypeVar("_Bits", np.ndarray, jax.Array)


def named_leaves(tree: object) -> dict[str, jax.Array]:
  """Returns the leaves of `tree` by their path, such as `params/layers/kernel`, in the tree's own
  order. Raises ValueError: two leaves would have the same name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
  if len(named) != len(leaves):
    raise ValueError("Two leaves of the tree have the same path.")
  return named


def fingerprints(tree: object, version: int = VERSION) -> dict[str, int]:
  """Returns the fingerprint of every leaf of `tree`, by name, by one of VERSIONS.

  Leaves are numbers or booleans of at most 8 bytes, of any shape and sharding (not PRNG keys). They
  stay where they are: one dispatch and one transfer. Waits until the leaves are computed.
  """
  leaves = named_leaves(tree)
  if not leaves:
    return {}
  sums = np.asarray(_compiled(_replicated_like(leaves), version)(list(leaves.values())))
  return dict(zip(leaves, map(_joined, sums), strict=True))


def _replicated_like(leaves: dict[str, jax.Array]) -> Sharding | None:
  """Returns a sharding with the whole result in every process; None where one device holds it."""
  for leaf in leaves.values():
    if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
      return NamedSharding(leaf.sharding.mesh, PartitionSpec())
  return None


@functools.cache
def _compiled(out_sharding: Sharding | None, version: int):
  return jax.jit(
    lambda leaves: jnp.stack([_fingerprint(leaf, version) for leaf in leaves]),
    out_shardings=out_sharding,
  )


@functools.partial(jax.jit, static_argnums=1)
def _fingerprint(leaf: jax.Array, version: int) -> jax.Array:
  """Returns the sums of one array, uint32[S].

  A function of its own for jax: traced once for all leaves of one shape, of which a state has many.
  """
  bits = _bits(leaf)
  terms = _terms(bits, _flat_index(bits.shape), version)

  def add(sums: Sequence[jax.Array], more: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.add, sums, more))

  # One reduction of all: six, each with weights of its own, take XLA's CPU compiler ten times as long.
  nothing = (np.uint32(0),) * len(terms)
  return jnp.stack(jax.lax.reduce(tuple(terms), nothing, add, range(bits.ndim)))


def _bits(leaf: jax.Array) -> jax.Array:
  """Returns the elements as uint32; an 8-byte element becomes two, along a new last dim."""
  if leaf.dtype == jnp.bool_:
    return leaf.astype(jnp.uint32)
  unsigned = _UNSIGNED[leaf.dtype.itemsize]
  return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _flat_index(shape: tuple[int, ...]) -> jax.Array:
  """Returns the place of every element in the flat array mod 2³²: uint32 of this shape."""
  index = jnp.zeros(shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(len(shape))):
    index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
    stride *= shape[axis]
  return index


def _terms(bits: _Bits, index: _Bits, version: int) -> list[_Bits]:
  """Returns what each element adds to each of the sums, as uint32 of their shape.

  Args:
    bits: the elements as uint32.
    index: theirs in the flat array.
  """
  places = scattered(index)
  if version < 3:
    return [(bits if version == 1 else scattered(bits)) * (places | np.uint32(1))]
  halves = (bits & np.uint32(0xFFFF), bits >> np.uint32(16))
  return [term for v in halves for term in (v, v * places, v * (places >> np.uint32(17)))]


def _joined(sums: np.ndarray) -> int:
  """Returns uint32[S] as one number, the first as its lowest bits."""
  return int.from_bytes(sums.astype("<u4").tobytes(), "little")


class PartsOfArray:
  """The fingerprint of an array of which consecutive parts come one after the other, as numpy's."""

  def __init__(self, version: int = VERSION):
    self._version, self._index, self._sums = version, 0, np.zeros(1, np.uint32)

  @property
  def fingerprint(self) -> int:
    """Returns that of the parts so far."""
    return _joined(self._sums)

  def add(self, part: np.ndarray) -> None:
    """Counts one part more."""
    unsigned = np.dtype(_UNSIGNED[part.dtype.itemsize].dtype)
    bits = np.ascontiguousarray(part).reshape(-1).view(unsigned)
    for start in range(0, bits.size, _AT_ONCE):
      some = bits[start : start + _AT_ONCE].astype(np.uint32)
      index = np.arange(self._index, self._index + some.size).astype(np.uint32)
      terms = _terms(some, index, self._version)
      self._sums = self._sums + np.array([each.sum(dtype=np.uint32) for each in terms])
      self._index += some.size


def verified(
  blocks: Iterable[np.ndarray], fingerprint: int, version: int, differs: UserError
) -> Iterator[np.ndarray]:
  """Yields the blocks of an array one after the other; raises `differs` at the end if they are not it."""
  result = PartsOfArray(version)
  for block in blocks:
    result.add(block)
    yield block
  if result.fingerprint != fingerprint:
    raise differs
