"""What a run measured, as panels over one axis: steps, samples, tokens or seconds."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from maxbatch.noise.advice import WELL_BELOW
from maxbatch.plots.chart import Band, Chart, Line, Mark, Panel, Style
from maxbatch.run_folder.history import SECONDS, Curve, RunHistory

_AXES = {"steps": "step", "samples": "samples", "tokens": "tokens", "seconds of steps": SECONDS}
_FEWEST_POINTS = 200
_STEP_TIMES = {"step_seconds": "a step", "data_wait_seconds": "of it waiting for rows"}
_SIZES = ("micro_batch_to_train", "gradient_accumulation_steps")
_BATCH, _RATE = "global_batch_to_train", "learning_rate"
_TOTAL, _LOW, _HIGH = "gns/total", "gns/total_low", "gns/total_high"
_OF_THE_WHOLE = (_TOTAL, _LOW, _HIGH, "gns/total_tokens", "gns/negative_share", "gns/slope")
_HIDDEN = ("/signal", "/noise")
"""A step's raw moments, whose quotient over a window is shown."""
MOST_POINTS = 1200
"""About as many as a screen has dots across."""
_KEPT_OF_EACH = 4


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
      if name.startswith("gns/") and not name.endswith(_HIDDEN) and name not in _OF_THE_WHOLE
    }
    yield Panel("noise scale by group (samples)", self._lines(groups), log=True)
    speed = self._lines({"tokens_per_second": "all devices"})
    yield Panel("tokens per second of all devices", speed, low=0)
    yield Panel("seconds", self._lines(_STEP_TIMES), log=True)
    shown = {"loss", _BATCH, _RATE, "grad_norm", "tokens_per_second", _TOTAL, _LOW, _HIGH}
    shown |= {*evaluations, *rewards, *groups, *_STEP_TIMES, *_SIZES}
    for name in names:
      if name not in shown and not name.endswith(_HIDDEN):
        yield Panel(name, self._lines({name: name}))

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
