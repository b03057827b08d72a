"""Prints the table of docs/long_rows.md: how rows of a length are best divided over how many chips, estimated.

python scripts/long_rows.py [MODEL [GENERATION]]
"""

import dataclasses
import sys

from maxbatch.command_line.screen import GIB
from maxbatch.config.load import load_config
from maxbatch.errors import UserError
from maxbatch.estimate.best_split import best_split
from maxbatch.estimate.chips import CHIPS, Chip
from maxbatch.estimate.step_work import StepWork, step_work

LENGTHS = (8192, 32768, 131072, 524288)
DEVICES = (8, 32, 128)
TOKENS = 2**22
"""Of a step."""


def cell(work: StepWork, chip: Chip, devices: int) -> str:
  """The mesh, time and memory of the best split."""
  try:
    one = best_split(work, chip, devices, TOKENS // work.length)
  except UserError:
    return "does not fit"
  sizes = {axis: size for axis, size in one.mesh.ici.items() if size > 1}
  mesh = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
  seconds, memory = one.step.step_seconds, one.step.peak_bytes / GIB
  return f"{mesh}, {one.remat}: {seconds:,.{0 if seconds >= 100 else 1}f} s, {memory:.0f} GiB"


def main(model: str = "llama3.1-8b", generation: str = "v5p") -> None:
  """Prints the table."""
  work, chip = step_work(load_config(["config=base", f"model_name={model}"])), CHIPS[generation]
  print(f"| tokens of a row | {' | '.join(f'{count} × {generation}' for count in DEVICES)} |")
  print(f"|---{'|---' * len(DEVICES)}|")
  for length in LENGTHS:
    rows = dataclasses.replace(work, length=length)
    print(f"| {length:,} | {' | '.join(cell(rows, chip, count) for count in DEVICES)} |")


if __name__ == "__main__":
  main(*sys.argv[1:])
