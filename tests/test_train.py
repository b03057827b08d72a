"""Whole runs of the command: what they leave behind, how they stop, and that they resume exactly."""

import functools
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import several_processes
import yaml
from damage import flip_bits
from preloaded import started
from processes import ONE_DEVICE, PATIENCE_SECONDS
from support import SMALLEST, stop_at

from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.errors import TrainingDivergedError, UserError
from maxbatch.modes import run as run_mode
from maxbatch.modes.run import run
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.train import check_keeps_batch, load_config, main

STEPS = 6
REPOSITORY = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("text") / "words.txt"
  path.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  return path


def arguments(text: pathlib.Path, folder: pathlib.Path, **keys: object) -> list[str]:
  defaults: dict[str, object] = {
    "base_output_directory": folder,
    "dataset_path": text,
    "dataset_cache_directory": text.parent / "cache",
    "steps": STEPS,
    "eval_samples": 12,
    "eval_interval": 2,
    "checkpoint_period": 2,
    "generate_length": 0,
    "write_report": "false",
    "per_device_batch_size": 1,
    **SMALLEST,
    "dropout_rate": 0.1,
  }
  return ["config=base", *(f"{key}={value}" for key, value in (defaults | keys).items())]


def train(text: pathlib.Path, folder: pathlib.Path, **keys: object):
  return run(load_config(arguments(text, folder, **keys)))


def without_times(folder: pathlib.Path) -> list[dict[str, float]]:
  return several_processes.records(folder / "first_run")


@pytest.fixture(scope="module")
def uninterrupted(text, tmp_path_factory):
  folder = tmp_path_factory.mktemp("uninterrupted")
  state, _ = train(text, folder)
  return fingerprints(state.params), without_times(folder), folder


LOST = (
  "        weight_dtype=bfloat16: there is no float32 copy of the weights. They have 8 significant "
  "bits,\n        and an update of less than 1/512 (0.2%) of a weight is rounded away; "
  "weight_rounding=stochastic\n        keeps it on average, weight_dtype=float32 exactly\n"
)


def test_what_weights_in_bfloat16_lose_is_said_before_the_first_step(
  text, tmp_path, monkeypatch, capsys
):
  def compiles(*_: object) -> None:
    raise InterruptedError

  monkeypatch.setattr("maxbatch.modes.run.step_compiler", compiles)
  with pytest.raises(InterruptedError):
    train(text, tmp_path, weight_dtype="bfloat16", weight_rounding="nearest", warmup_steps=0)
  before, _, _ = capsys.readouterr().out.partition("Folder ")
  assert " parameters\n" + LOST in before


def test_the_folder_holds_what_the_contract_says(uninterrupted):
  folder = uninterrupted[2] / "first_run"
  records = read_metrics(folder)
  assert [record["step"] for record in records] == list(range(STEPS + 1))
  keys = "step samples tokens loss grad_norm learning_rate global_batch_to_train"
  keys += " micro_batch_to_train gradient_accumulation_steps step_seconds data_wait_seconds tokens_per_second"
  assert all(set(keys.split()) <= record.keys() for record in records[1:])
  assert [r["step"] for r in records if "eval/loss" in r] == [0, 2, 4, 6]
  assert (records[-1]["samples"], records[-1]["tokens"]) == (48, 48 * 16)
  written = yaml.safe_load((folder / "config.yml").read_text())
  assert written["derived"]["global_batch_to_train"] == 8
  assert written["max_target_length"] == 16
  assert list((folder / "tensorboard").glob("events*"))
  assert (folder / "checkpoints" / "6").is_dir()


def test_the_written_config_starts_the_same_run(uninterrupted, capsys):
  assert main([f"config={uninterrupted[2] / 'first_run' / 'config.yml'}"]) == 0
  assert "complete at step 6" in capsys.readouterr().out


def test_the_plan_comes_first(text, tmp_path, capsys):
  train(text, tmp_path, steps=1)
  said = capsys.readouterr().out
  assert said.startswith("Batch plan\n")
  assert "\x1b" not in said


@pytest.mark.parametrize("step", range(1, STEPS))
def test_interrupted_anywhere_is_bit_identical(uninterrupted, text, tmp_path, monkeypatch, step):
  expected, records, _ = uninterrupted
  with monkeypatch.context() as patch:
    stop_at(patch, step)
    _, position = train(text, tmp_path)
  assert position.step == step
  state, position = train(text, tmp_path)
  assert position.step == STEPS
  assert fingerprints(state.params) == expected
  # Being stopped adds an evaluation; everything else is the same to the last bit.
  mine = without_times(tmp_path)
  assert len(mine) == len(records)
  for a, b in zip(mine, records, strict=True):
    assert {key: a[key] for key in b} == b


@pytest.mark.parametrize(
  "changed",
  [
    {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 8},
    {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
    {"accumulation": "streamed"},
  ],
  ids=lambda keys: "-".join(map(str, keys.values())),
)
def test_resumed_on_another_mesh_goes_on_alike(uninterrupted, text, tmp_path, monkeypatch, changed):
  with monkeypatch.context() as patch:
    stop_at(patch, 2)
    train(text, tmp_path)
  train(text, tmp_path, **changed)
  for a, b in zip(without_times(tmp_path), uninterrupted[1], strict=True):
    assert a["samples"] == b["samples"]
    for key in ("loss", "eval/loss"):
      if key in b:
        assert a[key] == pytest.approx(b[key], rel=1e-5)


@pytest.mark.parametrize("factor", ["0.5", "2", "1.5"])
def test_loading_more_or_less_at_once_changes_nothing(uninterrupted, text, tmp_path, factor):
  state, _ = train(text, tmp_path, expansion_factor_real_data=factor)
  assert fingerprints(state.params) == uninterrupted[0]


def test_a_larger_budget_goes_on_from_the_end(text, tmp_path):
  keys = {"lr_schedule_type": "constant", "warmup_steps": 0}
  longer, _ = train(text, tmp_path / "at-once", **keys)
  train(text, tmp_path / "in-two", steps=4, **keys)
  state, position = train(text, tmp_path / "in-two", **keys)
  assert position.step == STEPS
  assert fingerprints(state.params) == fingerprints(longer.params)


@pytest.mark.parametrize(
  ("changed", "named"),
  [
    ({"data_shuffle_seed": 5}, "data_shuffle_seed is 0 in the checkpoint and 5 now"),
    ({"init_weights_seed": 5}, "init_weights_seed is 0 in the checkpoint and 5 now"),
    ({"normalization": "layernorm"}, "normalization is rmsnorm"),
    (
      {"dataset_path": str(pathlib.Path(__file__))},
      "dataset is not that of the checkpoint: dataset_path was ",
    ),
  ],
)
def test_resuming_something_else_is_refused(uninterrupted, text, capsys, changed, named):
  code = main(arguments(text, uninterrupted[2], steps=8, **changed))
  message = capsys.readouterr().err
  assert code == 2
  assert named in message
  assert "allow_changed_resume=true" in message
  assert "Traceback" not in message


def test_resuming_another_seed_works_when_asked_for(text, tmp_path, capsys):
  train(text, tmp_path, steps=2)
  _, position = train(text, tmp_path, data_shuffle_seed=5, allow_changed_resume=True)
  assert position.step == STEPS
  assert "data_shuffle_seed is 0 in the checkpoint and 5 now" in capsys.readouterr().out


def test_divergence_names_the_step_and_saves_nothing_after_it(text, tmp_path, capsys):
  bad = {"learning_rate": 1e30, "gradient_clipping_threshold": 0, "warmup_steps": 0}
  code = main(arguments(text, tmp_path, checkpoint_period=1, opt_type="sgd", **bad))
  message = capsys.readouterr().err
  assert code == 3
  assert "which must be finite" in message
  records = read_metrics(tmp_path / "first_run")
  assert all(np.isfinite(record["loss"]) for record in records[1:])
  saved = [int(path.name) for path in (tmp_path / "first_run" / "checkpoints").glob("[0-9]*")]
  assert max(saved, default=0) <= records[-1]["step"]


def test_divergence_is_not_hidden_by_the_lag_of_metrics(text, tmp_path):
  bad = {"learning_rate": 1e30, "gradient_clipping_threshold": 0, "warmup_steps": 0}
  with pytest.raises(TrainingDivergedError):
    train(text, tmp_path, checkpoint_period=100, eval_interval=-1, opt_type="sgd", **bad)


EVERY_THIRD = {"eval_interval": 3, "checkpoint_period": 3}


class Steps:
  """Wraps compiled steps, whose dispatch returns when they have ended: step n takes 2^n seconds."""

  def __init__(self, monkeypatch: pytest.MonkeyPatch):
    compiler, own = run_mode.step_compiler, types.SimpleNamespace(perf_counter=self.clock)
    self.now, self.number, self._seen = 0.0, 0, threading.Event()
    self.fails: dict[int, Exception] = {}
    self._seen.set()
    for module in ("job", "loop"):
      monkeypatch.setattr(f"maxbatch.training.{module}.time", own)
    monkeypatch.setattr(
      run_mode,
      "step_compiler",
      lambda *of: lambda size: functools.partial(self, compiler(*of)(size)),
    )

  def clock(self) -> float:
    if threading.current_thread() is not threading.main_thread():
      self._seen.set()
    return self.now

  def __call__(self, compiled: Callable[..., Any], *inputs: Any) -> Any:
    self._seen.wait(PATIENCE_SECONDS)  # No clock sees a step's end only in the midst of the next.
    self._seen.clear()
    self.number += 1
    if self.number in self.fails:
      raise self.fails[self.number]
    result = jax.block_until_ready(compiled(*inputs))
    self.now += 2.0**self.number
    return result


def test_the_seconds_of_a_step_are_its_own_where_its_dispatch_waits_for_its_end(
  text, tmp_path, monkeypatch
):
  """GPUs: they were those of the next step, of the first and second together, and none of the last."""
  steps = Steps(monkeypatch)

  def evaluated(*_: object) -> dict[str, float]:
    steps.now += 1000.0  # Between steps.
    return {"eval/loss": 1.0}

  monkeypatch.setattr("maxbatch.training.loop.evaluate", evaluated)
  train(text, tmp_path, enable_checkpointing="false", **EVERY_THIRD)
  records = read_metrics(tmp_path / "first_run")[1:]
  assert [record["step_seconds"] for record in records] == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
  assert records[-1]["tokens_per_second"] == 128 / 64.0


@pytest.mark.parametrize(("place", "last"), [("dispatch", 2), ("decision", 3)])
def test_an_error_of_any_kind_leaves_the_records_of_the_steps_before_it(
  text, tmp_path, monkeypatch, place, last
):
  error = jax.errors.JaxRuntimeError("INTERNAL: captured")
  monkeypatch.setattr("maxbatch.training.loop.evaluate", lambda *_: {})
  if place == "dispatch":
    Steps(monkeypatch).fails[3] = error
  else:
    monkeypatch.setattr("maxbatch.training.loop.decided", Mock(side_effect=error))
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: captured"):
    train(text, tmp_path, enable_checkpointing="false", **EVERY_THIRD)
  assert [record["step"] for record in read_metrics(tmp_path / "first_run")] == [*range(last + 1)]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(uninterrupted, text, tmp_path, capsys):
  train(text, tmp_path, steps=4, learning_rate_schedule_steps=STEPS)
  flip_bits(tmp_path / "first_run" / "checkpoints" / "4")
  state, _ = train(text, tmp_path, learning_rate_schedule_steps=STEPS)
  out = capsys.readouterr().out
  assert "checkpoint step 4 is damaged" in out
  assert "Resuming after step 2" in out
  assert fingerprints(state.params) == uninterrupted[0]


@pytest.mark.parametrize(
  ("keys", "named"),
  [
    ({"stesp": 3}, "steps"),
    ({"per_device_batch_size": 0.3}, "per_device_batch_size=0.3"),
    ({"ici_tensor_parallelism": 3}, "ici_tensor_parallelism=3"),
    ({"dataset_path": "/no/such/file"}, "/no/such/file"),
    ({"opt_type": "adam"}, "adamw"),
    ({"lr_schedule_type": "cosin"}, "cosine"),
    ({"attention": "flash"}, "attention=flash"),
    ({"vocab_size": 100}, "vocab_size=100"),
    ({"base_num_kv_heads": 3, "base_num_query_heads": 4}, "base_num_kv_heads=3"),
    ({"total_tokens": 1000}, "total_tokens=1000"),
    ({"base_output_directory": "/proc/nowhere"}, "base_output_directory"),
  ],
)
def test_mistakes_end_with_exit_code_2_and_a_sentence(text, tmp_path, capsys, keys, named):
  code = main(arguments(text, tmp_path, **keys))
  captured = capsys.readouterr()
  assert code == 2
  assert named in captured.err
  assert captured.err.startswith("error: ")
  assert "Traceback" not in captured.err + captured.out


def test_help_lists_every_key(capsys):
  assert main(["--help", "all"]) == 0
  assert "gradient_accumulation_steps" in capsys.readouterr().out


def command(*arguments: str) -> list[str]:
  return [sys.executable, "-m", "maxbatch.train", *arguments]


def wait_for(condition, process) -> None:
  end = time.monotonic() + PATIENCE_SECONDS
  while not condition():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < end
    time.sleep(0.02)


def start(text, folder, **keys) -> subprocess.Popen[str]:
  return started(command(*arguments(text, folder, **keys)), stderr=subprocess.STDOUT)


def test_killed_and_interrupted_runs_go_on_exactly_on_other_devices(text, tmp_path):
  keys = {
    "steps": 300,
    "checkpoint_period": 10,
    "eval_interval": -1,
    "lr_schedule_type": "constant",
  }
  checkpoints = tmp_path / "first_run" / "checkpoints"
  killed = start(text, tmp_path, **keys)
  wait_for(lambda: (checkpoints / "20").is_dir(), killed)
  killed.kill()
  killed.communicate()
  halves = {"num_simulated_devices": 2, "gradient_accumulation_steps": 4}
  stopped = start(text, tmp_path, **keys, **halves)
  wait_for(lambda: (checkpoints / "50").is_dir(), stopped)
  stopped.send_signal(signal.SIGINT)
  output, _ = stopped.communicate(timeout=PATIENCE_SECONDS)
  assert stopped.returncode == 0, output
  assert "Resuming after step" in output
  assert "resume:  the same command again" in output
  reached = read_metrics(tmp_path / "first_run")[-1]["step"]
  assert 50 <= reached < 300
  train(text, tmp_path / "whole", **(keys | {"steps": reached}), learning_rate_schedule_steps=300)
  for a, b in zip(without_times(tmp_path), without_times(tmp_path / "whole"), strict=True):
    assert a["samples"] == b["samples"]
    assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-4)


def test_piped_output_has_no_progress_bar(text, tmp_path):
  keys = {"steps": 2, "eval_interval": -1, "generate_length": 4, "dropout_rate": 0}
  process = started(command(*arguments(text, tmp_path, **keys), ONE_DEVICE))
  output, errors = process.communicate(timeout=PATIENCE_SECONDS)
  assert (process.returncode, errors) == (0, "")
  assert "\r" not in output
  assert "text before training" in output
  assert json.loads((tmp_path / "first_run" / "metrics.jsonl").read_text().splitlines()[0])


@pytest.mark.parametrize("more", [{}, {"validate_only": "true"}, {"compile_only": "true"}])
def test_a_pipeline_that_does_not_divide_is_refused(text, tmp_path, capsys, more):
  keys = {"pipeline_schedule": "1f1b", "ici_pipeline_parallelism": 2} | more
  assert main(arguments(text, tmp_path / "runs", **keys)) == 2
  printed = capsys.readouterr()
  assert "base_num_decoder_layers=1; nearest: base_num_decoder_layers=2" in printed.err
  assert not (tmp_path / "runs").exists()


def test_the_longer_run_that_is_offered_goes_on_at_the_last_learning_rate(text, tmp_path, capsys):
  given = arguments(text, tmp_path / "run")
  assert main(given) == 0
  printed = capsys.readouterr().out
  offer = re.search(
    rf"for example\s+(steps={2 * STEPS} learning_rate_schedule_steps=\d+)\n", printed
  )
  rates = re.search(r"the rate jumps from ([\d.e-]+) to ([\d.e-]+)", printed)
  assert offer
  assert rates
  shutil.copytree(tmp_path / "run", tmp_path / "alone")
  assert main([*given, *offer[1].split()]) == 0
  assert main([*arguments(text, tmp_path / "alone"), f"steps={2 * STEPS}"]) == 0
  for folder, expected in (("run", rates[1]), ("alone", rates[2])):
    record = read_metrics(tmp_path / folder / "first_run")[STEPS + 1]
    assert record["step"] == STEPS + 1
    assert record["learning_rate"] == pytest.approx(float(expected), rel=0.01)


def test_a_constant_learning_rate_goes_on_without_further_keys(text, tmp_path, capsys):
  assert main(arguments(text, tmp_path, lr_schedule_type="constant")) == 0
  assert f"larger budget, for example\n           steps={2 * STEPS}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("keys", "words"),
  [
    (["enable_checkpointing=false"], "enable_checkpointing=true"),
    (["batch_size=-1", "per_device_batch_size=2"], "batch_size=256"),
    (["enable_rampup_batch_size=true"], "batch_schedule_type=linear"),
  ],
)
def test_what_cannot_keep_its_batch_is_refused(keys, words):
  with pytest.raises(UserError, match=words):
    check_keeps_batch(load_config(["config=base", "batch_size=8", *keys]))
  check_keeps_batch(load_config(["config=base", "batch_size=8"]))
