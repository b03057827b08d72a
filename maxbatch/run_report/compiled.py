"""What the compile report found, as tables of a page."""

from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.command_line.table import Table, gib

_NUM_LARGEST = 12
_WRONG_BY = 1.25
"""An estimate further off is called wrong."""


def compile_tables(report: Mapping[str, Any]) -> dict[str, Any]:
  """The title and the tables of one report, as far as it has them."""
  parts = {
    "Memory of a device": _memory(_part(report, "memory_bytes_per_device")),
    "Time of a step": _time(_part(report, "time")),
    "Where a step's time goes (estimate)": _scopes(_part(report, "estimate")),
    "Longest operations (estimate)": _largest(_part(report, "estimate")),
  }
  tables = [{"title": title, "table": table} for title, table in parts.items() if table.rows]
  return {"title": str(report.get("title", "")), "tables": tables}


def _part(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  found = report.get(name)
  return found if isinstance(found, Mapping) else {}


def _memory(memory: Mapping[str, Any]) -> Table:
  rows = [
    (name.replace("_", " "), f"{gib(size, '.3f')} GiB")
    for name, size in memory.items()
    if type(size) in (int, float)
  ]
  if "fits" in memory:
    rows.append(("fits", "yes" if memory["fits"] else "NO"))
  return Table(("what", "size"), rows)


def _time(time: Mapping[str, Any]) -> Table:
  rows = [
    (name.replace("_", " "), f"{value:,.4g}" if type(value) in (int, float) else str(value))
    for name, value in time.items()
  ]
  return Table(("what", "value"), rows)


def _scopes(estimate: Mapping[str, Any]) -> Table:
  scopes = {k: v for k, v in _part(estimate, "seconds_by_scope").items() if type(v) in (int, float)}
  total = sum(scopes.values()) or 1
  rows = [
    (scope, f"{seconds:.4g} s", f"{seconds / total:.1%}") for scope, seconds in scopes.items()
  ]
  return Table(("part of the model", "a step", "share"), rows)


def _largest(estimate: Mapping[str, Any]) -> Table:
  found = estimate.get("largest")
  rows = [
    (str(one.get("scope")), str(one.get("name")), str(one.get("count")), f"{one['seconds']:.4g} s", str(one.get("how")))
    for one in (found if isinstance(found, list) else [])[:_NUM_LARGEST]
    if isinstance(one, dict) and type(one.get("seconds")) in (int, float)
  ]  # fmt: skip
  return Table(("part", "operation", "times", "seconds", "by"), rows)


def profile_tables(profile: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> list[Any]:
  """What a trace measured, by part of the model and by operation, beside what had been estimated.

  Args:
    profile: as profile.json has it.
    reports: the compile reports, of which the last with an estimate counts.
  """
  estimates = [_part(_part(each, "estimate"), "seconds_by_scope") for each in reports]
  estimated = next((each for each in reversed(estimates) if each), {})
  tables = [
    ("Time of a traced step", _measured(_part(profile, "seconds_by_scope"), estimated)),
    ("Longest operations (measured)", _longest(profile.get("largest"))),
  ]
  return [{"title": title, "table": table} for title, table in tables if table.rows]


def _measured(scopes: Mapping[str, Any], estimated: Mapping[str, Any]) -> Table:
  measured = {name: each for name, each in scopes.items() if type(each) in (int, float)}
  total = sum(measured.values()) or 1
  rows = [
    (name, f"{each:.4g} s", f"{each / total:.1%}", *_beside(each, estimated.get(name)))
    for name, each in measured.items()
  ]
  return Table(("part of the model", "measured", "share", "estimated", "estimate / measured"), rows)


def _beside(measured: float, estimated: object) -> tuple[str, str]:
  """The estimate, and how far off it was."""
  if not isinstance(estimated, int | float) or not measured:
    return "–", "–"
  ratio = estimated / measured
  is_wrong = not 1 / _WRONG_BY <= ratio <= _WRONG_BY
  return f"{estimated:.4g} s", f"{ratio:.2f}" + (" — wrong" if is_wrong else "")


def _longest(found: object) -> Table:
  rows = [
    (str(one.get("scope")), str(one.get("name")), f"{one.get('count')}", f"{one['seconds']:.4g} s")
    for one in (found if isinstance(found, list) else [])[:_NUM_LARGEST]
    if isinstance(one, dict) and type(one.get("seconds")) in (int, float)
  ]
  return Table(("part", "operation", "times a step", "seconds a step"), rows)
