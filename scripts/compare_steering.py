"""Compares a batch size that follows the noise scale with fixed batch sizes, at equal tokens.

    .venv/bin/python scripts/compare_steering.py text=shakespeare.txt tokens=2000000 out=steering

Four arms: the small batch that the steered run begins with, a large one, the steered batch, and a
fixed batch of its mean size (the same number of steps). Each arm's learning rate is the best of
five by validation loss with the first seed; then all seeds are run. Prints the tokens and the steps
that each arm needs to reach the final loss of the last arm. Finished runs are kept, so an interrupted
command continues where it was. Writes steering.html and steering.json into `out`.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

from maxbatch.config.load import load_config
from maxbatch.modes.run import run
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.page import picture
from maxbatch.run_folder.metrics import Record, read_metrics

MODEL = """base_emb_dim=64 base_num_decoder_layers=2 base_num_query_heads=4 base_num_kv_heads=4
head_dim=16 base_mlp_dim=256 max_target_length=64 num_simulated_devices=1 generate_length=0
steps=-1 schedule_unit=tokens warmup_steps_fraction=0.05 learning_rate_final_fraction=0.1
micro_batch_size=16 enable_checkpointing=false log_period=1000000 eval_samples=512
block_cross_document_attention=false"""
STEERING = """gns=all batch_schedule=gns gns_window_steps=64 gns_windows_before_growth=2
gns_report_every=0"""
SMALL, LARGE, MOST = 16, 128, 256
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = (0, 1, 2)
_LOSS = "validation loss (nats per token)"
_HIGHEST_LOSS = 2.6


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way to choose the batch."""

  name: str
  keys: str


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Where the runs are, on what, and how long."""

  out: pathlib.Path
  text: str
  tokens: int

  def records(self, arm: Arm, rate: float, seed: int) -> list[Record]:
    """The records of a run, made if it is not there yet."""
    name = f"{arm.name.replace(' ', '_')}-lr{rate:g}-seed{seed}"
    result = read_metrics(self.out / name)
    if result and result[-1]["tokens"] >= self.tokens:
      return result
    place = (f"dataset_path={self.text}", f"base_output_directory={self.out}", f"run_name={name}")
    seeds = (f"init_weights_seed={seed}", f"data_shuffle_seed={seed}", f"learning_rate={rate}")
    length = (f"total_tokens={self.tokens}", f"eval_interval={self.tokens // 40}")
    keys = (*MODEL.split(), *arm.keys.split(), *place, *seeds, *length)
    run(load_config(["config=base", *keys]))
    return read_metrics(self.out / name)

  def best_rate(self, arm: Arm) -> float:
    """The rate with the lowest validation loss at the end, with the first seed."""
    return min(RATES, key=lambda rate: final_loss(self.records(arm, rate, SEEDS[0])))


def final_loss(records: Sequence[Record]) -> float:
  """The last validation loss."""
  return [record["eval/loss"] for record in records if "eval/loss" in record][-1]


def mean_batch(records: Sequence[Record]) -> float:
  """Samples per step over the run."""
  return records[-1]["samples"] / records[-1]["step"]


def curve(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
  """Tokens or steps, and the validation loss there."""
  points = [(record[key], record["eval/loss"]) for record in records if "eval/loss" in record]
  return np.array([x for x, _ in points], float), np.array([y for _, y in points], float)


def until(records: Sequence[Record], key: str, loss: float) -> int | None:
  """Tokens or steps at which the validation loss first reaches `loss`, between two evaluations.

  None if it never does.
  """
  places, losses = curve(records, key)
  at = int(np.argmax(losses <= loss))
  if losses[at] > loss:
    return None
  share = (losses[at - 1] - loss) / (losses[at - 1] - losses[at])
  return round(float(places[at - 1] + share * (places[at] - places[at - 1])))


def compare(experiment: Experiment) -> tuple[dict[str, dict[str, object]], dict[str, list]]:
  """Every arm's figures, and its runs."""
  small, large = (Arm(f"fixed {size}", f"batch_size={size}") for size in (SMALL, LARGE))
  steered = Arm("steered", f"batch_size={SMALL} gns_max_batch_size={MOST} {STEERING}")
  rates = {arm: experiment.best_rate(arm) for arm in (small, large, steered)}
  runs = {arm.name: [experiment.records(arm, rates[arm], s) for s in SEEDS] for arm in rates}
  size = SMALL * max(1, round(np.mean([mean_batch(r) for r in runs["steered"]]) / SMALL))
  mean = Arm(f"fixed {size} (mean)", f"batch_size={size}")
  rates[mean] = experiment.best_rate(mean)
  runs[mean.name] = [experiment.records(mean, rates[mean], seed) for seed in SEEDS]
  target = max(final_loss(records) for records in runs[mean.name])
  return {
    arm.name: {
      "learning_rate": rate,
      "final_loss": [round(final_loss(records), 4) for records in runs[arm.name]],
      "steps": [int(records[-1]["step"]) for records in runs[arm.name]],
      "target": round(target, 4),
      "tokens_to_target": [until(r, "tokens", target) for r in runs[arm.name]],
      "steps_to_target": [until(r, "step", target) for r in runs[arm.name]],
    }
    for arm, rate in rates.items()
  }, runs


def drawing(runs: dict[str, list]) -> list[Chart]:
  """Validation loss over tokens and over steps, and the batches."""
  charts = [
    Chart(f"loss over {name}", [name], [Panel(_LOSS, _mean_curves(runs, key), high=_HIGHEST_LOSS)])
    for name, key in (("tokens", "tokens"), ("steps", "step"))
  ]
  batches = [
    _line(f"seed {seed}", number, [(r["tokens"], r["global_batch_to_train"]) for r in records[1:]])
    for number, (seed, records) in enumerate(zip(SEEDS, runs["steered"], strict=True))
  ]
  scales = [(r["tokens"], r["gns/total"]) for r in runs["steered"][0] if "gns/total" in r]
  panel = Panel(
    "steered batch, and the noise scale it followed in seed 0 (samples)",
    [*batches, _line("noise scale", len(batches), scales)],
    low=0,
    high=2 * MOST,
  )
  return [*charts, Chart("steered batch", ["tokens"], [panel])]


def _line(name: str, number: int, points: Sequence[tuple[float, float]]) -> Line:
  x, y = zip(*points, strict=True)
  return Line(name, [x], y, color=number, dash=number)


def _mean_curves(runs: dict[str, list], key: str) -> list[Line]:
  lines = []
  for number, (name, each) in enumerate(runs.items()):
    curves = [curve(records, key) for records in each]
    count = min(len(places) for places, _ in curves)
    places = np.mean([places[:count] for places, _ in curves], axis=0)
    losses = np.mean([losses[:count] for _, losses in curves], axis=0)
    lines.append(_line(name, number, list(zip(places[1:], losses[1:], strict=True))))
  return lines


def main(arguments: Sequence[str]) -> None:
  """Runs what is missing, prints the comparison, draws it."""
  given = dict(argument.split("=", 1) for argument in arguments)
  out = pathlib.Path(given.get("out", "steering"))
  tokens = int(given.get("tokens", "2000000")) // (SMALL * 64) * (SMALL * 64)
  experiment = Experiment(out, given.get("text", "stdlib"), tokens)
  figures, runs = compare(experiment)
  (out / "steering.json").write_text(json.dumps(figures, indent=2) + "\n")
  title = "A batch that follows the noise scale, at equal tokens"
  (out / "steering.html").write_bytes(picture(title, drawing(runs)))
  for name, result in figures.items():
    print(f"{name}")
    for key, value in result.items():
      print(f"    {key:<18} {value}")
  print(f"Written: {out / 'steering.html'}, {out / 'steering.json'}")


if __name__ == "__main__":
  main(sys.argv[1:])
