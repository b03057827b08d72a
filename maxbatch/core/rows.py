"""Rows of a batch for loops of one's own: cut into microbatches, and a random key for each row."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


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
