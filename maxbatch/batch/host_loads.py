"""Which hosts load, and how many samples of a step each of them, for any number of hosts."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.batch.redistribution import Redistribution, consecutive_processes, redistribution
from maxbatch.core.keys import text
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class HostLoad:
  """Consecutive hosts that each load `samples` samples per step.

  With 0 they load nothing and receive their samples from the other hosts.
  """

  first_host: int
  num_hosts: int
  samples: int

  @property
  def last_host(self) -> int:
    """Index of the last of these hosts."""
    return self.first_host + self.num_hosts - 1


def loading_hosts(plan: BatchPlan, num_hosts: int) -> tuple[int, ...]:
  """The hosts that load for all; none: every host loads what its own devices take.

  With expansion_factor_real_data f > 1 they are num_hosts / f hosts, rounded up: the first ones, or
  those that the key loading_hosts names.

  Raises:
    UserError: the key names other hosts than there are, or more or fewer than the factor asks for.
  """
  named, factor = plan.loading_hosts, plan.expansion_factor_real_data
  wanted = math.ceil(num_hosts / factor) if factor > 1 else len(named)
  if not named:
    return tuple(range(wanted))
  given = f"loading_hosts={_written(named)}"
  example = _written(range(num_hosts - min(wanted, num_hosts), num_hosts))
  if max(named) >= num_hosts:
    raise UserError(
      f"{given}: there are {num_hosts} hosts, 0 to {num_hosts - 1}; for example "
      f"loading_hosts={example}"
    )
  if len(set(named)) < len(named):
    raise UserError(
      f"{given} names a host twice; for example loading_hosts={_written(sorted(set(named)))}"
    )
  if len(named) != wanted:
    raise UserError(
      f"{given} names {len(named)} hosts, but expansion_factor_real_data={text(factor)} lets "
      f"{wanted} of {num_hosts} load; for example loading_hosts={example}, or "
      f"expansion_factor_real_data=-1"
    )
  return tuple(sorted(named))


def host_loads(plan: BatchPlan, num_hosts: int) -> list[HostLoad]:
  """Samples of a step of the run's batch that each host loads; hosts with equal loads are grouped.

  Hosts have equally many devices, one host after the other in the order of the mesh.

  Raises:
    UserError: the devices do not divide evenly over the hosts, or loading_hosts does not fit them.
  """
  found = planned_redistribution(plan, num_hosts)
  of_block = plan.global_batch_to_train // len(found.readers)
  samples = [len(found.blocks_read.get(host, ())) * of_block for host in range(num_hosts)]
  loads, host = [], 0
  for size, hosts in itertools.groupby(samples):
    count = sum(1 for _ in hosts)
    loads.append(HostLoad(host, count, size))
    host += count
  return loads


def with_load_factor(plan: BatchPlan, factor: Fraction) -> BatchPlan:
  """The plan with another expansion_factor_real_data, more than 0."""
  loaded = math.ceil(plan.global_batch_to_train * factor)
  return dataclasses.replace(plan, expansion_factor_real_data=factor, global_batch_to_load=loaded)


def planned_redistribution(plan: BatchPlan, num_hosts: int) -> Redistribution:
  """Who reads what on hosts that have equally many devices, in the order of the mesh.

  Raises:
    UserError: the devices do not divide evenly over the hosts, or loading_hosts does not fit them.
  """
  devices = plan.topology.num_devices
  if devices % num_hosts:
    near = max(count for count in range(1, num_hosts) if devices % count == 0)
    raise UserError(
      f"num_hosts={num_hosts} must divide the {devices} devices evenly; for example "
      f"num_hosts={near}"
    )
  sharing = devices // plan.topology.num_batch_groups
  return redistribution(
    consecutive_processes(devices, num_hosts),
    [device // sharing for device in range(devices)],
    loading_hosts(plan, num_hosts),
  )


def _written(hosts: Sequence[int]) -> str:
  return f"[{','.join(map(str, hosts))}]"
