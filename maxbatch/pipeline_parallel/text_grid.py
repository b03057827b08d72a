"""A timetable as text: two lines per stage, forwards above backwards, a column per tick."""

from maxbatch.pipeline_parallel.timetable import Backward, Cell, Forward, Timetable

_WIDTH = 100
_BLOCKS = 4
"""Blocks of ticks that are shown; of more, the first and the last half."""
_IDLE = "·"


def text_grid(table: Timetable) -> str:
  """The drawing, at most 100 columns wide, in as many blocks of ticks as that takes.

  An entry is a microbatch, behind its repeat where there are several: `1.3`.
  """
  several = table.shape.repeats > 1
  cells = [[_pair(cell, several) for cell in row] for row in table.ticks]
  longest = max((len(text) for row in cells for pair in row for text in pair), default=1)
  width = 1 + max(longest, len(str(len(cells) - 1)))
  head = len(f"stage {table.shape.stages - 1}  F")
  per_block = max(1, (_WIDTH - head) // width)
  starts = list(range(0, len(cells), per_block))
  shown = starts
  if len(starts) > _BLOCKS:
    shown = starts[: _BLOCKS // 2] + starts[-(_BLOCKS // 2) :]
  parts, expected = [], 0
  for start in shown:
    if start != expected:
      parts.append(f"… ticks {expected} to {start - 1}: --csv, --svg and --trace write them all …")
    parts.append(_block(cells[start : start + per_block], start, head, width))
    expected = start + per_block
  return "\n\n".join(parts)


def _block(cells: list[list[tuple[str, str]]], start: int, head: int, width: int) -> str:
  """The lines of consecutive ticks."""
  ticks = range(start, start + len(cells))
  lines = ["tick".ljust(head) + "".join(str(tick).rjust(width) for tick in ticks)]
  for stage in range(len(cells[0])):
    for line, letter in enumerate("FB"):
      name = f"stage {stage}" if line == 0 else ""
      row = "".join(cell[stage][line].rjust(width) for cell in cells)
      lines.append(f"{name.ljust(head - 1)}{letter}{row}")
  return "\n".join(lines)


def _pair(cell: Cell, several: bool) -> tuple[str, str]:
  return _text(cell.forward, several), _text(cell.backward, several)


def _text(entry: Forward | Backward | None, several: bool) -> str:
  if entry is None:
    return _IDLE
  return f"{entry.repeat}.{entry.microbatch}" if several else str(entry.microbatch)
