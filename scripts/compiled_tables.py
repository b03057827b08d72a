"""Tables in pages of what the TPU compiler says of a few configurations: memory, time, utilisation.

    .venv/bin/python scripts/compiled_tables.py noise    # one of TABLES, or explore; minutes for each row

Each row is `compile_only=true` with its keys. Reports stay in runs/compiled_tables, by commit: what was
interrupted goes on where it was.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GIB = 2**30
OUT = pathlib.Path("runs/compiled_tables")
_LLAMA = "model_name=llama2-7b max_target_length=2048 dtype=bfloat16 remat_policy=full"
_SLICE = f"{_LLAMA} compile_topology=v5e-16"
_STAGES = (
  f"{_SLICE} packing=false ici_pipeline_parallelism=4 ici_fsdp_parallelism=4 ici_data_parallelism=1 \
per_device_batch_size=1 gradient_accumulation_steps=4 num_pipeline_microbatches=4"
)
_NOISE = f"{_SLICE} ici_fsdp_parallelism=16 per_device_batch_size=1 gradient_accumulation_steps=2"
EXPLORED = "model_name=llama2-7b compile_topology=v5e-256 max_target_length=2048 dtype=bfloat16 \
batch_size=8192 ici_data_parallelism=1 ici_fsdp_parallelism=-1"

ROWS: Mapping[str, Mapping[str, str]] = {
  "noise": {
    "`gns=off`": f"{_NOISE} gns=off",
    "`gns=all`": f"{_NOISE} gns=all",
  },
  "pipeline": {
    "no pipeline: fsdp 16, 4 accumulation steps": f"{_SLICE} packing=false ici_fsdp_parallelism=16 "
    "per_device_batch_size=1 gradient_accumulation_steps=4",
    "`1f1b`, residuals": f"{_STAGES} pipeline_schedule=1f1b pipeline_saved_activations=residuals",
    "`interleaved_1f1b`, 2 repeats": f"{_STAGES} pipeline_schedule=interleaved_1f1b num_pipeline_repeats=2",
    "`circular`, 2 repeats": f"{_STAGES} pipeline_schedule=circular num_pipeline_repeats=2",
    "`1f1b`": f"{_STAGES} pipeline_schedule=1f1b",
    "`gpipe`": f"{_STAGES} pipeline_schedule=gpipe",
  },
}


def head() -> str:
  """Returns the commit here."""
  git = ["git", "rev-parse", "--short", "HEAD"]
  return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def compiled(name: str, keys: str) -> list[dict[str, Any]]:
  """Returns the reports of a configuration, compiled unless they are there. Raises SystemExit: it fails."""
  folder = OUT / head() / name
  result = folder / "compile_report.json"
  if not result.exists():
    where = [f"base_output_directory={folder.parent}", f"run_name={folder.name}"]
    command = [sys.executable, "-m", "maxbatch.train", "config=base", "compile_only=true"]
    run = subprocess.run([*command, *keys.split(), *where], stdout=sys.stderr, check=False)
    if run.returncode:
      raise SystemExit(f"{keys}: exit code {run.returncode}")
  return json.loads(result.read_text(encoding="utf-8"))


def noise(row: dict[str, Any]) -> Sequence[str]:
  """Returns seconds of a step, the peak, and messages of a microbatch."""
  messages = sum(each["count"] for each in row["collectives"] if each["in_microbatch_loop"])
  return (*_time_and_peak(row), f"{messages:,}")


def pipeline(row: dict[str, Any]) -> Sequence[str]:
  """Returns seconds of a step, the peak, and the share of the devices' peak FLOPs."""
  return (*_time_and_peak(row), f"{row['time']['model_flop_utilisation']:.1%}")


def _time_and_peak(row: dict[str, Any]) -> tuple[str, str]:
  peak = row["memory_bytes_per_device"]["peak"] / GIB
  return f"{row['time']['step_seconds']:.4g} s", f"{peak:.3f} GiB"


TABLES: Mapping[str, tuple[Sequence[str], Callable[[dict[str, Any]], Sequence[str]]]] = {
  "noise": (("a step", "peak memory of a device", "messages each pass"), noise),
  "pipeline": (("a step", "peak memory of a device", "utilisation"), pipeline),
}


def explore() -> None:
  """Prints the ranking of a model's microbatch sizes, as a run prints it, for a page: indented."""
  keys = "compile_only=true micro_batch_size=explore run_name=explore"
  where = [*EXPLORED.split(), *keys.split(), f"base_output_directory={OUT / head()}"]
  command = [sys.executable, "-m", "maxbatch.train", "config=base", *where]
  said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
  table = said[said.index("   micro_batch_size") :].partition("\n\n")[0]
  print("\n" + "\n".join("    " + line for line in table.splitlines()) + "\n")


def main(arguments: Sequence[str]) -> int:
  """Prints a table."""
  (name,) = arguments
  if name == "explore":
    explore()
    return 0
  columns, cells = TABLES[name]
  rows = [
    [label, *cells(compiled(f"{name}{at}", keys)[0])]
    for at, (label, keys) in enumerate(ROWS[name].items())
  ]
  for row in (["", *columns], ["---"] * (len(columns) + 1), *rows):
    print(f"| {' | '.join(row)} |")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
