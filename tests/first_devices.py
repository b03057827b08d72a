"""Runs in a test's own process that train on fewer devices than all tests see."""

import jax
import pytest

from maxbatch.batch.from_config import topology
from maxbatch.config.schema import Config
from maxbatch.hardware.devices import Target


def use_first_devices(patch: pytest.MonkeyPatch, count: int) -> None:
  """Programs of fewer devices compile and run in less processor time."""

  def find(config: Config) -> Target:
    return Target(jax.devices()[:count], topology(config.mesh, count))

  patch.setattr("maxbatch.modes.start.find_devices", find)
