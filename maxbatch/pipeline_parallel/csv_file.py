"""A timetable as CSV, and back: a row for each tick and stage, empty cells where it is idle."""

import csv
import io
from collections.abc import Iterator

from maxbatch.config.find import did_you_mean
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.timetable import Backward, Cell, Forward, Timetable, TimetableShape

_WHERE = ("tick", "stage")
_WORK = ("forward_repeat", "forward_microbatch", "backward_repeat", "backward_microbatch")
_SLOTS = ("forward_slot", "backward_slot", "gradient_slot")
COLUMNS = (*_WHERE, *_WORK[:2], _SLOTS[0], *_WORK[2:], *_SLOTS[1:])
"""The columns that are written. Those of the slots may be absent when read."""


def to_csv(table: Timetable) -> str:
  """The timetable with every column."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(COLUMNS)
  for tick, row in enumerate(table.ticks):
    for stage, cell in enumerate(row):
      forward, backward = cell.forward, cell.backward
      first = (forward.repeat, forward.microbatch, forward.slot) if forward else ("",) * 3
      second = (
        (backward.repeat, backward.microbatch, backward.slot, backward.gradient_slot)
        if backward
        else ("",) * 4
      )
      writer.writerow((tick, stage, *first, *second))
  return text.getvalue()


def from_csv(text: str, shape: TimetableShape, name: str) -> Timetable:
  """The timetable that a CSV holds; idle rows may be left out, and all slots.

  Args:
    text: the file's text.
    shape: the sizes it is for.
    name: how messages call the file.

  Raises:
    UserError: it is no such table. Whether the table can be run is another question.
  """
  reader = csv.reader(io.StringIO(text))
  columns = _header(next(reader, []), name)
  cells: dict[tuple[int, int], Cell] = {}
  for line, row in _lines(reader, name):
    values = _values(row, columns, f"{name}:{line}")
    tick, stage = values["tick"], values["stage"]
    if tick is None or stage is None:
      raise UserError(f"{name}:{line}: every row needs a tick and a stage, both counted from 0")
    if stage >= shape.stages:
      raise UserError(
        f"{name}:{line}: stage={stage}, but the configuration has stages 0 to {shape.stages - 1}"
      )
    if tick >= _most_ticks(shape):
      raise UserError(
        f"{name}:{line}: tick={tick}, but {_most_ticks(shape)} ticks are enough to do one thing "
        "after the other; leave out idle ticks"
      )
    if (tick, stage) in cells:
      raise UserError(f"{name}:{line}: tick {tick} of stage {stage} for a second time; keep one")
    cells[tick, stage] = _cell(values, columns, f"{name}:{line}")
  count = 1 + max((tick for tick, _ in cells), default=-1)
  return Timetable(
    shape,
    tuple(
      tuple(cells.get((tick, stage), Cell()) for stage in range(shape.stages))
      for tick in range(count)
    ),
  )


def _most_ticks(shape: TimetableShape) -> int:
  """A forward and a backward of everything, each waiting for its hop."""
  return 2 * shape.work * shape.stages * shape.hop


def _header(names: list[str], name: str) -> list[str]:
  columns = [column.strip().lstrip("\ufeff") for column in names]
  for column in columns:
    if column not in COLUMNS:
      raise UserError(
        f"{name}:1: there is no column {column!r}.{did_you_mean(column, COLUMNS)} Known: "
        f"{', '.join(COLUMNS)}"
      )
    if columns.count(column) > 1:
      raise UserError(f"{name}:1: the column {column} is there twice; keep one")
  slots = _SLOTS if set(_SLOTS) & set(columns) else ()
  missing = [column for column in (*_WHERE, *_WORK, *slots) if column not in columns]
  if missing:
    raise UserError(
      f"{name}:1: no column {', '.join(missing)}; the first line names the columns, the three of "
      "slots all or none"
    )
  return columns


def _lines(reader: Iterator[list[str]], name: str) -> Iterator[tuple[int, list[str]]]:
  """The rows with their line numbers, empty lines left out."""
  try:
    for line, row in enumerate(reader, 2):
      if any(cell.strip() for cell in row):
        yield line, row
  except csv.Error as error:
    raise UserError(f"{name}: not a CSV file: {error}") from error


def _values(row: list[str], columns: list[str], where: str) -> dict[str, int | None]:
  if len(row) != len(columns):
    raise UserError(f"{where}: {len(row)} cells, but the first line names {len(columns)} columns")
  return {
    column: _number(cell.strip(), column, where) for column, cell in zip(columns, row, strict=True)
  }


def _number(text: str, column: str, where: str) -> int | None:
  if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
    raise UserError(f"{where}: {column}={text} must be a whole number, at least 0, or empty")
  return int(text) if text else None


def _cell(values: dict[str, int | None], columns: list[str], where: str) -> Cell:
  slots = "gradient_slot" in columns
  names = ["forward_repeat", "forward_microbatch", *(["forward_slot"] if slots else [])]
  first = _entry(values, names, where)
  names = ["backward_repeat", "backward_microbatch", *(_SLOTS[1:] if slots else [])]
  second = _entry(values, names, where)
  return Cell(Forward(*first) if first else None, Backward(*second) if second else None)


def _entry(values: dict[str, int | None], names: list[str], where: str) -> list[int]:
  """The values of these columns; none if the cells are empty."""
  given = [name for name in names if values[name] is not None]
  empty = [name for name in names if values[name] is None]
  if given and empty:
    raise UserError(f"{where}: {', '.join(given)} without {', '.join(empty)}; fill all or none")
  return [value for name in names if (value := values[name]) is not None]
