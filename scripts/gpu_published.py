"""Our estimates for GPUs beside what others measured and published (scripts/gpu_measurements.json).

    .venv/bin/python scripts/gpu_published.py [WORD …]    # rows whose names have the words; a minute each

Each row is `compile_only=true` with its keys, in the extra gpu-compile. Reports stay in runs/gpu_published:
what was interrupted goes on where it was; delete the folder after a change of the code.

A row whose hosts are known to have another network than the generation's data sheet says has it in its keys
(`compile_topology_network_gbps`).
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

DATA = pathlib.Path(__file__).with_name("gpu_measurements.json")
OUT = pathlib.Path("runs/gpu_published")
_COMMON = (
  "config=base",
  "compile_only=true",
  "dataset_type=synthetic",
  "dtype=bfloat16",
  "packing=false",
  # As the programs that were measured.
  "scan_layers=true",
)
# MaxText's and torchtitan's runs let the framework take nearly all of the memory.
_TAKEN = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}


def report_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
  """Returns the compile report of a row, made now where there is none; None if it could not be made."""
  name = re.sub(r"\W+", "-", row["name"])
  file = OUT / name / "compile_report.json"
  if not file.exists():
    keys = [*_COMMON, *row["keys"].split(), f"base_output_directory={OUT}", f"run_name={name}"]
    command = [sys.executable, "-m", "maxbatch.train", *keys]
    done = subprocess.run(
      command, capture_output=True, text=True, env=os.environ | _TAKEN, check=False
    )
    if not file.exists():
      print(f"{row['name']}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
      return None
  return json.loads(file.read_text())[0]


def line(row: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[str, float]:
  """Returns a row of the table, and the estimated time over the measured one."""
  devices, *_ = re.findall(r"compile_topology=\w+-(\d+)", row["keys"])
  time = report["time"]
  estimate = time["tokens_per_second"] / int(devices)
  ratio = row["tokens_per_second_per_gpu"] / estimate
  memory = report["memory_bytes_per_device"]["peak"] / 1e9
  cells = (
    row["name"],
    row["framework"],
    f"{row['tokens_per_second_per_gpu']:,}",
    f"{estimate:,.0f}",
    f"{time['model_flop_utilisation']:.1%}",
    f"{ratio:.2f}",
    f"{memory:.1f} GB",
  )
  return f"| {' | '.join(cells)} |", ratio


def main(words: Sequence[str]) -> None:
  """Prints the table and how far off the rows are."""
  rows = json.loads(DATA.read_text(encoding="utf-8"))["rows"]
  ratios: list[float] = []
  print(
    "| | measured by | tokens/s a GPU | estimate | utilisation | time, estimate / measured | peak |"
  )
  print("|---|---|---|---|---|---|---|")
  for row in rows:
    report = report_of(row) if all(word in row["name"] for word in words) else None
    if report is not None and "time" in report:
      text, ratio = line(row, report)
      ratios.append(ratio)
      print(text, flush=True)
  if ratios:
    near = sum(abs(ratio - 1) <= 0.2 for ratio in ratios)
    print(f"\n{near} of {len(ratios)} within 20%; median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
  main(sys.argv[1:])
