"""What each setting reads beside what the step consumes, and what a row costs on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxbatch.batch.solve import counted
from maxbatch.input_analysis.report import InputAnalysis
from maxbatch.input_analysis.settings import Setting
from maxbatch.plots.figure import COLORS, DASHES, count_axis, legend, new_figure

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure


def plot(analysis: InputAnalysis) -> Figure:
  """Settings above, stages below."""
  figure, (above, below) = new_figure(f"Input of {analysis.run_name}", 2)
  _settings(above, analysis)
  _stages(below, analysis)
  return figure


def _settings(axes: Axes, analysis: InputAnalysis) -> None:
  """A bar for each setting, and lines at what a loading host needs."""
  names = [_name(one.setting) for one in analysis.measured]
  speeds = [one.samples_per_second for one in analysis.measured]
  axes.bar(names, speeds, color=COLORS[0], gid="settings")
  needed = analysis.found.needed_per_second
  lines = {"the step": 1.0, f"× {analysis.bounds.margin:g}": analysis.bounds.margin}
  for (label, times), dashes in zip(lines.items(), DASHES, strict=False):
    axes.axhline(times * needed, color=COLORS[1], linestyle=dashes, label=label, gid=label)
  axes.set_yscale("log")
  axes.set_ylabel("samples/s")
  axes.tick_params(axis="x", labelsize="small")
  legend(axes)


def _name(setting: Setting) -> str:
  threads, workers = counted(setting.num_threads, "thread"), counted(setting.worker_count, "worker")
  return f"{workers if setting.worker_count else threads}\n{setting.buffer_size} ahead"


def _stages(axes: Axes, analysis: InputAnalysis) -> None:
  names = [stage.name for stage in analysis.stages]
  axes.bar(names, [1e6 * stage.seconds for stage in analysis.stages], color=COLORS[2], gid="stages")
  axes.set_ylabel("µs/sample")
  count_axis(axes.yaxis)
