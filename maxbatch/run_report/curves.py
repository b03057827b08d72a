"""What a run measured, as panels over one axis: steps, samples, tokens or seconds."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from maxbatch.noise.advice import WELL_BELOW
from maxbatch.plots.chart import Band, Cells, Chart, Line, Mark, Panel, Style
from maxbatch.run_folder.history import SECONDS, Curve, RunHistory

_AXES = {"steps": "step", "samples": "samples", "tokens": "tokens", "seconds of steps": SECONDS}
_FEWEST_POINTS = 200
_STEP_TIMES = {"step_seconds": "a step", "data_wait_seconds": "of it waiting for rows"}
_SIZES = ("micro_batch_to_train", "gradient_accumulation_steps")
_BATCH, _RATE = "global_batch_to_train", "learning_rate"
_GOODPUT, _WALL = "goodput/share", "goodput/wall_seconds"
_TOTAL, _LOW, _HIGH = "gns/total", "gns/total_low", "gns/total_high"
_OF_THE_WHOLE = (_TOTAL, _LOW, _HIGH, "gns/total_tokens", "gns/negative_share", "gns/slope")
_HIDDEN = ("/signal", "/noise")
"""A step's raw moments, whose quotient over a window is shown."""
MOST_POINTS = 1200
"""About as many as a screen has dots across."""
_KEPT_OF_EACH = 4
_LOAD = re.compile(r"moe/load/(\d+)/(\d+)")
_EACH_EXPERT = re.compile(r"moe/load/|gns/expert/")
"""Too many for lines."""
_BY_LAYER = {
  "moe/max_load": "largest load of an expert, by layer (1 is even)",
  "moe/load_deviation": "spread of the experts' loads, by layer (standard deviation)",
}
_DRAWN_LAYERS = 8
"""Of more layers, those whose last values are the largest are drawn."""
_LAST_LOADS = 20
"""Steps at the end over which a load is averaged."""


def training_chart(runs: Sequence[RunHistory]) -> Chart | None:
  """Draws all that was recorded through training; several runs over each other, by samples first.

  None where nothing was recorded.
  """
  names = sorted({key for run in runs for key in run.metrics.curves})
  axes = list(_AXES)
  if len(runs) > 1:
    axes = [axes[1], axes[0], *axes[2:]]
  drawing = _Drawing(runs, [_AXES[name] for name in axes])
  panels = [panel for panel in drawing.panels(names) if panel.marks]
  if not panels:
    return None
  return Chart(name="training", axes=axes, panels=panels)


def expert_chart(run: RunHistory) -> Chart | None:
  """Draws the loads of layers × experts at the end of what was recorded; None where there are none."""
  loads: dict[int, dict[int, float]] = {}
  for name, curve in run.metrics.curves.items():
    if match := _LOAD.fullmatch(name):
      layer, expert = map(int, match.groups())
      loads.setdefault(layer, {})[expert] = float(curve.values[-_LAST_LOADS:].mean())
  if not loads:
    return None
  names = [f"layer {layer}" for layer in sorted(loads)]
  values = [[each for _, each in sorted(loads[layer].items())] for layer in sorted(loads)]
  cells = Cells("load", names, values, high=max(2.0, *map(max, values)))
  panel = Panel(f"loads of experts, 1 is even: mean of the last {_LAST_LOADS} steps", [cells])
  return Chart("loads of experts by layer", ["expert"], [panel], row_names=names)


class _Drawing:
  """Makes the panels of some runs."""

  def __init__(self, runs: Sequence[RunHistory], positions: Sequence[str]):
    self._runs, self._positions = runs, positions
    share = max(_FEWEST_POINTS, 4 * MOST_POINTS // len(runs))
    self._most = min(MOST_POINTS, share // 4 * 4)

  def panels(self, names: Sequence[str]) -> Iterator[Panel]:
    """Yields the panels in the order in which one looks at them; unknown names come last."""
    evaluations = [name for name in names if name.startswith("eval/loss")]
    parts = [name.removeprefix("eval/loss").strip("/") for name in evaluations]
    labels = [f"validation, {part}" if part else "validation" for part in parts]
    validation = dict(zip(evaluations, labels, strict=True))
    losses = self._lines({"loss": "training"}, faint=True)
    losses += self._lines(validation, first=1, style="both")
    yield Panel("loss (nats per token)", losses)
    passed = {name: name.removeprefix("eval/") for name in names if "pass_at_" in name}
    rewards = {"rl/reward": "reward"} | passed
    yield Panel("reward, and how often completions are right", self._lines(rewards, style="both"))
    yield Panel("batch (samples per step)", self._lines({_BATCH: "batch"}, style="steps"), low=0)
    yield Panel("learning rate", self._lines({_RATE: "learning rate"}), low=0)
    yield Panel("gradient norm before clipping", self._lines({"grad_norm": "before clipping"}))
    yield Panel("noise scale (samples) and batch", self._noise(), log=True)
    groups = {
      name: name.removeprefix("gns/")
      for name in names
      if name.startswith("gns/")
      and not (name.endswith(_HIDDEN) or name in _OF_THE_WHOLE or _EACH_EXPERT.match(name))
    }
    yield Panel("noise scale by group (samples)", self._lines(groups), log=True)
    speed = self._lines({"tokens_per_second": "all devices"})
    yield Panel("tokens per second of all devices", speed, low=0)
    yield Panel("seconds", self._lines(_STEP_TIMES), log=True)
    yield Panel(
      "goodput: share of the time in steps that count",
      self._lines({_GOODPUT: "goodput"}),
      low=0,
      high=1,
    )
    lost = {
      name: name[len("goodput/") : -len("_seconds")].replace("_", " ")
      for name in names
      if name.startswith("goodput/") and name not in (_GOODPUT, _WALL)
    }
    yield Panel("seconds lost so far, by cause", self._lines(lost), low=0)
    shown = {"loss", _BATCH, _RATE, "grad_norm", "tokens_per_second", _TOTAL, _LOW, _HIGH}
    shown |= {
      *evaluations,
      *rewards,
      *groups,
      *_STEP_TIMES,
      *_SIZES,
      *lost,
      _GOODPUT,
      _WALL,
      *filter(_EACH_EXPERT.match, names),
    }
    for key, title in _BY_LAYER.items():
      layers = self._largest([name for name in names if name.startswith(f"{key}/")])
      shown |= {name for name in names if name.startswith(f"{key}/")}
      labels = {name: f"layer {name.rpartition('/')[2]}" for name in layers}
      yield Panel(title, self._lines(labels), low=0)
    for name in names:
      if name not in shown and not name.endswith(_HIDDEN):
        yield Panel(name, self._lines({name: name}))

  def _largest(self, names: Sequence[str]) -> list[str]:
    """Returns the curves that are drawn of one for each layer, in the layers' order."""

    def last(name: str) -> float:
      return max(
        run.metrics.curves[name].values[-1] for run in self._runs if name in run.metrics.curves
      )

    def layer(name: str) -> int:
      return int(name.rpartition("/")[2])

    return sorted(sorted(names, key=last)[-_DRAWN_LAYERS:], key=layer)

  def _lines(
    self, names: dict[str, str], first: int = 0, style: Style = "line", *, faint: bool = False
  ) -> list[Mark]:
    """Returns a line for each key of each run; of several runs by color, of one run by key."""
    results: list[Mark] = []
    several = len(self._runs) > 1
    for (key, label), (place, run) in itertools.product(names.items(), enumerate(self._runs)):
      curve = run.metrics.curves.get(key)
      if curve is None:
        continue
      number = first + list(names).index(key)
      look = Line(
        run.name if several else label,
        color=place if several else number,
        dash=place if several else number,
        style=style if len(curve.values) < _FEWEST_POINTS or style == "steps" else "line",
        faint=faint,
        group=f"run-{place}" if several else "",
      )
      results.append(self._through(run, curve, look))
    return results

  def _through(self, run: RunHistory, curve: Curve, look: Line) -> Line:
    """Returns the line that looks so, through a curve's points."""
    places = thinned(curve.values, self._most)
    x, y = self._x(run, curve.rows[places]), curve.values[places].tolist()
    return dataclasses.replace(look, x=x, y=y)

  def _x(self, run: RunHistory, rows: np.ndarray) -> list[list[float]]:
    return [run.metrics.positions[name][rows].tolist() for name in self._positions]

  def _noise(self) -> list[Mark]:
    """Returns the noise scale with its interval, and the batch beside it."""
    marks: list[Mark] = []
    for place, run in enumerate(self._runs):
      curves, several = run.metrics.curves, len(self._runs) > 1
      low, high, total = curves.get(_LOW), curves.get(_HIGH), curves.get(_TOTAL)
      if total is None:
        continue
      group, name = (f"run-{place}", run.name) if several else ("", "noise scale")
      if not several and low is not None and high is not None and len(low.rows) == len(high.rows):
        marks += self._bands(run, low, high)
      marks.append(self._through(run, total, Line(name, color=place, group=group)))
      if _BATCH in curves:
        batch = Line("batch", color=place + 1, dash=1, style="steps", group=group)
        marks.append(self._through(run, curves[_BATCH], batch))
    return marks

  def _bands(self, run: RunHistory, low: Curve, high: Curve) -> list[Band]:
    """Returns the interval, and the batches at which another changes little (advice.py)."""
    # On a logarithmic axis what is not above 0 has no place.
    known = np.flatnonzero(low.values > 0)
    places = known[thinned(high.values[known], self._most)] if len(known) else known
    x = self._x(run, low.rows[places])
    low_end, high_end = low.values[places], high.values[places]
    least = (WELL_BELOW * low_end).tolist()
    return [
      Band("efficient range", x, least, high_end.tolist(), color=2),
      Band("95%", x, low_end.tolist(), high_end.tolist(), color=0),
    ]


def thinned(y: np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
  """Returns the places of the points to draw, in order: all, or at most `most`.

  The curve is divided into stretches of equally many points, of which the first, the last, the
  lowest and the highest stay: so do the ends and extremes of the whole.

  Args:
    y: (n,), finite.
    most: a multiple of 4.
  """
  count, stretches = len(y), most // _KEPT_OF_EACH
  if count <= most:
    return np.arange(count)
  length = -(-count // stretches)
  padded = np.pad(y, (0, stretches * length - count), mode="edge").reshape(stretches, length)
  begins = np.arange(stretches) * length
  result = (0, length - 1, padded.argmin(axis=1), padded.argmax(axis=1))
  places = np.concatenate([begins + place for place in result])
  return np.unique(np.minimum(places, count - 1))
