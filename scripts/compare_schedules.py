"""Compares schedules of the batch at equal tokens, and with fixed batches of as many steps.

    .venv/bin/python scripts/compare_schedules.py out=schedules                    # everything: 132 runs
    .venv/bin/python scripts/compare_schedules.py out=schedules opt_types=muon experts=1 seeds=0 tokens=100000

Text: Python's own standard library, or text=FILE. Ten arms, for AdamW and Muon, for a dense model and for a
mixture (experts=1,4: the number of experts, 1 for none), with three seeds each: fixed batches of 16, 32 and 64; from 16 to 64 a linear ramp over half of the tokens, a doubling one, Seesaw, a batch
that follows the noise scale, and a switch after 80% of the tokens; and batch 16 whose embedding and head are
updated every second or fourth step. All have the same tokens, learning rate's schedule and first batch, and one
learning rate for each model and optimizer, the best of four for batch 16 by the first seed. Other batches take
that rate by the root. Prints each arm's validation loss less that of batch 16 with the same seed, and less what
a fixed batch of as many steps has, between the three over the logarithm of the steps; then what the rules say
that are about it (maxbatch/batch_rules/findings.py). Finished runs are kept, so an interrupted command
continues where it was. Writes schedules.html and schedules.json into `out`.
"""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from compare_steering import final_loss

from maxbatch.batch_rules.findings import FINDINGS, Setting
from maxbatch.config.load import load_config
from maxbatch.modes.run import run
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.page import picture
from maxbatch.run_folder.metrics import Record, read_metrics

MODEL = """base_emb_dim=32 base_num_decoder_layers=2 base_num_query_heads=2 base_num_kv_heads=2
head_dim=16 base_mlp_dim=128 max_target_length=64 num_simulated_devices=1 generate_length=0
steps=-1 schedule_unit=tokens warmup_steps_fraction=0.05 learning_rate_final_fraction=0.1
micro_batch_size=16 enable_checkpointing=false log_period=1000000 eval_samples=512 write_report=false
block_cross_document_attention=false"""
LENGTH = 64
SMALL, MIDDLE, LARGE = 16, 32, 64
LATE = 0.8
"""Share of the tokens with the small batch before the late switch."""
EVALUATIONS = 12
RATES = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
FIXED = tuple(f"fixed {batch}" for batch in (SMALL, MIDDLE, LARGE))
STEERED = "noise-steered"
_COUPLED = f"batch_size={LARGE} learning_rate_batch_coupling=sqrt"
_FROM_SMALL = f"{_COUPLED} batch_size_start={SMALL}"

TITLES = {
  "linear ramp": f"linear ramp, {SMALL} to {LARGE}",
  "doubling": f"doubling, {SMALL} to {LARGE}",
  "Seesaw": f"Seesaw, {SMALL} to {LARGE}",
  STEERED: "noise-steered (`batch_schedule=gns`)",
  "late switch": f"late switch, {SMALL} to {LARGE} after {LATE:.0%}",
  "groups every 2": f"batch {SMALL}, embedding and head every 2 steps",
  "groups every 4": f"batch {SMALL}, embedding and head every 4 steps",
}
"""Names of arms for readers; fixed batches have theirs."""
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}

Runs = Mapping[str, Sequence[Sequence[Record]]]
"""The runs of each arm, one for each seed."""


@dataclasses.dataclass(frozen=True)
class Experiment:
  """Where the runs are, on what, and how long."""

  out: pathlib.Path
  text: str
  tokens: int
  experts: int

  def arms(self) -> Mapping[str, str]:
    """Returns the keys of each way to choose the batch."""
    samples = self.tokens // LENGTH
    # Per-row gradients of experts are not measured: two microbatches are compared.
    measured = "gns_from_microbatches=true micro_batch_size=8" if self.experts > 1 else "gns=all"
    late = f"batch_schedule=[[0,{SMALL}],[{int(LATE * samples)},{LARGE}]]"
    arms = {name: f"batch_size={name.split()[1]}" for name in FIXED} | {
      "linear ramp": f"{_FROM_SMALL} batch_schedule_type=linear batch_schedule_length={samples // 2}",
      "doubling": f"{_FROM_SMALL} batch_schedule_type=doubling batch_schedule_length={samples // 2}",
      "Seesaw": f"batch_size={LARGE} batch_size_start={SMALL} batch_schedule_type=seesaw",
      STEERED: (
        f"batch_size={SMALL} gns_max_batch_size={LARGE} {measured} batch_schedule=gns "
        "gns_window_steps=32 gns_windows_before_growth=2 gns_report_every=0"
      ),
      "late switch": f"{late} learning_rate_batch_coupling=sqrt",
    }
    for steps in (2, 4):
      groups = f"batch_by_group=[[embedding,{steps}],[head,{steps}]]"
      arms[f"groups every {steps}"] = f"batch_size={SMALL} {groups}"
    return arms

  def records(self, arm: str, opt_type: str, rate: float, seed: int) -> list[Record]:
    """Returns the records of a run, made if it is not there yet."""
    keys = self.arms()[arm]
    kind = f"experts{self.experts}-" if self.experts > 1 else ""
    name = f"{kind}{arm.replace(' ', '_')}-{opt_type}-lr{rate:g}-seed{seed}"
    result = read_metrics(self.out / name)
    if result and result[-1]["tokens"] >= self.tokens:
      return result
    if self.experts > 1:
      keys += f" num_experts={self.experts} base_moe_mlp_dim=64 routed_bias=true"
    place = (f"dataset_path={self.text}", f"base_output_directory={self.out}", f"run_name={name}")
    seeds = (f"init_weights_seed={seed}", f"data_shuffle_seed={seed}", f"opt_type={opt_type}")
    length = (f"total_tokens={self.tokens}", f"eval_interval={self.tokens // EVALUATIONS}")
    peak = f"learning_rate={rate * self._share(arm) ** 0.5:g}"
    run(load_config(["config=base", *MODEL.split(), *keys.split(), *place, *seeds, *length, peak]))
    return read_metrics(self.out / name)

  def _share(self, arm: str) -> float:
    """Returns the batch that the configuration's rate is given for, over the small one."""
    if "coupling=sqrt" in self.arms()[arm]:
      return LARGE / SMALL
    return int(arm.split()[1]) / SMALL if arm in FIXED else 1.0

  def compare(self, opt_type: str, seeds: Sequence[int]) -> tuple[float, Runs]:
    """Returns the learning rate of batch 16, and all runs."""
    rate = min(RATES, key=lambda one: final_loss(self.records(FIXED[0], opt_type, one, seeds[0])))
    runs: dict[str, list[list[Record]]] = {arm: [] for arm in self.arms()}
    for seed in seeds:
      for arm, each in runs.items():
        each.append(self.records(arm, opt_type, rate, seed))
    return rate, runs


def figures(runs: Runs) -> dict[str, dict[str, list[float]]]:
  """Returns losses, steps and differences by arm, one for each seed."""
  losses = {arm: [final_loss(one) for one in each] for arm, each in runs.items()}
  steps = {arm: [one[-1]["step"] for one in each] for arm, each in runs.items()}
  small_last = FIXED[::-1]  # As np.interp wants them: by ascending steps.

  def of_as_many_steps(arm: str, place: int) -> float:
    known = [np.log(steps[one][place]) for one in small_last]
    return float(
      np.interp(np.log(steps[arm][place]), known, [losses[one][place] for one in small_last])
    )

  return {
    arm: {
      "final_loss": losses[arm],
      "steps": steps[arm],
      "over_small": [loss - losses[FIXED[0]][place] for place, loss in enumerate(losses[arm])],
      "over_equal_steps": [
        loss - of_as_many_steps(arm, place) for place, loss in enumerate(losses[arm])
      ],
    }
    for arm in runs
  }


def table(results: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]) -> list[str]:
  """Returns the lines of a table in Markdown; ± is the standard deviation over the seeds."""
  heads = ["steps", "loss", "less batch 16", "less a fixed batch of as many steps"]
  titles = [f"{OPTIMIZERS.get(name, name)}: {head}" for name in results for head in heads]
  lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
  for arm in next(iter(results.values())):
    cells = [title(arm)]
    for each in results.values():
      steps = [int(number) for number in each[arm]["steps"]]
      cells.append("–".join(f"{number:,}" for number in sorted({min(steps), max(steps)})))
      cells.append(f"{np.mean(each[arm]['final_loss']):.3f}")
      cells.append("" if arm == FIXED[0] else _spread(each[arm]["over_small"]))
      cells.append("" if arm in FIXED else _spread(each[arm]["over_equal_steps"]))
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def title(arm: str) -> str:
  """Returns an arm's name for readers."""
  return TITLES.get(arm, arm.replace("fixed", "batch"))


def _spread(values: Sequence[float]) -> str:
  deviation = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
  return f"{np.mean(values):+.3f}{deviation}"


def panel(name: str, results: Mapping[str, Mapping[str, Sequence[float]]]) -> Panel:
  """Returns the final losses over the steps they took: below the line is better than a fixed batch."""
  points = {
    arm: (float(np.mean(each["steps"])), float(np.mean(each["final_loss"])))
    for arm, each in results.items()
  }
  groups = tuple(arm for arm in points if arm.startswith("groups"))
  lines = list[Line]()
  for number, (label, arms) in enumerate(
    {
      f"batch {SMALL}, {MIDDLE}, {LARGE}": FIXED,
      **{arm: (arm,) for arm in TITLES if arm not in groups},
      "groups every 2, 4": groups,
    }.items()
  ):
    if set(arms) <= set(points):
      steps, losses = zip(*(points[arm] for arm in arms), strict=True)
      style = "both" if len(arms) > 1 else "dots"
      lines.append(Line(label, [list(steps)], list(losses), color=number, style=style))
  return Panel(f"validation loss, {name}", lines)


def main(arguments: Sequence[str]) -> None:
  """Runs what is missing, prints the comparison, draws it."""
  given = dict(argument.split("=", 1) for argument in arguments)
  out = pathlib.Path(given.get("out", "schedules"))
  tokens = int(given.get("tokens", "300000")) // (LARGE * LENGTH) * (LARGE * LENGTH)
  seeds = [int(seed) for seed in given.get("seeds", "0,1,2").split(",")]
  opt_types = given.get("opt_types", "adamw,muon").split(",")
  compared, panels = dict[str, object](), list[Panel]()
  for experts in map(int, given.get("experts", "1,4").split(",")):
    experiment = Experiment(out, given.get("text", "stdlib"), tokens, experts)
    made = {opt_type: experiment.compare(opt_type, seeds) for opt_type in opt_types}
    results = {opt_type: figures(runs) for opt_type, (_, runs) in made.items()}
    name = f"{experts} experts" if experts > 1 else "dense"
    print(f"{name}\n", *table(results), sep="\n", end="\n\n")
    for opt_type, (rate, _) in made.items():
      compared[f"{name}, {opt_type}"] = {"rate": rate} | results[opt_type]
      panels.append(panel(f"{OPTIMIZERS.get(opt_type, opt_type)}, {name}", results[opt_type]))
      print(f"{opt_type}: learning rate {rate:g} for batch {SMALL}")
      setting = Setting(opt_type, "cosine", has_experts=experts > 1)
      for one in FINDINGS:
        if not one.misfit(setting):
          print(f"    {one.name}: {one.says}")
    print()
  (out / "schedules.json").write_text(json.dumps(compared, indent=2) + "\n")
  charts = [Chart("loss over steps", ["steps"], panels)]
  (out / "schedules.html").write_bytes(picture("Schedules of the batch, at equal tokens", charts))
  print(f"Written: {out / 'schedules.html'}, {out / 'schedules.json'}")


if __name__ == "__main__":
  main(sys.argv[1:])
