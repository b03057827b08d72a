"""Compares reinforcement learning with TRL's on the same task: reward per completion, and completions per second.

  python scripts/compare_trl.py PYTHON OUT [--task format] [--steps 40] [--seeds 0 1] [--cores 2]

PYTHON is an interpreter with trl, in an environment of its own (python -m venv trl; trl/bin/pip install
trl torch --extra-index-url https://download.pytorch.org/whl/cpu). A model of 1.5 million parameters is
trained on the task's demonstrations and written as a Hugging Face folder too; both begin with these
weights, take the same prompts in the same order, 16 of 8 completions each, in microbatches of 32 completions,
with the same rewards, loss (Dr. GRPO), optimizer and schedule, in float32, one after the other. What
they sample differs, since their random numbers do. Finished runs are kept in OUT, so that an interrupted
command goes on where it was. Prints a table, and draws compare_trl.html into OUT.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxbatch.config.load import load_config
from maxbatch.plots.chart import Chart, Line, Panel
from maxbatch.plots.page import picture
from maxbatch.rl.tasks import task_named
from maxbatch.run_folder.metrics import read_metrics

PROMPTS, GENERATIONS, MICRO_BATCH = 16, 8, 32
COMPLETIONS = PROMPTS * GENERATIONS
# A shape that Hugging Face has a family for.
MODEL = ["mlp_activation=swiglu", "base_mlp_dim=512"]
RATES = {"format": 2e-4, "mix-sort": 1e-4}
DEMONSTRATED = {"format": 60, "mix-sort": 150}
SIDES = ("maxbatch", "TRL")
WARM_UP = 2
"""Steps whose times do not count."""


def command(module: str, *keys: str) -> None:
  """Runs a command of maxbatch."""
  done = subprocess.run(
    [sys.executable, "-m", f"maxbatch.{module}", *keys], stdout=subprocess.DEVNULL, check=False
  )
  if done.returncode:
    sys.exit(done.returncode)


def warm_start(out: Path, task: str) -> None:
  """The model that both begin with: a run, and the same as a Hugging Face folder."""
  if (out / "model").is_dir():
    return
  command(
    *("train", "config=configs/post_train/rl.yml", *MODEL, "num_generations=-1", "rl_task="),
    *("dataset_type=maxbatch.rl.demonstrations:build", f"dataset_path={task}", "packing=false"),
    *("batch_size=64", "micro_batch_size=-1", "accumulation=fused", "learning_rate=1e-3"),
    *(f"steps={DEMONSTRATED[task]}", "eval_interval=-1", f"base_output_directory={out}"),
    "run_name=warm_start",
  )
  run = out / "warm_start"
  command("convert", f"config={run / 'config.yml'}", f"checkpoint={run}", f"to_hf={out / 'model'}")


def ours(out: Path, task: str, steps: int, seed: int) -> dict[str, list[float]]:
  """Reward and seconds of each step of ours."""
  name = f"maxbatch-{seed}"
  command(
    *("train_rl", "config=configs/post_train/rl.yml", *MODEL, f"rl_task={task}"),
    *("warm_start_steps=0", f"load_parameters_path={out / 'warm_start'}", f"steps={steps}"),
    *(f"learning_rate={RATES[task]}", f"data_shuffle_seed={seed}", f"init_weights_seed={seed}"),
    *("eval_interval=-1", "eval_samples=8", f"base_output_directory={out}", f"run_name={name}"),
  )
  _, *records = read_metrics(out / name)
  names = {"rewards": "rl/reward", "seconds": "step_seconds"}
  return {key: [float(record[name]) for record in records] for key, name in names.items()}


def theirs(
  python: str, out: Path, task: str, steps: int, seed: int, cores: int
) -> dict[str, list[float]]:
  """Reward and seconds of each step of TRL."""
  result, prompts = out / f"trl-{seed}.json", task_named(task)
  if not result.exists():
    asked = [prompts.prompt(seed, number) for number in range(steps * PROMPTS)]
    config = load_config(["config=configs/post_train/rl.yml"])
    spec = {
      "model": str((out / "model").absolute()),
      "prompts": [{"prompt": each.text, "answer": each.columns["answer"]} for each in asked],
      "micro_batch_size": MICRO_BATCH,
      "microbatches": COMPLETIONS // MICRO_BATCH,
      "num_generations": GENERATIONS,
      "completion": config.batch.max_target_length - config.rl.max_prefill_predict_length,
      "steps": steps,
      "learning_rate": RATES[task],
      "warmup_steps": config.optimizer.warmup_steps,
      "adam_b2": config.optimizer.adam_b2,
      "seed": seed,
      "cores": cores,
    }
    given = out / f"spec-{seed}.json"
    given.write_text(json.dumps(spec))
    program = Path(__file__).with_name("trl_grpo.py")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with (out / f"trl-{seed}.log").open("w") as log:
      subprocess.run(
        [python, str(program), str(given), str(result)], env=env, stdout=log, stderr=log, check=True
      )
  return json.loads(result.read_text())


def smoothed(values: Sequence[float], window: int = 5) -> list[tuple[float, float]]:
  """Means of so many steps, by the completions that were trained on."""
  means = np.convolve(values, np.full(window, 1 / window), "valid")
  return [(COMPLETIONS * (step + window), float(mean)) for step, mean in enumerate(means)]


def table(results: dict[str, list[dict[str, Any]]], steps: int) -> None:
  """Prints both sides."""
  print(f"\n{'':24}{''.join(f'{side:>22}' for side in SIDES)}")
  length = max(steps // 4, 1)
  for quarter in range(4):
    part = slice(quarter * length, (quarter + 1) * length)
    means = {
      side: [statistics.mean(run["rewards"][part]) for run in results[side]] for side in SIDES
    }
    shown = (f"{statistics.mean(m):.3f} ({min(m):.3f}–{max(m):.3f})" for m in means.values())
    label = f"reward, to {COMPLETIONS * (quarter + 1) * length:,} completions"
    print(f"{label:24}{''.join(f'{each:>22}' for each in shown)}")
  speeds = {
    side: [COMPLETIONS / statistics.median(run["seconds"][WARM_UP:]) for run in results[side]]
    for side in SIDES
  }
  shown = (f"{statistics.median(s):.0f} ({min(s):.0f}–{max(s):.0f})" for s in speeds.values())
  print(f"{'completions per second':24}{''.join(f'{each:>22}' for each in shown)}")


def main() -> None:
  """Trains with both, seed after seed."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("python")
  parser.add_argument("out", type=Path)
  parser.add_argument("--task", choices=list(RATES), default="format")
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
  parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
  arguments = parser.parse_args()
  out, task, steps = arguments.out, arguments.task, arguments.steps
  out.mkdir(parents=True, exist_ok=True)
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
  warm_start(out, task)
  results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
  for seed in arguments.seeds:
    results["maxbatch"].append(ours(out, task, steps, seed))
    of_trl = theirs(arguments.python, out, task, steps, seed, arguments.cores)
    results["TRL"].append(of_trl)
    print(f"seed {seed}: both done, TRL {of_trl['version']}", flush=True)
  table(results, steps)
  lines = []
  for color, side in enumerate(SIDES):
    for dash, (seed, run) in enumerate(zip(arguments.seeds, results[side], strict=True)):
      x, y = zip(*smoothed(run["rewards"]), strict=True)
      lines.append(Line(f"{side}, seed {seed}", [x], y, color=color, dash=dash))
  panel = Panel(f"reward, mean of 5 steps (rl_task={task})", lines, low=0, high=1)
  file = out / "compare_trl.html"
  file.write_bytes(picture("GRPO in maxbatch and TRL", [Chart("reward", ["completions"], [panel])]))
  print(f"\nDrawn in {file}")


if __name__ == "__main__":
  main()
