"""Seesaw: the batch doubles where the learning rate's schedule would halve the rate.

Meterez et al. 2025 (arXiv 2510.14717). Where the gradient is mostly noise, a step of Adam moves the
weights as far as rate / √batch says: half the rate, or rate / √2 with twice the batch, is the same
training, and the second takes half as many steps. A batch can double only, so between two doublings
the rate follows the schedule:

    batch = batch_size_start · 2^i    from the first sample at which schedule(progress) ≤ 2^-i
    rate  = learning_rate · schedule(progress) · √(batch / batch_size_start)

so rate / √batch is that of the constant batch at every sample, and at each doubling the rate is
learning_rate / √2^i. A schedule that halves at once, in steps, is the paper's algorithm. Plain SGD
moves by rate / batch: learning_rate_batch_coupling=linear.
"""

import bisect
import math
from fractions import Fraction

from maxbatch.batch.learning_rate import SCHEDULES, progress, warmup_of
from maxbatch.config.registry import registered
from maxbatch.config.schema import OptimizerConfig
from maxbatch.core.keys import Unit, text
from maxbatch.core.schedule import PhaseStarts, ScheduleInputs, doublings
from maxbatch.errors import UserError


def seesaw(config: OptimizerConfig | None, unit: Unit, inputs: ScheduleInputs) -> PhaseStarts:
  """Returns the phases in samples.

  Args:
    config: says the learning rate's schedule.
    unit: of that schedule.
    inputs: sizes and budget.

  Raises:
    UserError: the schedule counts steps, which the batch would change, or does not fall so far.
  """
  if config is None:
    raise UserError(
      "batch_schedule_type=seesaw follows the learning rate's schedule, which is not read here; "
      "for example batch_schedule_type=constant"
    )
  length = _length(config, unit, inputs)
  batches, warmup = doublings(inputs), warmup_of(config, length, unit)
  schedule = registered("lr_schedule_type", config.lr_schedule_type, SCHEDULES, config.plugins)
  scale = inputs.keys.max_target_length if unit == "tokens" else 1
  samples = range(math.ceil(warmup / scale), math.ceil(length / scale))

  def fallen(sample: int) -> float:
    return -schedule(progress(sample * scale, length, warmup), config)

  places = [
    bisect.bisect_left(samples, -(0.5**number), key=fallen) for number in range(1, len(batches))
  ]
  reached = sum(place < len(samples) for place in places)
  if reached < len(places):
    raise UserError(_not_reached(config, batches, reached))
  return [(Fraction(0), batches[0])] + [
    (Fraction(samples[place]), batch) for place, batch in zip(places, batches[1:], strict=True)
  ]


def _length(config: OptimizerConfig, unit: Unit, inputs: ScheduleInputs) -> int:
  """Returns the length of the learning rate's schedule in `unit`, samples or tokens."""
  keys = inputs.keys
  if unit == "steps":
    raise UserError(
      "schedule_unit=steps: batch_schedule_type=seesaw doubles the batch where the learning rate's "
      "schedule halves, and so that schedule must not count steps, which are fewer with a larger "
      "batch; for example schedule_unit=samples"
    )
  if config.learning_rate_schedule_steps != -1:
    return config.learning_rate_schedule_steps
  if keys.total_tokens != -1:
    return keys.total_tokens if unit == "tokens" else keys.total_tokens // keys.max_target_length
  if keys.total_samples != -1:
    return keys.total_samples * (keys.max_target_length if unit == "tokens" else 1)
  raise UserError(
    f"steps={keys.steps}: batch_schedule_type=seesaw needs a budget that does not depend on the "
    "batch, or learning_rate_schedule_steps; for example steps=-1 "
    f"total_samples={max(keys.steps, 1) * inputs.sizes.batch}"
  )


def _not_reached(config: OptimizerConfig, batches: list[Fraction], reached: int) -> str:
  count, first, last = len(batches) - 1, batches[0], batches[-1]
  start = f"batch_size_start={text(last / 2**reached)}"
  lower = f"learning_rate_final_fraction={0.5 ** (count + 1):g}"
  # A schedule without an end to its fall has none to lower.
  offers = [start] if reached else []
  offers += ["lr_schedule_type=cosine"] if config.lr_schedule_type == "constant" else [lower]
  return (
    f"batch_size_start={text(first)} doubles {count} times to batch_size={text(last)}, but "
    f"lr_schedule_type={config.lr_schedule_type} with "
    f"learning_rate_final_fraction={config.learning_rate_final_fraction:g} halves the learning rate "
    f"{reached} times before its end; for example {' or '.join(offers)}"
  )
