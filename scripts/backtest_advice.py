"""The published schedules beside what the adviser would have said: a table for docs/advice.md.

    python scripts/backtest_advice.py

Prints it, whatever it shows. The adviser is asked by the numbers of parameters and tokens alone, at the
data overhead that it has by default; no slice rounds its batch.
"""

import statistics

from maxbatch.advice.batch_size import joined
from maxbatch.advice.ramp import ramp
from maxbatch.advice.words import percent, short
from maxbatch.batch_rules.chinchilla import expected_loss
from maxbatch.batch_rules.rule import Training
from maxbatch.batch_rules.schedules import SCHEDULES, PublishedSchedule

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
