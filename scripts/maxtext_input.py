"""Rows per second of MaxText's input pipeline, as its training loop gets them.

  python scripts/maxtext_input.py SECONDS key=value ...

Run it in an environment that has MaxText (0.2.5), with MaxText's keys; scripts/benchmark_input.py does as
its peer. It prints a line of JSON: seconds from building the pipeline to the first batch on the
device, and rows per second in the SECONDS after it.
"""

import json
import pkgutil
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import app


def main(arguments: Sequence[str]) -> None:
  """Measures and prints."""
  program, seconds, *keys = arguments
  # MaxText is not in the environment of this project and its type checker.
  pyconfig, interface, utils = (
    pkgutil.resolve_name(f"maxtext.{name}:")
    for name in (
      "configs.pyconfig",
      "input_pipeline.input_pipeline_interface",
      "utils.maxtext_utils",
    )
  )
  base = Path(pyconfig.__file__).with_name("base.yml")
  config = pyconfig.initialize([program, str(base), *keys])
  mesh = utils.get_mesh_from_config(config)
  began = time.perf_counter()
  iterator, _ = interface.create_data_iterator(config, mesh)
  jax.block_until_ready(next(iterator))
  first = time.perf_counter()
  rows, now = 0, first
  while now - first < float(seconds):
    batch = next(iterator)
    jax.block_until_ready(batch)
    rows, now = rows + batch["inputs"].shape[0], time.perf_counter()
  print(
    json.dumps({"first_row_seconds": first - began, "rows_per_second": rows / (now - first)}),
    flush=True,
  )


if __name__ == "__main__":
  app.run(main)  # It parses the flags that grain reads.
