"""validate_only: every check finds what it is for, compiles nothing and leaves nothing behind."""

import collections
import json
import pathlib
import re
import shutil
import sys
from typing import Any

import jax
import numpy as np
import pytest
from preloaded import started
from processes import PATIENCE_SECONDS
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.checkpoints.checkpointer import Checkpointer
from maxbatch.checkpoints.record import identity
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.plan import Position
from maxbatch.data.registry import SyntheticRows, build_dataset
from maxbatch.errors import UserError
from maxbatch.modes.compile_only import validate
from maxbatch.modes.prepare import bytes_per_device
from maxbatch.training.build import build_trainer
from maxbatch.training.state import TrainState, to_save

CHECKS = ["configuration", "batch plan", "mesh", "model", "memory", "learning rate", "input"]
CHECKS += ["dataset", "step", "folder", "checkpoints", "resume"]
LLAMA = "model_name=llama2-7b ici_data_parallelism=1 ici_fsdp_parallelism=256 remat_policy=full"
LLAMA += " max_target_length=2048 dtype=bfloat16 dataset_type=synthetic"
DiskUsage = collections.namedtuple("DiskUsage", "total used free")


def run(folder: pathlib.Path, **keys: object) -> Config:
  return config(**({"base_output_directory": folder, "dataset_type": "synthetic"} | keys))


def check(folder: pathlib.Path, **keys: object) -> list[str]:
  """The lines of a validation on 8 simulated devices."""
  lines: list[str] = []
  validate(run(folder, **keys), lines.append)
  return lines


def refusal(folder: pathlib.Path, **keys: object) -> tuple[str, list[str]]:
  """The error of a validation, and what was checked before it."""
  lines: list[str] = []
  with pytest.raises(UserError) as error:
    validate(run(folder, **keys), lines.append)
  return str(error.value), passed(lines)


def passed(lines: list[str]) -> list[str]:
  return [line[5:18].strip() for line in lines if line.startswith("ok   ")]


def found(lines: list[str], name: str) -> str:
  return next(line[20:] for line in lines if line[5:].startswith(name))


def abstract_state(here: Config) -> TrainState:
  plan = plan_batches(here.batch, here.run, topology(here.mesh, 8))
  return build_trainer(here, plan, jax.devices()).abstract


def zeros(abstract: Any) -> Any:
  """Real arrays, where the abstract ones say."""
  return jax.tree.map(
    lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract
  )


@pytest.fixture
def compiled():
  """The names of programs that are compiled."""
  names: list[object] = []

  def listen(event: str, duration_secs: float, **more: object) -> None:
    if "backend_compile" in event:
      names.append((more.get("fun_name"), duration_secs))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("keys", [{}, {"dropout_rate": 0.1, "accumulation": "streamed"}], ids=str)
def test_everything_is_checked_in_order_and_nothing_compiled(tmp_path, compiled, keys):
  folder = tmp_path / "not yet" / "there"
  jax.clear_caches()
  arrays = jax.live_arrays()
  lines = check(folder, **keys)
  assert passed(lines) == CHECKS
  assert lines[-1] == "Valid: nothing was compiled. Next: compile_only=true"
  assert compiled == []
  assert len(jax.live_arrays()) == len(arrays)
  assert list(tmp_path.iterdir()) == []


def test_a_compilation_would_be_seen(compiled):
  jax.jit(lambda x: x * 17.25).lower(1.0).compile()
  assert len(compiled) == 1


def test_the_plan_is_printed_whole(tmp_path):
  lines = check(tmp_path, batch_schedule="[[0, 32], [320, 64]]", batch_schedule_unit="samples")
  assert found(lines, "batch plan") == "2 phases, 400 steps"
  assert any("total_samples" in line for line in lines)
  assert any("from sample           320: 64 samples per step" in line for line in lines)


def test_a_7b_model_on_a_slice_that_is_not_here(tmp_path, compiled):
  pytest.importorskip("libtpu")
  lines: list[str] = []
  keys = [*LLAMA.split(), "compile_topology=v5e-256", f"base_output_directory={tmp_path}"]
  validate(load_config(["config=base", *keys]), lines.append)
  assert passed(lines) == CHECKS
  assert found(lines, "mesh").endswith("fsdp 256 × tensor 1 × stage 1 on 256 × TPU v5 lite")
  assert found(lines, "model") == "llama2-7b: 6,738,415,616 parameters"
  # 4 bytes of weights, 8 of Adam's moments and 4 of accumulators, over 256 devices.
  assert found(lines, "memory").startswith(f"{16 * 6738415616 / 256 / 2**30:.3f} GiB per device")
  assert compiled == []


def test_a_7b_model_on_256_simulated_devices(tmp_path):
  program = f"""
import jax
from maxbatch.config.load import load_config
from maxbatch.modes.compile_only import validate
compiled = []
def listen(event, duration_secs, **more):
  if "backend_compile" in event:
    compiled.append(event)
jax.monitoring.register_event_duration_secs_listener(listen)
config = load_config("config=base {LLAMA} num_simulated_devices=256 enable_checkpointing=false "
                     "device_memory_gb=16 base_output_directory={tmp_path}".split())
validate(config)
assert not compiled
"""
  process = started([sys.executable, "-c", program])
  output, errors = process.communicate(timeout=PATIENCE_SECONDS)
  assert (process.returncode, errors) == (0, "")
  assert passed(output.splitlines()) == CHECKS[:-2]


NARROW = {"weight_dtype": "bfloat16", "weight_rounding": "nearest"}


def test_memory_is_what_the_devices_will_hold(tmp_path):
  keys = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, **NARROW}
  here = run(tmp_path, **keys)
  abstract = abstract_state(here)
  for part in (abstract.params, abstract.opt_state.acc_grads, abstract.opt_state):
    held = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(zeros(part))]
    assert bytes_per_device(part) == sum(held)


def test_what_weights_in_bfloat16_lose_is_said(tmp_path):
  said = "\n".join(check(tmp_path, **NARROW))
  assert "an update of less than 1/512 (0.2%) of a weight is rounded away" in said
  assert "rounded away" not in "\n".join(check(tmp_path, dtype="bfloat16"))


def test_parameters_that_stay_whole_are_named(tmp_path):
  lines = check(tmp_path, vocab_size=261, ici_tensor_parallelism=2)
  assert "  embedding: vocab 261 is not a multiple of tensor = 2: replicated" in lines
  assert not any(": replicated" in line for line in check(tmp_path))


def test_a_metrics_writer_that_is_none_is_refused(tmp_path):
  said, _ = refusal(tmp_path, metrics_writers="[jsonl, wandbb]")
  assert said.startswith(
    "metrics_writers=wandbb: there is no such metrics_writer. Did you mean wandb? Known: jsonl, "
  )


@pytest.mark.parametrize("key", ["remat_policy", "compiler_flags"])
def test_what_is_explored_beside_the_size_needs_the_size(tmp_path, key):
  said, _ = refusal(tmp_path, **{key: "explore"})
  assert f"{key}=explore tries every size, and needs micro_batch_size=explore" in said


def test_a_microbatch_that_is_still_to_be_chosen_is_checked_at_its_smallest(tmp_path):
  lines = check(tmp_path, micro_batch_size="auto", batch_size=64)
  line = "  micro_batch_size=auto will choose from 4 sizes, 1 to 8; checked with 1"
  assert line in lines
  assert found(lines, "step") == "can be traced, for microbatches of 8"
  # Without a size it is the batch of a run without auto.
  line = "  micro_batch_size=auto will choose from 3 sizes, 1 to 4; checked with 1"
  assert line in check(tmp_path, micro_batch_size="auto")


@pytest.mark.parametrize(
  ("keys", "printed", "last"),
  [
    ({"ici_data_parallelism": 3}, "ici_data_parallelism=3", "configuration"),
    ({"batch_size": 7}, "batch_size=7", "configuration"),
    ({"vocab_size": 8}, "vocab_size=8 must be at least", "batch plan"),
    ({"base_num_kv_heads": 3}, "base_num_query_heads=4 must be a multiple", "batch plan"),
    ({"device_memory_gb": 0.0001}, "device_memory_gb=0.0001 is less than the", "model"),
    ({"warmup_steps": 999}, "warmup_steps=999 must be at most the", "memory"),
    (
      {"dataset_type": "text", "dataset_path": "/absent"},
      "dataset_path=/absent",
      "learning rate",
    ),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_first_failure_is_the_error_of_a_run(tmp_path, keys, printed, last):
  message, before = refusal(tmp_path, **keys)
  assert printed in message
  assert before == CHECKS[: CHECKS.index(last) + 1]


def test_the_offer_for_too_little_memory_works(tmp_path):
  limit = {"device_memory_gb": 0.0002}
  message, _ = refusal(tmp_path, **limit)
  offer = re.search(r"for example ici_fsdp_parallelism=(\d+)$", message)
  assert offer, message
  assert passed(check(tmp_path, **limit, ici_fsdp_parallelism=offer[1])) == CHECKS


def test_rows_that_cannot_be_read_are_found(tmp_path, monkeypatch):
  read = SyntheticRows.rows
  for part in (0, 1):

    def gone(self, indices, part=part):
      if self.part == part and len(indices):
        raise UserError(f"part {part}: gone")
      return read(self, indices)

    monkeypatch.setattr(SyntheticRows, "rows", gone)
    assert refusal(tmp_path)[0] == f"part {part}: gone"


@pytest.mark.usefixtures("traced_anew")
def test_a_model_whose_step_cannot_be_traced_is_found(tmp_path, monkeypatch):
  monkeypatch.setattr("maxbatch.training.loss.num_tiles", lambda *_, **__: [][0])
  with pytest.raises(IndexError):
    check(tmp_path)


def test_a_folder_that_cannot_be_made_is_found(tmp_path):
  (tmp_path / "file").touch()
  message, before = refusal(tmp_path / "file" / "runs")
  assert message.startswith(f"base_output_directory={tmp_path}/file/runs: {tmp_path}/file cannot")
  assert before[-1] == "step"


def test_a_folder_that_is_there_stays_as_it_is(tmp_path):
  (tmp_path / "first_run").mkdir()
  before = (tmp_path / "first_run").stat().st_ino
  assert found(check(tmp_path), "folder") == f"{tmp_path}/first_run can be written"
  assert list((tmp_path / "first_run").iterdir()) == []
  assert (tmp_path / "first_run").stat().st_ino == before


def checkpoint_bytes(folder: pathlib.Path) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(zeros(to_save(abstract_state(run(folder))))))


@pytest.mark.parametrize(
  ("keys", "count"),
  [({}, 4), ({"max_num_checkpoints_to_keep": 1}, 2), ({"checkpoint_keep_period": 100}, 8)],
  ids=["4", "2", "8"],
)
def test_disk_space_is_asked_for_to_the_byte(tmp_path, monkeypatch, keys, count):
  needed = count * checkpoint_bytes(tmp_path)
  disk = {"free": needed}
  monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(0, 0, disk["free"]))
  assert found(check(tmp_path, **keys), "checkpoints").startswith(f"{count} checkpoints of")
  disk["free"] -= 1
  message, before = refusal(tmp_path, **keys)
  assert f"this run needs {count} checkpoints of" in message
  assert before[-1] == "folder"
  assert passed(check(tmp_path, **keys, enable_checkpointing="false")) == CHECKS[:-2]
  offer = re.search(r"for example (\w+)=(\w+)", message)
  assert offer
  assert set(passed(check(tmp_path, **keys | {offer[1]: offer[2]}))) >= set(CHECKS[:-2])


def test_the_disk_of_another_machine_is_only_told(tmp_path, monkeypatch):
  pytest.importorskip("libtpu")
  monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(0, 0, 10))
  lines = check(tmp_path, compile_topology="v5e-8")
  assert "less is free on this machine" in found(lines, "checkpoints")


@pytest.fixture(scope="module")
def resumable(tmp_path_factory) -> pathlib.Path:
  """A run with checkpoints at steps 2 and 4."""
  folder = tmp_path_factory.mktemp("resumable")
  here = run(folder)
  state = zeros(to_save(abstract_state(here)))
  data = build_dataset(here.data, here.batch.max_target_length)
  directory = folder / "first_run" / "checkpoints"
  with Checkpointer(directory, here.checkpoint, identity(here, data)) as checkpointer:
    for step in (2, 4):
      checkpointer.save(state, Position(step, step * 32), {})
  return folder


def files(folder: pathlib.Path) -> set[pathlib.Path]:
  return set(folder.rglob("*"))


def test_a_run_that_can_go_on_says_from_where(resumable, compiled):
  before = files(resumable)
  compiled.clear()
  lines = check(resumable)
  assert found(lines, "resume") == "resumes after step 4 (128 samples)"
  assert found(lines, "checkpoints").startswith("2 checkpoints of")
  assert compiled == []
  assert files(resumable) == before


def test_a_run_that_is_over_says_so(resumable):
  assert found(check(resumable, steps=4), "resume").startswith("is complete at step 4")


@pytest.mark.parametrize(
  ("keys", "printed"),
  [
    ({"data_shuffle_seed": 5}, "  data_shuffle_seed is 0 in the checkpoint and 5 now\n"),
    ({"base_mlp_dim": 32}, "[2, 64, 32] in the checkpoint and float32[2, 32, 32] now\n"),
  ],
  ids=["identity", "shapes"],
)
def test_another_runs_checkpoint_is_refused(resumable, keys, printed):
  message, before = refusal(resumable, **keys)
  assert message.startswith("This run cannot resume from checkpoint step 4 in")
  assert printed in message
  assert before[-1] == "checkpoints"


def test_a_changed_run_may_go_on_when_allowed(resumable):
  lines = check(resumable, data_shuffle_seed=5, allow_changed_resume="true")
  assert found(lines, "resume").startswith("resumes after step 4")
  message, _ = refusal(resumable, base_mlp_dim=32, allow_changed_resume="true")
  assert "float32[2, 32, 32] now" in message
  message, _ = refusal(resumable, data_shuffle_seed=5)
  assert "allow_changed_resume=true" in message
  assert "allow_changed_resume" not in refusal(resumable, base_mlp_dim=32)[0].splitlines()[-1]


def test_damaged_records_are_passed_over(resumable, tmp_path):
  shutil.copytree(resumable, tmp_path, dirs_exist_ok=True)
  records = [tmp_path / "first_run/checkpoints" / step / "record/metadata" for step in "24"]
  record = json.loads(records[1].read_text())
  records[1].write_text(json.dumps(record | {"samples": 7}))
  assert found(check(tmp_path), "resume").startswith("resumes after step 2")
  records[0].write_text("{")
  message, _ = refusal(tmp_path)
  assert "has a record that can be read: [2, 4]" in message
