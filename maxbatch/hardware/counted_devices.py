"""Devices as mere numbers, for commands that look at none and start no jax."""

import dataclasses

from maxbatch.batch.from_config import given_sizes, topology
from maxbatch.batch.supervised import is_rl, training_devices
from maxbatch.config.schema import Config
from maxbatch.core.solve import solve_num_devices
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.tpu_slices import slice_named

SIMULATED_DEVICES = 8
"""Number of simulated CPU devices where there is no accelerator and no number is given."""


@dataclasses.dataclass(frozen=True)
class CountedDevices:
  """How the mesh axes divide the devices, and the hosts that these belong to."""

  layout: Topology
  """Layout of the devices that train; rollout_devices come on top."""
  num_hosts: int
  assumption: str = ""
  """Why they are as many, where nothing says how many there are."""


def count_devices(config: Config, num_devices: int = 0, num_hosts: int = 0) -> CountedDevices:
  """Returns the devices that the configuration names, or as many as a command's own keys say.

  Args:
    config: names a TPU slice, or a number of simulated devices.
    num_devices: instead of these; -1: as many as the given sizes need; 0: not given.
    num_hosts: instead of those of the slice, or of one; 0: not given.

  Raises:
    UserError: the keys contradict each other, there is no such slice, or the axes do not multiply
      to the devices.
  """
  if num_hosts and is_rl(config.rl):
    raise UserError(
      f"num_hosts={num_hosts} says who loads samples, and with num_generations="
      f"{config.rl.num_generations} they are sampled; leave out num_hosts"
    )
  name, slices = config.compile.compile_topology, config.compile.compile_topology_num_slices
  if name and num_devices:
    raise UserError(
      f"compile_topology={name} already says how many devices there are; "
      f"leave out num_devices={num_devices}"
    )
  if name:
    named = slice_named(name).times(slices)
    count, hosts = named.num_devices, named.num_hosts
  elif num_devices == -1:
    if is_rl(config.rl):
      raise UserError(
        f"num_devices=-1 is derived from samples per device, and with num_generations="
        f"{config.rl.num_generations} micro_batch_size counts completions on all devices; for "
        "example "
        "num_devices=8"
      )
    count, hosts = solve_num_devices(given_sizes(config.batch)), 1
  else:
    simulated = config.mesh.num_simulated_devices
    count, hosts = num_devices or (SIMULATED_DEVICES if simulated == -1 else simulated), 1
  if count == 0:
    raise UserError(
      "num_simulated_devices=0 means this machine's devices, which a plan does not look at; for "
      "example num_devices=8 or compile_topology=v5e-8"
    )
  assumption = ""
  if not (name or num_devices) and config.mesh.num_simulated_devices == -1:
    assumption = (
      f"{count} simulated devices, as a run where there is no accelerator; for others: num_devices"
    )
  training = training_devices(config.rl, count, slices) if is_rl(config.rl) else count
  return CountedDevices(topology(config.mesh, training, slices), num_hosts or hosts, assumption)
