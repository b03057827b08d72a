"""Prices and powers of chips by generation: a table with dates and sources, which a user's own can replace.

    {"h100": {"price": 2.5, "date": "2026-11-01", "source": "our contract"}, "v5p": {"price": 2.1, "watts": 350}}

`price` is of one chip, or GPU, for an hour. The package's table (prices.json) has list prices on demand, in
dollars; what is paid is often half of that or less. `watts` is what one draws at most, without its share of
hosts, network and cooling; Google has published none of TPUs after v4.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from maxbatch.advice.words import energy, short
from maxbatch.config.find import did_you_mean, shown, user_path
from maxbatch.errors import UserError
from maxbatch.estimate.chips import ALL_CHIPS

_TEXTS = ("date", "source", "power_source")
_TABLE = pathlib.Path(__file__).with_name("prices.json")
_EXAMPLE = '{"h100": {"price": 2.5, "date": "2026-11-01", "source": "our contract"}}'


@dataclasses.dataclass(frozen=True)
class Price:
  """What one chip costs for an hour, and draws; 0: not known."""

  price: float
  date: str = ""
  source: str = ""
  watts: float = 0.0
  power_source: str = ""

  def __str__(self) -> str:
    known = ", ".join(filter(None, (self.source, self.date)))
    return f"{self.price:g} an hour" + (f" ({known})" if known else "")


@dataclasses.dataclass(frozen=True)
class StepCost:
  """What one step costs, and the most that its chips draw."""

  price: Price
  cost: float
  joules: float

  def __str__(self) -> str:
    parts = [f"a step costs {short(self.cost)}"] if self.cost else []
    if self.joules:
      source = f" ({self.price.power_source})" if self.price.power_source else ""
      parts.append(
        f"its chips draw at most {energy(self.joules)} in a step, without hosts and cooling: "
        f"{self.price.watts:g} W each{source}"
      )
    elif self.cost:
      parts.append("what its chips draw is not published")
    return "; ".join(parts)


def step_cost(price: Price, chips: int, seconds: float) -> StepCost:
  """Returns the cost and energy of a step of so many seconds on so many chips."""
  return StepCost(price, price.price * chips * seconds / 3600, price.watts * chips * seconds)


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
  if not file:
    return table
  for name, row in _own(file).items():
    # Another price draws no other power.
    known = table.get(name, row)
    power = {} if row.watts else {"watts": known.watts, "power_source": known.power_source}
    table[name] = dataclasses.replace(row, **power)
  return table


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
  watts: Any = rest.pop("watts", 0)
  has_power = type(watts) in (int, float) and 0 <= watts < 1e6
  texts = all(key in _TEXTS and isinstance(rest[key], str) for key in rest)
  if not (is_number and has_power and texts):
    raise UserError(
      f"prices={shown(file)}: {name} has no price above 0 with, if at all, watts, and {', '.join(_TEXTS)} as "
      f"text; for example {_EXAMPLE}"
    )
  rest["watts"] = float(watts)
  return Price(float(price), **rest)
