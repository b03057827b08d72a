"""Writes a timetable as CSV and reads it: a row per tick and stage, empty cells where idle."""

import csv
import io
from collections.abc import Iterator

from maxbatch.config.find import did_you_mean
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.schedule import Backward, Cell, Forward, Timetable, TimetableShape

_INDEX_COLUMNS = ("tick", "stage")
_PASS_COLUMNS = ("forward_repeat", "forward_microbatch", "backward_repeat", "backward_microbatch")
_SLOT_COLUMNS = ("forward_slot", "backward_slot", "gradient_slot")
COLUMNS = (
  *_INDEX_COLUMNS,
  *_PASS_COLUMNS[:2],
  _SLOT_COLUMNS[0],
  *_PASS_COLUMNS[2:],
  *_SLOT_COLUMNS[1:],
)
"""The columns that are written. A file that is read may lack the three columns of slots."""


def to_csv(table: Timetable) -> str:
  """Returns the timetable as CSV, with every column."""
  text = io.StringIO()
  writer = csv.writer(text, lineterminator="\n")
  writer.writerow(COLUMNS)
  for tick, row in enumerate(table.ticks):
    for stage, cell in enumerate(row):
      forward, backward = cell.forward, cell.backward
      forward_cells = (forward.repeat, forward.microbatch, forward.slot) if forward else ("",) * 3
      backward_cells = (
        (backward.repeat, backward.microbatch, backward.slot, backward.gradient_slot)
        if backward
        else ("",) * 4
      )
      writer.writerow((tick, stage, *forward_cells, *backward_cells))
  return text.getvalue()


def from_csv(text: str, shape: TimetableShape, name: str) -> Timetable:
  """Returns the timetable of a file's text. Idle rows and the columns of slots may be left out.

  Raises:
    UserError: the text is not such a table. Whether it can be run, simulator.py checks.
  """
  reader = csv.reader(io.StringIO(text))
  columns = _header(next(reader, []), name)
  cells: dict[tuple[int, int], Cell] = {}
  for line, row in _lines(reader, name):
    values = _values(row, columns, f"{name}:{line}")
    tick, stage = values["tick"], values["stage"]
    if tick is None or stage is None:
      raise UserError(
        f"{name}:{line}: the row has no tick or no stage; every row needs both, counted from 0, for "
        "example 0,0"
      )
    if stage >= shape.stages:
      raise UserError(
        f"{name}:{line}: stage={stage} must be 0 to {shape.stages - 1}, since the configuration has "
        f"{shape.stages} stages; for example {shape.stages - 1}"
      )
    if tick >= _max_ticks(shape):
      raise UserError(
        f"{name}:{line}: tick={tick} must be below {_max_ticks(shape)}, which is enough for every "
        "forward and backward in turn; leave out idle ticks"
      )
    if (tick, stage) in cells:
      raise UserError(
        f"{name}:{line}: tick {tick} of stage {stage} has a row already; keep one of the two"
      )
    cells[tick, stage] = _cell(values, columns, f"{name}:{line}")
  count = 1 + max((tick for tick, _ in cells), default=-1)
  return Timetable(
    shape,
    tuple(
      tuple(cells.get((tick, stage), Cell()) for stage in range(shape.stages))
      for tick in range(count)
    ),
  )


def _max_ticks(shape: TimetableShape) -> int:
  """Returns the ticks of the slowest useful timetable: each forward and backward by itself."""
  return 2 * shape.forwards_per_stage * shape.stages * shape.forwarding_delay


def _header(names: list[str], name: str) -> list[str]:
  columns = [column.strip().lstrip("\ufeff") for column in names]
  for column in columns:
    if column not in COLUMNS:
      raise UserError(
        f"{name}:1: unknown column {column!r}.{did_you_mean(column, COLUMNS)} Known: "
        f"{', '.join(COLUMNS)}"
      )
    if columns.count(column) > 1:
      raise UserError(f"{name}:1: the column {column} appears twice; keep one")
  slots = _SLOT_COLUMNS if set(_SLOT_COLUMNS) & set(columns) else ()
  wanted = (*_INDEX_COLUMNS, *_PASS_COLUMNS, *slots)
  missing = [column for column in wanted if column not in columns]
  if missing:
    raise UserError(
      f"{name}:1: the first line lacks the columns {', '.join(missing)}; it must name all columns, "
      f"or all but {', '.join(_SLOT_COLUMNS)}"
    )
  return columns


def _lines(reader: Iterator[list[str]], name: str) -> Iterator[tuple[int, list[str]]]:
  """Yields the rows that are not empty, with their line numbers."""
  try:
    for line, row in enumerate(reader, 2):
      if any(cell.strip() for cell in row):
        yield line, row
  except csv.Error as error:
    raise UserError(f"{name}: not a CSV file: {error}") from error


def _values(row: list[str], columns: list[str], where: str) -> dict[str, int | None]:
  if len(row) != len(columns):
    raise UserError(
      f"{where}: {len(row)} cells, but the first line names {len(columns)} columns; give as many"
    )
  cells = zip(columns, row, strict=True)
  return {column: _number(cell.strip(), column, where) for column, cell in cells}


def _number(text: str, column: str, where: str) -> int | None:
  if text and not (text.isascii() and text.isdecimal() and len(text) < 10):
    raise UserError(
      f"{where}: {column}={text} must be a whole number, at least 0, or empty; for example 0"
    )
  return int(text) if text else None


def _cell(values: dict[str, int | None], columns: list[str], where: str) -> Cell:
  slots = "gradient_slot" in columns
  names = ["forward_repeat", "forward_microbatch", *(["forward_slot"] if slots else [])]
  forward = _entry(values, names, where)
  names = ["backward_repeat", "backward_microbatch", *(_SLOT_COLUMNS[1:] if slots else [])]
  backward = _entry(values, names, where)
  return Cell(Forward(*forward) if forward else None, Backward(*backward) if backward else None)


def _entry(values: dict[str, int | None], names: list[str], where: str) -> list[int]:
  """Returns the values of these columns; an empty list if all their cells are empty."""
  given = [name for name in names if values[name] is not None]
  empty = [name for name in names if values[name] is None]
  if given and empty:
    raise UserError(f"{where}: {', '.join(given)} without {', '.join(empty)}; fill all or none")
  return [value for name in names if (value := values[name]) is not None]
