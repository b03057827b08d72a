"""Pieces that small drawings are made of, as SVG text."""

import html
import math
from collections.abc import Sequence

Point = tuple[float, float]

PALETTE = ("#1f5fa8", "#b3401f", "#2e8b57", "#8a4fbf", "#b8860b", "#008b8b", "#c71585", "#555555")
"""Colors that can be told apart."""


def drawing(width: float, height: float, parts: Sequence[str]) -> str:
  """The whole file, on white."""
  opening = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
    f'width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="12">'
  )
  background = '<rect width="100%" height="100%" fill="white"/>'
  return "\n".join([opening, background, *parts, "</svg>"]) + "\n"


def line(start: Point, end: Point, color: str, *, dashed: bool = False) -> str:
  """A thin straight line."""
  dash = ' stroke-dasharray="5 4"' if dashed else ""
  return (
    f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" '
    f'stroke="{color}"{dash}/>'
  )


def curve(points: Sequence[Point], color: str, *, width: float = 2, opacity: float = 1) -> str:
  """Straight lines from point to point."""
  places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
  return (
    f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width:g}" '
    f'stroke-opacity="{opacity:g}"/>'
  )


def band(corner: Point, opposite: Point, color: str) -> str:
  """A pale rectangle between two corners."""
  x, y = min(corner[0], opposite[0]), min(corner[1], opposite[1])
  width, height = abs(opposite[0] - corner[0]), abs(opposite[1] - corner[1])
  return (
    f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}" '
    'fill-opacity="0.12"/>'
  )


def dot(center: Point, color: str) -> str:
  """A filled circle."""
  return f'<circle cx="{center[0]:.1f}" cy="{center[1]:.1f}" r="4" fill="{color}"/>'


def label(place: Point, words: str, anchor: str = "middle", color: str = "#000") -> str:
  """Words that begin, center or end (start, middle, end) at a place."""
  return (
    f'<text x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="{anchor}" fill="{color}">'
    f"{html.escape(words)}</text>"
  )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
  """At most `most` round numbers, evenly apart, from `low` to `high`; `low` < `high`."""
  unit = 10.0 ** math.floor(math.log10(high - low))
  step = next(
    unit * part for part in (0.1, 0.2, 0.5, 1, 2, 5) if (high - low) / (unit * part) < most
  )
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [step * count for count in range(first, last + 1)]


def short(value: float) -> str:
  """1200000 as 1.2M, 0.0003 as 0.0003."""
  for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= unit:
      return f"{value / unit:.4g}{letter}"
  return f"{value:.4g}"
