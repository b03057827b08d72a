"""What each setting reads beside what the step consumes, and what a row costs on its way."""

from maxbatch.core.keys import counted
from maxbatch.input_analysis.report import InputAnalysis
from maxbatch.input_analysis.settings import Setting
from maxbatch.plots.chart import Bars, Chart, Panel


def input_charts(analysis: InputAnalysis) -> list[Chart]:
  """Settings above, stages below."""
  return [_settings(analysis), _stages(analysis)]


def _settings(analysis: InputAnalysis) -> Chart:
  """A bar for what a loading host needs, with and without the margin, and for each setting."""
  consumed, margin = analysis.found.needed_per_second, analysis.bounds.margin
  needed = {"the step": consumed, f"the step × {margin:g}": margin * consumed}
  read = {_name(one.setting): one.samples_per_second for one in analysis.measured}
  bars = [
    Bars("consumed", list(needed), list(needed.values()), color=1),
    Bars("read", list(read), list(read.values())),
  ]
  panel = Panel("What settings read, and what the step consumes", bars)
  return Chart("settings", ["samples per second"], [panel], row_names=[*needed, *read])


def _name(setting: Setting) -> str:
  threads, workers = counted(setting.num_threads, "thread"), counted(setting.worker_count, "worker")
  return f"{workers if setting.worker_count else threads}, {setting.buffer_size} ahead"


def _stages(analysis: InputAnalysis) -> Chart:
  costs = {stage.name: 1e6 * stage.seconds for stage in analysis.stages}
  bars = Bars("", list(costs), list(costs.values()), color=2)
  panel = Panel("What a sample costs on its way", [bars])
  return Chart("stages", ["µs per sample"], [panel], row_names=list(costs))
