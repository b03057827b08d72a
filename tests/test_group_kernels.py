"""The kernels of products by groups, interpreted, beside a product for each row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.models import group_kernels

E, D, F = 4, 256, 384
SIZES = {
  "some empty": (300, [70, 0, 130, 100]),
  "rows of no group": (300, [0, 0, 128, 60]),
  "less than a tile": (20, [3, 0, 17, 0]),
  "none": (256, [0, 0, 0, 0]),
}


@pytest.mark.parametrize(("is_turned", "bytes_of_blocks"), [(False, 2**25), (True, 2**19)])
@pytest.mark.parametrize("case", SIZES)
def test_values_and_gradients_are_those_of_each_row(case, is_turned, bytes_of_blocks, monkeypatch):
  """With blocks of all columns, and with several, of what is contracted too."""
  monkeypatch.setattr(group_kernels, "BLOCK_BYTES", bytes_of_blocks)
  rows, sizes = SIZES[case]
  blocks = group_kernels.product_tiles(rows, rows, E, D, F, 4)
  assert not is_turned or (blocks.contracted < D and blocks.width < F)
  random = np.random.default_rng(0)
  shapes = (rows, D), (E, F, D) if is_turned else (E, D, F), (rows, F)
  x_SD, matrix_EDF, d_SF = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)
  number, of_row = sum(sizes), np.repeat(np.arange(E), sizes)

  def plain(x_SD, matrix_EDF):
    matrix_EDF = jnp.swapaxes(matrix_EDF, 1, 2) if is_turned else matrix_EDF
    return jnp.einsum("sd,sdf->sf", x_SD[:number], matrix_EDF[of_row])

  def ours(x_SD, matrix_EDF):
    sizes_E = jnp.asarray(sizes, jnp.int32)
    y_SF: Any = group_kernels.grouped(x_SD, matrix_EDF, sizes_E, is_turned, 1.0, True)
    return y_SF[:number]

  (y, back), (expected, plain_back) = (jax.vjp(f, x_SD, matrix_EDF) for f in (ours, plain))
  (d_x, d_matrix), (plain_d_x, plain_d_matrix) = (f(d_SF[:number]) for f in (back, plain_back))
  found, plainly = (y, d_x[:number], d_matrix), (expected, plain_d_x[:number], plain_d_matrix)
  for a, b in zip(found, plainly, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
