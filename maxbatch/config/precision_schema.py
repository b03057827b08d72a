"""The keys of number formats and of the loss's scale: a section of `schema.py`, where all others are."""

import dataclasses
from typing import Annotated, Literal

from maxbatch.config.allowed import FloatFormat, LossScale, Positive, Range, Scale


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
  """In which number formats a run computes and keeps what, and the scale of its loss."""

  precision: FloatFormat
  dtype: Literal["auto", "float32", "bfloat16", "float16", "cbfloat16"]
  weight_dtype: Literal["float32", "bfloat16"]
  weight_rounding: Literal["none", "stochastic", "nearest"]
  grad_dtype: FloatFormat
  loss_scale: LossScale | Literal["auto", "none", "dynamic"]
  initial_loss_scale: Scale
  min_loss_scale: Scale
  max_loss_scale: Scale
  loss_scale_window: Positive
  loss_scale_growth_factor: Annotated[float, Range(low=1.0625, high=1024)]
  loss_scale_backoff_factor: Annotated[float, Range(low=0.001, high=0.9375)]
  max_consecutive_skipped_steps: Positive
  precision_report: bool
