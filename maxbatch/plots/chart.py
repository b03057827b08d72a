"""Pictures as data: what is drawn, apart from what draws it (interactive.py)."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Style = Literal["line", "dots", "both", "steps"]


@dataclasses.dataclass(frozen=True)
class Line:
  """A curve through points, or the points alone."""

  label: str
  x: Sequence[Sequence[float]] = ()
  """Along each of the chart's axes."""
  y: Sequence[float] = ()
  color: int = 0
  """Which of the colors; they repeat."""
  dash: int = 0
  """Which of the dashes; they repeat."""
  style: Style = "line"
  faint: bool = False
  group: str = ""
  """Lines of one group are shown and hidden together, and have one entry in the legend."""


@dataclasses.dataclass(frozen=True)
class Band:
  """The area between two curves."""

  label: str
  x: Sequence[Sequence[float]]
  low: Sequence[float]
  high: Sequence[float]
  color: int = 0
  group: str = ""


@dataclasses.dataclass(frozen=True)
class Bars:
  """A horizontal bar for each name, from where it begins; of one name there may be several."""

  label: str
  names: Sequence[str]
  lengths: Sequence[float]
  begins: Sequence[float] = ()
  """Empty: at 0."""
  color: int = 0
  opacity: float = 1.0
  words: Sequence[str] = ()
  """Inside the bars that have room for them; elsewhere where one points."""


@dataclasses.dataclass(frozen=True)
class Cells:
  """A heat map: for each name a row of cells, the first at 0."""

  label: str
  names: Sequence[str]
  values: Sequence[Sequence[float]]
  """By name, then along x."""
  high: float
  """The value of the last color; the first is that of 0."""


Mark = Line | Band | Bars | Cells


@dataclasses.dataclass(frozen=True)
class Panel:
  """A pair of axes."""

  title: str
  marks: Sequence[Mark]
  log: bool = False
  """The axis of y is logarithmic."""
  low: float | None = None
  high: float | None = None
  """What is shown of the axis of y; None: all."""


@dataclasses.dataclass(frozen=True)
class Chart:
  """Panels under each other over one axis of x, which may be switched."""

  name: str
  """What a screen reader says."""
  axes: Sequence[str]
  """The titles of the axes of x that there are; the first is shown."""
  panels: Sequence[Panel]
  row_names: Sequence[str] = ()
  """With bars and cells: the names along y, from above."""
  log_x: bool = False
  ticks: Sequence[float] = ()
  """The places on the axis of x that are marked; empty: round numbers."""
