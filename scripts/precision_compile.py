"""Compiles one step in every format for a TPU slice that need not be here: memory and time of each.

    .venv/bin/python scripts/precision_compile.py model_name=llama2-7b compile_topology=v5e-256 \\
      max_target_length=2048 per_device_batch_size=4 ici_data_parallelism=1 ici_fsdp_parallelism=-1

Takes the keys of `compile_only=true` (docs/compile.md). Prints a table; the report of each format is in
runs/precision_compile/FORMAT. A format in which the step cannot be computed there says why. About two
minutes a format on 2 cores.
"""

import json
import pathlib
import sys
from typing import Any

import jax

from maxbatch.config.load import load_config
from maxbatch.errors import UserError
from maxbatch.modes.compile_only import prepare_only
from maxbatch.precision.formats import FORMATS

OUT = pathlib.Path("runs/precision_compile")
GIB = 2**30


def row(name: str, keys: list[str]) -> str:
  """A line of the table."""
  place = (f"base_output_directory={OUT}", f"run_name={name}", "compile_only=true")
  try:
    prepare_only(load_config(["config=base", f"precision={name}", *keys, *place]))
  except UserError as error:
    return f"| {name} | {' '.join(str(error).split())[:200]} | | | |"
  except jax.errors.JaxRuntimeError as error:
    return f"| {name} | the compiler refuses: {' '.join(str(error).split())[:160]} | | | |"
  result: Any = json.loads((OUT / name / "compile_report.json").read_text())
  result = result[-1] if isinstance(result, list) else result
  memory, time = result["memory_bytes_per_device"], result["time"]
  note = " (emulated: float32 and rounding)" if FORMATS[name].is_emulated else ""
  return (
    f"| {name}{note} | {memory['peak'] / GIB:.2f} GiB | {memory['activations_and_temporaries'] / GIB:.2f} "
    f"GiB | {time['step_seconds']:.4g} s | {time['tokens_per_second']:,.0f} |"
  )


def main() -> int:
  """Compiles and prints."""
  rows = [row(name, sys.argv[1:]) for name in FORMATS]
  print("\n| | peak of a device | activations, temporaries | step (estimate) | tokens per second |")
  print("|---|---|---|---|---|")
  print("\n".join(rows))
  return 0


if __name__ == "__main__":
  sys.exit(main())
