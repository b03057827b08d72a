"""The table of docs/reinforcement_learning.md: pass@k of runs' evaluations on prompts held out of training.

    maxbatch train_rl config=configs/post_train/rl.yml
    maxbatch train_rl config=configs/post_train/rl.yml rl_task=format \\
      warm_start_steps=60 learning_rate=2e-4 steps=80 run_name=format
    python scripts/rl_table.py runs/rl runs/format
"""

import sys
from pathlib import Path

from maxbatch.run_folder.history import read_history
from maxbatch.run_folder.metrics import read_metrics

_HEAD = "| task | steps | pass@1 | pass@8 | seeds |\n|---|---|---|---|---|"


def row(folder: Path) -> str:
  """Returns the line of a run."""
  config = read_history(folder).config
  evaluated = [record for record in read_metrics(folder) if "eval/pass_at_1" in record]

  def listed(key: str) -> str:
    return ", ".join(f"{record[key]:.3f}".removeprefix("0") for record in evaluated)

  steps = ", ".join(str(record["step"]) for record in evaluated)
  seeds = f"{config['init_weights_seed']}, {config['data_shuffle_seed']}"
  passed = f"{listed('eval/pass_at_1')} | {listed('eval/pass_at_8')}"
  return f"| `{config['rl_task']}` | {steps} | {passed} | {seeds} |"


if __name__ == "__main__":
  print(_HEAD, *(row(Path(folder)) for folder in sys.argv[1:]), sep="\n")
