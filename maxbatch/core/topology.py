"""The number of devices along each mesh axis, as plain integers: no jax, no device access."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class MeshAxis:
  """One axis of the mesh."""

  name: str
  key: str
  """The axis in the names of the configuration's keys: `ici_{key}_parallelism`."""
  depth: int
  """Its place in the device mesh, counted from the outermost. An inner shard_map takes only axes
  inside of those that the outer one takes: XLA (jax 0.12) aborts on any other nesting."""
  divides_batch: bool = False
  """Whether devices that differ along it get different samples; along the others they share them."""
  is_optional: bool = False
  """Whether a mesh has the axis only where it has several devices."""


AXES = (
  MeshAxis("data", "data", depth=0, divides_batch=True),
  MeshAxis("fsdp", "fsdp", depth=2, divides_batch=True),
  MeshAxis("expert", "expert", depth=3, divides_batch=True, is_optional=True),
  MeshAxis("context", "context", depth=4, is_optional=True),
  MeshAxis("tensor", "tensor", depth=5),
  MeshAxis("stage", "pipeline", depth=1),
)
"""Every axis there is. Neighbouring devices differ along the last one.

With a row here, its pair of keys and a place in hardware/sharding.py, an axis is known everywhere.
"""
AXIS_NAMES = tuple(axis.name for axis in AXES)
BATCH_AXES = tuple(axis.name for axis in AXES if axis.divides_batch)
WEIGHT_AXES = ("fsdp", "expert", "context")
"""Those whose devices have tokens of their own and divide the weights: `fsdp` and `expert` by rows,
`context` the tokens of each row. Experts' matrices are divided by `fsdp`, whole experts by `expert`."""

LONG_ROW_TOKENS = 16384
"""Tokens of a row that devices are advised to share: in halves of so many each product still has enough to
do, and in shorter ones messages would take longer."""


def row_shares(length: int, devices: int) -> Iterator[int]:
  """Yields over how many of these devices the tokens of rows are worth dividing: 1, and for long rows 2, 4, …"""
  context = 1
  while context == 1 or context * LONG_ROW_TOKENS // 2 <= length:
    if context == 1 or (devices % context == 0 and length % (2 * context) == 0):
      yield context
    context *= 2


def weight_groups(sizes: Mapping[str, int]) -> int:
  """Returns the groups of devices with different tokens that share one copy of the weights."""
  return math.prod(sizes.get(name, 1) for name in WEIGHT_AXES)


@dataclasses.dataclass(frozen=True)
class Topology:
  """Devices along each mesh axis: `ici` inside a slice, `dcn` between slices.

  Axes that a mapping leaves out have one device; the attributes hold all, in the order of AXES, but for
  optional ones of one device.
  """

  ici: Mapping[str, int]
  dcn: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    given = {"ici": self.ici, "dcn": self.dcn}
    if unknown := [name for sizes in given.values() for name in sizes if name not in AXIS_NAMES]:
      raise UserError(
        f"there is no mesh axis {', '.join(unknown)}; the axes are {', '.join(AXIS_NAMES)}"
      )
    names = [
      axis.name
      for axis in AXES
      if not axis.is_optional or any(sizes.get(axis.name, 1) != 1 for sizes in given.values())
    ]
    for kind, sizes in given.items():
      object.__setattr__(self, kind, {name: sizes.get(name, 1) for name in names})

  def __hash__(self) -> int:
    return hash((*self.ici.values(), *self.dcn.values()))

  @classmethod
  def of(cls, **sizes: int) -> "Topology":
    """Returns the topology of one slice: `Topology.of(data=2, fsdp=4)`."""
    return cls(sizes)

  @property
  def shape(self) -> dict[str, int]:
    """Devices along each mesh axis."""
    return {axis: size * self.dcn[axis] for axis, size in self.ici.items()}

  @property
  def num_devices(self) -> int:
    """Devices of the mesh."""
    return self.devices_per_slice * self.num_slices

  @property
  def num_slices(self) -> int:
    """Slices: sets of devices connected by ICI, the fast interconnect."""
    return math.prod(self.dcn.values())

  @property
  def devices_per_slice(self) -> int:
    """Devices of one slice."""
    return math.prod(self.ici.values())

  @property
  def num_batch_groups(self) -> int:
    """Data-parallel groups, the product of the axes that divide the batch. Each gets its own samples."""
    return math.prod(self.shape.get(axis, 1) for axis in BATCH_AXES)

  @property
  def weight_groups(self) -> int:
    """Groups of devices with tokens of their own that share one copy of the weights."""
    return weight_groups(self.shape)

  def __str__(self) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in self.shape.items())


def fill(sizes: Mapping[str, int], total: int, what: str) -> dict[str, int]:
  """Returns the sizes with a -1 replaced by the remaining devices, so that the product is `total`.

  Args:
    sizes: key, as messages name it, to the size given for an axis; in the order of AXES.
    total: the product that they must have.
    what: what `total` counts, for messages.

  Raises:
    UserError: several are -1, or the product is another.
  """
  given = ", ".join(f"{key}={size}" for key, size in sizes.items())
  open_axes = [key for key, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    raise UserError(
      f"{given}: only one axis can be -1 (the remaining devices), not {len(open_axes)}; "
      f"for example {_working_example(sizes, total)}"
    )
  product = math.prod(size for size in sizes.values() if size != -1)
  if total % product or (not open_axes and product != total):
    raise UserError(
      f"{given}: the product of the axes, {product}, must {'divide' if open_axes else 'equal'} the "
      f"{total} {what}; for example {_working_example(sizes, total)}"
    )
  return {key: total // product if size == -1 else size for key, size in sizes.items()}


def _working_example(sizes: Mapping[str, int], total: int) -> str:
  """Reduces each size to a divisor of the devices that remain; the first axis gets the rest."""
  left, (first, *others) = total, sizes
  example = []
  for key in others:
    fitting = math.gcd(max(sizes[key], 1), left)
    left //= fitting
    example.append(f"{key}={fitting}")
  return " ".join([f"{first}={left}", *example])
