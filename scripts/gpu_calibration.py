"""Steps of a GPU that is here beside their estimates: what turns estimates for its generation into measured ones.

    .venv/bin/python scripts/accelerator_check.py sections=calibrate

times some steps, compiles the same for as many such GPUs as if they were not here, and puts both into
maxbatch/estimate/gpu_calibration.json. The median of measured over estimated seconds of a generation then
scales all estimates for it: compile reports, explore, advice.
"""

import datetime
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.estimate.chips import ALL_CHIPS, measured_factor

_LARGE = (
  "base_num_decoder_layers=8 base_emb_dim=2048 base_mlp_dim=8192 base_num_query_heads=16 "
  "base_num_kv_heads=16 head_dim=128 max_target_length=2048"
)
FORMS = ("", "remat_policy=full", _LARGE, f"{_LARGE} remat_policy=full")
"""Keys of the steps that are timed, beside bfloat16."""


def record(
  generation: str, keys: str, estimated: float, measured: float, versions: Mapping[str, str]
) -> dict[str, Any]:
  """Returns a row of the table.

  Args:
    estimated: seconds of a step as estimated now, with what was measured before.
    measured: seconds of the same step.
  """
  return {
    "generation": generation,
    "keys": keys,
    "estimated_seconds": estimated / ALL_CHIPS[generation].calibration,
    "measured_seconds": measured,
    "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    **versions,
  }


def keep(records: Sequence[Mapping[str, Any]], file: pathlib.Path) -> float:
  """Writes the rows into the table, where they replace rows of the same step; returns the factor."""
  table = json.loads(file.read_text(encoding="utf-8"))
  new = {(one["generation"], one["keys"]) for one in records}
  kept = [one for one in table["measured"] if (one["generation"], one["keys"]) not in new]
  table["measured"] = [*kept, *records]
  file.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
  return measured_factor(records[0]["generation"], table["measured"])


def estimated_seconds(keys: Sequence[str], topology: str, out: pathlib.Path) -> float:
  """Compiles the step of a configuration for GPUs as if they were not here; returns the estimate.

  Args:
    keys: of the configuration, as a command takes them.
    topology: as compile_topology names the GPUs.
    out: a folder for its report.

  Raises:
    subprocess.CalledProcessError: it was refused, as it says.
  """
  command = [sys.executable, "-m", "maxbatch.train", *keys, "compile_only=true"]
  command += [f"compile_topology={topology}", f"base_output_directory={out}", "run_name=estimate"]
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
  (report,) = json.loads((out / "estimate" / "compile_report.json").read_text())
  return report["time"]["step_seconds"]
