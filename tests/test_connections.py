"""Devices of several processes are connected before a step needs them, however late one of them comes."""

import re
import socket
import sys

import jax
import pytest
from preloaded import started
from processes import small_run
from several_processes import free_port, place, train, wait

from maxbatch.errors import SaidByAnotherError, UserError
from maxbatch.hardware import agreement, ending
from maxbatch.hardware.agreement import Exchange

GLOO = "UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out"

CONNECTED = """
import sys
from maxbatch import train
from jax._src.distributed import global_state
from maxbatch.hardware.processes import leave_together
from maxbatch.modes import run


def groups():
  written = global_state.client.key_value_dir_get_bytes("cpu:gloo/")
  return sorted({name.split("/")[1] for name, _ in written})


prepare, before = run.prepare, []
def prepared(*arguments, **more):
  before.append(prepare(*arguments, **more))
  print("connected:", *groups())
  return before[0]
run.prepare = prepared
code = train.main(sys.argv[1:])
print("used:", *groups())
leave_together(code)
"""
"""A run that says which groups of devices Gloo had connected before its first step, and in all."""

SAMPLED = """
import sys
from maxbatch import sample
from jax._src.distributed import global_state
from maxbatch.hardware.processes import leave_together


def groups():
  written = global_state.client.key_value_dir_get_bytes("cpu:gloo/")
  return sorted({name.split("/")[1] for name, _ in written})


find, before = sample.connected_devices, []
def found(config):
  target = find(config)
  before.append(groups())
  return target
sample.connected_devices = found
code = sample.main(sys.argv[1:])
print("connected:", *before[0])
print("used:", *groups())
leave_together(code)
"""
"""Sampling that says which groups of devices Gloo had connected before the model was read, and in all."""

STILL = """
import sys, time
from maxbatch import train
from maxbatch.hardware import agreement
from maxbatch.hardware.agreement import Exchange
from maxbatch.hardware.processes import leave_together

reduce = agreement._reduce_over_all_axes
def reduced(mesh):
  # Longer than Gloo waits for an address.
  time.sleep(35 if "process_id=1" in sys.argv else 0)
  reduce(mesh)
agreement._reduce_over_all_axes = reduced
leave_together(train.main(sys.argv[1:]))
"""
"""A process that stands still in the middle of a connection."""

LATE = """
import sys, time
from maxbatch.config.load import load_config
from maxbatch.hardware.processes import leave_together
from maxbatch.modes import start

start.connect_processes = lambda limit, connect=start.connect_processes: (
  time.sleep({seconds} if config.distributed.process_id else 0), connect(limit)
)
config = load_config(["config=base", "num_simulated_devices=2", *sys.argv[1:]])
with start.started(config, leaves_files=False):
  pass
print("alike", flush=True)
leave_together(0)
"""
"""A process that has joined, and begins to compare its keys with the others late."""


def test_every_group_that_a_run_uses_is_connected_before_its_first_step(tmp_path):
  mesh = ["ici_data_parallelism=1", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"]
  run = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  ended = train(
    2,
    [*run, *mesh, "num_simulated_devices=4", "steps=1"],
    command=[sys.executable, "-c", CONNECTED],
  )
  assert [(one.exit_code, one.errors) for one in ended] == [(0, "")] * 2
  before, after = (re.findall(f"{word}: (.*)", ended[0].output) for word in ("connected", "used"))
  assert before == after
  # Two devices of each process, the second's from 2048: along fsdp, along tensor, along both.
  assert {"0,2048", "1,2049", "0,1,2048,2049"} <= {*after[0].split()}


def late(seconds: float, *keys: str) -> list[tuple[int, str, str]]:
  """How two processes end of which the second one is late."""
  port, code = free_port(), LATE.format(seconds=seconds)
  ended = wait(
    [started([sys.executable, "-c", code, *keys, *place(number, 2, port)]) for number in range(2)]
  )
  return [(one.exit_code, one.output, one.errors) for one in ended]


def test_a_process_may_come_later_than_gloo_would_wait():
  assert late(33) == [(0, "alike\n", "")] * 2


def test_a_process_that_comes_after_our_limit_is_said_to():
  # Longer than to join takes: from there on the limit counts anew.
  (code, output, errors), (other_code, *_) = late(60, "jax_distributed_initialization_timeout=20")
  assert (code, other_code, output) == (4, 4, "")
  assert "jax_distributed_initialization_timeout=20 seconds to connect their devices" in errors


def test_a_process_that_stands_still_while_all_connect_ends_all_with_a_sentence(tmp_path):
  run = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  command = [sys.executable, "-c", STILL]
  first, second = train(2, [*run, "num_simulated_devices=2", "steps=1"], command=command)
  # The second looked for the first's address in vain, instead of waiting at it for ever.
  assert (first.exit_code, second.exit_code) == (4, 4), first.errors
  for number in (0, 1):
    assert (
      f"process {number} on {socket.gethostname()}: its devices and those of the other"
      in first.errors
    )
  assert "Traceback" not in first.errors + second.errors


def test_sampling_connects_every_group_before_it_reads_the_model(tmp_path):
  given = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  own = ["run_name=tiny", "steps=1", "num_simulated_devices=2", "ici_fsdp_parallelism=2"]
  [trained] = train(1, [*given, *own, "ici_data_parallelism=1"])
  assert trained.exit_code == 0
  asked = [f"checkpoint={tmp_path / 'tiny'}", "prompt=abc", "max_new_tokens=3"]
  ended = train(2, asked, command=[sys.executable, "-c", SAMPLED])
  assert [(one.exit_code, one.errors) for one in ended] == [(0, "")] * 2
  assert '"tokens": 3' in ended[0].output
  before, after = (re.findall(f"{word}: (.*)", ended[0].output) for word in ("connected", "used"))
  assert before == after
  # One device of each process, along fsdp.
  assert "0,2048" in after[0].split()


def failing(times: int):
  """Work that meets an error of Gloo's so many times; and how often it was called."""
  calls = []

  def work() -> None:
    calls.append(1)
    if len(calls) <= times:
      raise jax.errors.JaxRuntimeError(f"{GLOO}\nwith a key")

  return work, calls


def test_a_connection_that_fails_ends_all_with_a_sentence():
  work, calls = failing(1)
  with pytest.raises(UserError) as error:
    agreement._together(work, 1)
  assert not isinstance(error.value, SaidByAnotherError)
  assert len(calls) == 1  # jaxlib would fail at once.
  assert str(error.value).startswith("its devices and those of the other processes could not be")
  assert f"could not be connected: {GLOO}. " in str(error.value)


def test_who_waits_for_a_process_that_never_answers_ends_with_a_sentence(monkeypatch):
  answers = iter([[None], TimeoutError()])

  def exchange(self: Exchange, value: object, seconds: float) -> list[None]:
    del self, value
    assert seconds == 0.2
    if isinstance(answer := next(answers), TimeoutError):
      raise answer
    return answer

  monkeypatch.setattr(Exchange, "__call__", exchange)
  with pytest.raises(UserError, match=r"initialization_timeout=0\.2 seconds of"):
    agreement._together(lambda: None, 0.2)


def test_other_errors_are_not_taken_for_one_of_a_connection():
  def work() -> None:
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")

  with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
    agreement._together(work, 1)


def test_a_save_that_fails_as_the_run_ends_is_no_error_of_its_own():
  """Process 0 said that it could not write, and not which process had ended."""
  watch = object.__new__(ending.Watch)
  vars(watch)["_end"] = ending.End(1, "host", "has ended without a word")
  failed = UserError("checkpoint step 100 could not be written")
  failed.__cause__ = RuntimeError("CANCELLED: the run ends")
  assert watch.cause_of(failed) == vars(watch)["_end"]
  failed.__cause__ = OSError("No space left on device")
  assert watch.cause_of(failed) is None


ABORTED = """
import ctypes, sys, threading
from maxbatch import train
from maxbatch.hardware.processes import leave_together
from maxbatch.data.loader import ChainedLoader

waited, steps = ChainedLoader.waited_seconds, []
def waited_seconds(loader):
  steps.append(1)
  if len(steps) == 2 and "process_id=1" in sys.argv:
    # As a library's own thread does, outside of Python.
    threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start()
  return waited(loader)
ChainedLoader.waited_seconds = waited_seconds
leave_together(train.main(sys.argv[1:]))
"""


def test_a_library_that_aborts_a_process_ends_all_with_our_exit_code(tmp_path):
  run = small_run(tmp_path, tmp_path / "words.txt", tmp_path / "cache")
  keys = ["num_simulated_devices=2", "steps=100000", "jax_distributed_heartbeat_timeout_seconds=4"]
  first, second = train(2, [*run, *keys], command=[sys.executable, "-c", ABORTED])
  assert (first.exit_code, second.exit_code) == (4, 4)
  said = f"stopped: process 1 on {socket.gethostname()} was aborted by a library, whose last words"
  assert said in first.errors
