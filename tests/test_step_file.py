"""A compiled step as a file: the same training to the last bit, and only for the run it is for."""

import base64
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import pickle
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
import pytest
from lowered_once import forget
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.compile import step_file, step_identity
from maxbatch.config import schema
from maxbatch.config.load import to_flat_dict
from maxbatch.core.plan import Position
from maxbatch.data.registry import build_dataset
from maxbatch.errors import UserError
from maxbatch.hardware.compiler_flags import bypassed
from maxbatch.hardware.devices import topology_devices
from maxbatch.training import build
from maxbatch.training.build import build_trainer, compiled_step, train_rows

KEYS = {"dataset_type": "synthetic", "gradient_accumulation_steps": 2}
KEYS |= {"base_num_decoder_layers": 1}
STREAMED_WITH_FSDP = {"accumulation": "streamed", "ici_fsdp_parallelism": 2}


class Run:
  """What a run has when it comes to compiling."""

  def __init__(self, **keys: object):
    self.config = config(**(KEYS | keys))
    devices = jax.devices()
    self.plan = plan_batches(self.config.batch, self.config.run, topology(self.config.mesh, 8))
    self.trainer = build_trainer(self.config, self.plan, devices)
    self.data = build_dataset(self.config.data, self.config.batch.max_target_length)

  def header(self) -> dict[str, Any]:
    return step_identity.header(self.config, self.plan, self.trainer, self.data.train)

  def compiled(self, micro_batch: int):
    build._compiled_step.cache_clear()  # Another test's may have been loaded from the cache.
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
  with bypassed():
    step = run.compiled(size)
  step_file.save(str(path), run.header(), {size: step})
  return path, run.three_steps(step)


def loaded(run: Run, path: pathlib.Path):
  return step_file.load(str(path), run.header())[run.plan.micro_batch_to_train]


def test_a_loaded_step_trains_to_the_same_bits(run, saved):
  path, expected = saved
  assert run.three_steps(loaded(run, path)) == expected
  assert os.listdir(path.parent) == [path.name]


_ELSEWHERE = """
import json, sys, conftest
from test_step_file import STREAMED_WITH_FSDP, Run, loaded
run = Run()
trained = run.three_steps(loaded(run, sys.argv[1]))
print(json.dumps([trained, Run(**STREAMED_WITH_FSDP).header()["lowered"]]))
"""


def test_a_process_in_another_folder_has_the_same_hashes_and_trains_to_the_same_bits(
  saved, tmp_path
):
  """Although every line of the code is another one there."""
  path, expected = saved
  for name in ("maxbatch", "configs", "tests"):
    shutil.copytree(pathlib.Path(__file__).parents[1] / name, tmp_path / "moved" / name)
  for file in (tmp_path / "moved" / "maxbatch").rglob("*.py"):
    file.write_text(f"# Every line is another one.\n{file.read_text()}")
  environment = os.environ | {"PYTHONPATH": os.pathsep.join([".", "tests"]), "PYTHONHASHSEED": "77"}
  environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.values["jax_compilation_cache_dir"]
  done = subprocess.run(
    [sys.executable, "-c", _ELSEWHERE, str(path)],
    capture_output=True,
    text=True,
    check=False,
    env=environment,
    cwd=tmp_path / "moved",
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert json.loads(done.stdout) == [list(expected), Run(**STREAMED_WITH_FSDP).header()["lowered"]]


@pytest.mark.parametrize(
  ("keys", "lines"),
  [
    (
      {"remat_policy": "full", "adam_b2": 0.5},
      [
        "remat_policy: the file has none, this run full",
        "adam_b2: the file has 0.95, this run 0.5",
      ],
    ),
    (
      {"per_device_batch_size": 2},
      [
        "micro_batch_to_train: the file has 32, this run 16",
        "per_device_batch_size: the file has -1, this run 2",
      ],
    ),
    (
      {"gradient_accumulation_steps": 17},
      [
        "microbatch_capacity: the file has 16, this run 32",
        "gradient_accumulation_steps: the file has 2, this run 17",
      ],
    ),
    (
      {"packing": "false", "max_target_length": 8},
      [
        "max_target_length: the file has 16, this run 8",
        "packing: the file has True, this run False",
      ],
    ),
    (
      STREAMED_WITH_FSDP,
      [
        "mesh: the file has data 8 × fsdp 1 × tensor 1 × stage 1, "
        "this run data 4 × fsdp 2 × tensor 1 × stage 1",
        "microbatch_capacity: the file has 16, this run none",
        "accumulation: the file has fused, this run streamed",
        "ici_fsdp_parallelism: the file has 1, this run 2",
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
    {"learning_rate": 1, "warmup_steps": 3, "lr_schedule_type": "wsd"}
    | {"gradient_accumulation_steps": 7, "steps": 99, "data_shuffle_seed": 4}
    | {"run_name": "other", "checkpoint_period": 7, "eval_per_device_batch_size": 1},
    # Another way to the same sizes.
    {"per_device_batch_size": -1, "gradient_accumulation_steps": -1, "batch_size": 64}
    | {"micro_batch_size": 4},
  ],
  ids=lambda keys: next(iter(keys)),
)
def test_what_does_not_shape_the_program_is_not_asked(run, keys):
  assert step_file.differences(run.header(), Run(**keys).header()) == []


def test_the_seed_counts_only_with_dropout(run):
  assert step_file.differences(run.header(), Run(init_weights_seed=3).header()) == []
  one, other = (Run(dropout_rate=0.1, init_weights_seed=seed).header() for seed in (1, 2))
  line = "init_weights_seed: the file has 1, this run 2"
  assert step_file.differences(one, other) == [line]


@pytest.fixture
def _other_code():
  """Nothing stays of what is built while the code is another one."""
  yield
  forget()


@pytest.mark.usefixtures("_other_code")
def test_a_change_of_the_code_that_changes_the_program_is_refused(run, saved, monkeypatch):
  plain = optax.adamw
  monkeypatch.setattr(optax, "adamw", lambda *sizes, **more: plain(*sizes, **more))
  forget()
  assert loaded(Run(), saved[0])
  monkeypatch.setattr(optax, "adamw", lambda *sizes, **more: plain(*sizes, **more | {"eps": 0.5}))
  forget()
  with pytest.raises(UserError, match="\n  the code: the same keys and versions make another pro"):
    loaded(Run(), saved[0])
  # Versions of what the step is traced with are named where they may be why.
  version = importlib.metadata.version
  changed = {"optax": "9.9"}
  monkeypatch.setattr(
    step_identity.importlib.metadata, "version", lambda name: changed.get(name) or version(name)
  )
  with pytest.raises(UserError, match=r"\n  optax: the file has \d\S*, this run 9.9\n"):
    loaded(Run(), saved[0])


def test_other_versions_devices_and_settings_are_refused(run, saved, monkeypatch):
  monkeypatch.setattr(step_identity.importlib.metadata, "version", lambda package: f"{package} 9")
  monkeypatch.setattr(platform, "machine", lambda: "abacus")
  monkeypatch.setenv("XLA_FLAGS", "--xla_new=1 --xla_dump_to=x --xla_a=2")
  monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("unpickled"))
  with pytest.raises(UserError) as refusal:
    loaded(run, saved[0])
  text = str(refusal.value)
  for part in ("jax: the file has 0", "this run jax 9", "this run jaxlib 9", "this run abacus"):
    assert part in text
  assert "XLA_FLAGS: the file has '', this run --xla_a=2 --xla_new=1\n" in text
  assert "libtpu" not in text
  # The same program of another optax is the same program.
  assert "optax" not in text


def test_a_setting_of_the_compiler_alone_is_refused(run, saved):
  before = jax.config.values["jax_disable_most_optimizations"]
  jax.config.update("jax_disable_most_optimizations", not before)
  try:
    with pytest.raises(UserError, match="jax_disable_most_optimizations: the file has"):
      loaded(run, saved[0])
  finally:
    jax.config.update("jax_disable_most_optimizations", before)


def test_a_step_for_a_slice_is_refused_on_other_devices(run):
  on_slice = {"platform": "tpu", "device_kind": "TPU v5 lite", "num_devices": 256}
  header = run.header()
  file = header | {"environment": header["environment"] | on_slice}
  assert step_file.differences(file, header) == [
    "platform: the file has tpu, this run cpu",
    "device_kind: the file has TPU v5 lite, this run cpu",
    "num_devices: the file has 256, this run 8",
  ]


def parts(lowered: dict[str, str], **named: Mapping[str, object]) -> dict[str, Any]:
  empty = {"environment": {}, "sizes": {}, "configuration": {}, "libraries": {}}
  return empty | {"lowered": lowered} | named


def test_a_key_that_only_one_side_knows_is_a_difference():
  file, run = ({"old": 1}, {"new": None})
  assert step_file.differences(
    parts({"8": "a"}, configuration=file), parts({"8": "b"}, configuration=run)
  ) == [
    "new: the file has nothing, this run none",
    "old: the file has 1, this run nothing",
  ]


def test_a_file_may_hold_more_microbatches_than_the_run_needs():
  file = parts({"8": "a", "16": "b"}, sizes={"micro_batch_to_train": [8, 16]})
  run = parts({"16": "b"}, sizes={"micro_batch_to_train": [16]})
  assert step_file.differences(file, run) == []
  assert step_file.differences(run, file) == [
    "micro_batch_to_train: the file has 16, this run 8, 16"
  ]


@pytest.mark.parametrize(
  "keys",
  [
    {"batch_schedule": "[[0, 32], [320, 64]]", "micro_batch_size": 4},
    {"batch_schedule": "[[0, 32], [320, 64]]", "micro_batch_size": "none"},
    {"batch_size": 64, "micro_batch_size": 4, "accumulation": "streamed"},
  ],
  ids=["one shape", "two shapes", "streamed"],
)
def test_a_run_resumed_later_takes_the_same_file(keys):
  run = Run(**keys, gradient_accumulation_steps=-1, steps=30)
  file = run.header()
  for at, samples in ((5, 160), (20, 320 + 10 * 64)):
    position = Position(at, 64 * at if "batch_size" in keys else samples)
    run.plan = run.plan.starting_at(position)
    run.trainer = build_trainer(run.config, run.plan, jax.devices())
    assert step_file.differences(file, run.header()) == []


def test_passes_are_baked_in_where_phases_stream_different_ones():
  keys = {"accumulation": "streamed", "gradient_accumulation_steps": -1}
  keys |= {"per_device_batch_size": 4}
  one, other = (
    Run(**keys, batch_schedule=schedule).header()
    for schedule in ("[[0, 32], [320, 64]]", "[[0, 32], [640, 64]]")
  )
  assert step_file.differences(one, other) == [
    "batch_schedule: the file has 0, 32, 320, 64, this run 0, 32, 640, 64"
  ]


def test_kernels_are_lowered_without_the_places_they_come_from(monkeypatch):
  pytest.importorskip("libtpu")
  of = config(**KEYS, attention="flash", head_dim=128, max_target_length=256, packing=False)
  layout = topology(of.mesh, 4)
  plan = plan_batches(of.batch, of.run, layout)
  trainer = build_trainer(of, plan, topology_devices("v5e-4"))
  texts: list[str] = []
  as_text = jax.stages.Lowered.as_text

  def noted(lowered: jax.stages.Lowered) -> str:
    texts.append(as_text(lowered))
    return texts[-1]

  monkeypatch.setattr(jax.stages.Lowered, "as_text", noted)
  source = build_dataset(of.data, of.batch.max_target_length).train
  step_identity.lowered_hash(of, plan, trainer, source, plan.micro_batch_to_train)
  kernels = re.findall(r"body\\22: \\22([\w+/=]+)", texts[0])
  assert kernels
  assert not [kernel for kernel in kernels if b".py" in base64.b64decode(kernel)]
  assert ".py" not in texts[0]


@pytest.mark.parametrize(
  ("damage", "printed"),
  [
    (lambda data: b"PK" + data, "this is not a compiled step, or one of another version"),
    (lambda data: b"", "this is not a compiled step, or one of another version"),
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


def test_a_file_that_cannot_be_written_leaves_nothing(run, tmp_path, monkeypatch):
  with bypassed():
    step = run.compiled(run.plan.micro_batch_to_train)
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
  with bypassed():
    program = jax.jit(lambda x: x + 1).lower(argument).compile()
  file, run = (parts({"8": "a"}, environment={"platform": name}) for name in ("tpu", "cpu"))
  step_file.save(str(tmp_path / "step"), file, {8: program})
  with pytest.raises(UserError, match="platform: the file has tpu, this run cpu"):
    step_file.load(str(tmp_path / "step"), run)


def test_the_header_holds_what_json_gives_back_and_every_key_of_the_program(run):
  header, flat = run.header(), to_flat_dict(run.config)
  assert json.loads(json.dumps(header)) == header
  sections = schema.RunConfig, schema.CheckpointConfig, schema.CompileConfig
  left_out = {
    field.name
    for section in (*sections, schema.DistributedConfig)
    for field in dataclasses.fields(section)
  }
  assert header["configuration"] == {key: flat[key] for key in flat.keys() - left_out}
  assert set(header["libraries"]) == {"maxbatch", "flax", "optax"}
