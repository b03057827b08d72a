"""A ring buffer with the moments of the last steps, for any number of parameter groups."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from maxbatch.noise.estimators import Moments

_KINDS = ("signal", "noise")


class Window:
  """The last `length` steps. Legend of shapes: K signal and noise, G groups, N steps."""

  def __init__(self, length: int):
    """An empty window of `length` steps.

    Raises:
      ValueError: `length` is less than 1.
    """
    if length < 1:
      raise ValueError(f"length={length} must be at least 1 step")
    self.length = length
    self.added = 0
    """Steps added since the beginning of the run."""
    self._rows: dict[str, int] = {}
    self._values_KGN = np.full((2, 0, length), np.nan)

  @property
  def groups(self) -> tuple[str, ...]:
    """Every group that was measured in any step."""
    return tuple(self._rows)

  def add(self, step: Mapping[str, Moments | None]) -> None:
    """Adds a step's moments by group; a group that is absent or None was not measured."""
    self._make_rows(step)
    place = self.added % self.length
    self._values_KGN[:, :, place] = np.nan
    for name, found in step.items():
      if found is not None:
        self._values_KGN[:, self._rows[name], place] = found.signal, found.noise
    self.added += 1

  def values(self, *groups: str) -> np.ndarray:
    """Signal and noise of these groups, (K, G, N), the steps in no particular order.

    NaN where a step did not measure a group.
    """
    found = np.full((2, len(groups), self.length), np.nan)
    for at, name in enumerate(groups):
      if name in self._rows:
        found[:, at] = self._values_KGN[:, self._rows[name]]
    return found

  def newest(self, *groups: str) -> np.ndarray:
    """As `values`, of the steps that were added, the newest first."""
    back_N = np.arange(min(self.added, self.length))
    return self.values(*groups)[:, :, (self.added - 1 - back_N) % self.length]

  def as_dict(self) -> dict[str, Any]:
    """The state as plain JSON; `from_dict` restores it exactly."""
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
    """The window whose state `as_dict` gave."""
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
