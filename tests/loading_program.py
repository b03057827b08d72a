"""One of several processes that load for each other: `loading_program.py FILE PORT COUNT NUMBER`.

FILE is a list of cases as JSON. Prints a line for each step of each: what the devices of this process
hold, by column, and what the step's check says. In a case with a fault, one process changes the rows
of one step after it has read them.
"""

import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any
from unittest import mock

import jax
import numpy as np
from compiled_once import compile_once
from jax.sharding import NamedSharding, PartitionSpec
from numbered_rows import NumberedRows

from maxbatch.batch.row_plan import StepRows
from maxbatch.core.topology import Topology
from maxbatch.data.loader import train_loader
from maxbatch.data.placement import RowPlacement, WrongRowError
from maxbatch.data.rows import Arrays, Rows, first_wrong_row
from maxbatch.hardware.sharding import make_mesh

NUM_DEVICES = 4
AXES = ("data", "fsdp", "tensor", "stage")
STAGE = RowPlacement.stage


def change(arrays: Arrays, fault: str) -> None:
  """Changes the first rows that a process has read."""
  for name, array in arrays.items():
    if fault == "swap":
      array[0, [0, 1]] = array[0, [1, 0]]
    elif fault == "lose":
      array[0, 1] = 0
    elif fault == "repeat":
      array[0, 1] = array[0, 0]
    elif name == "inputs":
      array[0, 1, 2] ^= 4


def inject(process: int, step: int, fault: str) -> None:
  """Lets one process change what it has read for one step."""
  staged = []

  def stage(place: RowPlacement, read: Mapping[int, Arrays], ids: np.ndarray) -> Any:
    staged.append(ids)
    if jax.process_index() == process and len(staged) == step + 1:
      read = {each: {n: a.copy() for n, a in arrays.items()} for each, arrays in read.items()}
      change(read[process], fault)
    return STAGE(place, read, ids)

  mock.patch.object(RowPlacement, "stage", stage).start()


def steps_of(case: dict[str, Any]) -> Iterator[Rows | WrongRowError]:
  """The rows of the case's steps; an error from where this process has found a wrong row on."""
  mesh = make_mesh(Topology(dict(zip(AXES, case["axes"], strict=True))), jax.devices())
  mock.patch.stopall()
  if "fault" in case:
    inject(*case["fault"])
  with train_loader(
    NumberedRows(),
    case["seed"],
    [StepRows(*step) for step in case["steps"]],
    micro_batch=case["micro_batch"],
    capacity=case["capacity"],
    sharding=NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"))),
    load_factor=Fraction(case["load_factor"]),
    worker_count=case["workers"],
    loading=case["loading"],
  ) as loader:
    for _ in case["steps"]:
      try:
        rows = next(loader)
      except WrongRowError as error:
        rows = error
      yield rows


def main(file: str, port: int, count: int, number: int) -> None:
  """Joins the others and goes through all cases."""
  compile_once()
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", NUM_DEVICES // count)
  jax.distributed.initialize(f"localhost:{port}", count, number)
  check = jax.jit(first_wrong_row)
  for case in json.loads(pathlib.Path(file).read_text()):
    for rows in steps_of(case):
      print(json.dumps(seen_of(rows, check)), flush=True)
  jax.distributed.shutdown()


def seen_of(
  rows: Rows | WrongRowError, check: Callable[[Rows], jax.Array | None]
) -> dict[str, Any]:
  """Returns a step's first wrong row, None if it has no checksums, and what is here of the step."""
  if isinstance(rows, WrongRowError):
    return {"wrong": rows.place}
  wrong, held = check(rows), {}
  for name, array in rows._asdict().items():
    if array is not None:
      shards = {str(each.index[1].start or 0): each for each in array.addressable_shards}
      held[name] = {first: each.data.tolist() for first, each in shards.items()}
  return {"wrong": None if wrong is None else int(wrong), "held": held}


if __name__ == "__main__":
  main(sys.argv[1], *map(int, sys.argv[2:]))
