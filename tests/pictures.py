"""Reads the pictures that were written: words and marks of an SVG, the size of a PNG."""

import dataclasses
import re
import struct
import xml.etree.ElementTree as ElementTree

from matplotlib.figure import Figure

from maxbatch.plots.figure import render

_SVG = "{http://www.w3.org/2000/svg}"
_NUMBER = re.compile(r"-?[\d.]+(?:e-?\d+)?")
Point = tuple[float, float]
Box = tuple[float, float, float, float]


@dataclasses.dataclass(frozen=True)
class Drawing:
  """An SVG: its words, and its groups by the names they were given."""

  size: Point
  words: list[str]
  groups: dict[str, ElementTree.Element]

  def points(self, name: str) -> list[Point]:
    """The corners of all paths in a group."""
    return [point for path in self._paths(name) for point in _corners(path)]

  def boxes(self, name: str) -> list[Box]:
    """x, y, width and height of every path in a group."""
    found = []
    for path in self._paths(name):
      xs, ys = zip(*_corners(path), strict=True)
      found.append((min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)))
    return found

  def opacities(self, name: str) -> set[float]:
    """How opaque the areas of a group are."""
    styles = [path.get("style", "") for path in self._paths(name)]
    found = [re.search(r"fill-opacity: ([\d.]+)|opacity: ([\d.]+)", style) for style in styles]
    return {float(one[1] or one[2]) if one else 1.0 for one in found}

  def _paths(self, name: str) -> list[ElementTree.Element]:
    return list(self.groups[name].iter(f"{_SVG}path"))


def _corners(path: ElementTree.Element) -> list[Point]:
  numbers = [float(word) for word in _NUMBER.findall(path.get("d", ""))]
  return list(zip(numbers[::2], numbers[1::2], strict=True))


def parsed(figure: Figure) -> Drawing:
  """The figure as its SVG has it."""
  return read_svg(render(figure, ".svg"))


def read_svg(content: bytes) -> Drawing:
  """An SVG file's content."""
  root = ElementTree.fromstring(content)
  _, _, width, height = map(float, root.get("viewBox", "").split())
  words = ["".join(text.itertext()).strip() for text in root.iter(f"{_SVG}text")]
  groups = {str(group.get("id")): group for group in root.iter(f"{_SVG}g") if group.get("id")}
  return Drawing((width, height), words, groups)


def png_size(content: bytes) -> tuple[int, int]:
  """Width and height that a PNG's header gives."""
  assert content.startswith(b"\x89PNG\r\n\x1a\n")
  return struct.unpack(">II", content[16:24])
