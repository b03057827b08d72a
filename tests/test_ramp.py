"""Whole runs whose batch grows: exact to the sample, compiled once, resumed anywhere."""

import itertools
import logging
import pathlib
import time

import jax
import pytest
import several_processes
from processes import PATIENCE_SECONDS
from support import SMALLEST, stop_at

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.batch.learning_rate import learning_rate
from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.config.load import load_config
from maxbatch.core.plan import Position
from maxbatch.modes.run import run
from maxbatch.training import build
from maxbatch.training.job import Hooks

RAMP = {
  "batch_size": 32,
  "per_device_batch_size": 1,
  "batch_schedule_type": "linear",
  "batch_schedule_length": 96,
  "batch_size_start": 8,
  "batch_size_increment": 8,
  "steps": -1,
  "total_samples": 160,
}
"""8, 16, 24, 32 samples a step on 8 devices, 32 samples (and what a step takes over) each."""


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("text") / "words.txt"
  path.write_text("".join(f"the number {n} follows {n - 1}\n" for n in range(300)))
  return path


def settings(text: pathlib.Path, folder: pathlib.Path, **keys: object):
  defaults: dict[str, object] = {
    "base_output_directory": folder,
    "dataset_path": text,
    "dataset_cache_directory": text.parent / "cache",
    "eval_interval": -1,
    "eval_samples": 8,
    "warmup_steps": 32,
    "generate_length": 0,
    **SMALLEST,
    "schedule_unit": "samples",
    "checkpoint_period": 1000,
  }
  values = defaults | RAMP | keys
  return load_config(["config=base", *(f"{key}={value}" for key, value in values.items())])


def train(text: pathlib.Path, folder: pathlib.Path, **keys: object):
  return run(settings(text, folder, **keys))


def records(folder: pathlib.Path) -> list[dict[str, float]]:
  return several_processes.records(folder / "first_run")


def batches(folder: pathlib.Path) -> list[float]:
  return [record["global_batch_to_train"] for record in records(folder)[1:]]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
  folder = tmp_path_factory.mktemp("whole")
  state, position = train(text, folder)
  assert position.samples == 160
  return fingerprints(state.params), records(folder), folder


def test_the_loop_takes_what_the_plan_says(whole, text, tmp_path):
  config = settings(text, tmp_path)
  plan = plan_batches(config.batch, config.run, topology(config.mesh, 8))
  expected = [phase.batch for phase in plan.phases for _ in range(phase.num_steps)]
  assert batches(whole[2]) == expected
  assert len(set(expected)) >= 4
  assert sum(expected) == 160
  assert len(expected) == 10  # the tests below stop after each of the first nine


@pytest.mark.parametrize("first", [1, 2])
def test_resumed_after_any_step_of_a_ramp(whole, text, tmp_path, monkeypatch, first):
  """Every other step is the last one of a process."""
  before = 0
  for step in range(first, 10, 2):
    with monkeypatch.context() as patch:
      stop_at(patch, step - before)
      _, position = train(text, tmp_path)
    assert position.step == step
    before = step
  state, _ = train(text, tmp_path)
  assert fingerprints(state.params) == whole[0]
  assert [r["samples"] for r in records(tmp_path)] == [r["samples"] for r in whole[1]]


@pytest.mark.parametrize("step", [2, 4, 7])
def test_resumed_in_a_ramp_on_another_mesh(whole, text, tmp_path, monkeypatch, step):
  with monkeypatch.context() as patch:
    stop_at(patch, step)
    train(text, tmp_path)
  train(text, tmp_path, ici_tensor_parallelism=2, per_device_batch_size=0.5)
  for a, b in zip(records(tmp_path), whole[1], strict=True):
    assert a["samples"] == b["samples"]
    assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-5)


def test_the_batch_is_kept_on_fewer_replicas(text, tmp_path, monkeypatch):
  # The programs are those of the ramps above.
  keys = {"batch_schedule_type": "constant", "batch_schedule_length": -1, "batch_size_start": -1}
  train(text, tmp_path / "whole", **keys)
  with monkeypatch.context() as patch:
    stop_at(patch, 3)
    train(text, tmp_path / "moved", **keys)
  train(text, tmp_path / "moved", **keys, ici_tensor_parallelism=2, per_device_batch_size=0.5)
  expected, result = records(tmp_path / "whole"), records(tmp_path / "moved")
  assert result[-1]["gradient_accumulation_steps"] == 8
  for a, b in zip(result, expected, strict=True):
    assert a["samples"] == b["samples"]
    assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-5)


def test_ten_phases_at_one_microbatch_compile_once(text, tmp_path, monkeypatch):
  compiled, compile_step = [], build.compiled_step
  monkeypatch.setattr(
    "maxbatch.compile.step_cache.compiled_step",
    lambda *all_: compiled.append(all_[-1]) or compile_step(*all_),
  )
  keys = {"batch_size": 80, "batch_schedule_length": 720, "total_samples": 1040}
  train(text, tmp_path, **keys)
  assert len(set(batches(tmp_path))) == 10
  assert compiled == [8]


def test_nothing_compiles_inside_the_loop_of_a_ramp(text, tmp_path, caplog):
  with caplog.at_level(logging.WARNING, "jax"), jax.log_compiles():
    train(text, tmp_path)
  steps = [
    r.message for r in caplog.records if "Finished XLA compilation of jit(step)" in r.message
  ]
  assert len(steps) <= 1


def test_another_microbatch_is_compiled_before_its_phase(text, tmp_path, monkeypatch):
  events, compile_step = [], build.compiled_step

  def compile_noted(*arguments):
    step = compile_step(*arguments)
    events.append(("compiled", arguments[-1]))
    return step

  def publish_noted(hooks, position, params):
    events.append(("step", 8 if position.samples < 80 else 16))
    end = time.monotonic() + PATIENCE_SECONDS
    while events.count(("step", 8)) == 5 and ("compiled", 16) not in events:
      assert time.monotonic() < end, "the next shape is not compiled while this one trains"
      time.sleep(0.01)

  monkeypatch.setattr("maxbatch.compile.step_cache.compiled_step", compile_noted)
  monkeypatch.setattr(Hooks, "publish", publish_noted)
  keys = {
    "batch_schedule_type": "constant",
    "batch_schedule_length": -1,
    "batch_size_start": -1,
    "per_device_batch_size": 2,
    "batch_size": 32,
    "batch_schedule": "[[0, 8], [80, 32]]",
    "total_samples": 240,
  }
  train(text, tmp_path, **keys)
  assert batches(tmp_path) == [8] * 10 + [32] * 5
  assert events.count(("compiled", 8)) == events.count(("compiled", 16)) == 1
  assert events.index(("step", 8)) < events.index(("step", 16))
  assert events.index(("compiled", 16)) < events.index(("step", 16))
  samples = [record["samples"] for record in records(tmp_path)]
  assert samples == [*range(0, 81, 8), *range(112, 241, 32)]


def test_a_streamed_ramp_equals_a_fused_one(whole, text, tmp_path):
  train(text, tmp_path, accumulation="streamed")
  assert batches(tmp_path) == batches(whole[2])
  for streamed, fused in zip(records(tmp_path), whole[1], strict=True):
    assert streamed.keys() == fused.keys()
    for key in {"loss", "grad_norm", "eval/loss"} & fused.keys():
      assert streamed[key] == pytest.approx(fused[key], rel=1e-5), key
  # What the last step has done to the parameters.
  assert "eval/loss" in whole[1][-1]


def test_a_schedule_edited_at_a_restart_takes_effect_from_the_sample(
  text, tmp_path, monkeypatch, capsys
):
  with monkeypatch.context() as patch:
    stop_at(patch, 3)
    _, position = train(text, tmp_path)
  capsys.readouterr()
  train(text, tmp_path, batch_size_start=16, batch_schedule_length=64)
  out = capsys.readouterr().out
  assert f"The batch schedule is another one from sample {position.samples} on" in out
  results = [record["samples"] for record in records(tmp_path)]
  assert results[: position.step + 1][-1] == position.samples
  assert results[-1] == 160


def test_a_ramp_moves_neither_rates_nor_evaluations(text, tmp_path):
  train(text, tmp_path, eval_interval=40)
  flat = {"batch_schedule_type": "constant", "batch_schedule_length": -1, "batch_size": 8}
  config = settings(text, tmp_path, **flat, batch_size_start=-1)
  plan = plan_batches(config.batch, config.run, topology(config.mesh, 8))
  rate_of = learning_rate(config.optimizer, plan, config.run.schedule_unit)
  ramp = {int(r["samples"]): r for r in records(tmp_path)[1:]}
  # Once it is warm: the first rates are those of whole steps.
  starts = [(begun, after) for begun, after in itertools.pairwise(ramp) if begun >= 32]
  assert len(starts) == 6
  for begun, after in starts:
    assert ramp[after]["learning_rate"] == rate_of(Position(begun // 8, begun))
  crossed = [r["samples"] for r in records(tmp_path) if "eval/loss" in r]
  assert [s // 40 for s in crossed] == [0, 1, 2, 3, 4]


def test_tensorboard_shows_the_batch_over_samples(whole):
  (events,) = (whole[2] / "first_run" / "tensorboard" / "over_samples").glob("events*")
  assert b"over_samples/global_batch_to_train" in events.read_bytes()


SEESAW = {
  "batch_schedule_type": "seesaw",
  "batch_schedule_length": -1,
  "batch_size_increment": -1,
  "lr_schedule_type": "linear",
  "learning_rate_final_fraction": 0,
}
"""8 samples a step, 16 from sample 96 and 32 from 128 on, as the rate halves after a warm-up of 32."""


def test_seesaw_resumed_after_steps_of_every_batch(text, tmp_path, monkeypatch):
  state, position = train(text, tmp_path / "whole", **SEESAW)
  assert batches(tmp_path / "whole") == [8] * 12 + [16] * 2 + [32]
  assert (position.step, position.samples) == (15, 160)
  rates = [record["learning_rate"] for record in records(tmp_path / "whole")[1:]]
  assert [rates[at] for at in (4, 12, 14)] == pytest.approx([0.003, 0.003 / 2**0.5, 0.0015])
  before = 0
  for step in (3, 12, 13, 14):
    with monkeypatch.context() as patch:
      stop_at(patch, step - before)
      train(text, tmp_path / "parts", **SEESAW)
    before = step
  again, _ = train(text, tmp_path / "parts", **SEESAW)
  assert fingerprints(again.params) == fingerprints(state.params)
  assert records(tmp_path / "parts")[-1] == records(tmp_path / "whole")[-1]


GROUPS = {"batch_by_group": "[[embedding,2],[head,3]]"}


def test_groups_resumed_after_each_of_their_steps(whole, text, tmp_path, monkeypatch):
  state, _ = train(text, tmp_path / "whole", **GROUPS)
  before = 0
  for step in (1, 2, 3, 4, 5, 8):
    with monkeypatch.context() as patch:
      stop_at(patch, step - before)
      train(text, tmp_path / "parts", **GROUPS)
    before = step
  again, position = train(text, tmp_path / "parts", **GROUPS)
  assert position.samples == 160
  assert fingerprints(again.params) == fingerprints(state.params)
  assert fingerprints(again.opt_state) == fingerprints(state.opt_state)
  # It is another training than with one batch for all.
  assert fingerprints(state.params) != whole[0]
