"""Branches in two real processes: process 0 decides and writes, all train, and the result is that of one."""

import json
import pathlib
import shutil
import sys
from typing import Any

import pytest
from processes import small_run
from several_processes import Ended, records, start, wait
from test_critical_batch import BRANCHES, place

from maxbatch.config.load import load_config
from maxbatch.critical_batch import main
from maxbatch.modes.run import run

MEASURE = [sys.executable, str(pathlib.Path(__file__).with_name("many_branches.py"))]
RUN = (
  "run_name=mine steps=4 checkpoint_period=4 per_device_batch_size=1 num_simulated_devices=8 "
  "ici_fsdp_parallelism=2 ici_expert_parallelism=2 num_experts=2 base_moe_mlp_dim=16 routed_bias=true "
  "opt_type=muon metrics_writers=[jsonl] dropout_rate=0.1"
)
"""Every device of a mesh across the processes has a part of each expert and of Muon's state."""
LINES = """\
factors=1,2 run_name=two
factors=1,2 run_name=diverging
factors=1,2 run_name=last|factors=1,4 run_name=last
"""
"""The second finds x1 there."""
OTHERS = [one for one in BRANCHES if not one.startswith("factors=")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[pathlib.Path, list[Ended]]:
  """A folder with branches of one process and of two, and how the two ended."""
  folder = tmp_path_factory.mktemp("branches")
  run(load_config([*small_run(folder, folder / "words.txt", folder / "cache"), *RUN.split()]))
  keys = [f"checkpoint={folder / 'mine'}", *OTHERS]
  assert main([*keys, "factors=1,2", "run_name=one"]) == 0
  there = folder / "diverging-critical_batch"
  shutil.copytree(folder / "one-critical_batch", there)
  shutil.rmtree(there / "step-4" / "x2")
  (folder / "lines").write_text(LINES)
  return folder, wait(start(2, [str(folder / "lines"), *keys], command=MEASURE))


def report(folder: pathlib.Path, name: str) -> dict[str, Any]:
  return json.loads((place(folder, name=name) / "critical_batch.json").read_text())


def test_two_processes_measure_what_one_does(measured):
  """With Muon and experts, on a mesh that divides both."""
  folder, _ = measured
  for name in ("x1", "x2"):
    mine, its = (records(place(folder, name=which) / name) for which in ("two", "one"))
    assert len(mine) == len(its) > 3
    for ours, theirs in zip(mine, its, strict=True):
      assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
  one, two = (report(folder, name) for name in ("one", "two"))
  for mine, its in zip(two["branches"], one["branches"], strict=True):
    assert mine.keys() == its.keys()
    assert mine["loss"] == pytest.approx(its["loss"], rel=1e-6)
  assert two["critical_batch_below"] == one["critical_batch_below"]


def test_a_branch_that_diverges_in_all_processes_is_a_result(measured):
  folder, ended = measured
  assert [one["diverged"] for one in report(folder, "diverging")["branches"]] == [False, True]
  assert "Branch x2 diverged: step 6: loss=nan\n" in ended[0].output
  assert ended[0].output.count("Finished before.") == 1
  assert [line for line in ended[0].output.splitlines() if line.startswith("exit")] == [
    "exit code 0",
    "exit code 0",
    "exit code 2",
  ]


def test_processes_with_other_branches_are_refused_and_the_first_alone_speaks(measured):
  folder, ended = measured
  assert [each.exit_code for each in ended] == [2, 2]
  assert ended[0].errors.startswith("error: the processes were started differently; compared with")
  assert "factors=1,4 instead of 1,2\n" in ended[0].errors
  assert (ended[1].output, ended[1].errors) == ("exit code 0\nexit code 0\nexit code 2\n", "")
  assert not place(folder, name="last").parent.exists()
