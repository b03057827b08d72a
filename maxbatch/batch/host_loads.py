"""How many samples of a step each host loads, for any number of hosts."""

import dataclasses
import itertools
from collections.abc import Iterator
from fractions import Fraction

from maxbatch.batch.plan import BatchPlan
from maxbatch.batch.solve import nearest_multiples, text
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


def host_loads(plan: BatchPlan, num_hosts: int) -> list[HostLoad]:
  """Samples of a step of the run's batch that each host loads; hosts with equal loads are grouped.

  With expansion_factor_real_data f > 1 the first num_hosts / f hosts load everything, f times what
  their own devices take. Otherwise a host loads what its devices take; hosts whose devices share a
  sample each load it.

  Raises:
    UserError: the devices or the samples do not divide evenly over the hosts.
  """
  devices = plan.topology.num_devices
  if devices % num_hosts:
    near = max(count for count in range(1, num_hosts) if devices % count == 0)
    raise UserError(
      f"num_hosts={num_hosts} must divide the {devices} devices evenly; for example "
      f"num_hosts={near}"
    )
  if plan.expansion_factor_real_data > 1:
    samples = _from_few_hosts(plan, num_hosts)
  else:
    samples = _own_samples(plan, num_hosts)
  loads, host = [], 0
  for size, hosts in itertools.groupby(samples):
    count = sum(1 for _ in hosts)
    loads.append(HostLoad(host, count, size))
    host += count
  return loads


def _from_few_hosts(plan: BatchPlan, num_hosts: int) -> Iterator[int]:
  """Each host loads an equal part of global_batch_to_load, until the step is complete."""
  batch = plan.global_batch_to_train
  each = Fraction(plan.global_batch_to_load, num_hosts)
  if each.denominator != 1:
    factors = [Fraction(load, batch) for load in nearest_multiples(num_hosts, each * num_hosts)]
    offers = " or ".join(f"expansion_factor_real_data={text(factor)}" for factor in factors)
    raise UserError(
      f"global_batch_to_load={plan.global_batch_to_load} over num_hosts={num_hosts} is "
      f"{text(each)} samples per host, which must be a whole number; nearest: {offers}"
    )
  return (max(0, min(int(each), batch - host * int(each))) for host in range(num_hosts))


def _own_samples(plan: BatchPlan, num_hosts: int) -> Iterator[int]:
  """Each host loads the samples of the data-parallel groups of its devices, in mesh order."""
  topology = plan.topology
  groups = topology.num_batch_groups
  sharing, local = topology.num_devices // groups, topology.num_devices // num_hosts
  for host in range(num_hosts):
    first, last = host * local // sharing, (host * local + local - 1) // sharing
    yield plan.global_batch_to_train // groups * (last + 1 - first)
