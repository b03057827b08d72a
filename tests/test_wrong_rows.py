"""Rows that are swapped, lost, repeated or changed on the way stop the run at the step they are in.

The host that reads rows finds it before they go to the devices; where rows are sent to other hosts, the
step does.
"""

import pathlib
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numbered_rows import NumberedRows
from processes import small_run
from support import config, mesh

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.row_plan import StepRows
from maxbatch.compile.compile_step import placeholder_rows
from maxbatch.data.loader import train_loader
from maxbatch.data.placement import RowPlacement, WrongRowError
from maxbatch.data.reading import ReadOrder
from maxbatch.data.rows import NONE_WRONG, Arrays, first_wrong_row, row_checksums
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import main
from maxbatch.training.build import build_trainer, eval_batch_rows, step_rows, traced_step

MICRO = 8
Fault = Callable[[Arrays], None]


def swap(arrays: Arrays) -> None:
  """Rows 3 and 5 of the first microbatch change places."""
  for array in arrays.values():
    array[0, [3, 5]] = array[0, [5, 3]]


def lose(arrays: Arrays) -> None:
  """Row 3 does not come: all of it is 0."""
  for array in arrays.values():
    array[0, 3] = 0


def repeat(arrays: Arrays) -> None:
  """Row 2 comes again in the place of row 3."""
  for array in arrays.values():
    array[0, 3] = array[0, 2]


def flip(arrays: Arrays) -> None:
  """One token of row 3 is another one."""
  arrays["inputs"][0, 3, 1] ^= 1


def flip_target(arrays: Arrays) -> None:
  """One bit of a target."""
  arrays["targets"][0, 3, 0] ^= 1 << 30


def weigh(arrays: Arrays) -> None:
  """One token does not count, or does."""
  arrays["weights"][0, 3, 1] = 1 - arrays["weights"][0, 3, 1]


def swap_tokens(arrays: Arrays) -> None:
  """Two tokens of row 3 change places."""
  arrays["inputs"][0, 3, [0, 2]] = arrays["inputs"][0, 3, [2, 0]]


def swap_fields(arrays: Arrays) -> None:
  """Inputs and targets of row 3 change places."""
  arrays["inputs"][0, 3], arrays["targets"][0, 3] = (
    arrays["targets"][0, 3].copy(),
    arrays["inputs"][0, 3].copy(),
  )


def fill(arrays: Arrays) -> None:
  """A row beyond the step's is not empty."""
  arrays["inputs"][-1, 0, 0] = 1


FAULTS = [swap, lose, repeat, flip, flip_target, weigh, swap_tokens, swap_fields]


def inject(
  monkeypatch: pytest.MonkeyPatch, fault: Fault, number: int, *, training: bool = True
) -> None:
  """Changes rows after they were read and before they are on the devices, in one dispatch.

  Of the training's steps, or of an evaluation's batches.
  """
  inner, staged = RowPlacement.stage, []

  def stage(place: RowPlacement, read, ids):
    if place.row_dim == training:
      staged.append(ids)
      if len(staged) == number:
        read = {
          process: {name: array.copy() for name, array in arrays.items()}
          for process, arrays in read.items()
        }
        for arrays in read.values():
          fault(arrays)
    return inner(place, read, ids)

  monkeypatch.setattr(RowPlacement, "stage", stage)


def in_step(monkeypatch: pytest.MonkeyPatch) -> None:
  """Rows take their checksums along, as if another host used them."""
  monkeypatch.setattr(RowPlacement, "sends", True)


@pytest.fixture(params=["host", "step"])
def checker(request, monkeypatch) -> str:
  """Who checks."""
  if request.param == "step":
    in_step(monkeypatch)
  return request.param


def wrong_rows(counts: list[int], capacity: int = 4) -> list[int]:
  """What is found of each step, on 8 devices, until the host finds something: it does not go on."""
  place = NamedSharding(mesh(4, 2), PartitionSpec(None, ("data", "fsdp")))
  firsts = np.cumsum([0, *counts]) * MICRO
  steps = [StepRows(int(first), k) for first, k in zip(firsts, counts, strict=False)]
  loader = train_loader(
    NumberedRows(), 7, steps, micro_batch=MICRO, capacity=capacity, sharding=place
  )
  check, found = jax.jit(first_wrong_row), []
  with loader:
    try:
      for rows in loader:
        place = check(rows)
        found.append(NONE_WRONG if place is None else int(place))
    except WrongRowError as error:
      found.append(error.place)
  return found


def test_right_rows_are_right(checker):
  assert wrong_rows([1, 2, 4, 3]) == [NONE_WRONG] * 4


@pytest.mark.parametrize("fault", FAULTS)
def test_the_row_is_found(monkeypatch, fault, checker):
  inject(monkeypatch, fault, 2)
  after = [NONE_WRONG] if checker == "step" else []
  assert wrong_rows([1, 2, 2]) == [NONE_WRONG, 3, *after]


def test_a_row_where_there_should_be_none_is_found(monkeypatch, checker):
  inject(monkeypatch, fill, 2)
  after = [NONE_WRONG] if checker == "step" else []
  assert wrong_rows([1, 2, 2]) == [NONE_WRONG, 3 * MICRO, *after]


def test_the_first_sample_of_all_may_not_be_lost_either(monkeypatch, checker):
  """Its id is 0, as are the numbers of a row that was lost."""

  def lose_first(arrays: Arrays) -> None:
    for array in arrays.values():
      array[0, 0] = 0

  inject(monkeypatch, lose_first, 1)
  assert wrong_rows([1]) == [0]


def test_equal_tokens_have_other_checksums_as_other_samples():
  samples = np.arange(100_000)
  zeros = {"inputs": np.zeros((samples.size, 1), np.int32)}
  ids = samples.astype(np.int32)
  assert len(np.unique(row_checksums(zeros, ids))) == samples.size


def test_two_flipped_signs_of_a_row_show():
  row = {"weights": np.ones((1, 8), np.float32)}
  flipped = {"weights": np.where(np.arange(8) % 4 == 1, -1, row["weights"]).astype(np.float32)}
  first, second = (row_checksums(each, np.zeros(1, np.int32)) for each in (row, flipped))
  assert first != second


def test_ids_begin_again_after_31_bits_and_checksums_with_them():
  order = ReadOrder(NumberedRows(), 7)
  one, other = order(np.array([5])), order(np.array([5 + 2**31]))
  assert (one["inputs"] == other["inputs"]).all() == (one["checksums"] == other["checksums"]).all()


RUNS = [
  (swap, "batch_size=16 micro_batch_size=1", 3, 3),
  (lose, "batch_size=16 micro_batch_size=1 accumulation=streamed", 6, 8 + 3),
  (repeat, "batch_size=16 ici_pipeline_parallelism=2 base_num_decoder_layers=2 pipeline_schedule=1f1b "
   "num_pipeline_microbatches=2", 3, 3),
  (flip, "batch_size=16 micro_batch_size=1 gns=all ici_fsdp_parallelism=2", 3, 3),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "keys", "dispatch", "row"), RUNS)
def test_the_step_stops_the_run_and_nothing_of_it_is_saved(
  monkeypatch, tmp_path, capsys, fault, keys, dispatch, row
):
  in_step(monkeypatch)
  inject(monkeypatch, fault, dispatch)
  check_stopped(tmp_path, capsys, f"{keys} checkpoint_period=1", row)


KEPT = [(1, "the last good checkpoint is step 2"), (5, "there is no checkpoint")]


@pytest.mark.parametrize(("run", "period"), [(RUNS[0], 5), (RUNS[1], 1)])
def test_the_host_stops_the_run_before_the_step(monkeypatch, tmp_path, capsys, run, period):
  """The step before is noted, also if nobody has fetched its metrics yet, as no checkpoint was due."""
  fault, keys, dispatch, row = run
  inject(monkeypatch, fault, dispatch)
  check_stopped(tmp_path, capsys, f"{keys} checkpoint_period={period}", row, dict(KEPT)[period])


def check_stopped(
  folder: pathlib.Path, capsys, keys: str, row: int, kept: str = KEPT[0][1]
) -> None:
  """Runs with the keys, and looks for the message about this row of step 3 and what is left."""
  settings = f"{keys} steps=5 dropout_rate=0.1".split()
  code = main([*small_run(folder, folder / "text", folder / "cache"), *settings])
  sample = 2 * 16 + row
  assert capsys.readouterr().err == (
    f"stopped: step 3: row {row} (sample {sample}), read by host 0 and used by host 0, is not what "
    f"was read: on the way it was swapped, lost, repeated or changed; {kept}. Nothing of that step is "
    "saved\n"
  )
  assert code == 5
  assert [record["step"] for record in read_metrics(folder / "first_run")] == [0, 1, 2]
  saved = {path.name for path in (folder / "first_run" / "checkpoints").glob("[0-9]*")}
  assert saved <= {"1", "2"}


def test_a_step_computes_checksums_only_of_rows_that_are_sent(monkeypatch):
  """The constants of the function that scatters numbers tell whether it does."""

  settings = config(
    dataset_type="synthetic", base_num_decoder_layers=1, batch_size=16, micro_batch_size=1
  )
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, 8))
  trainer, source = build_trainer(settings, plan, jax.devices()), placeholder_rows(settings)

  def checks() -> tuple[bool, bool]:
    evaluated = eval_batch_rows(plan, trainer, source)
    rows = step_rows(plan, trainer, source, plan.micro_batch_to_train)
    text = traced_step(trainer, rows).lower().as_text()
    return "2246822507" in text, evaluated.checksums is not None

  assert checks() == (False, False)
  in_step(monkeypatch)
  assert checks() == (True, True)


def test_a_wrong_row_of_an_evaluation_stops_the_run_too(monkeypatch, tmp_path, capsys, checker):
  del checker
  inject(monkeypatch, flip, 4, training=False)
  keys = "batch_size=16 micro_batch_size=1 steps=2 checkpoint_period=1 dropout_rate=0.1"
  given = [*small_run(tmp_path, tmp_path / "text", tmp_path / "cache"), *keys.split()]
  code = main([*given, "eval_samples=16", "eval_per_device_batch_size=1"])
  # The second batch of 8 of the evaluation at the end; the first one was before training.
  assert capsys.readouterr().err == (
    "stopped: validation: row 11 (sample 11), read by host 0 and used by host 0, is not what was "
    "read: on the way it was swapped, lost, repeated or changed; the last good checkpoint is step 2\n"
  )
  assert code == 5
  assert [set(one) & {"eval/loss"} for one in read_metrics(tmp_path / "first_run")] == [
    {"eval/loss"},
    set(),
    set(),
  ]
