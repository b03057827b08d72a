"""A trace of chosen steps: which steps, what it says of them, and what the page says beside it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY, environment, small_run
from written_runs import write_run

from maxbatch.run_folder.history import read_history
from maxbatch.run_report.page import profile_tables


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
  # In a process of its own: where another test has loaded libtpu, jax's profiler crashes.
  folder = tmp_path_factory.mktemp("run")
  keys = "steps=6 batch_size=8 gradient_accumulation_steps=2 num_simulated_devices=2"
  keys += " profiler=xplane skip_first_n_steps_for_profiler=2 profiler_steps=3"
  arguments = [*small_run(folder, folder / "text.txt", folder / "cache"), *keys.split()]
  command = [sys.executable, "-m", "maxbatch.train", *arguments]
  done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "Traced steps 3 to 5, in " in done.stdout
  return folder / "first_run"


def test_the_steps_that_were_asked_for_are_traced(run):
  assert list((run / "profile").rglob("*.xplane.pb"))
  profile = json.loads((run / "profile.json").read_text())
  assert (profile["steps"], profile["devices"]) == (3, 2)
  scopes = profile["seconds_by_scope"]
  assert {"attention", "mlp", "embedding", "head", "optimizer"} <= scopes.keys()
  assert list(scopes.values()) == sorted(scopes.values(), reverse=True)
  by_name = {one["name"]: one for one in profile["largest"]}
  # Each of a step's two microbatches runs the operations of its loop once.
  assert {round(one["count"], 6) for one in by_name.values()} <= {1.0, 2.0, 3.0, 4.0}
  steps = sum(scopes.values())
  measured = read_history(run).metrics.curves["step_seconds"].values[2:5].mean()
  assert steps < 4 * measured


def test_the_page_says_where_the_estimate_was_wrong():
  profile = {"seconds_by_scope": {"mlp": 2.0, "attention": 1.0, "other": 0.5}, "largest": [3]}
  [part] = profile_tables(
    profile, [{"estimate": {"seconds_by_scope": {"mlp": 1.9, "attention": 0.5}}}, {}]
  )
  assert part["table"].rows == [
    ("mlp", "2 s", "57.1%", "1.9 s", "0.95"),
    ("attention", "1 s", "28.6%", "0.5 s", "0.50 — wrong"),
    ("other", "0.5 s", "14.3%", "–", "–"),
  ]


def test_a_damaged_profile_is_named(tmp_path):
  folder = write_run(tmp_path / "mine")
  (folder / "profile.json").write_text("{")
  assert any(line.startswith("profile.json is damaged") for line in read_history(folder).missing)
