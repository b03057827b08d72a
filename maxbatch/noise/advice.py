"""The gradient noise scale of a run so far, and what it means for the present batch, in its log line.

What a batch costs in data and steps follows from the noise scale too.

With gns=norm only the normalization layers are measured at every step. The noise scale of the whole
model is then predicted from theirs, times a factor that is measured in calibration steps, which
measure both. The factor has no default, because it differs between runs (1.2 to 2.3 seen).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.core.confidence import FEWEST_STEPS, Interval, product_of_means
from maxbatch.core.noise_scale import (
  TOTAL,
  Calibration,
  Estimate,
  Moments,
  NoiseGroups,
  Status,
  Window,
)

NORM = "norm"
FEWEST_CALIBRATION_STEPS = FEWEST_STEPS

_CALIBRATION_STEPS = 256
"""Minimum length of their window: they are rare, and the factor changes slowly."""


class NoiseTracker(NoiseGroups):
  """The moments of the last `window_steps` steps and of the last calibration steps."""

  def __init__(self, window_steps: int):
    """Makes an empty tracker.

    Raises:
      ValueError: window_steps is less than 1.
    """
    super().__init__(window_steps)
    self._calibration = Window(max(window_steps, _CALIBRATION_STEPS))

  def add(self, step_moments: Mapping[str, Moments | None]) -> None:
    """Adds a step's moments by group; a group that is absent or None was not measured."""
    super().add(step_moments)
    both = {name: step_moments.get(name) for name in (NORM, TOTAL)}
    if None not in both.values():
      self._calibration.add(both)

  def calibration(self) -> Calibration:
    """Returns the factor from the normalization layers' noise scale to the whole model's.

    Over all calibration steps of the window, or the newest half, quarter, … of them: the gradients
    of a run's first steps may be a hundred times as large as later ones, and while they are among
    them the mean signal cannot be told from 0.
    """
    signal_GN, noise_GN = self._calibration.newest(NORM, TOTAL)
    count = steps = signal_GN.shape[1]
    while steps >= FEWEST_CALIBRATION_STEPS:
      signal, noise = signal_GN[:, :steps], noise_GN[:, :steps]
      slope = product_of_means((noise[1], signal[0]), (signal[1], noise[0]))
      if slope is not None:
        return Calibration("ok", steps, slope)
      steps //= 2
    status = "insufficient" if count >= FEWEST_CALIBRATION_STEPS else "unavailable"
    return Calibration(status, count)

  def predicted_total(self) -> Estimate:
    """Returns the noise scale of the whole model, predicted from its normalization layers'."""
    norm, calibration = self.estimate(NORM), self.calibration()
    scale = None
    if norm.scale is not None and norm.scale.value > 0 and calibration.slope is not None:
      scale = _product(norm.scale, calibration.slope)
    status = _worst(norm.status, calibration.status)
    return Estimate(
      group=TOTAL,
      status="insufficient" if status == "ok" and scale is None else status,
      window_steps=self.window_steps,
      steps=norm.steps,
      negative_share=norm.negative_share,
      scale=scale,
      calibration=calibration,
    )

  def as_dict(self) -> dict[str, Any]:
    """Returns the state as plain JSON; `from_dict` restores it exactly."""
    return super().as_dict() | {"calibration": self._calibration.as_dict()}

  @classmethod
  def from_dict(cls, content: Mapping[str, Any]) -> "NoiseTracker":
    """Returns the tracker whose state `as_dict` gave."""
    tracker = super().from_dict(content)
    tracker._calibration = Window.from_dict(content["calibration"])
    return tracker


def _worst(*statuses: Status) -> Status:
  order: tuple[Status, ...] = ("unavailable", "insufficient", "ok")
  return min(statuses, key=order.index)


def _product(one: Interval, other: Interval) -> Interval:
  """Returns the product of two positive values; their relative errors are added in quadrature."""
  down = math.hypot(1 - one.low / one.value, 1 - other.low / other.value)
  up = math.hypot(one.high / one.value - 1, other.high / other.value - 1)
  value = one.value * other.value
  return Interval(value, value * (1 - down), value * (1 + up))


@dataclasses.dataclass(frozen=True)
class RelativeCost:
  """Data and steps that reaching the same loss takes, relative to a reference."""

  data: float
  steps: float


def cost(batch: float, noise_scale: float) -> RelativeCost:
  """Returns data and steps at `batch`, each relative to its minimum over all batch sizes.

  (steps − 1)·(data − 1) = 1: McCandlish et al. 2018, equation 2.11. A heuristic.

  Args:
    batch: samples per step, above 0.
    noise_scale: in samples, above 0.
  """
  size = batch / noise_scale
  return RelativeCost(data=1 + size, steps=1 + 1 / size)


def cost_of_change(batch: float, factor: float, noise_scale: float) -> RelativeCost:
  """Returns data and steps at a batch `factor` times as large, relative to those at `batch`."""
  # A batch `factor` times as large has the cost of this one at a noise scale that much smaller.
  before, after = cost(batch, noise_scale), cost(batch, noise_scale / factor)
  return RelativeCost(after.data / before.data, after.steps / before.steps)


WELL_BELOW = 1 / 4
"""Fraction of the noise scale up to which doubling the batch costs at most a fifth more data."""

_CAVEAT = "a heuristic (McCandlish et al. 2018), verify with maxbatch critical_batch"


def advice(
  estimate: Estimate, batch: int, tokens_per_sample: float, left_out: Sequence[str] = ()
) -> str:
  """Returns the noise scale in samples and tokens, its interval, and the effect of another batch size.

  Args:
    estimate: of the whole model, measured or predicted.
    batch: samples per step now.
    tokens_per_sample: average number of tokens per sample that count in the loss.
    left_out: parameters that the estimate does not include, for example "the tied embedding".
  """
  scale = estimate.scale
  if scale is None:
    said = unknown(estimate, batch)
  else:
    value = _value(scale, tokens_per_sample, estimate.steps)
    origin = _predicted_by(estimate.calibration) if estimate.calibration else ""
    said = f"{value}{origin}; {_meaning(scale, batch)} — {_CAVEAT}"
  return f"{said}; left out: {', '.join(left_out)}" if left_out else said


def _value(scale: Interval, tokens_per_sample: float, steps: int) -> str:
  """Returns samples and tokens, rounded to what the interval supports."""
  value, low, high = shown(scale)
  tokens = Interval(*(part * tokens_per_sample for part in (scale.value, scale.low, scale.high)))
  value_tokens, _, high_tokens = shown(tokens)
  if scale.low <= 0:
    return f"noise scale below {high} samples, {high_tokens} tokens (95% over {steps} steps)"
  return (
    f"noise scale ≈ {value} samples, {value_tokens} tokens (95% {low}–{high} over {steps} steps)"
  )


def _predicted_by(calibration: Calibration) -> str:
  if calibration.slope is None:
    return ""
  value, low, high = shown(calibration.slope)
  return (
    f", predicted from the norm layers as {value} × theirs (95% {low}–{high} over "
    f"{calibration.steps} calibration steps)"
  )


def _meaning(scale: Interval, batch: int) -> str:
  """Says whether the batch is below, in or above the efficient range, if all of the interval is."""
  above = batch > scale.high
  if scale.low <= 0:
    smaller = "above that: a smaller one would save data"
    return f"batch {batch:,} is {smaller if above else 'not above that; more cannot be said'}"
  if above:
    data, steps = _change(scale, batch, 0.5)
    effect = f"halving it would take about {data} less data for {steps} more steps"
    return f"batch {batch:,} is {place(scale, batch)}: {effect}"
  data, steps = _change(scale, batch, 2)
  effect = f"doubling it would take about {steps} fewer steps for {data} more data"
  return f"batch {batch:,} is {place(scale, batch)}: {effect}"


def place(scale: Interval, batch: int) -> str:
  """Says where the batch is, if the whole interval agrees."""
  if batch > scale.high:
    return "above it"
  return "well below it" if batch < WELL_BELOW * scale.low else "in the efficient range"


def _change(scale: Interval, batch: int, factor: float) -> tuple[str, str]:
  """Returns changes of data and steps with `factor` times the batch, such as 28% and 36%."""
  costs = [cost_of_change(batch, factor, part) for part in (scale.value, scale.low, scale.high)]
  data = percent([abs(cost.data - 1) for cost in costs])
  return data, percent([abs(cost.steps - 1) for cost in costs])


def percent(shares: Sequence[float]) -> str:
  """Rounds the first of three fractions to the digit in which the others differ, at best 1%."""
  value, *ends = (100 * share for share in shares)
  unit = min(_leading(abs(ends[1] - ends[0]) / 2), _leading(value))
  rounded = _rounded(value, max(1.0, unit))
  return "less than 1%" if rounded == "0" else f"{rounded}%"


def unknown(estimate: Estimate, batch: int) -> str:
  """Returns why there is no noise scale yet, and what would help."""
  if estimate.status == "unavailable":
    return _unavailable(estimate, batch)
  steps, calibration = estimate.steps, estimate.calibration
  if steps < FEWEST_STEPS:
    return f"noise scale not known yet: {steps} of at least {FEWEST_STEPS} steps measured"
  if calibration is not None and calibration.status == "insufficient":
    return (
      f"noise scale not calibrated yet: over {calibration.steps} calibration steps the gradient "
      "cannot be distinguished from its noise; more of them are needed, as a smaller "
      "gns_calibrate_every gives"
    )
  hidden = f"over {steps} steps the gradient cannot be distinguished from its noise"
  if estimate.negative_share:
    hidden += f" (|G|² is estimated below 0 in {estimate.negative_share:.0%} of them)"
  if steps < estimate.window_steps:
    return f"noise scale not known yet: {hidden}; the window holds {estimate.window_steps}: wait"
  longer = 2 * estimate.window_steps
  return (
    f"noise scale not known: {hidden}; average over a longer window, for example {longer} steps"
  )


def _unavailable(estimate: Estimate, batch: int) -> str:
  calibration = estimate.calibration
  if batch < 2:
    return (
      "noise scale unavailable: it compares the samples of a step, and a batch of 1 has one; use a "
      "batch of at least 2"
    )
  if estimate.steps and calibration is not None:
    return (
      f"noise scale not calibrated yet: {calibration.steps} of at least "
      f"{FEWEST_CALIBRATION_STEPS} calibration steps"
    )
  return f"noise scale unavailable: none of the last {estimate.window_steps} steps measured it"


def shown(interval: Interval) -> tuple[str, str, str]:
  """Rounds value, low and high to the interval's precision; low and high keep two digits or more.

  Rounds as the Particle Data Group: an error that begins with 10 to 35 keeps two digits, else one.
  """
  value, low, high = interval.value, interval.low, interval.high
  error = max(min(value - low, high - value), 1e-3 * abs(value))
  leading = _leading(error)
  unit = leading / 10 if error < 3.55 * leading else leading
  low_shown, high_shown = (_rounded(end, min(unit, _leading(end) / 10)) for end in (low, high))
  return _rounded(value, unit), low_shown, high_shown


def _leading(value: float) -> float:
  """Returns the power of ten of the value's first digit."""
  return 10.0 ** math.floor(math.log10(max(abs(value), 1e-9)))


def _rounded(value: float, unit: float) -> str:
  decimals = max(0, -round(math.log10(unit)))
  return f"{round(value / unit) * unit:,.{decimals}f}"
