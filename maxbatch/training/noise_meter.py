"""The noise scale of a run as it goes on: what steps measured, as figures and as a line to read."""

from collections.abc import Mapping
from typing import Any

from maxbatch.config.schema import NoiseConfig
from maxbatch.core.noise_scale import TOTAL, Estimate
from maxbatch.models.registry import Model
from maxbatch.noise.advice import advice
from maxbatch.noise.tracker import NoiseTracker
from maxbatch.run_folder.metrics import Record
from maxbatch.training.noise_groups import FROM_MICROBATCHES, TYPES, moments_by_group
from maxbatch.training.step import StepMetrics

_RAW = (TOTAL, *TYPES, FROM_MICROBATCHES)
"""Groups of which a record has the step's own moments too."""


class NoiseMeter:
  """Takes in each step's metrics, in order."""

  def __init__(self, config: NoiseConfig, model: Model, calibrating: Model | None):
    """Makes a meter that has seen nothing.

    Args:
      config: windows and intervals.
      model: the model of ordinary steps.
      calibrating: the model of calibration steps, if there are any.
    """
    self._gns, self._every = config.gns, config.gns_calibrate_every
    self._models = {False: model, True: calibrating or model}
    self._calibrates = calibrating is not None
    self._tracker = NoiseTracker(config.gns_window_steps)
    self._tokens_per_sample = 0.0

  def is_calibration(self, step: int) -> bool:
    """Returns whether the update after `step` others measures all layers, to calibrate what the
    norms measure."""
    return self._calibrates and (step + 1) % self._every == 0

  def model_at(self, step: int) -> Model:
    """Returns the model that the update after `step` others runs."""
    return self._models[self.is_calibration(step)]

  def observe(self, step: int, metrics: StepMetrics) -> Record:
    """Returns what the update after `step` others adds to its record; `metrics` are on the host."""
    if metrics.noise is None or metrics.weight == 0:
      return {}
    model = self.model_at(step)
    measured = moments_by_group(
      model.probed(),
      metrics,
      every_layer=self._gns == "all" or self.is_calibration(step),
    )
    self._tracker.add(measured)
    self._tokens_per_sample = float(metrics.weight) / max(float(metrics.noise.rows), 1.0)
    record: Record = {}
    for name in _RAW:
      result = measured.get(name)
      if result is not None:
        record |= {f"gns/{name}/signal": result.signal, f"gns/{name}/noise": result.noise}
    return record | self._figures()

  def total(self) -> Estimate:
    """Returns the noise scale of the whole model, measured or predicted; else of whole
    microbatches."""
    result = self._tracker.predicted_total() if self._predicts else self._tracker.estimate(TOTAL)
    if self._gns == "off":
      return self._tracker.estimate(FROM_MICROBATCHES)
    return result

  def line(self, batch: int) -> str:
    """Says what is known, and what it means for steps of `batch` samples."""
    return advice(self.total(), batch, self._tokens_per_sample or 1.0, self._left_out())

  def as_dict(self) -> dict[str, Any]:
    """Returns plain JSON, from which a resumed run goes on as this one would."""
    return {"tracker": self._tracker.as_dict(), "tokens_per_sample": self._tokens_per_sample}

  def restore(self, content: Mapping[str, Any]) -> None:
    """Takes up what `as_dict` gave; a window of another length begins anew."""
    tracker = NoiseTracker.from_dict(content["tracker"])
    if tracker.window_steps == self._tracker.window_steps:
      self._tracker, self._tokens_per_sample = tracker, content["tokens_per_sample"]

  @property
  def _predicts(self) -> bool:
    return self._gns == "norm"

  def _figures(self) -> Record:
    """Returns the scales that are known, by group, in samples; of the whole with what is known
    about it."""
    estimates = self._tracker.estimates()
    record: Record = {
      f"gns/{name}": each.scale.value for name, each in estimates.items() if each.scale
    }
    record.pop(f"gns/{TOTAL}", None)
    total = self.total()
    if total.scale is not None:
      record["gns/total"] = total.scale.value
      record["gns/total_tokens"] = total.scale.value * self._tokens_per_sample
      record["gns/total_low"], record["gns/total_high"] = total.scale.low, total.scale.high
    if total.negative_share is not None:
      record["gns/negative_share"] = total.negative_share
    calibration = total.calibration
    if calibration is not None and calibration.slope is not None:
      record["gns/slope"] = calibration.slope.value
    return record

  def _left_out(self) -> list[str]:
    """Lists parameters that train and that no probe sees."""
    if self._gns != "all" and not self._calibrates:
      return []
    model = self._models[True]
    seen = {path for probe in model.probed() for path in probe.parameters}
    return [".".join(path) for path in sorted(set(model.axes()) - model.frozen - seen)]
