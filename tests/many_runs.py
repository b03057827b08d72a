"""Runs one after the other in one start: python tests/many_runs.py FILE [key=value …].

FILE has a line of keys for each run. Each leaves its last parameters beside its folder. A batch that
follows the noise scale does so however little is known of it, as it is in short runs. A program of
several processes is compiled by the first of them alone: what is compared is what they compute.
"""

import functools
import pathlib
import sys
from unittest import mock

import jax
import numpy as np
from compiled_once import compile_once
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
  with mock.patch("maxbatch.noise.controller.ControllerLimits", bold):
    main(sys.argv[1], sys.argv[2:])
  leave_together(0)
