"""What fits a slice and how fast it is: splits of a batch, other batches, half and twice the chips."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from maxbatch.advice.asked import Asked, Place
from maxbatch.advice.words import DAY, percent
from maxbatch.batch_rules.rule import data_factor, data_overhead_of
from maxbatch.command_line.screen import gib_of
from maxbatch.errors import UserError
from maxbatch.estimate.best_split import BatchSplit, best_split, divisible_batches
from maxbatch.estimate.chips import gpu_calibration
from maxbatch.estimate.pipeline_roofline import Stages
from maxbatch.estimate.step_roofline import StepRoofline
from maxbatch.estimate.step_work import StepWork

_LADDER = (0.25, 0.5, 2 / 3, 1.0, 4 / 3, 2.0, 4.0)
"""Batches that the frontier looks at, as multiples of the one that is advised."""
_ENOUGH = 2
"""Batches in a row that are slower than a smaller one: larger ones are too, once the chips are busy."""


def about(step: StepRoofline) -> str:
  """Returns the mark of what was not compiled."""
  return "" if step.how == "compiled" else "≈ "


def used(step: StepRoofline) -> str:
  """Returns the utilisation: 60% where it was compiled, ≈ 54% elsewhere."""
  return f"{about(step)}{percent(step.utilisation)}"


def on_gpus(places: Sequence[Place]) -> str:
  """Returns how far off times of GPUs are; empty: there are none."""
  if not any(place.chip.is_gpu for place in places):
    return ""
  known = gpu_calibration()
  if measured := sorted({one["generation"] for one in known["measured"]}):
    return (
      f"GPUs: times of {', '.join(measured)} are scaled to measured steps (docs/accelerators.md)."
    )
  said = known["published"]
  return (
    f"GPUs: estimated with XLA's tables, not measured by us. Of {said['rows']} published steps the "
    f"estimates are {said['lowest']:g} to {said['highest']:g} of the times (docs/compile.md)."
  )


def eight_bits(quantization: str, places: Sequence[Place]) -> Iterator[str]:
  """Yields what is known of products in eight bits on these places; nothing where none are asked for."""
  if quantization == "none":
    return
  chips = {place.generation: place.chip.eight_bits.get(quantization) for place in places}
  if known := [f"{share:.2g} on {name}" for name, share in chips.items() if share]:
    yield (
      f"quantization={quantization}: products of projections take {', '.join(known)} of their time in bfloat16, by "
      "the compiler, and rounding what they multiply takes time of its own (docs/precision.md)."
    )
  if unknown := [name for name, share in chips.items() if not share]:
    yield (
      f"quantization={quantization}: how long such products take on {', '.join(unknown)} is not known; times "
      "there are bfloat16's."
    )


@dataclasses.dataclass(frozen=True)
class Point:
  """A batch on a place, with what the same loss costs there."""

  place: Place
  split: BatchSplit
  data_overhead: float
  tokens: float
  """To the loss that the advised run has at its end."""
  steps: float
  seconds: float
  cost: float
  """0: no price is known."""
  is_knee: bool = False
  """Whether a percent of time costs a percent of data here: the least product of both."""

  @property
  def days(self) -> float:
    """Days of training, without starts and evaluations."""
    return self.seconds / DAY

  @property
  def chip_hours(self) -> float:
    """Hours of all chips together."""
    return self.place.chips * self.seconds / 3600

  def as_dict(self) -> dict[str, object]:
    """Returns plain values for --json."""
    return {
      "slices": str(self.place),
      "chips": self.place.chips,
      "keys": self.split.keys,
      "gradient_accumulation_steps": self.split.num_microbatches,
      "data_overhead": self.data_overhead,
      "total_tokens": self.tokens,
      "steps": self.steps,
      "step_seconds": self.split.step.step_seconds,
      "days": self.days,
      "chip_hours": self.chip_hours,
      "cost": self.cost or None,
      "tokens_per_second": self.split.step.tokens_per_second,
      "utilisation": self.split.step.utilisation,
      "peak_bytes": self.split.step.peak_bytes,
      "limited_by": self.split.step.limited_by,
      "how": self.split.step.how,
      "is_knee": self.is_knee,
    }


@dataclasses.dataclass(frozen=True)
class Goal:
  """The loss to be reached, as the data that a small batch would take to it."""

  least_tokens: float
  """Emin."""
  critical_tokens: float

  def tokens_with(self, batch_tokens: float) -> float:
    """Returns the tokens to the same loss with another batch."""
    overhead = data_overhead_of(batch_tokens, self.critical_tokens)
    return self.least_tokens * data_factor(overhead)


def nearest(work: StepWork, place: Place, samples: float, stages: Stages | None) -> int:
  """Returns the batch next to `samples` that the place can divide, in stages of a pipeline if there are any.

  Raises:
    UserError: no mesh of the place divides the model.
  """
  whole = max(1, round(samples))
  near = divisible_batches(work, place.devices_per_slice, whole, place.slices, stages)
  if not near and stages:
    raise UserError(
      f"compile_topology={place.name}: ici_pipeline_parallelism={stages.in_slice} and "
      f"dcn_pipeline_parallelism={stages.slices} do not divide {place.slices} × {place.devices_per_slice} devices; "
      "take numbers of stages that are powers of 2"
    )
  if not near:
    raise UserError(
      f"compile_topology={place.name}: {place.devices_per_slice} devices divide neither the model's "
      f"width nor its heads; take a number of {place.unit}s that is a power of 2"
    )
  return min(near, key=lambda size: abs(size - samples))


# Some hundred estimates, of which the same are asked for more than once.
@functools.lru_cache(maxsize=64)
def split_of(
  work: StepWork, place: Place, samples: int, stages: Stages | None = None
) -> BatchSplit:
  """Returns the fastest split of a batch that fits.

  Raises:
    UserError: it divides over no mesh, or nothing fits.
  """
  where = place.chip, place.devices_per_slice, samples, place.slices
  return best_split(work, *where, stages=stages)


def point(asked: Asked, goal: Goal, place: Place, samples: int) -> Point:
  """Returns a batch on a place.

  Raises:
    UserError: it divides over no mesh, or nothing fits.
  """
  split = split_of(asked.work, place, samples, asked.stages)
  batch_tokens = samples * asked.length
  tokens = goal.tokens_with(batch_tokens)
  steps = tokens / batch_tokens
  seconds = steps * split.step.step_seconds
  price = asked.price(place).price
  return Point(
    place=place,
    split=split,
    data_overhead=data_overhead_of(batch_tokens, goal.critical_tokens),
    tokens=tokens,
    steps=steps,
    seconds=seconds,
    cost=price * place.chips * seconds / 3600,
  )


def without_stages(asked: Asked, one: Point) -> str:
  """Returns what a batch takes on the same place where no pipeline is asked for."""
  place = one.place
  try:
    split = split_of(asked.work, place, one.split.batch)
  except UserError as error:
    return f"Without a pipeline: {error}"
  keys = " ".join(f"{key}={value}" for key, value in split.keys.items() if "parallelism" in key)
  step = split.step
  return (
    f"Without a pipeline: {keys}, {about(step)}{step.step_seconds:.3g} s a step, about "
    f"{gib_of(step.peak_bytes, step.capacity_bytes)}"
  )


@dataclasses.dataclass(frozen=True)
class Curve:
  """Time against data on one place: small batches first."""

  place: Place
  points: Sequence[Point]
  """Each next one is faster and takes more data."""

  @property
  def knee(self) -> Point:
    """The marked point."""
    return next(one for one in self.points if one.is_knee)

  @property
  def fastest(self) -> Point:
    """The last one."""
    return self.points[-1]


def curve(asked: Asked, goal: Goal, place: Place, samples: int) -> Curve | None:
  """Returns time against data for batches around `samples`; None if the model does not fit."""
  try:
    sizes = {nearest(asked.work, place, factor * samples, asked.stages) for factor in _LADDER}
  except UserError:
    return None
  results: list[Point] = []
  worse = 0
  for size in sorted(sizes):
    try:
      one = point(asked, goal, place, size)
    except UserError:
      continue
    if not results or one.seconds < results[-1].seconds:
      results.append(one)
      worse = 0
    else:
      worse += 1
    if worse == _ENOUGH:
      break
  if not results:
    return None
  least = min(results, key=lambda one: one.seconds * one.tokens)
  marked = [dataclasses.replace(one, is_knee=one is least) for one in results]
  return Curve(place, marked)


def elsewhere(asked: Asked, goal: Goal, samples: int) -> list[Point]:
  """Returns the batch, as each other place divides it.

  Raises:
    UserError: the model does not fit on one of them.
  """
  results = []
  for place in asked.elsewhere:
    try:
      near = nearest(asked.work, place, samples, asked.stages)
      results.append(point(asked, goal, place, near))
    except UserError as error:
      reason = str(error).removeprefix(f"compile_topology={place.name}: ")
      raise UserError(f"compare_with={place.name}: {reason}") from None
  return results


def curves(asked: Asked, goal: Goal, samples: int) -> list[Curve]:
  """Returns a curve on half the chips, these, and twice as many, where the model fits."""
  assert asked.place is not None
  places = [asked.place.half(), asked.place, asked.place.double()]
  results = [curve(asked, goal, place, samples) for place in places if place]
  return [one for one in results if one]
