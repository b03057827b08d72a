"""Checkpoints: what was saved comes back bit for bit, or a person is told why not."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from processes import PATIENCE_SECONDS

from maxbatch.checkpoints import reading as reading_module
from maxbatch.checkpoints.checkpointer import Checkpointer, Position
from maxbatch.checkpoints.fingerprint import VERSIONS, fingerprints
from maxbatch.checkpoints.formats import FORMATS, Format
from maxbatch.config.schema import CheckpointConfig
from maxbatch.errors import UserError

CONFIG = CheckpointConfig(
  enable_checkpointing=True,
  async_checkpointing=True,
  checkpoint_format="orbax",
  checkpoint_period=1,
  max_num_checkpoints_to_keep=3,
  checkpoint_keep_period=-1,
  allow_changed_resume=False,
  load_parameters_path="",
  load_full_state_path="",
)
IDENTITY = {"model_name": "default", "dataset": "stdlib", "data_shuffle_seed": 0}
PLAN = {"global_batch_to_train": 32, "per_device_batch_size": "1/2"}


def mesh_of(*shape: int) -> jax.sharding.Mesh:
  return jax.make_mesh(shape, ("data", "fsdp"), devices=jax.devices()[: int(np.prod(shape))])


def shardings(mesh: jax.sharding.Mesh) -> dict:
  divided = NamedSharding(mesh, PartitionSpec("data", "fsdp"))
  whole = NamedSharding(mesh, PartitionSpec())
  return {
    "params": {"kernel": divided, "scale": whole},
    "mu": [divided],
    "count": whole,
    "skipped": whole,
    "none": whole,
  }


def abstract_state(mesh: jax.sharding.Mesh, width: int = 512) -> dict:
  shapes = {
    "params": {
      "kernel": jax.ShapeDtypeStruct((64, width), jnp.float32),
      "scale": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
    },
    "mu": [jax.ShapeDtypeStruct((16, width), jnp.bfloat16)],
    "count": jax.ShapeDtypeStruct((), jnp.int32),
    "skipped": jax.ShapeDtypeStruct((), jnp.bool_),
    "none": jax.ShapeDtypeStruct((0, 4), jnp.float32),
  }
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
    shapes,
    shardings(mesh),
  )


def make_state(step: int, mesh: jax.sharding.Mesh | None = None) -> dict:
  """A state whose every number depends on the step, all bits in use."""
  draw = np.random.default_rng(step)

  def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(
      jnp.asarray(100 * draw.normal(size=leaf.shape)).astype(leaf.dtype), leaf.sharding
    )

  return jax.tree.map(fill, abstract_state(mesh or mesh_of(4, 2)))


def position(step: int) -> Position:
  return Position(step=step, samples=32 * step)


def write_steps(folder: pathlib.Path, *steps: int) -> None:
  with Checkpointer(folder, CONFIG, IDENTITY) as checkpointer:
    for step in steps:
      checkpointer.save(make_state(step), position(step), PLAN)


def assert_same(restored: dict, expected: dict) -> None:
  for (path, a), b in zip(
    jax.tree.leaves_with_path(restored), jax.tree.leaves(expected), strict=True
  ):
    assert a.dtype == b.dtype, path
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


def resume(folder: pathlib.Path, **changes: object):
  """What a new run finds in the folder, and what it reports."""
  lines: list[str] = []
  config = dataclasses.replace(CONFIG, allow_changed_resume=changes.pop("allow", False) is True)
  with Checkpointer(folder, config, IDENTITY | changes, lines.append) as checkpointer:
    return checkpointer.restore(abstract_state(mesh_of(4, 2))), lines


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A folder with steps 1 and 2, to be copied and damaged."""
  folder = tmp_path_factory.mktemp("two_steps") / "checkpoints"
  write_steps(folder, 1, 2)
  return folder


@pytest.fixture
def folder(two_steps: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  """A copy of `two_steps` that a test may damage."""
  return copy(two_steps, tmp_path / "checkpoints")


def copy(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  subprocess.run(["cp", "-r", source, target], check=True)
  return target


def files_of(folder: pathlib.Path, step: int) -> list[pathlib.Path]:
  return sorted(path for path in (folder / str(step)).rglob("*") if path.is_file())


@pytest.mark.parametrize("background", [True, False])
def test_comes_back_bit_for_bit(tmp_path, background):
  config = dataclasses.replace(CONFIG, async_checkpointing=background)
  with Checkpointer(tmp_path / "c", config, IDENTITY) as checkpointer:
    checkpointer.save(make_state(7), position(7), PLAN)
    if not background:
      assert (tmp_path / "c" / "7").is_dir()
  restored, lines = resume(tmp_path / "c")
  assert restored is not None
  assert_same(restored.state, make_state(7))
  assert (restored.position, restored.plan) == (Position(7, 224), PLAN)
  assert lines == []


@pytest.mark.parametrize("shape", [(2, 4), (2, 1), (1, 1)])
def test_comes_back_on_another_mesh(two_steps, shape):
  target = abstract_state(mesh_of(*shape))
  with Checkpointer(two_steps, CONFIG, IDENTITY) as checkpointer:
    restored = checkpointer.restore(target)
  assert restored is not None
  assert_same(restored.state, make_state(2))
  for leaf, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(target), strict=True):
    assert leaf.sharding == wanted.sharding


def test_nothing_there_is_none_and_touches_nothing(tmp_path):
  assert resume(tmp_path / "c") == (None, [])
  assert not (tmp_path / "c").exists()


def test_buffers_may_be_donated_at_once(tmp_path):
  mesh = mesh_of(4, 2)
  make = jax.jit(
    lambda step: {"a": jnp.full((2048, 1024), step), "b": jnp.full((512, 512), step)},
    out_shardings={
      "a": NamedSharding(mesh, PartitionSpec("data", "fsdp")),
      "b": NamedSharding(mesh, PartitionSpec()),
    },
  )
  train = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
  with Checkpointer(tmp_path / "c", CONFIG, IDENTITY) as checkpointer:
    state = make(jnp.float32(0))
    for step in range(3):
      checkpointer.save(state, position(step), PLAN)
      still_writing = checkpointer.steps()
      for _ in range(5):
        state = train(state)
      jax.block_until_ready(state)
      assert step not in still_writing  # else this test shows nothing
  with Checkpointer(tmp_path / "c", CONFIG, IDENTITY) as checkpointer:
    lines: list[str] = []
    restored = Checkpointer(tmp_path / "c", CONFIG, IDENTITY, lines.append).restore(
      jax.eval_shape(make, jnp.float32(0))
    )
  assert restored is not None
  assert lines == []
  assert restored.position.step == 2
  assert set(np.unique(np.asarray(restored.state["a"]))) == {10.0}


def test_keeps_the_newest_and_every_period(tmp_path):
  config = dataclasses.replace(CONFIG, max_num_checkpoints_to_keep=2, checkpoint_keep_period=3)
  with Checkpointer(tmp_path / "c", config, IDENTITY) as checkpointer:
    for step in range(1, 6):
      checkpointer.save(make_state(step), position(step), PLAN)
  with Checkpointer(tmp_path / "c", config, IDENTITY) as checkpointer:
    for step in range(6, 9):
      checkpointer.save(make_state(step), position(step), PLAN)
  assert Checkpointer(tmp_path / "c", config, IDENTITY).steps() == [3, 6, 7, 8]


def test_older_steps_stay_until_a_newer_one_was_read_back(tmp_path, monkeypatch):
  def other_values(arrays: dict[str, jax.Array]) -> ocp.args.StandardSave:
    return ocp.args.StandardSave({name: x + 1 for name, x in arrays.items()})

  broken = Format(other_values, ocp.args.StandardRestore)
  monkeypatch.setitem(FORMATS, "broken", broken)
  config = dataclasses.replace(CONFIG, max_num_checkpoints_to_keep=1)
  folder, lines = tmp_path / "c", []
  with Checkpointer(folder, config, IDENTITY) as checkpointer:
    checkpointer.save(state := {"a": jnp.arange(8.0)}, position(1), PLAN)
  broken_config = dataclasses.replace(config, checkpoint_format="broken")
  checkpointer = Checkpointer(folder, broken_config, IDENTITY, lines.append)
  checkpointer.save(state, position(2), PLAN)
  with pytest.raises(UserError, match=r"step 2 in .* does not read back as it was saved: leaf a "):
    checkpointer.close()
  assert lines[0].endswith("training continues, and older ones are kept")
  with Checkpointer(folder, config, IDENTITY, lines.append) as checkpointer:
    assert checkpointer.steps() == [1, 2]
    restored = checkpointer.restore(jax.eval_shape(lambda: state))
    assert restored is not None
    assert restored.position.step == 1
    checkpointer.save(state, position(3), PLAN)
  assert checkpointer.steps() == [3]


def test_a_step_is_saved_once(folder):
  before = [path.stat().st_mtime_ns for path in files_of(folder, 2)]
  write_steps(folder, 2)
  assert [path.stat().st_mtime_ns for path in files_of(folder, 2)] == before


def flip_bit(path: pathlib.Path, index: int, bit: int) -> None:
  content = bytearray(path.read_bytes())
  content[index] ^= 1 << bit
  path.write_bytes(content)


def test_a_flipped_bit_never_changes_what_is_restored(folder):
  """In any file: the newest step comes back as it was, or the older one does with a word why."""
  draw = random.Random(0)
  named = 0
  for path in files_of(folder, 2):
    content = path.read_bytes()
    for _ in range(2 if content else 0):
      flip_bit(path, draw.randrange(len(content)), draw.randrange(8))
      restored, lines = resume(folder)
      assert restored is not None
      assert_same(restored.state, make_state(restored.position.step))
      assert restored.plan == PLAN
      assert restored.position.samples == 32 * restored.position.step
      if restored.position.step == 1:
        assert len(lines) == 1
        assert lines[0].startswith("checkpoint step 2 is damaged (")
        assert lines[0].endswith("); using step 1 instead")
        named += "differs from its fingerprint" in lines[0]
      else:
        assert lines == []
      path.write_bytes(content)
  assert named > 0  # some went through Orbax in silence


def flip_in_one_leaf(folder: pathlib.Path, step: int) -> str:
  """Flips a bit of the largest file and returns the leaf that Orbax itself now reads otherwise.

  Where in the file a leaf lies differs from save to save, and not every bit is one of a leaf.
  """
  expected = {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree.leaves_with_path(make_state(step))
    if leaf.size
  }
  largest = max(files_of(folder, step), key=lambda path: path.stat().st_size)
  for index in range(largest.stat().st_size // 2, largest.stat().st_size, 997):
    flip_bit(largest, index, 3)
    with contextlib.suppress(Exception):  # a bit without which nothing is read
      read = ocp.StandardCheckpointer().restore(folder / str(step) / "state", expected)
      changed = [
        name
        for name, leaf in expected.items()
        if np.asarray(leaf).tobytes() != np.asarray(read[name]).tobytes()
      ]
      if changed:
        [leaf] = changed
        return leaf
    flip_bit(largest, index, 3)
  raise AssertionError(f"no bit of {largest} changes a leaf")


def rewrite_record(folder: pathlib.Path, step: int, version: int | None) -> None:
  """Gives a step the fingerprints, and the name, of another version of them; None: no name."""
  path = folder / str(step) / "record" / "metadata"
  record = json.loads(path.read_text())
  prints = fingerprints(make_state(step), version or 1) if version in (None, *VERSIONS) else {}
  for name, print_ in prints.items():
    record["leaves"][name]["fingerprint"] = print_
  record |= {"fingerprint_version": version}
  fields = {key: value for key, value in record.items() if key != "checksum" and value is not None}
  checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
  path.write_text(json.dumps(fields | {"checksum": checksum}))


@pytest.mark.parametrize("version", [None, 2])
def test_a_checkpoint_of_an_earlier_version_verifies_by_its_own_fingerprints(folder, version):
  rewrite_record(folder, 2, version)
  restored, lines = resume(folder)
  assert restored is not None
  assert (restored.position.step, lines) == (2, [])
  leaf = flip_in_one_leaf(folder, 2)
  assert f"step 2 is damaged (leaf {leaf} differs from its fingerprint)" in resume(folder)[1][0]


def test_fingerprints_of_a_later_version_are_not_taken_for_damage(folder):
  rewrite_record(folder, 2, 7)
  with pytest.raises(UserError, match="checkpoint step 2 are of version 7"):
    resume(folder)


def test_the_damaged_leaf_is_named(folder):
  leaf = flip_in_one_leaf(folder, 2)
  restored, lines = resume(folder)
  assert restored is not None
  assert restored.position.step == 1
  assert f"step 2 is damaged (leaf {leaf} differs from its fingerprint)" in lines[0]


@pytest.mark.parametrize("fault", ["truncated", "missing"])
def test_a_file_cut_or_gone_is_found(two_steps, tmp_path, fault):
  results = set()
  for number, name in enumerate(path.relative_to(two_steps) for path in files_of(two_steps, 2)):
    folder = copy(two_steps, tmp_path / str(number))
    content = (folder / name).read_bytes()
    if fault == "missing":
      (folder / name).unlink()
    else:
      (folder / name).write_bytes(content[: len(content) // 2])
    restored, lines = resume(folder)
    assert restored is not None
    assert_same(restored.state, make_state(restored.position.step))
    if restored.position.step == 1:
      assert "step 2 is damaged" in lines[0]
      results.add(str(name.relative_to("2").parent))
  # The others are notes of Orbax to itself, on which neither arrays nor record depend.
  assert results >= {"record", "state", "state/d"}


def damage(folder: pathlib.Path, step: int) -> None:
  (folder / str(step) / "state" / "_METADATA").write_text("{}")


def test_nothing_verifies_is_an_error_and_leaves_all_in_place(folder):
  damage(folder, 1)
  (folder / "2" / "record" / "metadata").unlink()
  with pytest.raises(UserError) as error:
    resume(folder)
  message = str(error.value)
  assert message.startswith(f"No checkpoint in {folder} can be used:\n  step 2: its record")
  assert "\n  step 1: its state cannot be read" in message
  assert "choose another run_name" in message
  assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_a_record_of_another_step_is_damage(folder):
  (folder / "2").rename(folder / "9")
  restored, lines = resume(folder)
  assert restored is not None
  assert restored.position.step == 1
  assert "its record is that of step 2" in lines[0]


@pytest.mark.parametrize("text", ["[]", "{}", '{"step": 2}'])
def test_a_record_that_is_none_is_damage(folder, text):
  (folder / "2" / "record" / "metadata").write_text(text)
  restored, lines = resume(folder)
  assert restored is not None
  assert restored.position.step == 1
  assert "its record differs from its checksum" in lines[0]


@pytest.mark.parametrize("depth", [500, 900, 990, 2_000, 100_000])
def test_a_deeply_nested_record_is_damage(folder, depth):
  (folder / "2" / "record" / "metadata").write_text('{"a":' * depth + "1" + "}" * depth)
  restored, lines = resume(folder)
  assert restored is not None
  assert restored.position.step == 1
  assert "step 2 is damaged" in lines[0]


@contextlib.contextmanager
def unreadable(path: pathlib.Path) -> Iterator[None]:
  """The system refuses to open the file, with an error that even root gets: too many links."""
  aside = path.rename(path.parent.parent.parent / "aside")
  path.symlink_to(path.name)
  try:
    yield
  finally:
    path.unlink()
    aside.rename(path)


@pytest.mark.parametrize("item", ["record", "state"])
def test_a_read_error_that_passes_is_none(folder, item):
  largest = max((folder / "2" / item).rglob("*"), key=lambda path: path.stat().st_size)
  refused = contextlib.ExitStack()
  refused.enter_context(unreadable(largest))
  timer = threading.Timer(0.5, refused.close)
  timer.start()
  restored, lines = resume(folder)
  timer.join()
  assert restored is not None
  assert (restored.position.step, lines) == (2, [])
  assert_same(restored.state, make_state(2))


@pytest.mark.parametrize("item", ["record", "state"])
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(folder, item, monkeypatch):
  monkeypatch.setattr(reading_module, "_PAUSES_SECONDS", (0.1, 0.1))
  largest = max((folder / "2" / item).rglob("*"), key=lambda path: path.stat().st_size)
  lines: list[str] = []
  with unreadable(largest), Checkpointer(folder, CONFIG, IDENTITY, lines.append) as checkpointer:
    with pytest.raises(UserError) as error:
      checkpointer.restore(abstract_state(mesh_of(4, 2)))
    message = str(error.value)
    assert message.startswith(f"checkpoint step 2 cannot be read: {largest} (Too many levels of ")
    assert "it is not known to be damaged" in message
    assert f"move {folder / '2'} elsewhere" in message
    with pytest.raises(UserError, match="cannot be read"):
      checkpointer.restore(abstract_state(mesh_of(4, 2)))
    checkpointer.save(make_state(3), position(3), PLAN)
  assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"]
  assert lines == []
  restored, lines = resume(folder)
  assert restored is not None
  assert (restored.position.step, lines) == (3, [])


def test_shardings_without_devices_are_not_taken_for_damage(two_steps):
  abstract = mesh_of(4, 2).abstract_mesh
  target = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(abstract, PartitionSpec())
    ),
    abstract_state(mesh_of(4, 2)),
  )
  with pytest.raises(TypeError, match="names no devices"):
    Checkpointer(two_steps, CONFIG, IDENTITY).restore(target)


def test_a_damaged_step_is_kept_and_can_be_written_again(folder):
  damage(folder, 2)
  (folder / "damaged-2").mkdir()
  lines: list[str] = []
  with Checkpointer(folder, CONFIG, IDENTITY, lines.append) as checkpointer:
    assert checkpointer.restore(abstract_state(mesh_of(4, 2))) is not None
    assert checkpointer.steps() == [1, 2]  # reading renames nothing
    checkpointer.save(make_state(2), position(2), PLAN)
  assert "its files are kept as" in lines[1]
  assert (folder / "damaged-2-2" / "state" / "_METADATA").read_text() == "{}"
  restored, lines = resume(folder)
  assert restored is not None
  assert (restored.position.step, lines) == (2, [])


def test_an_unfinished_save_is_ignored_then_removed(folder, tmp_path):
  unfinished = copy(folder / "2", folder / "5.orbax-checkpoint-tmp")
  restored, lines = resume(folder)
  assert restored is not None
  assert (restored.position.step, lines) == (2, [])
  write_steps(folder, 3)
  assert not unfinished.exists()
  assert Checkpointer(folder, CONFIG, IDENTITY).steps() == [1, 2, 3]
  alone = tmp_path / "alone"
  copy(folder / "2", alone).rename(alone.with_suffix(".orbax-checkpoint-tmp"))
  restored, lines = resume(tmp_path)
  assert restored is None
  assert lines == [
    f"ignoring {tmp_path}/alone.orbax-checkpoint-tmp: the save was interrupted before it was "
    "complete"
  ]


def test_a_changed_run_is_refused_with_the_difference(two_steps):
  with pytest.raises(UserError) as error:
    resume(two_steps, data_shuffle_seed=1, dataset="other", tokenizer="new")
  assert "\n  data_shuffle_seed is 0 in the checkpoint and 1 now\n" in str(error.value)
  assert "\n  dataset is stdlib in the checkpoint and other now\n" in str(error.value)
  assert "\n  tokenizer is (absent) in the checkpoint and new now\n" in str(error.value)
  assert "allow_changed_resume=true" in str(error.value)


def test_a_changed_run_may_be_allowed(two_steps):
  restored, lines = resume(two_steps, data_shuffle_seed=1, allow=True)
  assert restored is not None
  assert_same(restored.state, make_state(2))
  assert lines == [
    "resuming from step 2 although it differs: data_shuffle_seed is 0 in the checkpoint and 1 now"
  ]


@pytest.mark.parametrize("allow", [True, False])
def test_other_shapes_or_leaves_are_refused(two_steps, allow):
  wider = abstract_state(mesh_of(4, 2), width=64)
  wider["extra"] = wider.pop("count")
  wider["skipped"] = jax.ShapeDtypeStruct((), jnp.int32)
  config = dataclasses.replace(CONFIG, allow_changed_resume=allow)
  with (
    Checkpointer(two_steps, config, IDENTITY) as checkpointer,
    pytest.raises(UserError) as error,
  ):
    checkpointer.restore(wider)
  message = str(error.value)
  assert "\n  count is int32[] in the checkpoint and (absent) now\n" in message
  assert "\n  extra is (absent) in the checkpoint and int32[] now\n" in message
  assert (
    "\n  params/kernel is float32[64, 512] in the checkpoint and float32[64, 64] now\n" in message
  )
  assert "\n  skipped is bool[] in the checkpoint and int32[] now\n" in message
  assert "run_name" in message


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
  """Files of this process cannot grow past 10 kB: writing fails as it does on a full disk."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def poll_until_reported(checkpointer: Checkpointer, lines: list[str]) -> None:
  """Polls as a training loop does, until a report comes."""
  deadline = time.monotonic() + PATIENCE_SECONDS
  while not lines and time.monotonic() < deadline:
    checkpointer.poll()
    time.sleep(0.01)


def test_a_failed_save_is_reported_and_the_next_one_works(tmp_path, capfd):
  lines: list[str] = []
  config = dataclasses.replace(CONFIG, max_num_checkpoints_to_keep=1)
  folder = tmp_path / "c"
  write_steps(folder, 1)
  with Checkpointer(folder, config, IDENTITY, lines.append) as checkpointer:
    with full_disk():
      checkpointer.save(make_state(2), position(2), PLAN)
      poll_until_reported(checkpointer, lines)
    assert checkpointer.steps() == [1]  # not deleted to make room for a save that failed
    assert lines[0].startswith(f"warning: checkpoint step 2 could not be written to {folder} (")
    assert "bytes free): " in lines[0]
    assert lines[0].endswith("; training continues, the newest checkpoint is step 1")
    checkpointer.save(make_state(2), position(2), PLAN)
  assert len(lines) == 1
  assert [path.name for path in folder.iterdir()] == ["2"]
  assert capfd.readouterr() == ("", "")


def test_a_failed_last_save_is_an_error(tmp_path):
  lines: list[str] = []
  with (
    full_disk(),
    pytest.raises(UserError, match=r"step 1 could not be written.*bytes free"),
    Checkpointer(tmp_path / "c", CONFIG, IDENTITY, lines.append) as checkpointer,
  ):
    checkpointer.save(make_state(1), position(1), PLAN)
  assert lines[0].endswith("; training continues, there is no checkpoint yet")


def test_a_failed_save_does_not_hide_another_error(tmp_path):
  lines: list[str] = []

  def interrupted_run() -> None:
    with Checkpointer(tmp_path / "c", CONFIG, IDENTITY, lines.append) as checkpointer:
      checkpointer.save(make_state(1), position(1), PLAN)
      raise KeyboardInterrupt

  with full_disk(), pytest.raises(KeyboardInterrupt):
    interrupted_run()
  assert len(lines) == 1


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
  (tmp_path / "file").write_text("")
  lines: list[str] = []
  checkpointer = Checkpointer(tmp_path / "file" / "c", CONFIG, IDENTITY, lines.append)
  checkpointer.save(make_state(1), position(1), PLAN)
  assert "Not a directory" in lines[0]
  with pytest.raises(UserError, match="could not be written"):
    checkpointer.close()
  checkpointer.close()


KILLED = """
import os, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
sys.path[:0] = sys.argv[2:]
import pathlib
import test_checkpoint as helper
from maxbatch.checkpoints import checkpointer as checkpointer_module
from maxbatch.checkpoints.checkpointer import Checkpointer

folder = pathlib.Path(sys.argv[1])
checkpointer = Checkpointer(folder, helper.CONFIG, helper.IDENTITY)
for step in (1, 2):
  state = helper.make_state(step) | ({"large": jax.random.normal(jax.random.key(0), (4096, 4096))} if step == 2 else {})
  checkpointer.save(state, helper.position(step), helper.PLAN)
while not list(folder.glob("2*/*")):
  pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_during_a_save_loses_nothing_before_it(tmp_path):
  tests = pathlib.Path(__file__).parent
  done = subprocess.run(
    [sys.executable, "-c", KILLED, str(tmp_path / "c"), str(tests), str(tests.parent)],
    capture_output=True,
    text=True,
    check=False,
    timeout=PATIENCE_SECONDS,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert (tmp_path / "c" / "2.orbax-checkpoint-tmp").is_dir()
  restored, lines = resume(tmp_path / "c")
  assert restored is not None
  assert_same(restored.state, make_state(1))
  assert (restored.position.step, lines) == (1, [])
