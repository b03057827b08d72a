"""Draws a timetable as text: a column per tick and two lines per stage, forward and backward."""

from maxbatch.pipeline_parallel.timetable import Backward, Cell, Forward, Timetable

_WIDTH = 100
_BLOCKS = 4
"""The most blocks of ticks that are shown: of more, the first two and the last two."""
_IDLE = "·"


def text_diagram(table: Timetable) -> str:
  """The diagram, at most 100 columns wide, divided into blocks of consecutive ticks.

  An entry is the number of a microbatch; with several repeats, `repeat.microbatch`.
  """
  with_repeat = table.shape.repeats > 1
  cells = [[_pair(cell, with_repeat) for cell in row] for row in table.ticks]
  longest = max((len(text) for row in cells for pair in row for text in pair), default=1)
  width = 1 + max(longest, len(str(len(cells) - 1)))
  label_width = len(f"stage {table.shape.stages - 1}  F")
  per_block = max(1, (_WIDTH - label_width) // width)
  starts = list(range(0, len(cells), per_block))
  shown = starts
  if len(starts) > _BLOCKS:
    shown = starts[: _BLOCKS // 2] + starts[-(_BLOCKS // 2) :]
  parts, expected = [], 0
  for start in shown:
    if start != expected:
      parts.append(f"… ticks {expected} to {start - 1}: --csv, --plot and --trace write them all …")
    parts.append(_block(cells[start : start + per_block], start, label_width, width))
    expected = start + per_block
  return "\n\n".join(parts)


def _block(cells: list[list[tuple[str, str]]], start: int, label_width: int, width: int) -> str:
  """The lines of one block of consecutive ticks."""
  ticks = range(start, start + len(cells))
  lines = ["tick".ljust(label_width) + "".join(str(tick).rjust(width) for tick in ticks)]
  for stage in range(len(cells[0])):
    for line, letter in enumerate("FB"):
      name = f"stage {stage}" if line == 0 else ""
      row = "".join(cell[stage][line].rjust(width) for cell in cells)
      lines.append(f"{name.ljust(label_width - 1)}{letter}{row}")
  return "\n".join(lines)


def _pair(cell: Cell, with_repeat: bool) -> tuple[str, str]:
  return _text(cell.forward, with_repeat), _text(cell.backward, with_repeat)


def _text(entry: Forward | Backward | None, with_repeat: bool) -> str:
  if entry is None:
    return _IDLE
  return f"{entry.repeat}.{entry.microbatch}" if with_repeat else str(entry.microbatch)
