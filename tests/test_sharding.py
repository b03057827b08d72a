"""Sums over the devices that fsdp sets apart, of a parameter's gradient in bfloat16 too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import mesh

from maxbatch.core.topology import Topology
from maxbatch.hardware.shard_maps import over_rows, sum_over_rows
from maxbatch.hardware.sharding import make_mesh

AXES = ("embed", None)


def product(x_BE: jax.Array, matrix_EL: jax.Array) -> jax.Array:
  return x_BE @ matrix_EL


def outer(x_BE: jax.Array, d_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
  return x_BE.T @ d_BL, d_BL.sum(1)


# XLA's CPU compiler aborts the process on a sum of bfloat16 that comes from a shard_map.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [8, 6])
def test_a_gradient_is_the_sum_over_the_rows_of_all_devices(dtype, width):
  random = np.random.default_rng(0)
  x_BE, d_BL, matrix_EL = (
    jnp.asarray(random.integers(-3, 4, shape), dtype) for shape in [(8, width), (8, 2), (width, 2)]
  )

  def gradients(matrix_EL, x_BE, d_BL):
    with jax.sharding.use_abstract_mesh(mesh(fsdp=4).abstract_mesh):
      _, back = jax.vjp(
        lambda matrix_EL: over_rows(lambda m, x: product(x, m), matrix_EL, AXES, x_BE), matrix_EL
      )
      return back(d_BL)[0], *sum_over_rows(outer, AXES, matrix_EL.shape, x_BE, d_BL)

  whole = jax.sharding.NamedSharding(mesh(fsdp=4), jax.sharding.PartitionSpec())
  result = jax.jit(gradients, out_shardings=whole)(matrix_EL, x_BE, d_BL)
  expected_EL, of_each_B = outer(x_BE, d_BL)
  # Small whole numbers: exact in any order.
  for each, expected in zip(result, (expected_EL, expected_EL, of_each_B), strict=True):
    assert each.dtype == dtype
    np.testing.assert_array_equal(each, expected)


def test_every_device_has_its_place_along_every_axis():
  """The mesh names its axes in another order than a topology does."""
  devices = jax.devices()
  made = make_mesh(Topology.of(data=2, fsdp=2, stage=2), devices)
  assert made.shape == {"data": 2, "stage": 2, "fsdp": 2, "tensor": 1}
  # XLA wants the axes that an outer shard_map takes before those of an inner one.
  assert made.axis_names[:2] == ("data", "stage")
  for number, (data, fsdp, stage) in enumerate(np.ndindex(2, 2, 2)):
    assert made.devices[data, stage, fsdp, 0] == devices[number]
