"""Runs one after the other in one start: python tests/many_runs.py FILE [key=value …].

FILE has a line of keys for each run. Each leaves its last parameters beside its folder. A batch that
follows the noise scale does so however little is known of it, as it is in short runs.
"""

import functools
import pathlib
import sys
from unittest import mock

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxbatch.config.load import load_config
from maxbatch.hardware.processes import leave_together
from maxbatch.modes.run import run
from maxbatch.noise.controller import ControllerLimits
from maxbatch.run_folder.paths import RunFolder


def whole(leaf: jax.Array) -> np.ndarray:
  """An array of which every process has a part."""
  return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def main(file: str, keys: list[str]) -> None:
  """Trains all runs and keeps their parameters."""
  for line in pathlib.Path(file).read_text().splitlines():
    config = load_config([*keys, *line.split()])
    state, _ = run(config)
    leaves = [whole(leaf) for leaf in jax.tree.leaves(state.params)]
    if jax.process_index() == 0:
      path = RunFolder.of(config.run).path
      np.savez(path.with_name(f"{path.name}.npz"), *leaves)


if __name__ == "__main__":
  bold = functools.partial(ControllerLimits, max_relative_half_width=1e6)
  with mock.patch("maxbatch.noise.steering.ControllerLimits", bold):
    main(sys.argv[1], sys.argv[2:])
  leave_together(0)
