"""The page itself: a template filled with what the runs' files say, and with their charts."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxbatch.command_line.table import Table
from maxbatch.plots.chart import Bars, Chart, Panel
from maxbatch.plots.page import rendered
from maxbatch.plots.thinning import MOST_POINTS
from maxbatch.run_folder.events import START
from maxbatch.run_folder.history import RunHistory
from maxbatch.run_folder.status import Status, span, status_of
from maxbatch.run_report import facts
from maxbatch.run_report.compiled import compile_tables, profile_tables
from maxbatch.run_report.curves import training_chart
from maxbatch.run_report.planned import Planned, planned

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
