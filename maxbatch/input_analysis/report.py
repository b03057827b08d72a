"""What the analysis found: as text, as plain values, and as charts."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from maxbatch.command_line.screen import Table, section
from maxbatch.core.keys import counted, text
from maxbatch.data.input_report import InputReport
from maxbatch.input_analysis.measure import Measured, Setting, Stage
from maxbatch.input_analysis.need import Need
from maxbatch.input_analysis.recommend import (
  Bounds,
  Loading,
  Recommendation,
  Slurm,
  host_bytes,
  recommend,
)
from maxbatch.plots.chart import Bars, Chart, Panel


@dataclasses.dataclass(frozen=True)
class InputAnalysis:
  """All of it, for a run of `num_hosts` processes."""

  run_name: str
  need: Need
  bounds: Bounds
  num_hosts: int
  num_cores: int
  input_function: InputReport
  open_seconds: float
  """To find and check the token cache, or to make it."""
  stages: tuple[Stage, ...]
  measured: tuple[Measured, ...]
  left_out: tuple[Setting, ...]
  """For which there was no time."""
  options: tuple[Loading, ...]
  found: Recommendation
  slurm: Slurm
  notes: tuple[str, ...] = ()

  @property
  def keys(self) -> dict[str, str]:
    factor = self.found.loading.factor
    written = {name: str(value) for name, value in self.found.setting.keys().items()}
    return written | {"expansion_factor_real_data": "-1" if factor == 1 else text(factor)}

  @property
  def num_shards(self) -> int:
    """Files that the data should come in, at least, where they cannot be divided."""
    return max(self.num_cores, self.found.loading.num_hosts)

  def as_dict(self) -> dict[str, Any]:
    result = self.found
    return {
      "keeps_up": result.keeps_up,
      "recommended": self.keys,
      "slurm": dataclasses.asdict(self.slurm),
      "shards": self.num_shards,
      "times_faster_than_the_step": result.ratio,
      "margin": self.bounds.margin,
      "need": dataclasses.asdict(self.need) | {"samples_per_second": self.need.samples_per_second},
      "loading_hosts": result.loading.num_hosts,
      "needed_samples_per_second_of_a_loading_host": result.needed_per_second,
      "open_seconds": self.open_seconds,
      "stages": [dataclasses.asdict(stage) for stage in self.stages],
      "measured": [dataclasses.asdict(one) for one in self.measured],
      "left_out": [dataclasses.asdict(one) for one in self.left_out],
      "loading": [dataclasses.asdict(one) | {"factor": text(one.factor)} for one in self.options],
      "input_function": self.input_function.as_dict(),
      "notes": list(self.notes),
    }

  def __str__(self) -> str:
    parts = [
      f"Input analysis of {self.run_name}: {self._verdict()}",
      section("Needed", self._needed()),
      str(self.input_function),
      section("Stages, one thread", _lines(self._stages(), left=(0, 1))),
      section(
        f"Settings, one process on {counted(self.num_cores, 'core')}",
        _lines(self._settings(), left=(6,)),
      ),
      section("Loading hosts", _lines(self._loading(), left=(5,))),
      section("Recommended", self._recommended()),
    ]
    return "\n\n".join(parts)

  def _verdict(self) -> str:
    result, margin = self.found, self.bounds.margin
    if result.keeps_up:
      return f"the data keep up with the step, {result.ratio:,.3g} times as fast"
    return (
      f"the data DO NOT KEEP UP with a margin of {margin:g}: at most "
      f"{_speed(result.samples_per_second)} of {_speed(margin * result.needed_per_second)} samples/s of a "
      "loading host"
    )

  def _needed(self) -> Iterator[str]:
    need = self.need
    yield (
      f"{_speed(need.samples_per_second)} samples/s: {counted(need.samples, 'sample')} in a step of "
      f"{need.step_seconds:,.4g} s, {need.how}"
    )
    yield (
      f"{counted(self.num_hosts, 'host')}; a margin of {self.bounds.margin:g} times that; samples of "
      f"{self.bounds.row_bytes:,} bytes"
    )
    yield from self.notes

  def _stages(self) -> Iterator[tuple[str, ...]]:
    yield "stage", "", "µs/sample", "samples/s"
    yield "open", "the token cache, once", f"{self.open_seconds:,.3g} s", ""
    for source in self.input_function.sources:
      name = f"tokens of {source.name}" if source.name else "tokens"
      if source.rate is None:
        yield "tokenize", f"{name}: {'soon made' if source.cold_bytes else 'in the cache'}", "", ""
      else:
        speed = f"{source.rate.text_bytes_per_second / 1e6:,.3g} MB/s a core"
        yield "tokenize", f"{name}: {source.cold_seconds:,.3g} s, once", speed, ""
    for one in self.stages:
      speed = _speed(1 / one.seconds) if one.seconds else ""
      yield one.name, one.what, f"{1e6 * one.seconds:,.3g}", speed

  def _settings(self) -> Iterator[tuple[str, ...]]:
    yield "workers", "threads", "loads ahead", "samples/s", "first load", "slowest", "keeps up"
    for one in sorted(self.measured, key=lambda one: one.setting):
      setting = one.setting
      yield (
        str(setting.worker_count),
        "" if setting.worker_count else str(setting.num_threads),
        str(setting.buffer_size) + (" each" if setting.worker_count else ""),
        _speed(one.samples_per_second),
        f"{one.first_seconds:,.3g} s",
        f"{one.slowest_seconds:,.3g} s",
        self._keeps_up(one),
      )
    if self.left_out:
      yield (
        f"no time for {counted(len(self.left_out), 'more setting')}; more seconds=… measures it",
      )

  def _keeps_up(self, one: Measured) -> str:
    result = recommend([one], self.options, self.bounds)
    if not result.keeps_up:
      return "no"
    loading = result.loading.num_hosts
    return f"with {loading:,} of {self.num_hosts:,} loading" if self.num_hosts > 1 else "yes"

  def _loading(self) -> Iterator[tuple[str, ...]]:
    yield "hosts", "factor", "samples/s of one", "its loads", "rounds", ""
    for one in self.options:
      chosen = one == self.found.loading
      size = host_bytes(self.found.setting, one, self.bounds.row_bytes)
      needed = _speed(one.samples_per_step / self.bounds.step_seconds)
      yield (
        f"{one.num_hosts:,}",
        text(one.factor),
        needed,
        f"{size / 1e6:,.4g} MB",
        f"{one.num_rounds:,}",
        "recommended" if chosen else "",
      )

  def _recommended(self) -> Iterator[str]:
    yield from (f"{name}: {value}" for name, value in self.keys.items())
    yield f"or: {' '.join(f'{name}={value}' for name, value in self.keys.items())}"
    loading = self.found.loading.num_hosts
    if self.num_hosts > 1:
      each = "each its own samples" if loading == self.num_hosts else "for all"
      yield f"loading hosts: {loading:,} of {self.num_hosts:,}, {each}"
    yield from self.slurm.lines()
    yield f"shards: {self._shards()}"

  def _shards(self) -> str:
    undivided = [one for one in self.input_function.sources if one.largest_undivided[0]]
    if undivided:
      return f"split the data into {self.num_shards} files or more, of equal size"
    return "any number of files; parts of them are read alone"


def _lines(rows: Iterator[tuple[str, ...]], left: Sequence[int]) -> list[str]:
  head, *rest = rows
  return Table(head, rest, left).lines(indent="")


def _speed(samples_per_second: float) -> str:
  if samples_per_second >= 100:
    return f"{samples_per_second:,.0f}"
  return f"{samples_per_second:.3g}"


def input_charts(analysis: InputAnalysis) -> list[Chart]:
  return [_settings_chart(analysis), _stages_chart(analysis)]


def _settings_chart(analysis: InputAnalysis) -> Chart:
  """Draws bars: what a loading host needs, with and without the margin, and each setting."""
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


def _stages_chart(analysis: InputAnalysis) -> Chart:
  costs = {stage.name: 1e6 * stage.seconds for stage in analysis.stages}
  bars = Bars("", list(costs), list(costs.values()), color=2)
  panel = Panel("What a sample costs on its way", [bars])
  return Chart("stages", ["µs per sample"], [panel], row_names=list(costs))
