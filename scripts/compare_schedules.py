"""Compares schedules of the batch at equal tokens: which gives the lowest loss, and in how many steps.

    .venv/bin/python scripts/compare_schedules.py out=schedules                    # everything: 36 runs
    .venv/bin/python scripts/compare_schedules.py out=schedules tokens=200000 seeds=0 opt_types=adamw

Text: Python's own standard library, or text=FILE. Six arms, for AdamW and Muon, with three seeds each: a
fixed batch, a linear ramp and a doubling one to four times it, Seesaw, a batch that follows the noise
scale, and a late switch to the large batch. All have the same tokens, learning rate's schedule and first
batch, and one learning rate for each optimizer, that of the first batch; a ramp's rate follows the root
of its batch. Prints each arm's validation loss and steps, and what the rules say that are about it
(maxbatch/batch_rules/findings.py). Finished runs are kept, so an interrupted command continues where it
was. Writes schedules.html and schedules.json into `out`.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from compare_steering import MODEL, curve, final_loss

from maxbatch.batch_rules.findings import FINDINGS, Setting
from maxbatch.config.load import load_config
from maxbatch.modes.run import run
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.page import picture
from maxbatch.run_folder.metrics import Record, read_metrics

SMALL, LARGE = 16, 64
LATE = 0.8
"""Share of the tokens with the small batch before the late switch."""
RATES = {"adamw": 4e-3, "muon": 4e-3}
LENGTH = 64
_ROOT = f"batch_size={LARGE} batch_size_start={SMALL} learning_rate_batch_coupling=sqrt"


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Where the runs are, on what, and how long."""

  out: pathlib.Path
  text: str
  tokens: int

  def arms(self) -> Mapping[str, str]:
    """Returns the keys of each way to choose the batch."""
    samples = self.tokens // LENGTH
    late = f"batch_schedule=[[0,{SMALL}],[{int(LATE * samples)},{LARGE}]]"
    return {
      "fixed": f"batch_size={SMALL}",
      "linear ramp": f"{_ROOT} batch_schedule_type=linear batch_schedule_length={samples // 2}",
      "doubling": f"{_ROOT} batch_schedule_type=doubling batch_schedule_length={samples // 2}",
      "Seesaw": f"batch_size={LARGE} batch_size_start={SMALL} batch_schedule_type=seesaw",
      "noise-steered": (
        f"batch_size={SMALL} gns_max_batch_size={LARGE} gns=all batch_schedule=gns "
        "gns_window_steps=64 gns_windows_before_growth=2 gns_report_every=0"
      ),
      "late switch": f"{late} learning_rate_batch_coupling=sqrt",
    }

  def records(self, name: str, opt_type: str, seed: int) -> list[Record]:
    """Returns the records of a run, made if it is not there yet."""
    keys = self.arms()[name]
    # Where the batch is coupled to its last, the rate that is given is that batch's.
    factor = (LARGE / SMALL) ** 0.5 if "coupling=sqrt" in keys else 1.0
    folder = f"{name.replace(' ', '_')}-{opt_type}-seed{seed}"
    result = read_metrics(self.out / folder)
    if result and result[-1]["tokens"] >= self.tokens:
      return result
    place = (f"dataset_path={self.text}", f"base_output_directory={self.out}", f"run_name={folder}")
    seeds = (f"init_weights_seed={seed}", f"data_shuffle_seed={seed}", f"opt_type={opt_type}")
    length = (f"total_tokens={self.tokens}", f"eval_interval={self.tokens // 40}")
    rate = f"learning_rate={RATES[opt_type] * factor:g}"
    run(load_config(["config=base", *MODEL.split(), *keys.split(), *place, *seeds, *length, rate]))
    return read_metrics(self.out / folder)


def compare(
  experiment: Experiment, opt_types: Sequence[str], seeds: Sequence[int]
) -> dict[str, dict[str, list[list[Record]]]]:
  """Returns the runs of every optimizer and arm, one for each seed."""
  return {
    opt_type: {
      name: [experiment.records(name, opt_type, seed) for seed in seeds]
      for name in experiment.arms()
    }
    for opt_type in opt_types
  }


def figures(runs: Mapping[str, list[list[Record]]]) -> dict[str, dict[str, object]]:
  """Returns validation losses, steps and mean batches by arm."""
  return {
    name: {
      "final_loss": [round(final_loss(one), 4) for one in each],
      "mean_loss": round(float(np.mean([final_loss(one) for one in each])), 4),
      "steps": [int(one[-1]["step"]) for one in each],
      "mean_batch": [round(one[-1]["samples"] / one[-1]["step"], 1) for one in each],
    }
    for name, each in runs.items()
  }


def drawing(runs: Mapping[str, Mapping[str, list[list[Record]]]]) -> list[Chart]:
  """Returns the mean loss over tokens and over steps, a panel for each optimizer."""
  charts = []
  for axis, key in (("tokens", "tokens"), ("steps", "step")):
    panels = [Panel(f"validation loss, {name}", _lines(arms, key)) for name, arms in runs.items()]
    charts.append(Chart(f"loss over {axis}", [axis], panels))
  return charts


def _lines(arms: Mapping[str, list[list[Record]]], key: str) -> list[Line]:
  lines = []
  for number, (name, each) in enumerate(arms.items()):
    curves = [curve(records, key) for records in each]
    count = min(len(places) for places, _ in curves)
    places = np.mean([places[1:count] for places, _ in curves], axis=0)
    losses = np.mean([losses[1:count] for _, losses in curves], axis=0)
    lines.append(Line(name, [places.tolist()], losses.tolist(), color=number, dash=number))
  return lines


def main(arguments: Sequence[str]) -> None:
  """Runs what is missing, prints the comparison, draws it."""
  given = dict(argument.split("=", 1) for argument in arguments)
  out = pathlib.Path(given.get("out", "schedules"))
  tokens = int(given.get("tokens", "2000000")) // (LARGE * LENGTH) * (LARGE * LENGTH)
  seeds = [int(seed) for seed in given.get("seeds", "0,1,2").split(",")]
  opt_types = given.get("opt_types", "adamw,muon").split(",")
  runs = compare(Experiment(out, given.get("text", "stdlib"), tokens), opt_types, seeds)
  results = {opt_type: figures(arms) for opt_type, arms in runs.items()}
  (out / "schedules.json").write_text(json.dumps(results, indent=2) + "\n")
  (out / "schedules.html").write_bytes(
    picture("Schedules of the batch, at equal tokens", drawing(runs))
  )
  for opt_type, arms in results.items():
    print(opt_type)
    for name, result in arms.items():
      print(
        f"    {name:<14} loss {result['mean_loss']} {result['final_loss']} steps {result['steps']}"
      )
    setting = Setting(opt_type, "cosine", has_experts=False)
    for one in FINDINGS:
      if not one.misfit(setting):
        print(f"    {one.name}: {one.says}")
  print(f"Written: {out / 'schedules.html'}, {out / 'schedules.json'}")


if __name__ == "__main__":
  main(sys.argv[1:])
