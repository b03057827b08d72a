"""The page itself: a template filled with what the runs' files say, and with their charts."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from maxbatch.command_line.table import Table
from maxbatch.plots.chart import Bars, Chart, Panel
from maxbatch.plots.page import rendered
from maxbatch.run_report.curves import MOST_POINTS
from maxbatch.run_folder.events import START
from maxbatch.run_folder.history import RunHistory
from maxbatch.run_folder.status import Status, span, status_of
from maxbatch.run_report import facts
from maxbatch.run_report.curves import training_chart
from maxbatch.batch.plan import BatchPlan, plan_batches
from maxbatch.batch.rl_plan import plan_rl
from maxbatch.batch.rl_sizes import is_rl
from maxbatch.batch.topology import topology
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.plot import timetable_chart
from maxbatch.pipeline_parallel.schedule import timetable
from maxbatch.plots.chart import Chart
from maxbatch.run_folder.paths import RunFolder
from collections.abc import Mapping, Sequence
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


_MOST_CELLS = 1500
"""Of a timetable that is drawn in a page."""


@dataclasses.dataclass(frozen=True)
class Planned:
  """What follows from the keys of the latest start."""

  derivation: str = ""
  pipeline: str = ""
  timetable: Chart | None = None
  missing: str = ""
  """Why it is not known; empty: it is."""


def planned(run: RunHistory) -> Planned:
  """Plans the run again, on the devices that it had."""
  num_devices = run.derived.get("num_devices")
  if not run.config or not isinstance(num_devices, int):
    return Planned(missing="the batch cannot be derived: config.yml does not say it")
  try:
    config = load_config([f"config={RunFolder(run.folder).config}"])
    layout = topology(config.mesh, num_devices, config.compile.compile_topology_num_slices)
    plan = (
      plan_rl(config, layout).pairs
      if is_rl(config.rl)
      else plan_batches(config.batch, config.run, layout)
    )
    return _with_pipeline(config, plan)
  except UserError as error:
    return Planned(missing=f"the batch cannot be derived from config.yml by this version: {error}")


def _with_pipeline(config: Config, plan: BatchPlan) -> Planned:
  if config.pipeline.pipeline_schedule == "none":
    return Planned(str(plan))
  pipeline = pipeline_of(config, plan.topology, plan)
  shape = pipeline.shape
  if shape.forwards_per_stage * shape.stages > _MOST_CELLS:
    return Planned(
      str(plan), f"{pipeline}\nToo long to be drawn here: python -m maxbatch.pipeline --plot"
    )
  table = timetable(pipeline.schedule, shape)
  return Planned(str(plan), str(pipeline), timetable_chart(table, pipeline.schedule))


_TRAINING = "training"
_TEMPLATES = Path(__file__).parent / "templates"


@dataclasses.dataclass(frozen=True)
class _Shown:
  """What the template says of one run."""

  run: RunHistory
  status: Status
  planned: Planned

  @property
  def name(self) -> str:
    return self.run.name

  @property
  def missing(self) -> list[str]:
    return [*self.run.missing, *([self.planned.missing] if self.planned.missing else [])]

  @property
  def glance(self) -> list[tuple[str, str]]:
    return facts.glance(self.run)

  @property
  def time_table(self) -> Table:
    uses = facts.seconds_by_use(self.run)
    total = sum(uses.values())
    rows = [(name, span(seconds), f"{seconds / total:.1%}") for name, seconds in uses.items()]
    return Table(("what", "time", "share"), rows)

  @property
  def memory(self) -> Table:
    return facts.memory(self.run)

  @property
  def command(self) -> str:
    starts = self.run.of_kind(START)
    words = starts[-1].get("command") if starts else None
    return facts.command(words)

  @property
  def about(self) -> str:
    return self._of_start("about")

  @property
  def versions(self) -> str:
    return self._of_start("versions")

  @property
  def keys(self) -> Table:
    return Table(
      ("key", "value"), [(key, facts.shown(value)) for key, value in self.run.config.items()]
    )

  @property
  def starts(self) -> Table:
    return facts.starts(self.run)

  @property
  def notices(self) -> Table:
    return facts.notices(self.run)

  @property
  def checkpoints(self) -> Table:
    return facts.checkpoints(self.run)

  @property
  def texts(self) -> list[tuple[str, str]]:
    return list(facts.texts(self.run))

  @property
  def compile_reports(self) -> list[dict[str, Any]]:
    return [compile_tables(each) for each in self.run.compile_reports]

  @property
  def profile(self) -> list[Any]:
    return profile_tables(self.run.profile, self.run.compile_reports)

  def _of_start(self, key: str) -> str:
    starts = self.run.of_kind(START)
    return str(starts[-1].get(key, "")) if starts else ""


_SECTIONS = {
  "differences": "differences",
  "runs": "runs",
  "training": "training",
  "time": "time",
  "what": "what was trained",
  "starts": "starts",
  "notices": "faults",
  "checkpoints": "checkpoints",
  "texts": "texts",
  "pipeline": "pipeline",
  "profile": "profile",
  "compile-1": "compile report",
}


def page(runs: Sequence[RunHistory]) -> str:
  """The HTML of one run, or of several beside each other."""
  shown = [_Shown(run, status_of(run), planned(run)) for run in runs]
  several = len(runs) > 1
  comparison = None
  if several:
    states = [one.status.state for one in shown]
    comparison = {"differing": facts.differing(runs), "sweep": facts.sweep(runs, states)}
  charts = _charts(shown)
  return rendered(
    "report.html",
    charts,
    _TEMPLATES,
    title=f"{len(runs)} runs" if several else runs[0].name,
    written=facts.moment(time.time()),
    runs=shown,
    comparison=comparison,
    most_points=f"{MOST_POINTS:,}",
    sections=_sections(shown, has_training=_TRAINING in charts),
  )


def _sections(shown: Sequence[_Shown], *, has_training: bool) -> list[tuple[str, str]]:
  """The anchors that the page has, with their names."""
  there = {"differences": len(shown) > 1, "runs": len(shown) > 1, "training": has_training}
  if len(shown) == 1:
    [one] = shown
    there |= {
      "time": bool(one.time_table.rows),
      "what": bool(one.about or one.planned.derivation or one.command),
      "starts": bool(one.starts.rows),
      "notices": bool(one.notices.rows),
      "checkpoints": bool(one.checkpoints.rows),
      "texts": bool(one.texts),
      "pipeline": bool(one.planned.pipeline),
      "profile": bool(one.profile),
      "compile-1": bool(one.compile_reports),
    }
  return [(name, _SECTIONS[name]) for name, is_there in there.items() if is_there]


def _charts(shown: Sequence[_Shown]) -> dict[str, Chart]:
  """All charts of the page, by the names that the template has for them."""
  found = {_TRAINING: training_chart([one.run for one in shown])}
  for number, one in enumerate(shown, start=1):
    found[f"time-{number}"] = _time_chart(facts.seconds_by_use(one.run))
    found[f"timetable-{number}"] = one.planned.timetable
  return {name: chart for name, chart in found.items() if chart is not None}


def _time_chart(uses: dict[str, float]) -> Chart | None:
  if not uses:
    return None
  bars = Bars("", list(uses), list(uses.values()))
  return Chart("where the time went", ["seconds"], [Panel("", [bars])], row_names=list(uses))
