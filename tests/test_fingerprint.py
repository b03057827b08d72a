"""Fingerprints: equal for equal values however they are divided, different after any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxbatch.checkpoints.fingerprint import (
  VERSIONS,
  PartsOfArray,
  fingerprints,
  named_leaves,
)

DTYPES = (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32, jnp.int8, jnp.bool_)


def tree_of_everything() -> dict:
  """Leaves of every kind a training state has, on one device."""
  values = np.random.default_rng(0).integers(0, 200, (16, 24))
  tree = {jnp.dtype(dtype).name: jnp.asarray(values).astype(dtype) for dtype in DTYPES}
  return tree | {
    "nested": [jnp.float32(1.5), (jnp.int32(-7),)],
    "flag": jnp.bool_(True),
    "empty": jnp.zeros((0, 3)),
  }


def scattered(number: int) -> int:
  number = ((number ^ (number >> 16)) * 0x85EBCA6B) % 2**32
  number = ((number ^ (number >> 13)) * 0xC2B2AE35) % 2**32
  return number ^ (number >> 16)


def scalar_reference(array: np.ndarray, version: int) -> int:
  """The formula of the module's docstring, one element at a time."""
  sums = [0] * (6 if version == 3 else 1)
  unsigned = np.ascontiguousarray(array).view(f"u{array.itemsize}")
  for index, bits in enumerate(unsigned.ravel().tolist()):
    place = scattered(index)
    if version < 3:
      sums[0] += (bits if version == 1 else scattered(bits)) * (place | 1)
      continue
    for at, half in ((0, bits % 2**16), (3, bits >> 16)):
      for number, weight in enumerate((1, place, place >> 17)):
        sums[at + number] += half * weight
  return sum((each % 2**32) << (32 * number) for number, each in enumerate(sums))


@pytest.mark.parametrize("version", VERSIONS)
def test_follows_the_formula(version):
  tree = tree_of_everything()
  leaves = named_leaves(tree).items()
  expected = {name: scalar_reference(np.asarray(leaf), version) for name, leaf in leaves}
  assert fingerprints(tree, version) == expected
  assert expected["empty"] == 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("parts", [1, 3, 16])
def test_parts_of_an_array_have_the_fingerprint_of_the_whole(version, parts):
  # Several times as long as what is computed at once.
  tree = tree_of_everything() | {"long": np.arange(300_000, dtype=np.float32)}
  for name, leaf in named_leaves(tree).items():
    array = np.asarray(leaf)
    found = PartsOfArray(version)
    for part in np.array_split(array, parts) if array.ndim else [array]:
      found.add(part)
    assert {name: found.fingerprint} == fingerprints({name: leaf}, version)


def test_the_newest_version_is_taken_by_default():
  tree = tree_of_everything()
  assert fingerprints(tree) == fingerprints(tree, 3)
  assert len({str(fingerprints(tree, version)) for version in VERSIONS}) == 3


def opposite_weights(size: int) -> tuple[int, int]:
  """Two places of an array whose weights in version 2 add up to 0."""
  seen: dict[int, int] = {}
  for index in range(size):
    weight = scattered(index) | 1
    if -weight % 2**32 in seen:
      return seen[-weight % 2**32], index
    seen[weight] = index
  raise AssertionError(f"no two of {size}")


def test_an_equal_change_of_two_equal_elements_shows_wherever_they_are():
  """Version 2 is blind to it: the birthday paradox gives every larger array such a pair."""
  first, second = opposite_weights(2**18)
  zeros = np.zeros(second + 1, np.float32)
  changed = zeros.copy()
  changed[[first, second]] = -0.0
  for version, is_seen in ((2, False), (3, True)):
    prints = [fingerprints({"a": jnp.asarray(a)}, version) for a in (zeros, changed)]
    assert (prints[0] != prints[1]) == is_seen


def test_no_two_changes_cancel_in_the_sums():
  """Changes made to cancel in two of the three sums, at the worst distance: 2¹⁷ apart by s."""
  places = {scattered(index): index for index in range(2**21)}
  first, other = next((s, s ^ 2**17) for s in places if s ^ 2**17 in places and not s & 2**17)
  size = max(places[first], places[other]) + 1
  arrays = [np.full(size, 2**15, np.uint32), np.full(size, 2**15, np.uint32)]
  arrays[1][places[first]] += 2**14
  arrays[1][places[other]] -= 2**14
  before, after = (fingerprints({"a": jnp.asarray(a)})["a"] for a in arrays)
  assert before % 2**32 == after % 2**32
  assert before != after


@settings(max_examples=200)
@given(
  values=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4),
  places=st.sets(st.integers(0, 16 * 24 - 1), min_size=2, max_size=2),
)
def test_any_two_changes_show(values, places):
  arrays = [np.zeros((16, 24), np.uint32) for _ in range(2)]
  for number, place in enumerate(sorted(places)):
    arrays[0].flat[place], arrays[1].flat[place] = values[2 * number : 2 * number + 2]
  one, other = (fingerprints({"a": jnp.asarray(a)}) for a in arrays)
  assert (one == other) == bool((arrays[0] == arrays[1]).all())


@settings(max_examples=examples(100))
@given(
  elements=st.sets(st.integers(0, 16 * 24 - 1), min_size=1, max_size=16),
  bit=st.integers(0, 7),
  dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int32]),
)
def test_the_same_bit_flipped_in_several_elements_shows(elements, bit, dtype):
  """An even number of signs too, which odd weights do not tell apart: 2³¹ · odd is 2³¹."""
  array = np.array(tree_of_everything()[jnp.dtype(dtype).name])
  flipped = array.copy()
  unsigned = f"u{array.itemsize}"
  mask = np.array(1 << (8 * array.itemsize - 1 - bit), unsigned)
  flipped.view(unsigned).reshape(-1)[sorted(elements)] ^= mask
  assert fingerprints({"a": jnp.asarray(array)}) != fingerprints({"a": jnp.asarray(flipped)})


def test_names_are_paths():
  assert list(fingerprints({"a": {"b": jnp.ones(2)}, "c": [jnp.ones(1)]})) == ["a/b", "c/0"]
  assert fingerprints({}) == {}


def test_two_leaves_of_one_name_are_refused():
  with pytest.raises(ValueError, match="same path"):
    named_leaves({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("shape", "spec"), [((4, 2), ("x", "y")), ((2, 4), ("y", None))])
def test_does_not_depend_on_sharding(axis_type, shape, spec):
  tree = tree_of_everything()
  mesh = jax.make_mesh(shape, ("x", "y"), axis_types=(axis_type,) * 2)

  def place(leaf: jax.Array) -> jax.Array:
    divided = leaf.ndim == 2 and leaf.size > 0
    return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*spec if divided else ())))

  assert fingerprints(jax.tree.map(place, tree)) == fingerprints(tree)


def test_leaves_on_fewer_devices_than_there_are():
  tree = tree_of_everything()
  mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[3:5])
  there = jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
  assert fingerprints(there) == fingerprints(tree)


@settings(max_examples=examples(60))
@given(element=st.integers(0, 16 * 24 - 1), bit=st.integers(0, 31), dtype=st.sampled_from(DTYPES))
def test_every_flipped_bit_shows(element, bit, dtype):
  array = np.array(tree_of_everything()[jnp.dtype(dtype).name])
  bit = 0 if dtype == jnp.bool_ else bit % (8 * array.itemsize)
  flipped = array.copy()
  unsigned = f"u{array.itemsize}"
  flipped.view(unsigned).reshape(-1)[element] ^= np.array(1 << bit, unsigned)
  assert fingerprints({"a": jnp.asarray(array)}) != fingerprints({"a": jnp.asarray(flipped)})


def test_swapped_rows_and_elements_show():
  # Values whose low 24 bits are zero, in rows of a power of two: linear weights would miss these.
  array = np.float32(2.0) ** np.arange(16, dtype=np.float32)[:, None] * np.ones(
    (1, 65536), np.float32
  )
  swapped = array.copy()
  swapped[[0, 8]] = swapped[[8, 0]]
  one_swap = array.copy()
  one_swap[0, 0], one_swap[1, 0] = array[1, 0], array[0, 0]
  results = [fingerprints({"a": jnp.asarray(a)})["a"] for a in (array, swapped, one_swap)]
  assert len(set(results)) == 3


def test_negative_zero_and_nan_payloads_are_told_apart():
  plus = jnp.array([0.0, jnp.nan])
  minus = jnp.array([-0.0, jnp.nan])
  assert fingerprints({"a": plus}) != fingerprints({"a": minus})
  assert fingerprints({"a": plus}) == fingerprints({"a": plus + 0})
