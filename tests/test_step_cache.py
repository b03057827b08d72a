"""A second start runs the step of the first without tracing it, but only where nothing of it has changed."""

import dataclasses
import json
import pathlib
import re
import shutil
import sys

import jax
import pytest
from preloaded import started
from processes import ONE_DEVICE, PATIENCE_SECONDS, REPOSITORY, small_run
from support import config

import maxbatch
from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile import step_cache
from maxbatch.compile.cache import STEPS
from maxbatch.config.registry import names_plugin
from maxbatch.data.registry import build_dataset
from maxbatch.training.build import build_trainer, step_rows, traced_step

LOWERED = re.compile(r"module conversion jit\((\w+)\)")
"""What jax says of every function that it has traced and lowered."""

PLUGIN = """
import optax
def build(config, axes):
  return optax.scale(-{rate})
"""


class Start:
  """What a start of a small run said and left."""

  def __init__(self, folder: pathlib.Path, *keys: str, package: pathlib.Path = REPOSITORY):
    number = len(list(folder.glob("runs/*")))
    arguments = [*small_run(folder / "runs", folder / "text.txt", folder), "steps=3", ONE_DEVICE]
    command = [sys.executable, "-m", "maxbatch.train", *arguments, f"run_name={number}", *keys]
    variables = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_LOG_COMPILES": "1"}
    process = started(command, {**variables, "PYTHONPATH": f"{package}:{folder}"}, folder=folder)
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, said
    self.traces_step = "step" in LOWERED.findall(said)
    lines = (folder / "runs" / str(number) / "metrics.jsonl").read_text().splitlines()
    self.losses = [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def kept(folder: pathlib.Path) -> list[pathlib.Path]:
  """The steps that starts in this folder have kept."""
  return sorted((folder / "cache" / STEPS).glob("*"))


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[pathlib.Path, Start]:
  """A folder, and the first start in it."""
  folder = tmp_path_factory.mktemp("starts")
  start = Start(folder)
  assert start.traces_step
  assert len(kept(folder)) == 1
  return folder, start


def test_a_second_start_traces_no_step_and_trains_to_the_same_losses_until_code_changes(
  first, tmp_path
):
  folder, start = first
  shutil.copytree(folder / "cache", tmp_path / "cache")
  shutil.copytree(REPOSITORY / "maxbatch", tmp_path / "moved" / "maxbatch")
  shutil.copytree(REPOSITORY / "configs", tmp_path / "moved" / "configs")
  second = Start(tmp_path, package=tmp_path / "moved")
  assert not second.traces_step
  assert second.losses == start.losses
  rates = tmp_path / "moved" / "maxbatch" / "training" / "optimizer.py"
  code = rates.read_text()
  before = 'u * extra["learning_rate"]'
  assert before in code
  rates.write_text(code.replace(before, f"2 * {before}"))
  changed = Start(tmp_path, package=tmp_path / "moved")
  assert changed.traces_step
  assert changed.losses != start.losses


def test_what_is_no_part_of_the_step_may_be_another(first):
  folder, start = first
  second = Start(folder, "learning_rate=0.01", "data_shuffle_seed=5", "log_period=2")
  assert not second.traces_step
  assert second.losses != start.losses


def test_a_changed_key_is_another_step(first):
  folder, start = first
  second = Start(folder, "adam_b1=0.5")
  assert second.traces_step
  assert second.losses[0] == start.losses[0]
  assert second.losses != start.losses
  assert len(kept(folder)) == 2


def test_a_damaged_step_is_traced_again_and_replaced(first, tmp_path):
  folder, start = first
  shutil.copytree(folder / "cache", tmp_path / "cache")
  damaged = {}
  for file in kept(tmp_path):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    damaged[file] = bytes(content)
  second = Start(tmp_path)
  assert second.traces_step
  assert second.losses == start.losses
  assert [file.read_bytes() == damaged[file] for file in kept(tmp_path)].count(False) == 1


def test_a_plug_in_is_traced_at_every_start(tmp_path):
  losses = []
  for rate in (0.1, 0.5):
    (tmp_path / "mine.py").write_text(PLUGIN.format(rate=rate))
    start = Start(tmp_path, "opt_type=mine:build")
    assert start.traces_step
    losses.append(start.losses)
  assert losses[0] != losses[1]
  assert kept(tmp_path) == []


def test_a_plug_in_of_maxbatch_is_known_code():
  assert names_plugin(config(dataset_type="mine:build"))
  assert names_plugin(config(metrics="[mine:one]"))
  assert not names_plugin(config(dataset_type="maxbatch.rl.demonstrations:build"))
  assert not names_plugin(config())


def test_a_program_that_imports_maxbatch_traces():
  of = config(dataset_type="synthetic")
  plan = plan_batches(of.batch, of.run, topology(of.mesh, 8))
  assert step_cache._must_trace(of, build_trainer(of, plan, jax.devices()))


def test_code_that_changed_under_way_is_not_taken_for_what_was_imported(monkeypatch):
  step_cache._code.cache_clear()
  assert step_cache._code()
  step_cache._code.cache_clear()
  newest = max(f.stat().st_mtime for f in pathlib.Path(maxbatch.__path__[0]).rglob("*.py"))
  monkeypatch.setattr(maxbatch, "IMPORTED_AT", newest)
  assert step_cache._code() is None
  step_cache._code.cache_clear()


class _Unread:
  """A section of the configuration that nobody may read, but for some of its keys."""

  def __init__(self, section: object, *read: str):
    for key in ("plugins", *read):
      setattr(self, key, getattr(section, key))


@pytest.mark.parametrize(
  "keys",
  [
    {},
    {"accumulation": "streamed", "batch_schedule": "[[0, 32], [64, 64]]"},
    {"gns": "all", "weight_dtype": "bfloat16", "weight_rounding": "stochastic"},
    {"pipeline_schedule": "1f1b", "ici_pipeline_parallelism": 2, "base_num_decoder_layers": 2},
  ],
)
def test_a_step_is_made_of_nothing_but_what_identifies_it(keys):
  of = config(dataset_type="synthetic", gradient_accumulation_steps=2, **keys)
  plan = plan_batches(of.batch, of.run, topology(of.mesh, 8))
  source = build_dataset(of.data, of.batch.max_target_length).train
  unread = dataclasses.replace(
    of,
    run=_Unread(of.run, "metrics"),
    data=_Unread(of.data, "tokenizer_type", "tokenizer_path"),
    compile=_Unread(of.compile, "compiler_flags"),
    checkpoint=_Unread(of.checkpoint),
    distributed=_Unread(of.distributed),
    profiling=_Unread(of.profiling),
  )
  trainer = build_trainer(unread, plan, jax.devices(), keep=False)
  size = plan.micro_batch_to_train
  traced_step(trainer, step_rows(plan, trainer, source, size))
  text = json.dumps(step_cache.identity(of, plan, trainer, source, size))
  assert " at 0x" not in text
