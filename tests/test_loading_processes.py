"""Real processes that load for each other: the row stream is that of a single one, id for id."""

import json
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import several_processes
from first_devices import use_first_devices
from loading_program import NUM_DEVICES
from numbered_rows import NumberedRows
from preloaded import started
from processes import PATIENCE_SECONDS, small_run
from test_faults import ALONE

from maxbatch.batch.row_plan import StepRows, StepTable
from maxbatch.data.reading import ReadOrder
from maxbatch.data.rows import NONE_WRONG
from maxbatch.train import main

PROGRAM = pathlib.Path(__file__).with_name("loading_program.py")
RAMP = (1, 3, 3, 1)


def case(axes, loading, load_factor="1", *, counts=RAMP, first=0, workers=0, micro=12, **more):
  """A case, with its steps in a row from sample `first` on."""
  ends = first + micro * np.cumsum(counts)
  steps = [(int(end) - micro * k, k) for end, k in zip(ends, counts, strict=True)]
  return {
    "axes": axes, "loading": loading, "load_factor": load_factor, "workers": workers,
    "micro_batch": micro, "capacity": max(counts) + 1, "seed": 7, "steps": steps,
  } | more  # fmt: skip


DATA, FSDP, STAGES, TENSOR = (4, 1, 1, 1), (2, 2, 1, 1), (2, 1, 1, 2), (1, 1, 4, 1)
STREAMED: dict[str, Any] = {"counts": (1,) * 4, "capacity": 1}
CASES = {
  2: [
    case(DATA, []),
    case(FSDP, [1], "1/2"),
    case(STAGES, [1], "2", first=24, **STREAMED),
    case(STAGES, [0, 1], "4/3"),
    case(DATA, [1], "2", first=48, fault=(1, 2, "swap")),
    case(DATA, [0], "2", fault=(0, 1, "lose")),
    case(STAGES, [0], "2", fault=(0, 3, "repeat")),
    case(FSDP, [], fault=(1, 1, "flip")),
  ],
  4: [
    case(DATA, [0, 1, 2], "4/3"),
    case(DATA, [1, 3], "2"),
    case(FSDP, [3, 1, 2], "4/3", **STREAMED),
    case(STAGES, [3], "4", workers=1),
    case(TENSOR, [1, 2], "2"),
    case(DATA, [3], "4", first=36, fault=(3, 2, "flip")),
    case(TENSOR, [2], "4", fault=(2, 2, "swap")),
  ],
}


def loaded(count: int, folder: pathlib.Path) -> list[list[dict[str, Any]]]:
  """What each of `count` processes says of each step of all cases."""
  cases = folder / "cases"
  cases.write_text(json.dumps(CASES[count]))
  port = several_processes.free_port()
  # Into files: one that waits for the reader of its pipe would keep the others waiting.
  said = [folder / f"said-{number}" for number in range(count)]
  processes = []
  try:
    for number in range(count):
      command = [sys.executable, str(PROGRAM), str(cases), *map(str, (port, count, number))]
      with said[number].open("w") as out:
        processes.append(started(command, stdout=out, stderr=subprocess.STDOUT))
    codes = [process.wait(PATIENCE_SECONDS) for process in processes]
  finally:
    for process in processes:
      process.kill()
  texts = [one.read_text() for one in said]
  assert codes == [0] * count, texts
  # gloo prints lines of its own.
  return [[json.loads(line) for line in text.splitlines() if line[:1] == "{"] for text in texts]


def expected_step(case: dict[str, Any], table: StepTable, step: int) -> dict[str, np.ndarray]:
  """The arrays of one step as one process reads them."""
  shape = (case["capacity"], case["micro_batch"])
  ids = table.sample_ids(step, case["capacity"])
  read = ReadOrder(NumberedRows(), case["seed"])(table.samples(step, np.arange(shape[1])))
  whole = {"sample_ids": ids}
  for name, array in read.items():
    whole[name] = np.zeros((*shape, *array.shape[1:]), array.dtype)
    whole[name].reshape(-1, *array.shape[1:])[: len(array)] = array
  return whole


@pytest.mark.parametrize("count", CASES)
def test_processes_that_load_for_others_have_the_rows_of_a_single_one(count, tmp_path):
  said = loaded(count, tmp_path)
  lines = list(zip(*said, strict=True))
  for one in CASES[count]:
    steps = [StepRows(*step) for step in one["steps"]]
    table = StepTable(steps, one["micro_batch"])
    faulty_step = one["fault"][1] if "fault" in one else None
    sent = 0 < len(one["loading"]) < count
    for step in range(len(steps)):
      of_processes, lines = lines[0], lines[1:]
      wrong = {said["wrong"] for said in of_processes}
      if step == faulty_step or (faulty_step is not None and step > faulty_step and not sent):
        if (
          not sent
        ):  # The process that reads them finds it, and stays there; the other has right ones.
          assert None in wrong
          wrong.remove(None)
        assert len(wrong) == 1
        assert wrong.pop() < one["micro_batch"], one
        continue
      assert wrong == {NONE_WRONG if sent else None}, one
      for name, whole in expected_step(one, table, step).items():
        if name == "checksums" and not sent:
          continue
        results = [held for said in of_processes for held in said["held"][name].items()]
        columns = np.zeros(one["micro_batch"], int)
        for first, rows in results:
          part = slice(int(first), int(first) + len(rows[0]))
          columns[part] += 1
          np.testing.assert_array_equal(np.array(rows, whole.dtype), whole[:, part], name)
        assert columns.all()
  assert not lines
  assert NUM_DEVICES % count == 0


def test_all_processes_stop_at_the_step_of_a_wrong_row(tmp_path, capsys, monkeypatch):
  """Until then, with one of two processes loading, they train as a single one does."""
  use_first_devices(monkeypatch, 1)
  folder, data = tmp_path / "runs", (tmp_path / "text", tmp_path / "cache")
  keys = ["steps=5", "checkpoint_period=1", *ALONE]
  assert main([*small_run(tmp_path / "one", *data), *keys, "steps=2"]) == 0
  capsys.readouterr()
  own = ["loading_hosts=[1]", "expansion_factor_real_data=2"]
  own += ["num_simulated_devices=2", "ici_fsdp_parallelism=2"]  # The step of tests/test_faults.py.
  program = [sys.executable, str(PROGRAM.with_name("wrong_rows_train.py"))]
  ended = several_processes.train(2, [*small_run(folder, *data), *keys, *own], command=program)
  said = (
    "stopped: step 3: row 3 (sample 19), read by host 1 and used by host 0, is not what was read: on "
    "the way it was swapped, lost, repeated or changed; the last good checkpoint is step 2"
  )
  assert [one.exit_code for one in ended] == [5, 5], ended
  assert all(said in one.errors for one in ended), ended
  result, single = (
    several_processes.records(run / "first_run") for run in (folder, tmp_path / "one")
  )
  assert [one["step"] for one in result] == [0, 1, 2]
  for one, other in zip(result[1:], single[1:], strict=True):
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
