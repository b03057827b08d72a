"""Runs one after the other in one start: python tests/many_runs.py FILE [key=value …].

FILE has a line of keys for each run. Each leaves its last parameters beside its folder. A batch that
follows the noise scale does so however little is known of it, as it is in short runs. A program of
several processes is compiled by the first of them alone: what is compared is what they compute.
"""

import functools
import pathlib
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import cache_key
from jax.sharding import NamedSharding, PartitionSpec

from maxbatch.config.load import load_config
from maxbatch.hardware.processes import leave_together
from maxbatch.modes.run import run
from maxbatch.noise.controller import ControllerLimits
from maxbatch.run_folder.paths import RunFolder


def whole(leaves: list[jax.Array]) -> list[np.ndarray]:
  """Arrays of which every process has a part."""
  sharding = leaves[0].sharding
  assert isinstance(sharding, NamedSharding)
  everywhere = NamedSharding(sharding.mesh, PartitionSpec())
  return list(map(np.asarray, jax.jit(lambda x: x, out_shardings=everywhere)(leaves)))


def compile_once() -> None:
  """Processes of CPUs have one key for a program that all of them run, and one compiles it.

  The key has what jax calls a topology in it, which says on CPU whose process it is.
  """
  of_one_process = cache_key._hash_accelerator_config

  def hashed(hash_object: Any, devices: np.ndarray) -> None:
    if len({device.process_index for device in devices.flat}) > 1:
      cache_key._hash_devices(hash_object, devices)
    else:
      of_one_process(hash_object, devices)

  cache_key._hash_accelerator_config = hashed
  jax.config.update("jax_share_binary_between_hosts", True)


def main(file: str, keys: list[str]) -> None:
  """Trains all runs and keeps their parameters."""
  for line in pathlib.Path(file).read_text().splitlines():
    config = load_config([*keys, *line.split()])
    state, _ = run(config)
    leaves = whole(jax.tree.leaves(state.params))
    if jax.process_index() == 0:
      path = RunFolder.of(config.run).path
      np.savez(path.with_name(f"{path.name}.npz"), *leaves)


if __name__ == "__main__":
  compile_once()
  bold = functools.partial(ControllerLimits, max_relative_half_width=1e6)
  with mock.patch("maxbatch.noise.steering.ControllerLimits", bold):
    main(sys.argv[1], sys.argv[2:])
  leave_together(0)
