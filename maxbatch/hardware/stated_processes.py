"""What keys and environment say of the processes that train together: no jax, no connection.

Keys come first, then variables. JAX_COORDINATOR_IP, JAX_COORDINATOR_PORT, NNODES and NODE_RANK are
MaxText's; JAX_PROCESS_COUNT, JOB_INDEX and PROCESSES_IN_JOB are those that xpk sets in a JobSet.
"""

import dataclasses
from collections.abc import Mapping

from maxbatch.config.allowed import Address
from maxbatch.config.schema import DistributedConfig
from maxbatch.errors import UserError

_POD = "JOB_COMPLETION_INDEX"
_NUMBERED = (
  ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
  ("PMI_SIZE", "PMI_RANK"),
  ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
  ("SLURM_NTASKS", "SLURM_PROCID"),
  ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
  ("JAX_PROCESS_COUNT", _POD),
  ("NNODES", "NODE_RANK"),
  ("WORLD_SIZE", "RANK"),
)
"""Variables that say how many processes there are, and which of them this one is."""

_ADDRESSES = ("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_IP")
_PORT_VARIABLE = "JAX_COORDINATOR_PORT"
_PORT = 1234
"""Where an address has none, as in MaxText."""


@dataclasses.dataclass(frozen=True)
class StatedProcesses:
  """Where process 0 listens, how many processes there are, and which one this is, if it is said."""

  address: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  sign: str = ""
  """The variable that shows several processes, with its value; empty: none does."""

  @property
  def several(self) -> bool:
    """Whether there must be others."""
    return self.address is not None or bool(self.sign) or (self.num_processes or 1) > 1


def stated_processes(keys: DistributedConfig, environment: Mapping[str, str]) -> StatedProcesses:
  """What is said of this process and the others.

  Raises:
    UserError: a variable is no number or no address, or there is no such process.
  """
  number, own, sign = _numbers(environment)
  number = number if keys.num_processes < 0 else keys.num_processes
  own = own if keys.process_id < 0 else keys.process_id
  if number is not None and own is not None and own >= number:
    raise UserError(
      f"process_id={own} num_processes={number}{f' ({sign})' if sign else ''}: processes count "
      f"from 0 to {number - 1}; for example process_id={number - 1}"
    )
  return StatedProcesses(_address(keys, environment), number, own, sign)


def _numbers(environment: Mapping[str, str]) -> tuple[int | None, int | None, str]:
  """Number of processes, number of this one, and the variable that shows several."""
  for count, rank in _NUMBERED:
    number = _integer(environment, count)
    if number is None or number < 2:
      continue
    own = _integer(environment, rank)
    if own is not None and rank == _POD:
      own += (_integer(environment, "JOB_INDEX") or 0) * (
        _integer(environment, "PROCESSES_IN_JOB") or 0
      )
    return number, own, f"{count}={number}"
  workers = environment.get("TPU_WORKER_HOSTNAMES", "")
  for name, is_sign in (
    ("TPU_WORKER_HOSTNAMES", "," in workers),
    ("MEGASCALE_NUM_SLICES", (_integer(environment, "MEGASCALE_NUM_SLICES") or 1) > 1),
    # Of a pod in an indexed job; nothing says of how many.
    (_POD, _POD in environment),
  ):
    if is_sign:
      return None, None, f"{name}={environment[name]}"
  return None, None, ""


def _address(keys: DistributedConfig, environment: Mapping[str, str]) -> str | None:
  """HOST:PORT of process 0. Raises UserError if a variable says something else."""
  name = next((name for name in _ADDRESSES if environment.get(name)), "")
  if keys.coordinator_address or not name:
    return keys.coordinator_address or None
  address, said = environment[name], f"{name}={environment[name]}"
  # An address of IPv6 has other colons.
  if address.count(":") != 1 and not address.rpartition("]:")[2].isdecimal():
    port = environment.get(_PORT_VARIABLE)
    address, said = (
      f"{address}:{port or _PORT}",
      f"{said} {_PORT_VARIABLE}={port}" if port else said,
    )
  if not Address().holds(address):
    raise UserError(
      f"{said} must be HOST:PORT, an IPv6 address in brackets; for example "
      f"{Address().nearest(address)}"
    )
  return address


def _integer(environment: Mapping[str, str], name: str) -> int | None:
  value = environment.get(name)
  if not value:
    return None
  if not value.isdecimal():
    raise UserError(f"{name}={value}: must be a number of processes or of one of them; unset it")
  return int(value)
