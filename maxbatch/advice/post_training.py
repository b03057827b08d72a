"""The same question for reinforcement learning: prompts × completions of each, for so many in all.

Where a run has measured the noise of the policy gradient by prompts and by sampling
(docs/reinforcement_learning.md), shapes of equally many completions are compared by it; else there are the
published choices, and what they disagree about.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from maxbatch.advice.asked import Place, stages_of
from maxbatch.advice.batch_size import last_record_with
from maxbatch.advice.slices import eight_bits, nearest, split_of
from maxbatch.advice.words import DAY, percent, short, span, wrapped
from maxbatch.batch_rules.post_training import CHOICES, EQUAL_GENERATIONS
from maxbatch.command_line.screen import Table
from maxbatch.config.find import shown, user_path
from maxbatch.config.schema import Config, cached_numbers
from maxbatch.errors import UserError
from maxbatch.estimate.best_split import BatchSplit
from maxbatch.estimate.step_work import StepWork, step_work
from maxbatch.noise.advice import cost
from maxbatch.noise.prompts import within_at
from maxbatch.run_folder.paths import RunFolder

_GENERATIONS = (2, 4, 8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class PromptNoise:
  """What a run has measured of its policy gradient."""

  where: str
  generations: int
  """That of the run."""
  scale: float
  """The noise scale, in prompts of so many completions."""
  sampling: float
  """The share of the noise that is by sampling completions."""


@dataclasses.dataclass(frozen=True)
class Shape:
  """Prompts and completions of each."""

  prompts: int
  generations: int
  steps: float
  """Relative to the best shape, to the same reward; 0: not known."""


@dataclasses.dataclass(frozen=True)
class StepSeconds:
  """One step on a place, sampling and training one after the other."""

  rollout: float
  """At best: the bytes and products of sampling, at the chip's published rates."""
  training: float
  split: BatchSplit


@dataclasses.dataclass(frozen=True)
class PostTrainingAdvice:
  """The answer."""

  config: Config
  completions: int
  taken: Shape
  shapes: Sequence[Shape]
  noise: PromptNoise | None
  place: Place | None
  seconds: StepSeconds | None

  @property
  def keys(self) -> dict[str, object]:
    """The keys to set."""
    return {"batch_size": self.taken.prompts, "num_generations": self.taken.generations}

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values for --json."""
    seconds = self.seconds
    return {
      "keys": self.keys,
      "completions": self.completions,
      "shapes": [dataclasses.asdict(one) for one in self.shapes],
      "published": [dataclasses.asdict(one) for one in CHOICES],
      "measured": dataclasses.asdict(self.noise) if self.noise else None,
      "rollout_seconds": seconds.rollout if seconds else None,
      "training_seconds": seconds.training if seconds else None,
    }


def advise_post_training(
  config: Config, completions: int, place: Place | None, from_run: str
) -> PostTrainingAdvice:
  """Answers the question.

  Args:
    completions: completions of a step; 0: those of the configuration.
    from_run: a run's folder; empty: none.

  Raises:
    UserError: the run has measured no such noise, or no shape has as many completions.
  """
  wanted = completions or int(config.batch.batch_size * config.rl.num_generations)
  noise = _measured(from_run)
  divided = [(wanted // each, each) for each in _GENERATIONS if wanted % each == 0]
  shapes = _compared([Shape(*each, 0.0) for each in divided], noise)
  if not shapes:
    near = max(2, wanted + wanted % 2)
    raise UserError(
      f"completions={wanted}: a group has at least 2 completions, so they are an even number; for example "
      f"completions={near}"
    )
  taken = min(shapes, key=lambda one: one.steps) if noise else _usual(shapes, config)
  seconds = _seconds(config, wanted, place) if place else None
  return PostTrainingAdvice(config, wanted, taken, shapes, noise, place, seconds)


def _measured(folder: str) -> PromptNoise | None:
  if not folder:
    return None
  run = user_path(folder)
  keys = ("gns/sampling", "gns/total_completions", "gns/total")
  last = last_record_with(run, *keys) if RunFolder(run).metrics.exists() else None
  if last is None:
    raise UserError(
      f"from_run={shown(folder)}: the run has measured no noise of its policy gradient; measure with "
      "gns_from_microbatches=true in a run of reinforcement learning"
    )
  generations = round(last["gns/total_completions"] / last["gns/total"])
  sampling = min(max(float(last["gns/sampling"]), 0.0), 1.0)
  return PromptNoise(folder, generations, float(last["gns/total"]), sampling)


def _compared(shapes: Sequence[Shape], noise: PromptNoise | None) -> list[Shape]:
  """Compares steps to the same reward by McCandlish's rule, with the noise that each shape has."""
  if noise is None:
    return list(shapes)
  steps = [_steps(one, noise) for one in shapes]
  return [
    dataclasses.replace(one, steps=each / min(steps))
    for one, each in zip(shapes, steps, strict=True)
  ]


def _steps(shape: Shape, noise: PromptNoise) -> float:
  within = within_at(noise.sampling, noise.generations, shape.generations)
  return cost(shape.prompts, noise.scale * (1 - noise.sampling + within)).steps


def _usual(shapes: Sequence[Shape], config: Config) -> Shape:
  """Returns the configuration's own shape where it is among those found equal, else the one nearest
  to the middle."""
  low, high = EQUAL_GENERATIONS
  own = [one for one in shapes if one.generations == config.rl.num_generations]
  if own and low <= own[0].generations <= high:
    return own[0]
  middle = (low * high) ** 0.5
  return min(shapes, key=lambda one: max(one.generations / middle, middle / one.generations))


def _seconds(config: Config, completions: int, place: Place) -> StepSeconds:
  """Returns a step's two parts.

  Raises:
    UserError: the model does not fit, or the completions do not divide over the place.
  """
  work, stages = step_work(config), stages_of(config)
  split = split_of(work, place, nearest(work, place, completions, stages), stages)
  return StepSeconds(_rollout(config, work, completions, place), split.step.step_seconds, split)


def _rollout(config: Config, work: StepWork, completions: int, place: Place) -> float:
  """Estimates the seconds of sampling all completions at once: every token reads the weights and
  each completion's keys and values once, divided over all devices. Latency, prompts and uneven
  lengths come on top."""
  model, chip = config.model, place.chip
  completion = config.batch.max_target_length - config.rl.max_prefill_predict_length
  places = place.slices * place.devices_per_slice
  kept = cached_numbers(model) * model.base_num_decoder_layers
  seen = config.rl.max_prefill_predict_length + completion / 2
  moved = work.parameters + completions * kept * seen
  reading = moved * work.compute_bytes / chip.hbm_bandwidth
  products = 2 * work.parameters * completions / chip.peak_flops
  return completion * max(reading, products) / float(Fraction(places))


def report(advice: PostTrainingAdvice) -> str:
  """Returns the text that is printed."""
  return "\n\n".join("\n".join(lines) for lines in map(list, _sections(advice)) if lines)


def _sections(advice: PostTrainingAdvice) -> Iterator[Iterator[str]]:
  yield _answer(advice)
  yield _shapes(advice)
  yield _published()
  if advice.seconds:
    yield _times(advice, advice.seconds)


def _answer(advice: PostTrainingAdvice) -> Iterator[str]:
  one = advice.taken
  yield (
    f"{one.prompts:,} prompts × {one.generations} completions: {advice.completions:,} in all a step"
  )
  yield f"  batch_size={one.prompts} num_generations={one.generations}"
  low, high = EQUAL_GENERATIONS
  yield from wrapped(
    f"by the noise that {advice.noise.where} has measured: of equally many completions it needs the fewest "
    "steps"
    if advice.noise
    else f"nothing was measured: between {low} and {high} completions, which one source finds equal"
  )


def _shapes(advice: PostTrainingAdvice) -> Iterator[str]:
  noise = advice.noise
  yield f"Shapes of {advice.completions:,} completions"
  head, rows = ("prompts", "completions", *(["steps"] if noise else []), ""), []
  for one in advice.shapes:
    steps = [f"{one.steps:.2f}×"] if noise else []
    mark = "*" if one == advice.taken else ""
    rows.append((f"{one.prompts:,}", str(one.generations), *steps, mark))
  yield from Table(head, rows, left=(len(head) - 1,)).lines()
  if noise:
    yield from wrapped(
      f"The noise scale was {short(noise.scale)} prompts of {noise.generations} completions, "
      f"{percent(noise.sampling)} of the noise by sampling: prompts divide all of it, completions that "
      "part. A heuristic (McCandlish 2018)."
    )
    completions = noise.scale * noise.generations
    side = "below" if advice.completions < completions else "above"
    yield from wrapped(
      f"{advice.completions:,} completions are {side} the noise scale's {short(completions)}: "
      + ("twice as many save steps." if side == "below" else "half as many save samples.")
    )
  else:
    yield from wrapped(
      "gns_from_microbatches=true in a run measures which of the two to raise; from_run=runs/NAME then "
      "compares these by it."
    )


def _published() -> Iterator[str]:
  yield "Published, and in disagreement"
  rows = []
  for one in CHOICES:
    sizes = f"{one.prompts} × {one.generations}" if one.prompts else "–"
    rows.append((one.title, sizes, f"{one.completions:,}" if one.completions else "–"))
  lines = Table(("source", "prompts × completions", "completions"), rows, left=(0,)).lines()
  yield lines[0]
  for line, one in zip(lines[1:], CHOICES, strict=True):
    yield line
    yield from wrapped(one.says, "    ")
  yield from wrapped(
    "ScaleRL finds shapes of equally many completions equal where IsoCompute lets the compute decide and "
    "2-GRPO takes the smallest group. For the size of a step all count the completions in all: raise the completions only while samples a second grow more than the samples it takes, and the "
    "rate by the square root."
  )


def _times(advice: PostTrainingAdvice, one: StepSeconds) -> Iterator[str]:
  yield f"A step on {advice.place}, estimated without compiling"
  total = one.rollout + one.training
  yield from wrapped(
    f"sampling at least {span(one.rollout / DAY)}, training {span(one.training / DAY)}: "
    f"{percent(one.rollout / total)} of the step at least is sampling"
  )
  longer = max(one.rollout, one.training)
  yield from wrapped(
    f"one after the other {span(total / DAY)}, overlapped at best {span(longer / DAY)}"
  )
  assert advice.place
  for sentence in eight_bits(advice.config.precision.quantization, [advice.place]):
    yield from wrapped(sentence)
  if one.rollout > one.training:
    yield from wrapped(
      "More completions read the weights no more often: sampling gains most from them."
    )
