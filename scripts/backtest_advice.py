"""The published schedules beside what the adviser would have said: a table for docs/advice.md.

    python scripts/backtest_advice.py

Prints it, whatever it shows. The adviser is asked by the numbers of parameters and tokens alone, at the
data overhead that it has by default; no slice rounds its batch.
"""

import dataclasses
import statistics

from maxbatch.advice.batch_size import joined
from maxbatch.advice.ramp import ramp
from maxbatch.advice.words import percent, short
from maxbatch.batch_rules.published import expected_loss
from maxbatch.batch_rules.rule import Read, Training

_STAIRS = 64


@dataclasses.dataclass(frozen=True)
class PublishedSchedule:
  """A training as published."""

  name: str
  parameters: float
  """Active for a token."""
  tokens: float
  phases: tuple[tuple[float, float], ...]
  """(from token, tokens of a step)."""
  read: Read
  """Of the phases; sizes and tokens are the well-known ones."""
  note: str = ""

  @property
  def batch_tokens(self) -> float:
    """Of a step, at the end."""
    return self.phases[-1][1]

  def average_batch_tokens(self) -> float:
    """Tokens over steps."""
    ends = [*(at for at, _ in self.phases[1:]), self.tokens]
    steps = sum((end - at) / size for (at, size), end in zip(self.phases, ends, strict=True))
    return self.tokens / steps

  def reached_at(self) -> float:
    """The share of the tokens after which the last batch is in force."""
    return self.phases[-1][0] / self.tokens


def constant(name: str, parameters: float, tokens: float, size: float) -> PublishedSchedule:
  """One batch throughout, read in the source."""
  return PublishedSchedule(name, parameters, tokens, ((0, size),), "text or code")


def rise(start: float, end: float, over: float) -> tuple[tuple[float, float], ...]:
  """A linear rise as a staircase of equally long phases, then `end`.

  Args:
    start: tokens of a step at first.
    end: tokens of a step afterwards.
    over: tokens that the rise lasts.
  """
  each = [((n + 0.5) / _STAIRS) * (end - start) + start for n in range(_STAIRS)]
  return (*((over * n / _STAIRS, size) for n, size in enumerate(each)), (over, end))


SCHEDULES = (
  PublishedSchedule(
    "GPT-3", 175e9, 300e9, rise(32e3, 3.2e6, 12e9), "text or code", "linear over 4 to 12B, here 12B"
  ),
  PublishedSchedule(
    "Llama 3 405B", 405e9, 15.6e12, ((0, 4e6), (252e6, 8e6), (2.87e12, 16e6)), "text or code"
  ),
  PublishedSchedule(
    "DeepSeek-V3",
    37e9,
    14.8e12,
    rise(12.6e6, 62.9e6, 469e9),
    "text or code",
    "a rise over 469B tokens; experts",
  ),
  PublishedSchedule(
    "MiniMax-01",
    45.9e9,
    11.4e12,
    ((0, 16e6), (69e9, 32e6), (790e9, 64e6), (4.7e12, 128e6)),
    "text or code",
    "by its own loss rule; experts",
  ),
  PublishedSchedule(
    "GLM-4.5",
    32e9,
    23e12,
    rise(16e6, 64e6, 500e9),
    "summary",
    "a rise over 500B tokens; experts; Muon",
  ),
  PublishedSchedule("MiniCPM 2.4B", 2.4e9, 1.1e12, ((0, 2e6), (500e9, 4e6)), "summary"),
  PublishedSchedule(
    "OLMo 1B (Merrill)",
    1.2e9,
    658e9,
    ((0, 4.2e6), (168e9, 8.4e6), (503e9, 16.8e6)),
    "text or code",
    "by branches; 43% fewer steps than 4.2M",
  ),
  constant("OLMo 2 32B", 32e9, 6e12, 8.4e6),
  constant("OLMo 3 7B", 7e9, 5.9e12, 4.2e6),
  PublishedSchedule("Kimi K2", 32e9, 15.5e12, ((0, 67e6),), "text or code", "experts; Muon"),
  PublishedSchedule(
    "DeepSeek LLM 7B", 7e9, 2e12, ((0, 2304 * 4096.0),), "memory", "by its own rule"
  ),
  PublishedSchedule(
    "DeepSeek LLM 67B", 67e9, 2e12, ((0, 4608 * 4096.0),), "memory", "by its own rule"
  ),
)

_OVERHEAD = 0.2
_HEAD = (
  "training",
  "tokens",
  "batch at its end",
  "average",
  "adviser, x = 0.2",
  "factor",
  "its interval",
  "x that the average means",
  "last batch from",
  "adviser's from",
)


def row(one: PublishedSchedule) -> tuple[str, ...]:
  """One training."""
  training = training_of(one)
  said = joined(training, _OVERHEAD)
  phases = ramp(round(said.tokens), 1, one.tokens, share=1.0)
  return (
    one.name + (f" ({one.note})" if one.note else ""),
    short(one.tokens),
    short(one.batch_tokens),
    short(one.average_batch_tokens()),
    short(said.tokens),
    f"{factor(one):.2g}",
    f"{short(said.low)} to {short(said.high)}",
    f"{one.average_batch_tokens() / said.critical_tokens:.2g}",
    percent(one.reached_at()),
    percent(phases[-1].at_tokens / one.tokens),
  )


def training_of(one: PublishedSchedule) -> Training:
  """As the rules ask for it: 6 FLOPs a parameter and token."""
  loss = expected_loss(one.parameters, one.tokens)
  return Training(one.parameters, one.tokens, 6 * one.parameters, loss)


def factor(one: PublishedSchedule) -> float:
  """The published batch at the end over the advised one."""
  return one.batch_tokens / joined(training_of(one), _OVERHEAD).tokens


def main() -> None:
  """Prints the table and a summary."""
  rows = [_HEAD, *map(row, SCHEDULES)]
  lines = ["| " + " | ".join(cells) + " |" for cells in rows]
  lines.insert(1, "|" + "---|" * len(_HEAD))
  print("\n".join(lines))
  factors = [factor(one) for one in SCHEDULES]
  inside = sum(
    said.low <= one.batch_tokens <= said.high
    for one in SCHEDULES
    for said in [joined(training_of(one), _OVERHEAD)]
  )
  spread = statistics.geometric_mean([max(each, 1 / each) for each in factors])
  print(
    f"\n{inside} of {len(SCHEDULES)} last batches are inside the interval; factors "
    f"{min(factors):.2g} to {max(factors):.2g}, median {statistics.median(factors):.2g}, typically "
    f"{spread:.2g} either way"
  )


if __name__ == "__main__":
  main()
