"""The page itself: a template filled with what the runs' files say, and with their charts."""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from maxbatch.advice.run_advice import run_advice
from maxbatch.batch.from_config import is_rl, mesh_of, plan_batches
from maxbatch.batch.rl_plan import plan_rl
from maxbatch.command_line.screen import Table, in_unit
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.errors import UserError
from maxbatch.pipeline_parallel.drawings import timetable_chart
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.schedule import timetable
from maxbatch.plots.chart import Bars, Chart, Panel
from maxbatch.plots.interactive import COLORS
from maxbatch.plots.page import rendered
from maxbatch.run_folder.events import START
from maxbatch.run_folder.history import RunHistory, span, status_of
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_report import facts
from maxbatch.run_report.curves import MOST_POINTS, expert_chart, training_chart

_MOST_CELLS = 1500
"""Most cells of a timetable that is drawn in a page."""
_NUM_LARGEST = 12
_WRONG_BY = 1.25
"""An estimate further off is called wrong."""
_AGAIN = 0.5
"""Opacity of colors that are used a second time."""
_TRAINING = "training"
_TEMPLATES = Path(__file__).parent / "templates"
_SECTIONS = {
  "differences": "differences",
  "runs": "runs",
  "training": "training",
  "experts": "experts",
  "time": "time",
  "advice": "what to change",
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
  """Returns the HTML of one run, or of several beside each other."""
  shown = [_shown(run) for run in runs]
  several = len(runs) > 1
  comparison = None
  if several:
    states = [one.status.state for one in shown]
    comparison = {"differing": facts.differing(runs), "sweep": facts.sweep(runs, states)}
  charts = {_TRAINING: training_chart(runs)}
  for number, one in enumerate(shown, start=1):
    charts |= {f"time-{number}": one.time_chart, f"timetable-{number}": one.planned.timetable}
    charts |= {f"experts-{number}": one.expert_chart}
  drawn = {name: chart for name, chart in charts.items() if chart is not None}
  return rendered(
    "report.html",
    drawn,
    _TEMPLATES,
    title=f"{len(runs)} runs" if several else runs[0].name,
    written=facts.moment(time.time()),
    runs=shown,
    comparison=comparison,
    most_points=f"{MOST_POINTS:,}",
    sections=_sections(shown, has_training=_TRAINING in drawn),
  )


def _shown(run: RunHistory) -> SimpleNamespace:
  """Returns what the template says of one run."""
  plan, uses = _planned(run), facts.seconds_by_cause(run)
  start = (run.of_kind(START) or [{}])[-1]
  total = sum(uses.values())
  shares = [(name, span(each), f"{each / total:.1%}") for name, each in uses.items()]
  begins = itertools.accumulate(uses.values(), initial=0.0)
  bars = [
    Bars(name, ["time"], [seconds], [begin], number, 1.0 if number < len(COLORS) else _AGAIN)
    for number, ((name, seconds), begin) in enumerate(zip(uses.items(), begins, strict=False))
  ]
  time_chart = Chart("where the time went", ["seconds"], [Panel("", bars)], row_names=["time"])
  return SimpleNamespace(
    name=run.name,
    status=status_of(run),
    planned=plan,
    missing=[*run.missing, *([plan.missing] if plan.missing else [])],
    glance=facts.glance(run),
    time_table=Table(("what", "time", "share"), shares),
    time_chart=time_chart if uses else None,
    expert_chart=expert_chart(run),
    memory=facts.memory(run),
    advice=_advice(run),
    command=facts.command(start.get("command")),
    about=str(start.get("about", "")),
    versions=str(start.get("versions", "")),
    keys=Table(("key", "value"), [(key, facts.shown(one)) for key, one in run.config.items()]),
    starts=facts.starts(run),
    notices=facts.notices(run),
    checkpoints=facts.checkpoints(run),
    texts=list(facts.texts(run)),
    compile_reports=[compile_tables(each) for each in run.compile_reports],
    profile=profile_tables(run.profile, run.compile_reports),
  )


def _advice(run: RunHistory) -> list[str]:
  """Returns what to change in the run, in sentences; none where too few steps say anything."""
  try:
    return [one.sentence for one in run_advice(run)]
  except UserError:
    return []


def _sections(shown: Sequence[SimpleNamespace], *, has_training: bool) -> list[tuple[str, str]]:
  """Returns the anchors that the page has, with their names."""
  there = {"differences": len(shown) > 1, "runs": len(shown) > 1, "training": has_training}
  if len(shown) == 1:
    [one] = shown
    there |= {name: getattr(one, name).rows for name in ("starts", "notices", "checkpoints")}
    there |= {
      "experts": one.expert_chart,
      "time": one.time_table.rows,
      "advice": one.advice,
      "what": one.about or one.planned.derivation or one.command,
      "texts": one.texts,
      "pipeline": one.planned.pipeline,
      "profile": one.profile,
      "compile-1": one.compile_reports,
    }
  return [(name, words) for name, words in _SECTIONS.items() if there.get(name)]


@dataclasses.dataclass(frozen=True)
class _Planned:
  """What follows from the keys of the latest start."""

  derivation: str = ""
  pipeline: str = ""
  timetable: Chart | None = None
  missing: str = ""
  """Why it is not known; empty: it is."""


def _planned(run: RunHistory) -> _Planned:
  """Plans the run again, on the devices that it had."""
  num_devices = run.derived.get("num_devices")
  if not run.config or not isinstance(num_devices, int):
    return _Planned(missing="the batch cannot be derived: config.yml does not say it")
  try:
    config = load_config([f"config={RunFolder(run.folder).config}"])
    layout = mesh_of(config, num_devices, config.compile.compile_topology_num_slices)
    plan = (
      plan_rl(config, layout).batch_plan
      if is_rl(config.rl)
      else plan_batches(config.batch, config.run, layout, config.optimizer)
    )
    return _Planned(str(plan), *_pipeline(config, plan))
  except UserError as error:
    return _Planned(missing=f"the batch cannot be derived from config.yml by this version: {error}")


def _pipeline(config: Config, plan: BatchPlan) -> tuple[str, Chart | None]:
  if config.pipeline.pipeline_schedule == "none":
    return "", None
  pipeline = pipeline_of(config, plan.topology, plan)
  shape = pipeline.shape
  if shape.forwards_per_stage * shape.stages > _MOST_CELLS:
    return f"{pipeline}\nToo long to be drawn here: maxbatch pipeline --plot", None
  return str(pipeline), timetable_chart(timetable(pipeline.schedule, shape), pipeline.schedule)


def compile_tables(report: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the title and the tables of one compile report, as far as it has them."""
  memory, estimate = _part(report, "memory_bytes_per_device"), _part(report, "estimate")
  numbers = _numbers(memory)
  largest = max(numbers.values(), default=0)
  sizes = [
    (name.replace("_", " "), " ".join(in_unit(size, largest))) for name, size in numbers.items()
  ]
  sizes += [("fits", "yes" if memory["fits"] else "NO")] if "fits" in memory else []
  times = [
    (name.replace("_", " "), f"{value:,.4g}" if _is_number(value) else str(value))
    for name, value in _part(report, "time").items()
  ]
  tables = {
    "Memory of a device": Table(("what", "size"), sizes),
    "Time of a step": Table(("what", "value"), times),
    "Where a step's time goes (estimate)": Table(
      ("part of the model", "a step", "share"), _shares(_part(estimate, "seconds_by_scope"))
    ),
    "Longest operations (estimate)": Table(
      ("part", "operation", "times", "seconds", "by"),
      [(*cells, str(one.get("how"))) for one, cells in _longest(estimate)],
    ),
  }
  return {"title": str(report.get("title", "")), "tables": _titled(tables)}


def profile_tables(profile: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> list[Any]:
  """Returns what a trace measured, by part and by operation, beside what had been estimated.

  Args:
    profile: as profile.json has it.
    reports: the compile reports, of which the last with an estimate counts.
  """
  estimates = [_part(_part(each, "estimate"), "seconds_by_scope") for each in reports]
  estimated = next((each for each in reversed(estimates) if each), {})
  scopes = _part(profile, "seconds_by_scope")
  rows = _shares(scopes)
  measured = [(*row, *_beside(scopes[row[0]], estimated.get(row[0]))) for row in rows]
  tables = {
    "Time of a traced step": Table(
      ("part of the model", "measured", "share", "estimated", "estimate / measured"), measured
    ),
    "Longest operations (measured)": Table(
      ("part", "operation", "times a step", "seconds a step"),
      [cells for _, cells in _longest(profile)],
    ),
  }
  return _titled(tables)


def _titled(tables: Mapping[str, Table]) -> list[dict[str, Any]]:
  return [{"title": title, "table": table} for title, table in tables.items() if table.rows]


def _part(report: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  result = report.get(name)
  return result if isinstance(result, Mapping) else {}


def _is_number(value: object) -> bool:
  return type(value) in (int, float)


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
  return {name: value for name, value in values.items() if _is_number(value)}


def _shares(scopes: Mapping[str, Any]) -> list[tuple[str, str, str]]:
  seconds = _numbers(scopes)
  total = sum(seconds.values()) or 1
  return [(name, f"{each:.4g} s", f"{each / total:.1%}") for name, each in seconds.items()]


def _longest(report: Mapping[str, Any]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
  """Returns the longest operations of an estimate or a profile, each with its cells."""
  result = report.get("largest")
  return [
    (one, (*(str(one.get(key)) for key in ("scope", "name", "count")), f"{one['seconds']:.4g} s"))
    for one in (result if isinstance(result, list) else [])[:_NUM_LARGEST]
    if isinstance(one, dict) and _is_number(one.get("seconds"))
  ]


def _beside(measured: float, estimated: object) -> tuple[str, str]:
  """Returns the estimate, and how far off it was."""
  if not isinstance(estimated, int | float) or not measured:
    return "–", "–"
  ratio = estimated / measured
  is_wrong = not 1 / _WRONG_BY <= ratio <= _WRONG_BY
  return f"{estimated:.4g} s", f"{ratio:.2f}" + (" — wrong" if is_wrong else "")
