"""The devices of this run: those that are there, or simulated ones on the CPU."""

from collections.abc import Sequence
from typing import Protocol

import jax

from maxbatch.errors import UserError


class Device(Protocol):
  """What we ask of a jax device."""

  @property
  def platform(self) -> str:
    """cpu, gpu or tpu."""
    ...

  @property
  def device_kind(self) -> str:
    """The model of the device."""
    ...


def find_devices(num_simulated_devices: int) -> Sequence[Device]:
  """All devices of all processes.

  Args:
    num_simulated_devices: CPU devices to simulate; 0 takes what is there.

  Raises:
    UserError: jax has already started with another number of devices.
  """
  if num_simulated_devices:
    _simulate(num_simulated_devices)
  return jax.devices()


def _simulate(count: int) -> None:
  try:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
  except RuntimeError as error:
    there = len(jax.devices())
    if there != count:
      raise UserError(
        f"num_simulated_devices={count}, but jax has already started with {there} devices; "
        f"set it first, or use num_simulated_devices={there}"
      ) from error


def num_slices(devices: Sequence[Device]) -> int:
  """Slices the devices belong to; 1 where the platform knows none."""
  return len({getattr(device, "slice_index", 0) for device in devices})
