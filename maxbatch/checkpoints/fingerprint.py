"""One number per array that differs when the array does.

The fingerprint of an array is Σᵢ h(bitsᵢ)·wᵢ mod 2³², where bitsᵢ is element i read as an unsigned
integer, h scatters it one to one, and wᵢ is an odd weight drawn from its flat index i. Odd numbers
have an inverse mod 2³², so a change of any single element changes the sum, always; swapped or
shifted elements change it because weights differ. Without h (version 1) high bits count for little:
2³¹ times any odd number is 2³¹, so that an even number of flipped signs would not show. Integer sums
do not depend on their order, so neither does the fingerprint on how the array is divided over
devices.
"""

import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from maxbatch.data.rows import scattered
from maxbatch.errors import UserError

VERSION = 2
"""Of the formula; checkpoints that do not name one were written with version 1."""
VERSIONS = (1, VERSION)

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_AT_ONCE = 2**20
"""Elements of which numpy holds several copies, in the processor's cache."""


def named_leaves(tree: object) -> dict[str, jax.Array]:
  """Returns the leaves of `tree` by their path, such as `params/layers/kernel`, in the tree's own
  order. Raises ValueError: two leaves would have the same name."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
  if len(named) != len(leaves):
    raise ValueError("Two leaves of the tree have the same path.")
  return named


def fingerprints(tree: object, version: int = VERSION) -> dict[str, int]:
  """Computes the fingerprint of every leaf of `tree`, by name, each in [0, 2³²), by one of
  VERSIONS.

  Leaves are numbers or booleans of at most 8 bytes, of any shape and sharding (not PRNG keys).
  They stay where they are; one dispatch computes all the sums and one transfer brings them here.
  Waits until the leaves are computed.
  """
  leaves = named_leaves(tree)
  if not leaves:
    return {}
  sums = _compiled(_replicated_like(leaves), version)(list(leaves.values()))
  return dict(zip(leaves, np.asarray(sums).tolist(), strict=True))


def _replicated_like(leaves: dict[str, jax.Array]) -> Sharding | None:
  """Returns a sharding that gives every process the whole result; None where one device holds it
  all."""
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
  """Computes the fingerprint of one array, a uint32 scalar.

  A function of its own for jax: traced once for all leaves of one shape, of which a state has many.
  """
  bits = _bits(leaf) if version == 1 else scattered(_bits(leaf))
  return jnp.sum(bits * _odd_weights(bits.shape), dtype=jnp.uint32)


def _bits(leaf: jax.Array) -> jax.Array:
  """Returns the elements as uint32; an 8-byte element becomes two, along a new last dim."""
  if leaf.dtype == jnp.bool_:
    return leaf.astype(jnp.uint32)
  unsigned = _UNSIGNED[leaf.dtype.itemsize]
  return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _odd_weights(shape: tuple[int, ...]) -> jax.Array:
  """Returns an odd uint32 for every element, drawn from its flat index.

  Scattered, because under weights linear in the index two swapped rows of bfloat16-like values
  (low bits zero) can cancel.
  """
  index = jnp.zeros(shape, jnp.uint32)
  stride = 1
  for axis in reversed(range(len(shape))):
    index += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
    stride *= shape[axis]
  return scattered(index) | np.uint32(1)


def part_of_fingerprint(part: np.ndarray, first: int) -> int:
  """Computes what consecutive elements of an array add to its fingerprint, by the newest version.

  The fingerprint is the sum over all parts mod 2³²; no array needs to be in memory whole.

  Args:
    first: the index of the first of them in the flat array.
  """
  unsigned = np.dtype(_UNSIGNED[part.dtype.itemsize].dtype)
  bits = np.ascontiguousarray(part).reshape(-1).view(unsigned)
  first *= part.dtype.itemsize // unsigned.itemsize
  total = 0
  for start in range(0, bits.size, _AT_ONCE):
    some = bits[start : start + _AT_ONCE].astype(np.uint32)
    index = np.arange(first + start, first + start + some.size).astype(np.uint32)
    weighted = scattered(some) * (scattered(index) | np.uint32(1))
    total += int(weighted.sum(dtype=np.uint32))
  return total % 2**32


def verified(
  blocks: Iterable[np.ndarray], fingerprint: int, differs: UserError
) -> Iterator[np.ndarray]:
  """Yields the blocks of an array one after the other; raises `differs` at the end if the
  fingerprint does."""
  total, first = 0, 0
  for block in blocks:
    total += part_of_fingerprint(block, first)
    first += block.size
    yield block
  if total % 2**32 != fingerprint:
    raise differs
