"""Checks that the size that micro_batch_size=explore recommends is the fastest, by longer runs.

    .venv/bin/python scripts/check_explore.py [seconds per size] [key=value ...]

Prints samples per second of every size over many steps, the sizes in turn, and how far the
recommended size is from the fastest.
"""

import statistics
import sys

from maxbatch.compile.measured_time import measure_step
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.keys import text
from maxbatch.hardware.devices import find_devices
from maxbatch.training.build import build_trainer
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.microbatch_size import explore_sizes
from maxbatch.tuning.search import Prober

ROUNDS = 3
"""Times each size is measured, in turn, so that a slow period of the machine affects all of them."""


def main(arguments: list[str]) -> None:
  """Explores, then checks."""
  seconds = float(arguments.pop(0)) if arguments and "=" not in arguments[0] else 20.0
  keys = ["config=base", "batch_size=128", "compile_only=true", "micro_batch_size=explore"]
  config = load_config([*keys, *arguments])
  target = find_devices(config)
  prober = Prober(config, target.devices, target.layout)
  _, result = explore_sizes(config, target, prober)
  recommended = result.ranked[0].candidate
  medians = speeds(config, prober, seconds)
  best = max(medians, key=medians.__getitem__)
  print(f"\nEvery size for {seconds:g} s, {ROUNDS} rounds in turn:")
  for size, speed in sorted(medians.items(), key=lambda one: -one[1]):
    marks = "recommended" if size == recommended else ""
    print(
      f"  {text(size.per_device):>4}  {speed:8.1f} samples/s  {speed / medians[best]:6.1%}  {marks}"
    )
  print(f"The recommended size has {medians[recommended] / medians[best]:.1%} of the best speed.")


def speeds(config: Config, prober: Prober, seconds: float) -> dict[Candidate, float]:
  """Samples per second of every size that the prober found to fit, each measured for `seconds`."""
  results: dict[Candidate, list[float]] = {size: [] for size in prober.reports}
  for _ in range(ROUNDS):
    for size, each in results.items():
      each.append(_speed(config, size, prober, seconds / ROUNDS))
  return {size: statistics.median(each) for size, each in results.items()}


def _speed(config: Config, size: Candidate, prober: Prober, seconds: float) -> float:
  """Samples per second at the run's batch, measured for `seconds`."""
  report = prober.reports[size]
  program = report.program
  trainer = build_trainer(size.applied_to(config), report.plan, find_devices(config).devices)
  timing = measure_step(
    trainer,
    program.step,
    program.rows,
    streamed=False,
    num_microbatches=size.num_microbatches,
    seconds=seconds,
  )
  passes = size.num_microbatches * timing.seconds_per_microbatch
  return size.batch / (timing.seconds_rest + passes)


if __name__ == "__main__":
  main(sys.argv[1:])
