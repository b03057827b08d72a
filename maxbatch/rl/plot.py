"""A run of reinforcement learning drawn: how often it is right, and what its rollouts are rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxbatch.plots.figure import COLORS, DASHES, MARKERS, count_axis, legend, new_figure
from maxbatch.run_folder.metrics import Record

if TYPE_CHECKING:
  from matplotlib.figure import Figure

PASS_AT = "eval/pass_at_"


def plot(run_name: str, records: Sequence[Record]) -> Figure:
  """pass@k of the evaluations, and below it the mean reward of every step, over the steps."""
  figure, (above, below) = new_figure(f"{run_name}: pass@k and reward", 2)
  names = [name for name in records[0] if name.startswith(PASS_AT)]
  for name, color, dashes, marker in zip(names, COLORS, DASHES, MARKERS, strict=False):
    points = [(record["step"], record[name]) for record in records if name in record]
    label = f"pass@{name.removeprefix(PASS_AT)}"
    above.plot(
      *zip(*points, strict=True), color=color, linestyle=dashes, marker=marker, label=label
    )
  above.set_ylim(0, 1.02)
  legend(above)
  rewarded = [(record["step"], record["rl/reward"]) for record in records if "rl/reward" in record]
  below.plot(*zip(*rewarded, strict=True), color=COLORS[0], label="reward")
  legend(below)
  below.set_xlim(above.get_xlim())
  below.set_xlabel("step")
  count_axis(below.xaxis)
  return figure
