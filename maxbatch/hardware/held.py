"""The copies in one supervisor's memory: of its own training process, and what no other host has of others'."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from maxbatch.hardware.copies import SLOTS, Header, Slot


def _slots() -> list[Slot]:
  return [Slot() for _ in range(SLOTS)]


class HeldCopies:
  """Files in memory, which training processes inherit."""

  def __init__(self) -> None:
    """Makes those of its own process."""
    self.own = _slots()
    self._others = collections.defaultdict[int, list[Slot]](_slots)
    """By the process that sends them."""

  def slots(self) -> list[Slot]:
    """Returns all of them."""
    return [*self.own, *itertools.chain.from_iterable(self._others.values())]

  def _headers(self) -> list[tuple[Header, Slot]]:
    return [(header, slot) for slot in self.slots() if (header := slot.header())]

  def about(self) -> list[dict[str, Any]]:
    """Returns what they hold, plain as JSON."""
    return [dataclasses.asdict(header) for header, _ in self._headers()]

  def find(self, key: Sequence[int]) -> Slot | None:
    """Returns the one that holds a copy, if there is one."""
    return next((slot for header, slot in self._headers() if header.key == tuple(key)), None)

  def slot_for(self, header: Header) -> Slot:
    """Returns the one for what another process sends, which holds its copy before the last, or nothing.

    Whoever sends a copy knows that the one before is whole, and the one before that not needed.
    """
    return min(self._others[header.key[2]], key=lambda slot: slot.made)

  def drop_but(self, copy: Sequence[int]) -> None:
    """Forgets all but one of a generation and step: the training takes another course from there."""
    for header, slot in self._headers():
      if header.key[:2] != tuple(copy):
        slot.clear()

  def drop_before(self, generation: int) -> None:
    """Forgets copies of earlier generations."""
    for header, slot in self._headers():
      if header.key[0] < generation:
        slot.clear()
