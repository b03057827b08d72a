"""Compiled programs are found again by the next start, and nothing goes wrong where they cannot be."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from preloaded import started
from processes import environment
from several_processes import free_port, wait
from small_disk import fill, small

from maxbatch.compile import cache
from maxbatch.hardware.compiler_flags import bypassed

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")

HIT = "/jax/compilation_cache/cache_hits"

# What a run does until its first step, in a process of its own.
START = """
import json, sys
import jax, numpy as np
from maxbatch.batch.from_config import plan_batches
from maxbatch.compile import cache
from maxbatch.hardware.devices import find_devices
from maxbatch.checkpoints.fingerprint import fingerprints
from maxbatch.training.build import build_trainer, compiled_step, train_rows
from maxbatch.core.plan import Position
from maxbatch.data.registry import build_dataset
from maxbatch.batch.from_config import topology
from support import config

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.split("/")[-1]))
run = config(dataset_type="synthetic", base_num_decoder_layers=1, num_simulated_devices=2)
devices = find_devices(run).devices
cache.enable(sys.argv[1])
plan = plan_batches(run.batch, run.run, topology(run.mesh, 2))
trainer = build_trainer(run, plan, devices)
data = build_dataset(run.data, run.batch.max_target_length)
step = compiled_step(run, plan, trainer, data.train, plan.micro_batch_to_train)
with train_rows(run, trainer, data)(plan, Position(0, 0)) as rows:
  rows = next(iter(rows))
random = np.random.default_rng(0)
before = jax.tree.map(
  lambda x: jax.device_put(random.random(x.shape).astype(x.dtype), x.sharding), trainer.abstract
)
state, metrics = step(before, rows, np.int32(1), np.float32(0.01))
memory = step.memory_analysis()
print(json.dumps({
  "hits": events.count("cache_hits"),
  "misses": events.count("cache_misses"),
  "params": fingerprints(state.params),
  "loss": float(metrics.loss),
  "donated": all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params)),
  "memory": [memory.temp_size_in_bytes, memory.alias_size_in_bytes],
  "text": "input_output_alias" in step.as_text(),
}))
"""

# A process of two that add up a number of each; what it finds in the folder.
PAIR = """
import sys
import jax, numpy as np
from maxbatch.compile import cache

folder, port, own = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_compilation_cache_dir", folder)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.split("/")[-1]))
jax.distributed.initialize(f"localhost:{port}", 2, int(own))
cache.enable("")
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
along, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
numbers = jax.make_array_from_callback((2,), along, lambda _: np.ones(1) + int(own))
result = jax.jit(lambda x: x.sum(), out_shardings=whole)(numbers)
print(float(result), events.count("cache_hits"))
"""


def start(folder: object) -> dict:
  """What a new process says of its first step, with nothing on stderr."""
  variables = environment(PYTHONPATH=os.pathsep.join(["tests", "."]))
  for name in SETTINGS:
    variables.pop(name.upper(), None)
  done = subprocess.run(
    [sys.executable, "-c", START, str(folder)],
    capture_output=True,
    text=True,
    check=False,
    env=variables,
    cwd=os.path.dirname(os.path.dirname(__file__)),
  )
  assert (done.returncode, done.stderr) == (0, "")
  return json.loads(done.stdout)


@pytest.fixture
def unset():
  """No cache is configured in this process, as in one that has just started."""
  before = {name: jax.config.values[name] for name in SETTINGS}
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def compile_something(number: int) -> None:
  """A program that no other test compiles."""
  jax.jit(lambda x: jnp.sin(x) * number).lower(jnp.zeros(3)).compile()


def entries(folder) -> set[str]:
  return {path.name for path in folder.glob("*-cache")}


def test_a_second_start_compiles_nothing_and_steps_alike(tmp_path):
  cold, warm = start(tmp_path), start(tmp_path)
  assert cold["misses"] > 2
  assert warm["misses"] == 0
  assert warm["hits"] == cold["hits"] + cold["misses"]
  assert cold["donated"]
  assert cold["text"]
  assert cold["memory"][1] > 0
  for key in ("params", "loss", "donated", "memory", "text"):
    assert cold[key] == warm[key]


def test_every_process_finds_what_process_0_has_kept(tmp_path):
  """Which alone writes to the folder."""

  def both() -> list[str]:
    port = str(free_port())
    commands = [[sys.executable, "-c", PAIR, str(tmp_path), port, own] for own in "01"]
    return [one.output.splitlines()[-1] for one in wait(list(map(started, commands)))]

  assert both() == ["3.0 0"] * 2
  assert both() == ["3.0 1"] * 2


@pytest.mark.usefixtures("unset")
def test_on_by_default_in_the_users_cache_folder(tmp_path, monkeypatch, capfd):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  folder = cache.enable("")
  assert folder == tmp_path / "maxbatch" / "compiled"
  assert folder is not None
  assert folder.stat().st_mode & 0o077 == 0
  compile_something(1)
  assert len(entries(folder)) >= 1
  assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("unset")
def test_none_keeps_nothing_even_where_a_folder_was_set(tmp_path):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path))
  assert cache.enable("none") is None
  compile_something(2)
  assert entries(tmp_path) == set()


@pytest.mark.usefixtures("unset")
def test_a_folder_set_before_stays(tmp_path, capfd):
  jax.config.update("jax_compilation_cache_dir", str(tmp_path / "set"))
  assert cache.enable("") == tmp_path / "set"
  assert cache.enable(str(tmp_path / "set")) == tmp_path / "set"
  assert capfd.readouterr().err == ""
  assert cache.enable(str(tmp_path / "key")) == tmp_path / "set"
  line = f"jax_cache_dir={tmp_path / 'key'} is not used: jax already keeps programs in {tmp_path}"
  assert capfd.readouterr().err == f"{line}/set\n"
  assert not (tmp_path / "key").exists()


@pytest.mark.usefixtures("unset")
def test_a_folder_that_cannot_be_made_is_one_line_and_no_failure(tmp_path, capfd):
  (tmp_path / "file").touch()
  assert cache.enable(str(tmp_path / "file" / "folder")) is None
  line = "folder: cannot be written (Not a directory); every start compiles again\n"
  assert capfd.readouterr().err == f"jax_cache_dir={tmp_path}/file/{line}"
  compile_something(3)


@pytest.mark.usefixtures("unset")
def test_a_damaged_entry_is_compiled_anew_and_replaced(tmp_path):
  cache.enable(str(tmp_path))
  compile_something(4)
  for entry in tmp_path.glob("*-cache"):
    entry.write_bytes(entry.read_bytes()[:20])
  with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
    compile_something(4)
  compile_something(4)


@pytest.mark.usefixtures("unset")
def test_what_a_full_disk_left_of_an_entry_is_replaced_once_there_is_room(tmp_path):
  with small(tmp_path / "disk", kibibytes=256) as disk:
    cache.enable(str(disk / "programs"))
    filler = fill(disk)
    with pytest.warns(UserWarning, match="No space left on device"):
      compile_something(5)
    assert entries(disk / "programs")
    filler.unlink()
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
      compile_something(5)
    compile_something(5)


@pytest.mark.usefixtures("unset")
def test_a_cpu_whose_programs_xla_does_not_take_back_gets_no_cache(tmp_path, monkeypatch, capfd):
  load = serialize_executable.deserialize_and_load

  def complain(*arguments, **keys):
    os.write(2, b"E0000 cpu_aot_loader.cc:195] Loading XLA:CPU AOT result. Target machine ...\n")
    return load(*arguments, **keys)

  monkeypatch.setattr(serialize_executable, "deserialize_and_load", complain)
  assert cache.enable(str(tmp_path)) is None
  printed = capfd.readouterr().err
  assert "XLA refuses to load its own programs on this CPU" in printed
  assert len(printed.splitlines()) == 1
  monkeypatch.undo()
  assert cache.enable(str(tmp_path)) == tmp_path


@pytest.mark.usefixtures("unset")
def test_what_was_not_used_for_longest_goes_first(tmp_path):
  now = time.time()
  (tmp_path / cache.STEPS).mkdir()
  names = "new-cache", "middle-cache", "old-cache", f"{cache.STEPS}/oldest", "not an entry"
  for age, name in enumerate(names):
    (tmp_path / name).write_bytes(bytes(100))
    os.utime(tmp_path / name, (now - age, now - 100))
  cache._drop_oldest(tmp_path, largest_bytes=400)
  assert (tmp_path / cache.STEPS / "oldest").exists()
  cache._drop_oldest(tmp_path, largest_bytes=300)
  assert entries(tmp_path) == {"new-cache", "middle-cache", "old-cache"}
  assert not (tmp_path / cache.STEPS / "oldest").exists()
  cache._drop_oldest(tmp_path, largest_bytes=250)
  assert entries(tmp_path) == {"new-cache", "middle-cache"}
  assert (tmp_path / "not an entry").exists()


@pytest.mark.usefixtures("unset")
def test_bypassed_neither_reads_nor_writes(tmp_path):
  events = []

  def listen(event: str, **_: object) -> None:
    events.append(event)

  jax.monitoring.register_event_listener(listen)
  cache.enable(str(tmp_path))
  compile_something(5)
  kept = entries(tmp_path)
  events.clear()
  with bypassed():
    compile_something(5)
    compile_something(6)
  assert entries(tmp_path) == kept
  assert HIT not in events
  compile_something(5)
  assert HIT in events
  compile_something(6)
  assert entries(tmp_path) > kept
  jax.monitoring.unregister_event_listener(listen)
