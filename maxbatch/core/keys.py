"""The keys that say how large batches are and how long a run is, and the sizes that they give.

They have the names of the configuration's keys; here they are plain numbers, -1 where not given.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from maxbatch.errors import UserError

Number = int | float | str | Fraction
Unit = Literal["steps", "samples", "tokens"]
_LONGEST = 100
"""Characters of a number."""
Pairs = tuple[tuple[Fraction | int, ...], ...]
"""(at, samples per step) of every phase of a schedule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchKeys:
  """The keys from which a plan derives every size; -1 is one that is not given."""

  batch_size: int = -1
  global_batch_to_train: int = -1
  tokens_per_step: int = -1
  per_device_batch_size: Fraction | int = -1
  micro_batch_size: Fraction | int | Literal["none"] = -1
  gradient_accumulation_steps: int = -1
  max_target_length: int = 1
  expansion_factor_real_data: Fraction | int = 1
  eval_per_device_batch_size: Fraction | int = 0
  pad_batch: bool = False
  batch_schedule: Pairs | str = ()
  """Pairs, or the name of a schedule that a run makes, of which batch_size is the first batch."""
  batch_schedule_type: str = "constant"
  batch_schedule_unit: Unit = "samples"
  batch_schedule_length: int = -1
  batch_size_start: int = -1
  batch_size_increment: int = -1
  enable_rampup_batch_size: bool = False
  per_device_batch_size_start: Fraction | int = 1
  per_device_batch_size_increment: Fraction | int = 1
  global_rampup_samples: int = 500
  steps: int = -1
  total_samples: int = -1
  total_tokens: int = -1

  def given_sizes(self) -> "GivenSizes":
    """Returns the three sizes of a step, from MaxText's names and from Cerebras's.

    Raises:
      UserError: two keys give one size different values.
    """
    none = self.micro_batch_size == "none"
    pairs = () if isinstance(self.batch_schedule, str) else self.batch_schedule
    last = pairs[-1][1:2] if pairs else ()
    return GivenSizes(
      batch=single_value(
        *(
          GivenSize("the last batch of batch_schedule", Fraction(size), pairs=pairs)
          for size in last
        ),
        *_if_set("batch_size", self.batch_size),
        *_if_set("global_batch_to_train", self.global_batch_to_train),
        *_if_set("tokens_per_step", self.tokens_per_step, self.max_target_length),
      ),
      per_device=single_value(
        *_if_set("per_device_batch_size", self.per_device_batch_size),
        *([] if none else _if_set("micro_batch_size", Fraction(self.micro_batch_size))),
      ),
      num_microbatches=single_value(
        *_if_set("gradient_accumulation_steps", self.gradient_accumulation_steps),
        *([GivenSize("micro_batch_size", Fraction(1), word="none")] if none else []),
      ),
      may_pad=self.pad_batch,
    )


@dataclasses.dataclass(frozen=True)
class GivenSize:
  """A size as one key gives it; `scale` times the size is the key's value."""

  key: str
  size: Fraction
  scale: Fraction | int = 1
  word: str = ""
  """The key's value where it is not a number."""
  pairs: Pairs = ()
  """The key's value where the size is that of the last of these pairs."""

  def assigned(self, size: Fraction | int | None = None) -> str:
    """Returns `key=value`, of this size or of another."""
    value = text(Fraction(self.size if size is None else size) * self.scale)
    if self.pairs and size is not None:
      before = "".join(f"{pair_text(pair)}, " for pair in self.pairs[:-1])
      return f"batch_schedule=[{before}[{text(self.pairs[-1][0])}, {value}]]"
    return f"{self.key}={self.word or value}"

  def __str__(self) -> str:
    return self.assigned() + (f" ({counted(self.size, 'sample')})" if self.scale != 1 else "")


@dataclasses.dataclass(frozen=True)
class GivenSizes:
  """The three sizes of a step as the keys give them, in samples; None where they give none."""

  batch: GivenSize | None
  per_device: GivenSize | None
  num_microbatches: GivenSize | None
  may_pad: bool = False
  """Whether rows without weight may fill the last microbatch up."""


def _if_set(key: str, value: Fraction | int, scale: int = 1) -> list[GivenSize]:
  return [] if value == -1 else [GivenSize(key, Fraction(value) / scale, scale)]


def single_value(*given: GivenSize) -> GivenSize | None:
  """Returns the size that all these keys agree on; None if there are no keys."""
  for other in given[1:]:
    if other.size != given[0].size:
      free = next(one.key for one in (other, given[0]) if " " not in one.key)
      raise UserError(
        f"{given[0]} and {other} give the same size two values; keep one of them, for example "
        f"with {free}=-1"
      )
  return given[0] if given else None


def exact(key: str, value: Number) -> Fraction:
  """Returns the number that is written: 0.1 and "0.1" are 1/10, and "1/3" is a third.

  Raises:
    UserError: it is not a number, or longer than anybody means.
  """
  words = str(value)
  exponent = words.lower().partition("e")[2].lstrip("+-")
  # Exact numbers of more digits than anybody means would fill the memory.
  if not isinstance(value, bool) and len(words) <= _LONGEST and len(exponent) <= 3:
    with contextlib.suppress(ValueError, ZeroDivisionError):
      return Fraction(words)
  shown = repr(words[:_LONGEST] if isinstance(value, str) else value)[: _LONGEST + 2]
  raise UserError(f"{key}={shown} is not a number; for example {key}=4, {key}=0.25 or {key}='1/3'")


def whole(key: str, value: Number) -> int:
  """Returns a count, or -1 for none.

  Raises:
    UserError: it is no whole number, or less than 1.
  """
  number = exact(key, value)
  if number.denominator != 1 or (number < 1 and number != -1):
    near = sorted({max(1, math.floor(number)), max(1, math.ceil(number))})
    raise UserError(
      f"{key}={text(number)} must be a whole number, 1 or more; nearest: "
      + " or ".join(f"{key}={size}" for size in near)
    )
  return int(number)


def plain_number(value: Fraction) -> int | float | str:
  """Returns a number or a text that means exactly `value`: 4, 0.25, "1/3"."""
  if value.denominator == 1:
    return value.numerator
  # A float prints the shortest decimal that means it, so a short decimal fraction survives.
  decimal = value.numerator / value.denominator if abs(value) < 1e15 else 0.0
  is_exact = Fraction(repr(decimal)) == value
  return decimal if is_exact else f"{value.numerator}/{value.denominator}"


def text(value: Fraction | int) -> str:
  """Returns a number as the keys take it: 4, 0.25, 1/3."""
  return str(plain_number(Fraction(value)))


def pair_text(pair: Sequence[Fraction | int]) -> str:
  """Returns `[at, batch]`."""
  return f"[{', '.join(map(text, pair))}]"


def counted(number: Fraction | int, one: str, many: str = "") -> str:
  """Returns `1 sample`, `2,000 samples`."""
  shown = f"{int(number):,}" if number == int(number) else text(Fraction(number))
  return f"{shown} {one if number == 1 else many or one + 's'}"
