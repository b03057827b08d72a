"""The slices a run may have: the one that is asked about, its half and its double."""

import dataclasses

from maxbatch.errors import UserError
from maxbatch.estimate.chips import CHIPS, Chip
from maxbatch.hardware.tpu_slices import FAMILIES, slice_named

_ALIASES = {"v5litepod": "v5e"}


@dataclasses.dataclass(frozen=True)
class Place:
  """One or several equal slices."""

  generation: str
  chips_per_slice: int
  slices: int = 1

  @property
  def name(self) -> str:
    """As compile_topology has it."""
    return f"{self.generation}-{self.chips_per_slice * self._family.named_units_per_chip}"

  def __str__(self) -> str:
    return self.name if self.slices == 1 else f"{self.slices} × {self.name}"

  @property
  def chip(self) -> Chip:
    """One device."""
    return CHIPS[self.generation]

  @property
  def chips(self) -> int:
    """Of all slices: what is paid for."""
    return self.chips_per_slice * self.slices

  @property
  def devices_per_slice(self) -> int:
    """As jax counts them."""
    return self.chips_per_slice * self._family.devices_per_chip

  @property
  def _family(self):
    return FAMILIES[self.generation]

  @property
  def keys(self) -> dict[str, object]:
    """The configuration's keys that name it."""
    several = {"compile_topology_num_slices": self.slices} if self.slices > 1 else {}
    return {"compile_topology": self.name, **several}

  def half(self) -> "Place | None":
    """Half the chips; None where there is no such slice."""
    if self.slices % 2 == 0:
      return dataclasses.replace(self, slices=self.slices // 2)
    half, odd = divmod(self.chips_per_slice, 2)
    is_slice = self.slices == 1 and not odd and half in self._family.chips
    return dataclasses.replace(self, chips_per_slice=half) if is_slice else None

  def double(self) -> "Place":
    """Twice the chips: a slice of them, or twice as many slices."""
    twice = 2 * self.chips_per_slice
    if self.slices == 1 and twice in self._family.chips:
      return dataclasses.replace(self, chips_per_slice=twice)
    return dataclasses.replace(self, slices=2 * self.slices)


def place_named(name: str, num_slices: int) -> Place | None:
  """The slices that the configuration names; None if it names none.

  Raises:
    UserError: there is no such slice, or its speed is not known.
  """
  if not name:
    return None
  slice_named(name)  # Refuses what is no slice.
  generation, _, size = name.partition("-")
  generation = _ALIASES.get(generation, generation)
  if generation not in CHIPS:
    raise UserError(
      f"compile_topology={name}: the speed of {generation} is not known; known: "
      f"{', '.join(CHIPS)}; for example compile_topology=v5e-256"
    )
  return Place(generation, int(size) // FAMILIES[generation].named_units_per_chip, num_slices)
