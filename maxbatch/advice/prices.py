"""Prices of chips by generation: a table with dates and sources, which a user's own can replace.

    {"h100": {"price": 2.5, "date": "2026-11-01", "source": "our contract"}, "v5p": {"price": 2.1}}

`price` is of one chip, or GPU, for an hour. The package's table (prices.json) has list prices on demand, in
dollars; what is paid is often half of that or less.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from maxbatch.config.find import did_you_mean, shown, user_path
from maxbatch.errors import UserError
from maxbatch.estimate.chips import ALL_CHIPS

_TABLE = pathlib.Path(__file__).with_name("prices.json")
_EXAMPLE = '{"h100": {"price": 2.5, "date": "2026-11-01", "source": "our contract"}}'


@dataclasses.dataclass(frozen=True)
class Price:
  """What one chip costs for an hour."""

  price: float
  date: str = ""
  source: str = ""

  def __str__(self) -> str:
    known = ", ".join(filter(None, (self.source, self.date)))
    return f"{self.price:g} an hour" + (f" ({known})" if known else "")


def prices(file: str = "") -> Mapping[str, Price]:
  """Returns the price of a chip by generation.

  Args:
    file: JSON of a user's own table, whose rows replace the package's; empty: none.

  Raises:
    UserError: it cannot be read, is no such table, or has an unknown generation.
  """
  table = {
    name: Price(**row) for name, row in json.loads(_TABLE.read_text(encoding="utf-8")).items()
  }
  return {**table, **_own(file)} if file else table


def _own(file: str) -> Mapping[str, Price]:
  try:
    rows = json.loads(user_path(file).read_text(encoding="utf-8"))
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(
      f"prices={shown(file)}: cannot be read as JSON ({error}); for example {_EXAMPLE}"
    ) from error
  if not isinstance(rows, dict):
    raise UserError(f"prices={shown(file)}: no table by generation; for example {_EXAMPLE}")
  return {name: _row(file, name, row) for name, row in rows.items()}


def _row(file: str, name: str, row: Any) -> Price:
  if name not in ALL_CHIPS:
    raise UserError(
      f"prices={shown(file)}: {shown(name)} is no generation.{did_you_mean(name, ALL_CHIPS)} Known: "
      f"{', '.join(ALL_CHIPS)}"
    )
  fields: dict[str, Any] = row if isinstance(row, dict) else {}
  price: Any = fields.get("price")
  rest = {key: fields[key] for key in fields if key != "price"}
  is_number = type(price) in (int, float) and 0 < price < 1e6
  texts = all(key in ("date", "source") and isinstance(rest[key], str) for key in rest)
  if not (is_number and texts):
    raise UserError(
      f"prices={shown(file)}: {name} has no price above 0 with, if at all, date and source as text; "
      f"for example {_EXAMPLE}"
    )
  return Price(float(price), **rest)
