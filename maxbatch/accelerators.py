"""Devices and hosts of a TPU slice by its name: no jax, nothing touched."""

import dataclasses

from maxbatch.config.find import did_you_mean
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class Family:
  """How the slices of one generation are named and built.

  Names count chips, or TensorCores of which two make one chip; a chip is one device.
  """

  named_units_per_chip: int
  chips_per_host: int
  sizes: tuple[int, ...]
  """The sizes, in the units of the name, that exist."""


_SMALL = (1, 4, 8, 16, 32, 64, 128, 256)
FAMILIES = {
  "v4": Family(2, 4, tuple(range(8, 8193, 8))),
  "v5p": Family(2, 4, tuple(range(8, 17921, 8))),
  "v5e": Family(1, 4, _SMALL),
  "v6e": Family(1, 4, _SMALL),
}
_ALIASES = {"v5litepod": "v5e"}


@dataclasses.dataclass(frozen=True)
class Slice:
  """The devices of a slice, or of several, and the hosts they belong to."""

  num_devices: int
  num_hosts: int

  def times(self, count: int) -> "Slice":
    """The devices and hosts of `count` such slices together."""
    return Slice(self.num_devices * count, self.num_hosts * count)


def slice_named(name: str) -> Slice:
  """The slice that a name such as v5e-256 or v5p-128 means.

  Raises:
    UserError: there is no such generation or size; offers the nearest.
  """
  generation, _, size = name.partition("-")
  family = FAMILIES.get(_ALIASES.get(generation, generation))
  if family is None:
    raise UserError(
      f"compile_topology={name}: there is no such slice.{did_you_mean(generation, FAMILIES)} "
      f"Known: {', '.join(f'{key}-{known.sizes[-1]}' for key, known in FAMILIES.items())} and smaller"
    )
  if not size.isdecimal() or int(size) not in family.sizes:
    wanted = int(size) if size.isdecimal() else 0
    near = min(family.sizes, key=lambda known: abs(known - wanted))
    raise UserError(
      f"compile_topology={name}: {generation} has no slice of this size; "
      f"nearest: compile_topology={generation}-{near}"
    )
  chips = int(size) // family.named_units_per_chip
  # v5e and v6e also have hosts of one and of eight chips, which make a slice of their own.
  single = chips <= family.chips_per_host or (family.named_units_per_chip == 1 and chips == 8)
  return Slice(chips, 1 if single else chips // family.chips_per_host)
