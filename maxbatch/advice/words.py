"""Numbers and sentences as the advice prints them: within 80 columns."""

import textwrap

WIDTH = 80
DAY = 86_400
"""Seconds."""
_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
  """Returns two or three digits and a unit: 3.1M, 140B, 52.3k, 512."""
  for size, unit in _UNITS:
    # What rounds up to the next unit is written in it.
    if value >= 0.9995 * size:
      return f"{value / size:.3g}{unit}" if value / size < 1000 else f"{value / size:,.0f}{unit}"
  return f"{value:,.3g}"


def percent(share: float) -> str:
  """Returns a share in percent: 57%, 0.4%."""
  value = 100 * share
  return f"{value:.2g}%" if value < 10 else f"{value:.0f}%"


def times(factor: float) -> str:
  """Returns a factor: 1.4×, 12×."""
  return f"{factor:.2g}×" if factor < 9.95 else f"{factor:,.0f}×"


def span(days: float) -> str:
  """Returns how long a run takes: 2.3 days, 5.1 hours, 40 seconds."""
  for size, unit in ((1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes")):
    if days >= size:
      number = f"{days / size:,.3g}"
      return f"1 {unit.removesuffix('s')}" if number == "1" else f"{number} {unit}"
  return f"{DAY * days:.3g} seconds"


def money(value: float) -> str:
  """Returns whole units of the price's currency, two digits after the point below a hundred."""
  return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def energy(joules: float) -> str:
  """Returns an energy with its unit: 1.2 MJ."""
  for size, unit in ((1e9, "GJ"), (1e6, "MJ"), (1e3, "kJ")):
    if joules >= size:
      return f"{joules / size:,.3g} {unit}"
  return f"{joules:.3g} J"


def wrapped(sentence: str, indent: str = "  ") -> list[str]:
  """Returns a sentence in lines of at most 80 columns."""
  return textwrap.wrap(
    sentence,
    WIDTH,
    initial_indent=indent,
    subsequent_indent=indent,
    break_long_words=False,
    break_on_hyphens=False,
  )
