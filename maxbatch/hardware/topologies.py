"""TPU slices and GPUs by name: devices, hosts and their compiler's names. No jax, no device access.

The names and shapes are those of the public pages on TPU v4, v5e, v5p, v6e and TPU7x
(docs.cloud.google.com/tpu/docs) and of MaxText's accelerator_to_spec_map.py. A host is a virtual
machine, which runs one process: a physical v5e or v6e host of 8 chips is two of 4 in larger slices.

GPUs are named by their number, as h100-64: of one host up to 8 (gb200: 4), then whole hosts (gb200 beyond
72: whole racks). How many a host has, and what the compiler must know of one, is in estimate/gpus.json.

Devices as mere numbers, for commands that look at none and start no jax.
"""

import dataclasses
import functools
import math
from typing import Any

from maxbatch.batch.from_config import given_sizes, is_rl, mesh_of, training_devices
from maxbatch.config.find import did_you_mean, shown
from maxbatch.config.schema import Config
from maxbatch.core.solve import divisors, solve_num_devices
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.estimate.chips import GPU_DATA, described

Shape = tuple[int, int, int]

_CUBE = 4
"""Edge of the cubes that 3-D slices of 64 chips or more consist of, joined by optical switches."""


@dataclasses.dataclass(frozen=True)
class Family:
  """The naming and the sizes of one generation's slices."""

  compiler_name: str
  dimensions: int
  named_units_per_chip: int
  """2 where a name counts TensorCores, 1 where it counts chips."""
  devices_per_chip: int
  """1, or 2 where jax sees every TensorCore."""
  chip_config_name: str
  chips: tuple[int, ...]
  """The standard sizes in chips, ascending."""
  gpus_per_host: int = 0
  """0: these are TPUs."""

  @property
  def sizes(self) -> tuple[int, ...]:
    """The standard sizes in the units of the name."""
    return tuple(count * self.named_units_per_chip for count in self.chips)


def _cubes(*counts: int) -> tuple[int, ...]:
  return tuple(count * _CUBE**3 for count in counts)


# A slice has no edge longer than 256 chips: a prime number of more than 64 cubes has no shape.
_UP_TO_96_CUBES = _cubes(
  *(count for count in range(1, 97) if count not in (67, 71, 73, 79, 83, 89))
)
_FLAT = (1, 4, 8, 16, 32, 64, 128, 256)
_LESS_THAN_A_CUBE = (4, 8, 16, 32)
FAMILIES = {
  "v4": Family("v4", 3, 2, 1, "megacore", _LESS_THAN_A_CUBE + _cubes(1, 2, 3, 4, 8, 12, 16, 32)),
  "v5p": Family("v5", 3, 2, 1, "megacore", _LESS_THAN_A_CUBE + _UP_TO_96_CUBES + _cubes(108, 140)),
  "v5e": Family("v5e", 2, 1, 1, "default", _FLAT),
  "v6e": Family("v6e", 2, 1, 1, "default", _FLAT),
  "tpu7x": Family(
    "tpu7x",
    3,
    2,
    2,
    "default",
    (1, *_LESS_THAN_A_CUBE, *_UP_TO_96_CUBES, *_cubes(108, 128, 140, 144)),
  ),
}


_MOST_GPUS = 16384


def _gpus(generation: str) -> Family:
  known = GPU_DATA[generation]
  host, domain = known["gpus_per_host"], known["gpus_per_domain"]
  small = [count for count in (1, 2, 4) if count < host]
  within = range(host, domain + 1, host)
  sizes = (*small, *within, *range(2 * domain, _MOST_GPUS + 1, domain))
  return Family(generation, 1, 1, 1, "", sizes, host)


FAMILIES |= {generation: _gpus(generation) for generation in GPU_DATA}
_ALIASES = {"v5litepod": "v5e"}


@dataclasses.dataclass(frozen=True)
class Slice:
  """The devices and hosts of one or several slices, or of GPUs, and the compiler's description of one."""

  num_devices: int
  num_hosts: int
  topology_name: str
  """The generation and the shape in chips, as v5e:16x16 or v5:4x4x8; of GPUs partitions, hosts and GPUs of
  a host: 1x8x8."""
  chip_config_name: str
  """megacore where the two TensorCores of a chip are one device, else default."""
  chips_per_host_bounds: Shape
  gpu: str = ""
  """Generation of GPUs; empty: TPUs."""

  def times(self, count: int) -> "Slice":
    """Returns the devices and hosts of `count` such slices together."""
    return dataclasses.replace(
      self, num_devices=self.num_devices * count, num_hosts=self.num_hosts * count
    )

  @property
  def compiler(self) -> str:
    """The platform whose compiler it is for, as jax calls it: tpu or cuda."""
    return "cuda" if self.gpu else "tpu"

  @property
  def platform(self) -> str:
    """What jax says of such a device: tpu or gpu."""
    return "gpu" if self.gpu else "tpu"

  @property
  def device_kind(self) -> str:
    """What jax calls such a GPU; of TPUs the slice."""
    return GPU_DATA[self.gpu]["name"] if self.gpu else self.topology_name

  @property
  def compute_capability(self) -> str:
    """That of GPUs, as 9.0; empty: TPUs."""
    return ".".join(map(str, GPU_DATA[self.gpu]["compute_capability"])) if self.gpu else ""

  def compiler_arguments(self, num_slices: int) -> dict[str, Any]:
    """Returns what jax's get_topology_desc takes beside the platform."""
    if self.gpu:
      return {"topology": self.topology_name, "target_config": described(self.gpu)}
    return {
      "topology_name": self.topology_name,
      "chip_config_name": self.chip_config_name,
      "chips_per_host_bounds": self.chips_per_host_bounds,
      "num_slices": num_slices,
    }


def slice_named(name: str, num_slices: int = 1, network_gbps: float = 0) -> Slice:
  """Returns the slice that a name such as v5e-256 or v5p-128 means, or the GPUs of h100-64.

  Args:
    num_slices: of TPUs, which are asked for together; the result is one of them.
    network_gbps: of a device to those of other hosts or slices, if it is another than published.

  Raises:
    UserError: there is no such generation or no standard slice of this size; offers the nearest
      and lists the known ones. Or several slices of GPUs, or a network that nothing uses.
  """
  generation, _, size = name.partition("-")
  family = FAMILIES.get(_ALIASES.get(generation, generation))
  if family is None:
    raise UserError(
      f"compile_topology={shown(name)}: unknown slice.{did_you_mean(generation, FAMILIES)} "
      f"Known: {', '.join(f'{key}-{known.sizes[-1]}' for key, known in FAMILIES.items())} and smaller"
    )
  if family.gpus_per_host and num_slices > 1:
    raise UserError(
      f"compile_topology_num_slices={num_slices}: GPUs are named by their number on all hosts, as "
      f"compile_topology={generation}-{2 * family.gpus_per_host}; leave out "
      "compile_topology_num_slices"
    )
  wanted = int(size) if size.isdecimal() and len(size) < 10 else 0
  if wanted not in family.sizes:
    near = min(family.sizes, key=lambda known: abs(known - wanted))
    raise UserError(
      f"compile_topology={shown(name)}: {_WHAT[family.gpus_per_host > 0].format(generation)}; "
      f"nearest: compile_topology={generation}-{near}. Known: {_as_ranges(family.sizes)}"
    )
  if network_gbps and num_slices == 1 and wanted <= (domain := _linked(generation, wanted)):
    more = (
      f"compile_topology={generation}-{2 * domain}"
      if family.gpus_per_host
      else "compile_topology_num_slices=2"
    )
    raise UserError(
      f"compile_topology_network_gbps={network_gbps:g}: the devices of compile_topology={name} are all on fast "
      f"links, and nothing goes over the network; leave it out, or name more, for example {more}"
    )
  return _slice(family, wanted // family.named_units_per_chip)


def _linked(generation: str, wanted: int) -> int:
  """Returns how many devices fast links connect: the GPUs of an NVLink domain, or all of a slice."""
  return GPU_DATA[generation]["gpus_per_domain"] if generation in GPU_DATA else wanted


_WHAT = {False: "{} has no slice of this size", True: "{}s come in other numbers"}
"""By whether they are GPUs."""


def _slice(family: Family, chips: int) -> Slice:
  if family.gpus_per_host:
    each = min(chips, family.gpus_per_host)
    hosts = chips // each
    return Slice(chips, hosts, f"1x{hosts}x{each}", "", (each, 1, 1), family.compiler_name)
  if family.dimensions == 2:
    # The squarest rectangle with edges that are powers of two, the shorter first.
    short = 2 ** ((chips.bit_length() - 1) // 2)
    shape = (short, chips // short, 1)
  else:
    shape = _cubic_shape(chips)
  # 2x2 chips, except that 2-D slices of up to 8 have a single host.
  is_one_host = family.dimensions == 2 and chips <= 8
  host = shape if is_one_host else (min(shape[0], 2), min(shape[1], 2), 1)
  return Slice(
    num_devices=chips * family.devices_per_chip,
    num_hosts=chips // math.prod(host),
    topology_name=f"{family.compiler_name}:{'x'.join(map(str, shape[: family.dimensions]))}",
    chip_config_name=family.chip_config_name,
    chips_per_host_bounds=host,
  )


def _cubic_shape(chips: int) -> Shape:
  """Returns the box nearest a cube, edges ascending; of whole cubes from 64 chips on."""
  if chips == 4:
    return (2, 2, 1)  # one host, which the compiler and the clouds write this way round
  edge = _CUBE if chips >= _CUBE**3 else 1
  a, b, c = _most_cubic(chips // edge**3)
  return (a * edge, b * edge, c * edge)


@functools.cache
def _most_cubic(count: int) -> Shape:
  boxes = (
    (a, b, count // (a * b))
    for a in divisors(count)
    for b in divisors(count // a)
    if a <= b <= count // (a * b)
  )
  return min(boxes, key=sum)


def _as_ranges(sizes: tuple[int, ...]) -> str:
  """Lists sizes such as `8, 16, 32, 64, 128 to 8448 by 128`: equally spaced ones as a range."""
  words: list[str] = []
  start = 0
  while start < len(sizes):
    end = start + 1
    while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[start + 1] - sizes[start]:
      end += 1
    if end < len(sizes) and end - start >= 3:
      words.append(f"{sizes[start]} to {sizes[end]} by {sizes[end] - sizes[end - 1]}")
      start = end + 1
    else:
      words.append(str(sizes[start]))
      start += 1
  return ", ".join(words)


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
    network = config.compile.compile_topology_network_gbps
    named = slice_named(name, slices, network).times(slices)
    count, hosts = named.num_devices, named.num_hosts
  elif num_devices == -1:
    if is_rl(config.rl):
      raise UserError(
        "num_devices=-1 is derived from samples per device, and with "
        f"num_generations={config.rl.num_generations} micro_batch_size counts completions on all "
        "devices; for example num_devices=8"
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
  return CountedDevices(mesh_of(config, training, slices), num_hosts or hosts, assumption)
