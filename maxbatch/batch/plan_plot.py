"""Batch size and learning rate over the samples of a run, drawn as a small SVG."""

import html
import math
from collections.abc import Sequence

from maxbatch.batch.learning_rate import LearningRate
from maxbatch.batch.plan import BatchPlan, Position

_WIDTH, _LEFT, _PANEL, _GAP, _TOP = 720, 80, 180, 50, 40
_POINTS = 400
Curve = Sequence[tuple[float, float]]


def plot(plan: BatchPlan, rate: LearningRate, title: str) -> str:
  """The drawing as SVG text: batch above, learning rate below, on one axis of samples."""
  height = _TOP + 2 * _PANEL + _GAP + 50
  bottom = _TOP + 2 * _PANEL + _GAP
  parts = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
    'font-family="sans-serif" font-size="12">',
    '<rect width="100%" height="100%" fill="white"/>',
    _text(_WIDTH / 2, 20, title, "middle"),
    *_panel(_TOP, "batch (samples per step)", _batches(plan), plan.total_samples, "#1f5fa8"),
    *_panel(
      _TOP + _PANEL + _GAP, "learning rate", _rates(plan, rate), plan.total_samples, "#b3401f"
    ),
    _text(_WIDTH / 2, bottom + 38, "samples consumed", "middle"),
    "</svg>",
  ]
  return "\n".join(parts) + "\n"


def _batches(plan: BatchPlan) -> Curve:
  """The corners of the staircase."""
  return [
    (samples, phase.batch)
    for phase in plan.phases
    for samples in (phase.first.samples, phase.end.samples)
  ]


def _rates(plan: BatchPlan, rate: LearningRate) -> Curve:
  """The rate at steps spread evenly over the run, the first and last of every phase included."""
  last = max(plan.steps - 1, 0)
  steps = {last * n // _POINTS for n in range(_POINTS + 1)}
  for phase in plan.phases:
    steps |= {phase.first.step, max(phase.first.step, phase.end.step - 1)}
  positions = [Position(step, plan.samples_at(step)) for step in sorted(steps)]
  return [(position.samples, rate(position)) for position in positions]


def _panel(top: float, label: str, curve: Curve, x_end: float, color: str) -> list[str]:
  """One pair of axes from 0, with its curve."""
  y_end = max(max(y for _, y in curve), 1e-30) * 1.08
  x_end = max(x_end, 1)
  width, bottom = _WIDTH - _LEFT - 30, top + _PANEL

  def at(x: float, y: float) -> tuple[float, float]:
    return _LEFT + width * x / x_end, bottom - _PANEL * y / y_end

  parts = [_text(_LEFT, top - 8, label, "start")]
  for tick in _ticks(y_end):
    y = at(0, tick)[1]
    parts += [
      _line(_LEFT, y, _LEFT + width, y, "#ddd"),
      _text(_LEFT - 6, y + 4, _short(tick), "end"),
    ]
  for tick in _ticks(x_end):
    x = at(tick, 0)[0]
    parts += [
      _line(x, bottom, x, bottom + 5, "#333"),
      _text(x, bottom + 18, _short(tick), "middle"),
    ]
  points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in curve))
  parts += [
    _line(_LEFT, top, _LEFT, bottom, "#333"),
    _line(_LEFT, bottom, _LEFT + width, bottom, "#333"),
    f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>',
  ]
  return parts


def _ticks(end: float) -> list[float]:
  """Round numbers from 0 to `end`, a handful of them."""
  unit = 10.0 ** math.floor(math.log10(end))
  step = next(unit * part for part in (0.1, 0.2, 0.5, 1, 2) if end / (unit * part) <= 6)
  return [step * count for count in range(math.floor(end / step) + 1)]


def _short(value: float) -> str:
  """1200000 as 1.2M, 0.0003 as 0.0003."""
  for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if value >= unit:
      return f"{value / unit:.4g}{letter}"
  return f"{value:.3g}"


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
  return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
  return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
