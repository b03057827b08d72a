"""The devices of this run: those that are there, or simulated ones on the CPU."""

import os
from collections.abc import Sequence
from typing import Protocol

import jax

from maxbatch.errors import UserError

_NO_TPU = {
  # Else the TPU library asks a cloud's metadata server about the machine it is on, for minutes.
  "TPU_SKIP_MDS_QUERY": "1",
  # Else it prints that it does not find these.
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  # Compiling holds no TPU, so nobody needs to be kept out.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


_THREADS_EACH = 8
"""Of a simulated device, in XLA's pool."""


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
  elif not platforms():
    # Where jax finds a TPU it has named it there. Elsewhere it tries the TPU library all the same,
    # if only the compiler in it is wanted, and its complaints would come before our first line.
    keep_tpu_library_quiet()
  return jax.devices()


def platforms() -> str:
  """The platforms that jax is told to use; empty: it looks for itself."""
  return jax.config.values["jax_platforms"] or ""


def keep_tpu_library_quiet() -> None:
  """Tells the TPU library, where there is no TPU, what it would otherwise look and wait for."""
  for key, value in _NO_TPU.items():
    os.environ.setdefault(key, value)


def _simulate(count: int) -> None:
  # Who takes part in a collective holds a thread of XLA's pool until all have come. A device may be
  # in several at once, and with a thread for each device, as XLA has it where cores are fewer, some
  # wait for ever for others that get none. Idle threads cost nothing.
  os.environ.setdefault("NPROC", str(max(_THREADS_EACH * count, os.cpu_count() or 1)))
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
