"""Measures what overlapping rollout and training gains, with rewards that take a while and without.

  python scripts/benchmark_rl.py [--delays 0 0.4 0.8] [--steps 12] [--rounds 3] [KEY=VALUE ...]

Runs configs/post_train/rl.yml (rl_task=format, without its warm start) in one process, in turn: one
microbatch made after the other, each awaited before the next; and as the command does, each sampled and
rewarded while the one before is trained on. Rewards take `delay` seconds for a step, asleep, as those of
another machine would. Both train the same: the parameters are compared bit by bit.

R and T are the seconds for which a step's completions are made and trained on, one after the other; a pipeline
of n microbatches takes max(R, T) + min(R, T) / n at best where sampling and training have devices of
their own. Here both are on the same cores, and only the delay has a place of its own: what of R is not
delay cannot overlap with T. `shared` is the best there is then: the cores are busy for all of it, or they
wait for rewards but for the first microbatch that is sampled and the last that is trained on. At the end, the same step with
and without measuring the noise scale.
"""

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from maxbatch.batch.from_config import topology
from maxbatch.batch.rl_plan import plan_rl
from maxbatch.config.load import load_config
from maxbatch.rl import method as mode
from maxbatch.rl.completions import Completions
from maxbatch.rl.rollout import RolloutLoader
from maxbatch.rl.run import run_rl
from maxbatch.run_folder.metrics import Record, read_metrics

DELAY = "MAXBATCH_REWARD_DELAY"
MEASURING = "gns_from_microbatches=true"
WARM_UP = 2


def delayed(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
  """Rewards after a prompt's share of a step's delay; they differ, so that all completions are trained on."""
  time.sleep(float(os.environ[DELAY]))
  return [float(sum(text.encode()) % 7) for text in completions]


class OneByOne(RolloutLoader):
  """Makes nothing before it is asked for, and nothing while anything else runs."""

  def __init__(self, *arguments: Any, **keys: Any):
    super().__init__(*arguments, **keys, overlaps=False)

  def __next__(self) -> Completions:
    jax.block_until_ready(jax.live_arrays())
    return super().__next__()


class Timed(NamedTuple):
  """Seconds of a step, medians over a run's."""

  step: float
  rollout: float
  rewards: float
  train: float


def timed(records: list[Record]) -> Timed:
  """Without the first steps, and what waits for their compilation."""
  names = ("step_seconds", "rl/rollout_seconds", "rl/reward_seconds", "rl/train_seconds")
  steps = records[1 + WARM_UP :]
  return Timed(*(statistics.median(float(record[name]) for record in steps) for name in names))


@contextlib.contextmanager
def loader(kind: type[RolloutLoader]) -> Iterator[None]:
  """Runs with this loader."""
  usual, mode.RolloutLoader = mode.RolloutLoader, kind
  try:
    yield
  finally:
    mode.RolloutLoader = usual


def measure(kind: type[RolloutLoader], keys: list[str]) -> tuple[Timed, list[np.ndarray]]:
  """One run: its times, and the parameters that it ends with."""
  with tempfile.TemporaryDirectory() as folder, loader(kind):
    with contextlib.redirect_stdout(io.StringIO()):
      config = load_config([*keys, f"base_output_directory={folder}", "run_name=run"])
      state, _ = run_rl(config)
    records = read_metrics(Path(folder) / "run")
  return timed(records), [np.asarray(leaf) for leaf in jax.tree.leaves(state.parameters)]


def compare(delay: float, prompts: int, n: int, rounds: int, keys: list[str]) -> None:
  """Prints a line for one delay."""
  os.environ[DELAY] = str(delay / prompts)
  measure(RolloutLoader, keys)
  ideals, shareds, gains, whole = [], [], [], []
  same = True
  for _ in range(rounds):
    one, expected = measure(OneByOne, keys)
    both, result = measure(RolloutLoader, keys)
    same &= all(np.array_equal(a, b) for a, b in zip(expected, result, strict=True))
    R, T, busy = one.rollout + one.rewards, one.train, one.rollout + one.train
    ideal = max(R, T) + min(R, T) / n
    shared = max(busy, one.rewards + busy / n)
    ideals.append(both.step / ideal)
    shareds.append(both.step / shared)
    gains.append(one.step / both.step)
    whole.append((one.step, R, T, both.step, ideal, shared))
  figures = [statistics.median(column) for column in zip(*whole, strict=True)]
  print(
    f"{delay:5.2f}  {'  '.join(f'{figure:10.3f}' for figure in figures)}   "
    f"{_spread(gains)}  {_spread(ideals)}  {_spread(shareds)}  {'same' if same else 'OTHER'}",
    flush=True,
  )


def noise_cost(rounds: int, keys: list[str]) -> None:
  """Prints how much longer a step takes that measures the noise scale, and its training."""
  os.environ[DELAY] = "0"
  steps, trainings = [], []
  measure(RolloutLoader, [*keys, MEASURING])
  for _ in range(rounds):
    plain, _ = measure(RolloutLoader, keys)
    measuring, _ = measure(RolloutLoader, [*keys, MEASURING])
    steps.append(measuring.step / plain.step)
    trainings.append(measuring.train / plain.train)
  print(f"{MEASURING}: step ×{_spread(steps)}, its training ×{_spread(trainings)}", flush=True)


def _spread(ratios: list[float]) -> str:
  return f"{statistics.median(ratios):6.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def main() -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--delays", type=float, nargs="*", default=[0.0, 0.4, 0.8, 1.6])
  parser.add_argument("--steps", type=int, default=12)
  parser.add_argument("--rounds", type=int, default=3)
  arguments, more = parser.parse_known_args()
  keys = [
    *("config=configs/post_train/rl.yml", "rl_task=format", "warm_start_steps=0"),
    *(
      "reward_functions=[benchmark_rl:delayed]",
      "reward_processes=1",
      "enable_checkpointing=false",
      "eval_samples=8",
      "eval_interval=-1",
    ),
    *(f"steps={arguments.steps}", "warmup_steps=0", "log_period=1000000", *more),
  ]
  config = load_config(keys)
  plan = plan_rl(config, topology(config.mesh, 1))
  names = ("one by one", "R", "T", "overlapped", "ideal", "shared")
  ratios = ("one / overlapped", "overlapped / ideal", "overlapped / shared", "parameters")
  print(f"delay  {'  '.join(f'{name:>10}' for name in names)}   {'  '.join(ratios)}")
  for delay in arguments.delays:
    compare(delay, plan.batch_size, plan.num_microbatches, arguments.rounds, keys)
  noise_cost(arguments.rounds, keys)


if __name__ == "__main__":
  main()
