"""A compiled step as a file: the same training to the last bit, and only for the run it is for."""

import ast
import dataclasses
import json
import os
import pathlib
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest
from support import config
from test_layers import TREES, WITHOUT_JAX, imports

from maxbatch.batch.plan import Position, plan_batches
from maxbatch.batch.topology import topology
from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.compile import cache, step_file, step_identity
from maxbatch.config import schema
from maxbatch.config.load import to_flat_dict
from maxbatch.data.registry import build_dataset
from maxbatch.errors import UserError
from maxbatch.hardware.devices import topology_devices
from maxbatch.training.build import build_trainer, compiled_step, train_rows

KEYS = {"dataset_type": "synthetic", "dropout_rate": 0.1, "gradient_accumulation_steps": 2}
KEYS |= {"base_num_decoder_layers": 1}


class Run:
  """What a run has when it comes to compiling."""

  def __init__(self, **keys: object):
    self.config = config(**(KEYS | keys))
    devices = jax.devices()
    self.plan = plan_batches(self.config.batch, self.config.run, topology(self.config.mesh, 8))
    self.trainer = build_trainer(self.config, self.plan, devices)
    self.data = build_dataset(self.config.data, self.config.batch.max_target_length)

  def header(self) -> dict[str, object]:
    return step_identity.header(self.config, self.plan, self.trainer)

  def compiled(self, micro_batch: int):
    return compiled_step(self.config, self.plan, self.trainer, self.data.train, micro_batch)

  def three_steps(self, step) -> tuple[dict[str, int], list[float]]:
    """Fingerprints of the parameters after three steps, and their losses."""
    state, losses = self.trainer.init(0), []
    with train_rows(self.config, self.trainer, self.data)(self.plan, Position(0, 0)) as rows:
      for _, batch in zip(range(3), rows, strict=False):
        state, metrics = step(state, batch, np.int32(2), np.float32(0.01))
        losses.append(float(metrics.loss))
    return fingerprints(state.params), losses


@pytest.fixture(scope="module")
def run() -> Run:
  return Run()


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory) -> tuple[pathlib.Path, tuple[dict[str, int], list[float]]]:
  """A file of the run's step, and what the step itself computes."""
  path = tmp_path_factory.mktemp("saved") / "folder" / "step.compiled"
  size = run.plan.micro_batch_to_train
  with cache.bypassed():
    step = run.compiled(size)
  step_file.save(str(path), run.header(), {size: step})
  return path, run.three_steps(step)


def loaded(run: Run, path: pathlib.Path):
  return step_file.load(str(path), run.header())[run.plan.micro_batch_to_train]


def test_a_loaded_step_trains_to_the_same_bits(run, saved):
  path, expected = saved
  assert run.three_steps(loaded(run, path)) == expected
  assert os.listdir(path.parent) == [path.name]


def test_another_process_trains_to_the_same_bits(saved):
  path, expected = saved
  program = f"""
import json, conftest
from test_step_file import Run, loaded
run = Run()
print(json.dumps(run.three_steps(loaded(run, {str(path)!r}))))
"""
  environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", "tests"])}
  environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.values["jax_compilation_cache_dir"]
  done = subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    check=False,
    env=environment,
    cwd=pathlib.Path(__file__).parents[1],
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert json.loads(done.stdout) == list(expected)


@pytest.mark.parametrize(
  ("keys", "lines"),
  [
    ({"remat_policy": "full"}, ["remat_policy: the file has none, this run full"]),
    ({"adam_b2": 0.5}, ["adam_b2: the file has 0.95, this run 0.5"]),
    ({"per_device_batch_size": 2}, ["micro_batch_to_train: the file has 32, this run 16"]),
    ({"gradient_accumulation_steps": 17}, ["microbatch_capacity: the file has 16, this run 32"]),
    ({"init_weights_seed": 3}, ["init_weights_seed: the file has 0, this run 3"]),
    (
      {"packing": "false", "max_target_length": 8},
      [
        "max_target_length: the file has 16, this run 8",
        "packing: the file has True, this run False",
      ],
    ),
    (
      {"ici_fsdp_parallelism": 2},
      [
        "mesh: the file has data 8 × fsdp 1 × tensor 1 × stage 1, "
        "this run data 4 × fsdp 2 × tensor 1 × stage 1"
      ],
    ),
    (
      {"accumulation": "streamed"},
      [
        "accumulation: the file has fused, this run streamed",
        "microbatch_capacity: the file has 16, this run none",
        "streamed_passes: the file has none, this run 2",
      ],
    ),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_another_run_is_refused_by_name(saved, keys, lines):
  other = Run(**keys)
  with pytest.raises(UserError) as refusal:
    loaded(other, saved[0])
  first, *listed, way_out = str(refusal.value).splitlines()
  assert first == f"compiled_step={saved[0]} was compiled for another run:"
  assert listed == [f"  {line}" for line in lines]
  assert f"save_compiled_step={saved[0]}" in way_out


@pytest.mark.parametrize(
  "keys",
  [
    {"learning_rate": 1, "warmup_steps": 3, "lr_schedule_type": "wsd"},
    {"gradient_accumulation_steps": 7, "steps": 99, "data_shuffle_seed": 4},
    {"run_name": "other", "checkpoint_period": 7, "eval_per_device_batch_size": 1},
  ],
  ids=lambda keys: next(iter(keys)),
)
def test_what_does_not_shape_the_program_is_not_asked(run, saved, keys):
  other = Run(**keys)
  assert other.header() == run.header()


def test_the_seed_counts_only_with_dropout(run):
  one, other = (Run(dropout_rate=0, init_weights_seed=seed).header() for seed in (1, 2))
  assert one == other


def test_other_versions_devices_and_code_are_refused(run, saved, monkeypatch):
  monkeypatch.setattr(step_identity.importlib.metadata, "version", lambda package: f"{package} 9")
  monkeypatch.setattr(step_identity, "_cpu", lambda: "abacus")
  monkeypatch.setattr(step_identity, "source_hash", lambda config: "changed")
  monkeypatch.setenv("XLA_FLAGS", "--xla_new=1 --xla_dump_to=x --xla_a=2")
  monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("unpickled"))
  with pytest.raises(UserError) as refusal:
    loaded(run, saved[0])
  text = str(refusal.value)
  for part in ("jax: the file has 0", "this run jax 9", "this run jaxlib 9", "this run abacus"):
    assert part in text
  assert "source: the file has" in text
  assert "XLA_FLAGS: the file has '', this run --xla_a=2 --xla_new=1\n" in text
  assert "libtpu" not in text


def test_a_step_for_a_slice_is_refused_on_other_devices(run):
  on_slice = run.header() | {"platform": "tpu", "device_kind": "TPU v5 lite", "num_devices": 256}
  assert step_file.differences(on_slice, run.header()) == [
    "platform: the file has tpu, this run cpu",
    "device_kind: the file has TPU v5 lite, this run cpu",
    "num_devices: the file has 256, this run 8",
  ]


def test_a_key_that_only_one_side_knows_is_a_difference():
  assert step_file.differences({"old": 1}, {"new": None}) == [
    "new: the file has nothing, this run none",
    "old: the file has 1, this run nothing",
  ]


def test_a_file_may_hold_more_microbatches_than_the_run_needs():
  file, run = {"micro_batch_to_train": [8, 16]}, {"micro_batch_to_train": [16]}
  assert step_file.differences(file, run) == []
  assert step_file.differences(run, file) == [
    "micro_batch_to_train: the file has 16, this run 8, 16"
  ]


def test_passes_are_baked_in_where_stages_stream_different_ones():
  keys = {"accumulation": "streamed", "batch_schedule": "[[0, 32], [320, 64]]"}
  keys |= {"gradient_accumulation_steps": -1, "per_device_batch_size": 4}
  assert Run(**keys).header()["streamed_passes"] == [[0, 1], [10, 2]]


@pytest.mark.parametrize(
  ("damage", "printed"),
  [
    (lambda data: b"PK" + data, "this is not a compiled step"),
    (lambda data: b"", "this is not a compiled step"),
    (lambda data: data[:27], "its header is damaged or cut short"),
    (lambda data: data[:300], "its header is damaged or cut short"),
    (lambda data: data[:25] + b"\xff" * 8 + data[33:], "its header is damaged or cut short"),
    (lambda data: data.replace(b'"adamw"', b'"adamv"'), "its header is damaged or cut short"),
    (lambda data: data[:-1], "it is cut short"),
    (lambda data: data[:-9] + b"x" + data[-8:], "its program for microbatches of 32 is damaged"),
  ],
)
def test_a_damaged_file_is_never_unpickled(run, saved, tmp_path, monkeypatch, damage, printed):
  path = tmp_path / "damaged"
  path.write_bytes(damage(saved[0].read_bytes()))
  monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("unpickled"))
  with pytest.raises(UserError, match=f"compiled_step={path}: {printed}; write it again with save"):
    loaded(run, path)


def test_no_file_is_told_how_to_get_one(run, tmp_path):
  with pytest.raises(UserError, match="No such file or directory; save_compiled_step="):
    loaded(run, tmp_path / "absent")


def test_a_file_that_cannot_be_written_leaves_nothing(run, saved, tmp_path, monkeypatch):
  step = loaded(run, saved[0])
  monkeypatch.setattr(step_file, "_is_hollow", lambda saved: False)
  (tmp_path / "file").touch()
  with pytest.raises(
    UserError, match=r"save_compiled_step=.*file/step: cannot be written: File ex"
  ):
    step_file.save(str(tmp_path / "file" / "step"), run.header(), {32: step})
  monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
  with pytest.raises(UserError, match="No space left"):
    step_file.save(str(tmp_path / "step"), run.header(), {32: step})
  assert os.listdir(tmp_path) == ["file"]


def test_on_cpu_a_loaded_step_is_not_saved_again(run, saved, tmp_path):
  with pytest.raises(UserError, match="loaded from a cache or a file"):
    step_file.save(str(tmp_path / "again"), run.header(), {32: loaded(run, saved[0])})
  assert os.listdir(tmp_path) == []


def test_a_step_for_a_slice_that_is_not_here_can_be_saved(tmp_path):
  pytest.importorskip("libtpu")
  place = jax.sharding.SingleDeviceSharding(topology_devices("v5e-4")[0])
  argument = jax.ShapeDtypeStruct((8, 128), np.float32, sharding=place)
  with cache.bypassed():
    program = jax.jit(lambda x: x + 1).lower(argument).compile()
  step_file.save(str(tmp_path / "step"), {"platform": "tpu"}, {8: program})
  with pytest.raises(UserError, match="platform: the file has tpu, this run cpu"):
    step_file.load(str(tmp_path / "step"), {"platform": "cpu"})


def test_every_key_is_sorted():
  derived = [key for keys in step_identity.DERIVED.values() for key in keys]
  sorted_keys = [*step_identity.BAKED, *derived, *step_identity.FREE]
  assert sorted(sorted_keys) == sorted(schema.fields())


def test_the_header_holds_what_it_should_and_nothing_else(run):
  header = run.header()
  assert set(step_identity.BAKED) | set(step_identity.DERIVED) <= header.keys()
  assert json.loads(json.dumps(header)) == header
  assert not set(header) & set(step_identity.FREE)


def test_every_key_of_model_and_optimizer_that_is_free_is_known():
  # A new key of these sections shapes the program unless somebody has made sure that it does not.
  free = set(step_identity.FREE)
  model = {field.name for field in dataclasses.fields(schema.ModelConfig)}
  assert model & free == {"model_name"}
  optimizer = {field.name for field in dataclasses.fields(schema.OptimizerConfig)}
  assert {key for key in optimizer & free if "learning_rate" not in key} == {
    "lr_schedule_type",
    "warmup_steps",
    "warmup_steps_fraction",
    "wsd_decay_steps_fraction",
  }


def test_values_in_the_header_are_those_of_the_run(run):
  header, flat = run.header(), to_flat_dict(run.config)
  resolved = {"attention": "dot_product"}
  assert {key: header[key] for key in step_identity.BAKED} == {
    key: resolved.get(key, flat[key]) for key in step_identity.BAKED
  }


def test_the_source_is_all_code_that_the_step_is_traced_from():
  found, todo = set(), ["maxbatch.training.step"]
  while todo:
    module = todo.pop()
    if module not in found and module in TREES and module.split(".")[1] not in WITHOUT_JAX:
      found.add(module)
      todo += imports(TREES[module])
  listed = {module.__name__ for module in step_identity.STEP_MODULES}
  # What timetables say is no part of the program, but must mean to it what it meant before.
  timetables = {
    f"maxbatch.pipeline_parallel.{name}" for name in ("timetable_arrays", "schedule", "slots")
  }
  assert listed == found - {"maxbatch.hardware.devices"} | {"maxbatch.training.build"} | timetables


def test_a_change_of_the_code_is_seen(run, tmp_path, monkeypatch):
  before = run.header()["source"]
  copy = tmp_path / "loss.py"
  copy.write_text(ast.unparse(ast.parse(pathlib.Path(step_identity.loss.__file__).read_text())))
  monkeypatch.setattr(step_identity.loss, "__file__", str(copy))
  assert run.header()["source"] != before
