"""The rates by which counted work becomes seconds: a small table, found from compiled steps.

`step_rates.json` is written by `scripts/fit_step_rates.py` from compile reports. Every rate is a property
of the chip or of an operation, none of a model.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping

_FILE = pathlib.Path(__file__).with_name("step_rates.json")


@dataclasses.dataclass(frozen=True)
class StepRates:
  """How fast what is counted goes, and how much memory it takes."""

  product: Mapping[str, float]
  """By generation, the share of its peak at which matrix products run."""
  cycles: Mapping[str, float]
  """Cycles of a core for one vector register (1024 elements), in each pass, by what it holds."""
  traffic: Mapping[str, float]
  """How often the bytes that are counted move, by what they are."""
  waits: Mapping[str, float]
  """By generation and width of fsdp, how long computing waits for collectives of weights and gradients,
  in the time that all-gathers and reduce-scatters of them take on the links: less where they run beside
  products, more where the compiler sums whole gradients, or gathers weights by sums. `wide`: over more
  than 16 devices."""
  memory: Mapping[str, float]
  """How many copies of what is counted lie in memory at the peak, by what it is."""
  spread: Mapping[str, float]
  """Root mean square of the differences to what was compiled, as shares, of seconds and of bytes: each
  step estimated with rates from the steps of all other models."""
  cases: int
  """Compiled steps from which the rates are."""


@functools.cache
def step_rates() -> StepRates:
  """The table."""
  return StepRates(**json.loads(_FILE.read_text(encoding="utf-8")))
