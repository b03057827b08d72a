"""Parses the replica groups of a collective, which HLO writes in three formats.

Explicit lists {{0,1},{2,3}}; a reshaped and transposed iota, [2,2]<=[4] or [2,2]<=[2,2]T(1,0); and
axes of a mesh, mesh['a'=2,'b'=2] {'b'}.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"(?:replica_groups=|device_ids=\(?)\[([\d,]+)\](?:<=\[([\d,]+)\])?")
_TRANSPOSE = re.compile(r"(?:<=)?\[[\d,]+\]\)?\s*T\(([\d,]+)\)")
_MESH = re.compile(r"replica_groups=@?\w*mesh\w*\[([^\]]*)\](.*?)\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclasses.dataclass(frozen=True)
class ReplicaGroups:
  """Groups of device numbers; the devices of a group communicate with each other."""

  groups: tuple[tuple[int, ...], ...]

  @property
  def size(self) -> int:
    """Devices of the largest group."""
    return max((len(group) for group in self.groups), default=1)

  def crosses(self, devices_per_slice: int) -> bool:
    """Returns whether any group spans two slices; devices are numbered slice by slice."""
    return any(len({one // devices_per_slice for one in group}) > 1 for group in self.groups)


def parse_groups(attributes: str, num_devices: int) -> ReplicaGroups:
  """Returns the groups in a collective's attributes; absent or empty groups mean all devices."""
  if result := _PAIRS.search(attributes):
    return ReplicaGroups(_lists(result[1]))
  if result := _MESH.search(attributes):
    return ReplicaGroups(_mesh_groups(*result.groups()))
  if result := _IOTA.search(attributes):
    permutation = _TRANSPOSE.search(attributes, result.start())
    return ReplicaGroups(
      _iota_groups(result[1], result[2] or "", permutation[1] if permutation else "")
    )
  result = _LISTS.search(attributes)
  groups = _lists(result[1]) if result else ()
  return ReplicaGroups(groups or (tuple(range(num_devices)),))


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(number) for number in text.split(",") if number)


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
  return tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text))


def _iota_groups(shape: str, source: str, permutation: str) -> tuple[tuple[int, ...], ...]:
  """Returns [number of groups, size of each] over a transposed iota."""
  sizes = _numbers(shape)
  devices = _transposed(_numbers(source) or (math.prod(sizes),), _numbers(permutation))
  return _split(devices, sizes[-1])


def _mesh_groups(mesh: str, order: str, used: str) -> tuple[tuple[int, ...], ...]:
  """Returns groups along the axes `used`, over the devices of the mesh in row-major order.

  An axis may be used in part, 'a':(p)s. It is then split into three axes, of p, s and the remaining
  devices, of which the middle one is used.
  """
  parts: list[int] = []
  inside: list[int] = []
  chosen = {name: (before, size) for name, before, size in _USED.findall(used)}
  for name, size in _AXIS.findall(mesh):
    before, part = chosen.get(name, ("", ""))
    if not part:
      inside += [len(parts)] if name in chosen else []
      parts.append(int(size))
      continue
    inside.append(len(parts) + 1)
    parts += [int(before), int(part), int(size) // (int(before) * int(part))]
  outside = [axis for axis in range(len(parts)) if axis not in inside]
  places = _transposed(parts, [*outside, *inside])
  devices = _device_order(order, math.prod(parts))
  return _split([devices[place] for place in places], math.prod(parts[axis] for axis in inside))


def _device_order(text: str, count: int) -> Sequence[int]:
  """Returns the mesh's devices in row-major order: 0, 1, 2, … unless device_ids are given."""
  result = _IOTA.search(text)
  if result is None:
    return range(count)
  permutation = _TRANSPOSE.search(text, result.start())
  return _transposed(
    _numbers(result[2] or result[1]), _numbers(permutation[1]) if permutation else ()
  )


def _transposed(sizes: Sequence[int], permutation: Sequence[int]) -> list[int]:
  """Returns iota(sizes).transpose(permutation), flattened; no permutation leaves the order."""
  strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
  axes = permutation or range(len(sizes))
  steps = ([strides[axis] * place for place in range(sizes[axis])] for axis in axes)
  return [sum(offsets) for offsets in itertools.product(*steps)]


def _split(devices: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
  return tuple(tuple(devices[at : at + size]) for at in range(0, len(devices), size))
