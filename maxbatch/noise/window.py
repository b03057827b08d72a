"""The moments of the last steps, of any number of groups, as one array that is written in place."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxbatch.noise.estimators import Moments

_KINDS = ("signal", "noise")


class Window:
  """A ring of the last `length` steps. Legend: K signal and noise, G groups, N steps."""

  def __init__(self, length: int):
    """An empty window of `length` steps.

    Raises:
      ValueError: no step would fit.
    """
    if length < 1:
      raise ValueError(f"a window of {length} steps holds nothing")
    self.length = length
    self.added = 0
    """Steps that were added since the beginning."""
    self._rows: dict[str, int] = {}
    self._values_KGN = np.full((2, 0, length), np.nan)

  @property
  def groups(self) -> tuple[str, ...]:
    """Every group that was ever measured."""
    return tuple(self._rows)

  def add(self, step: Mapping[str, Moments | None]) -> None:
    """Adds a step; groups that it lacks, or has as None, were not measured in it."""
    self._make_rows(step)
    place = self.added % self.length
    self._values_KGN[:, :, place] = np.nan
    for name, found in step.items():
      if found is not None:
        self._values_KGN[:, self._rows[name], place] = found.signal, found.noise
    self.added += 1

  def values(self, *groups: str) -> np.ndarray:
    """(K, G, N): signal and noise of these groups, the steps in no particular order.

    NaN where a step did not measure a group; a name never seen was measured in none.
    """
    found = np.full((2, len(groups), self.length), np.nan)
    for at, name in enumerate(groups):
      if name in self._rows:
        found[:, at] = self._values_KGN[:, self._rows[name]]
    return found

  def as_dict(self) -> dict[str, Any]:
    """Plain JSON; `from_dict` gives the same window, to the last bit."""
    groups = {
      name: {
        kind: [None if np.isnan(value) else float(value) for value in self._values_KGN[at, row]]
        for at, kind in enumerate(_KINDS)
      }
      for name, row in self._rows.items()
    }
    return {"length": self.length, "added": self.added, "groups": groups}

  @classmethod
  def from_dict(cls, content: Mapping[str, Any]) -> "Window":
    """The window that `as_dict` wrote."""
    window = cls(content["length"])
    window.added = content["added"]
    window._make_rows(content["groups"])
    for name, kinds in content["groups"].items():
      for at, kind in enumerate(_KINDS):
        # numpy reads None as NaN.
        window._values_KGN[at, window._rows[name]] = np.array(kinds[kind], dtype=float)
    return window

  def _make_rows(self, names: Mapping[str, object]) -> None:
    new = [name for name in names if name not in self._rows]
    if new:
      self._rows |= {name: len(self._rows) + at for at, name in enumerate(new)}
      unmeasured = np.full((2, len(new), self.length), np.nan)
      self._values_KGN = np.concatenate([self._values_KGN, unmeasured], axis=1)
