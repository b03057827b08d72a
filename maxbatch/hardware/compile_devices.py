"""The devices a program is compiled for: those of the run, or those of a TPU slice that is not here.

The TPU compiler runs on any machine. It describes a slice's devices, and programs can be compiled
for these, but never run.
"""

import importlib.util
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Device, find_devices, keep_tpu_library_quiet, platforms
from maxbatch.hardware.tpu_slices import slice_named


def devices_of(config: Config) -> Sequence[Device]:
  """What the configuration's programs are compiled for.

  Raises:
    UserError: as `topology_devices` and `find_devices`.
  """
  name = config.compile.compile_topology
  if not name:
    return find_devices(config.mesh.num_simulated_devices)
  return topology_devices(name, config.compile.compile_topology_num_slices)


def topology_devices(name: str, num_slices: int = 1) -> Sequence[Device]:
  """The devices of `num_slices` TPU slices of this name, for compiling only.

  Raises:
    UserError: there is no such slice, or the TPU compiler is not installed.
  """
  slice_ = slice_named(name)
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(
      f"compile_topology={name} needs the TPU compiler, which is not installed; "
      "pip install 'maxbatch[tpu]' installs it, on any x86-64 Linux machine"
    )
  keep_tpu_library_quiet()
  if not platforms():
    jax.config.update("jax_platforms", "cpu")
  return topologies.get_topology_desc(
    platform="tpu",
    topology_name=slice_.topology_name,
    chip_config_name=slice_.chip_config_name,
    chips_per_host_bounds=slice_.chips_per_host_bounds,
    num_slices=num_slices,
  ).devices
