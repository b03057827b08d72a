"""The learning rate as a pure function of progress, in steps, samples or tokens.

rate = learning_rate · (batch / its batch)^c · schedule(progress), after a linear warm-up. A schedule
maps progress in [0, 1] after the warm-up to a fraction of the peak. c is the coupling to the batch
size, 0 by default, and its batch the one that learning_rate is given for: the last of a ramp, the
first where the batch follows the noise scale, a file or the rate itself. To add a schedule, write a
function and register it in SCHEDULES.

Seesaw: the batch doubles where the learning rate's schedule would halve the rate. Meterez et al. 2025
(arXiv 2510.14717). Where the gradient is mostly noise, a step of Adam moves the weights as far as
rate / √batch says: half the rate, or rate / √2 with twice the batch, is the same training, and the
second takes half as many steps. A batch can double only, so between two doublings the rate follows the
schedule:

    batch = batch_size_start · 2^i    from the first sample at which schedule(progress) ≤ 2^-i
    rate  = learning_rate · schedule(progress) · √(batch / batch_size_start)

so rate / √batch is that of the constant batch at every sample, and at each doubling the rate is
learning_rate / √2^i. A schedule that halves at once, in steps, is the paper's algorithm. Plain SGD
moves by rate / batch: learning_rate_batch_coupling=linear.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

from maxbatch.config.registry import registered
from maxbatch.config.schema import OptimizerConfig
from maxbatch.core.keys import Unit, text
from maxbatch.core.phases import Phase
from maxbatch.core.plan import BatchPlan, Position
from maxbatch.core.schedule import PhaseStarts, ScheduleInputs, doublings
from maxbatch.errors import UserError


def constant(progress: float, config: OptimizerConfig) -> float:
  """Returns the peak, without decay."""
  del progress, config
  return 1.0


def linear(progress: float, config: OptimizerConfig) -> float:
  """Decays linearly from the peak to learning_rate_final_fraction of it."""
  final = config.learning_rate_final_fraction
  return 1.0 + (final - 1.0) * progress


def cosine(progress: float, config: OptimizerConfig) -> float:
  """Decays by a cosine to learning_rate_final_fraction of the peak (Loshchilov & Hutter 2017)."""
  final = config.learning_rate_final_fraction
  return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


def wsd(progress: float, config: OptimizerConfig) -> float:
  """Warms up, stays, and decays linearly over wsd_decay_steps_fraction (Hu et al. 2024)."""
  start = 1.0 - config.wsd_decay_steps_fraction
  if progress <= start:
    return 1.0
  return linear((progress - start) / (1.0 - start), config)


Schedule = Callable[[float, OptimizerConfig], float]
SCHEDULES: dict[str, Schedule] = {
  "constant": constant,
  "cosine": cosine,
  "linear": linear,
  "wsd": wsd,
}

COUPLINGS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
"""Exponents of (batch / its batch), which multiplies the rate: linear scaling for SGD (Goyal et
al. 2017), square-root scaling for Adam (Malladi et al. 2022)."""


@dataclasses.dataclass(frozen=True)
class LearningRate:
  """The learning rate of a run: warm-up, schedule, then the schedule's final value.

  `length` and `warmup` are counted in `unit`; the warm-up is part of the length.
  """

  config: OptimizerConfig
  plan: BatchPlan
  unit: Unit
  schedule: Schedule
  length: float
  warmup: float

  def __call__(self, position: Position) -> float:
    """Returns the rate of the step that begins at `position`."""
    at = self.plan.measure(position, self.unit)
    exponent = COUPLINGS[_coupling(self.config, self.plan)]
    share = self.plan.share_of_batch(position)
    peak = self.config.learning_rate * float(share) ** exponent
    if at < self.warmup:
      # The rate that the warm-up reaches at the step's end, so that the first step's is not zero.
      after = self.plan.measure(self.plan.advance(position), self.unit)
      return peak * min(1.0, after / self.warmup)
    return peak * self.schedule(progress(at, self.length, self.warmup), self.config)

  def highest(self, phase: Phase) -> float:
    """Returns the highest rate of a phase: at the warm-up's end if that is in it, else at an end.

    So it is for schedules that never rise again, as those registered here.
    """
    steps = range(phase.num_steps)
    ends = bisect.bisect_left(
      steps, self.warmup, key=lambda step: self.plan.measure(phase.after(step + 1), self.unit)
    )
    last = phase.num_steps - 1
    return max(self(phase.after(step)) for step in {0, min(ends, last), last} if step >= 0)


def _coupling(config: OptimizerConfig, plan: BatchPlan) -> str:
  """Resolves auto: sqrt where the rate that is given is of the schedule's first batch; else none."""
  if config.learning_rate_batch_coupling != "auto":
    return config.learning_rate_batch_coupling
  return "sqrt" if plan.rate_is_of_first_batch else "none"


def learning_rate(config: OptimizerConfig, plan: BatchPlan, unit: Unit) -> LearningRate:
  """Returns the run's learning rate.

  Raises:
    UserError: the schedule is unknown, or the warm-up is longer than the schedule.
  """
  schedule = registered("lr_schedule_type", config.lr_schedule_type, SCHEDULES, config.plugins)
  length = config.learning_rate_schedule_steps
  length = plan.measure(plan.end(), unit) if length == -1 else length
  return LearningRate(config, plan, unit, schedule, length, warmup_of(config, length, unit))


def progress(at: float, length: float, warmup: float) -> float:
  """Returns how far the schedule is after the warm-up: 0 at its end, 1 from `length` on."""
  return 1.0 if at >= length else (at - warmup) / (length - warmup)


def warmup_of(config: OptimizerConfig, length: float, unit: Unit) -> float:
  """Returns the length of the warm-up, which is part of the schedule's `length` in `unit`.

  Raises:
    UserError: it is longer than the schedule.
  """
  warmup = config.warmup_steps
  warmup = length * config.warmup_steps_fraction if warmup == -1 else warmup
  if warmup > length:
    raise UserError(
      f"warmup_steps={warmup} must be at most the {length} {unit} of the learning rate's schedule, "
      f"which includes the warm-up; for example warmup_steps={length // 10}"
    )
  return warmup


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
