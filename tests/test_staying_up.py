"""elastic=true with real processes, of which each stands for a host: killed ones, and hosts that come back.

scripts/soak_hosts.py does this at random.
"""

import importlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from preloaded import started
from processes import REPOSITORY, environment
from several_processes import free_port
from test_joining import slurm

from maxbatch import train
from maxbatch.checkpoints.find import completed_steps
from maxbatch.config.load import load_config
from maxbatch.run_folder.metrics import read_metrics

sys.path.insert(0, str(REPOSITORY / "scripts"))

# By name, for type checkers do not look there.
soak: Any = importlib.import_module("soak_hosts")
STEPS = ("steps=120", "checkpoint_period=1000", "ici_fsdp_parallelism=-1", "ici_data_parallelism=1")


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(soak, "QUICK_START", environment())
  monkeypatch.setattr(soak, "free_ports", free_port)


def is_supervisor(pid: int) -> bool:
  """Returns whether a process that the cluster has started has become a supervisor."""
  return b"hardware.supervisor" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()


def start(folder, name: str, hosts: int, *keys: str):
  return soak.Run(folder, name, hosts, [*STEPS, *keys])


class Undisturbed(soak.Run):
  """The same run in one process without a supervisor, which finds the imports done."""

  only_elastic = ("elastic=", "state_copy_period=", "max_restarts_per_hour=")

  def start(self, number: int) -> subprocess.Popen[str]:
    keys = [key for key in self.keys if not key.startswith(self.only_elastic)]
    with (self.folder / f"{self.name}.{number}.out").open("a") as output:
      command = [sys.executable, "-m", self.command, *keys]
      return started(command, stdout=output, stderr=subprocess.STDOUT)


def test_a_run_goes_on_when_process_0_is_killed_and_when_its_host_goes_and_comes_back(tmp_path):
  """Two hosts with half of the state each. Until a host goes, bit for bit; then within 1e-5."""
  # On a busy machine the faults come a hundred steps later than they are meant to.
  steps = "steps=240"
  undisturbed = Undisturbed(tmp_path, "undisturbed", 1, [*STEPS, "num_simulated_devices=2", steps])
  run = start(tmp_path, "run", 2, steps)
  try:
    assert undisturbed.wait() == [0], undisturbed.said()
    assert run.wait_for(lambda: run.step() >= 12), run.said()
    soak.Fault(run, [0], random.Random(0)).process_dies()
    assert run.wait_for(lambda: run.events("restart")), run.said()
    (restart,) = run.events("restart")
    assert restart["processes"] == [0, 1]
    assert restart["source"] == "memory"
    assert restart["step"] >= 12 - 2 * soak.COPY_PERIOD
    killed = run.step()
    assert run.wait_for(lambda: run.step() >= killed + 12), run.said()
    exact = run.events("restart")[-1]["step"]
    run.supervisors[0].kill()
    run.supervisors[0].wait()
    assert run.wait_for(lambda: len(run.events("restart")) > 1 and run.training(1)), run.said()
    left = run.training(1)
    soak.send(left, signal.SIGSTOP)  # It would end before the other is there.
    run.supervisors[0] = run.start(0)
    assert run.wait_for(lambda: is_supervisor(run.supervisors[0].pid)), run.said()
    time.sleep(2)
    soak.send(left, signal.SIGCONT)
    assert run.wait() == [0, 0], run.said()
  finally:
    run.kill()
    undisturbed.kill()
  alone = run.events("restart")[1]
  assert (alone["processes"], alone["source"]) == ([1], "memory")
  (joined,) = run.events("joined")
  assert joined["processes"] == [0]
  assert run.events("restart")[-1]["processes"] == [0, 1]
  assert not soak.compare(run, undisturbed, exact=False)
  ours, theirs = (read_metrics(each.path) for each in (run, undisturbed))
  pairs = [(a["loss"], b["loss"]) for a, b in zip(ours, theirs, strict=True) if "loss" in a]
  assert all(a == b for a, b in pairs[:exact])


def test_a_copy_with_a_wrong_bit_is_not_used_but_the_newest_checkpoint(tmp_path):
  keys = ("num_simulated_devices=1", "steps=64", "checkpoint_period=8")
  undisturbed = Undisturbed(tmp_path, "undisturbed", 1, [*STEPS, *keys])
  run = start(tmp_path, "run", 1, *keys)
  try:
    # Copies are made after steps 1, 6, 11, 16, checkpoints after 8 and 16; a busy machine looks later.
    assert run.wait_for(lambda: run.step() >= 17), run.said()
    training = run.training(0)
    soak.send(training, signal.SIGSTOP)
    copied = run.events("copied")[-1]["step"]
    saved = completed_steps(run.path / "checkpoints")
    flip_bits(run.supervisors[0].pid)
    soak.send(training, signal.SIGKILL)
    assert run.wait() == [0], run.said()
    assert undisturbed.wait() == [0], undisturbed.said()
  finally:
    run.kill()
    undisturbed.kill()
  (restart,) = run.events("restart")
  assert (restart["source"], restart["step"]) == ("memory", copied)
  assert f"the copy of step {copied} in memory cannot be used" in run.said()
  assert run.events("start")[-1]["step"] in saved[-2:]
  assert not soak.compare(run, undisturbed, exact=True)


def flip_bits(supervisor: int) -> None:
  """Changes a bit of the last number in each of the memory files of a supervisor."""
  for link in pathlib.Path(f"/proc/{supervisor}/fd").iterdir():
    if "memfd" in str(link.readlink()) and (size := link.stat().st_size):
      with link.open("r+b") as memory:
        memory.seek(size - 2)
        (byte,) = memory.read(1)
        memory.seek(size - 2)
        memory.write(bytes([byte ^ 1]))


def test_a_run_that_fails_again_and_again_ends(tmp_path):
  run = start(tmp_path, "run", 1, "max_restarts_per_hour=0", "num_simulated_devices=1")
  try:
    assert run.wait_for(lambda: run.step() >= 3), run.said()
    soak.Fault(run, [0], random.Random(0)).process_dies()
    assert run.wait() == [4]
  finally:
    run.kill()
  texts = [event["text"] for event in run.events("fault")]
  assert texts[0].endswith("was ended by SIGKILL")
  assert "max_restarts_per_hour=0" in texts[1]


def test_a_mistake_of_the_user_ends_the_run_at_once(tmp_path):
  run = start(tmp_path, "run", 1, "num_simulated_devices=1", "ici_fsdp_parallelism=7")
  assert run.wait() == [2]
  assert not run.events("restart")
  assert "ici_fsdp_parallelism" in run.said()


def test_a_scheduler_may_send_its_signal_to_every_process_of_a_task(tmp_path):
  """As some do: the training process gets it itself, and from its supervisor."""
  run = start(tmp_path, "run", 1, "num_simulated_devices=1", "steps=100000")
  try:
    assert run.wait_for(lambda: run.step() >= 3), run.said()
    for pid in (run.training(0), run.supervisors[0].pid, run.training(0)):
      soak.send(pid, signal.SIGTERM)
    assert run.wait() == [0], run.said()
  finally:
    run.kill()
  last = read_metrics(run.path)[-1]["step"]
  assert f"Stopped after step {last}:" in run.said()
  assert (run.path / "checkpoints" / str(last)).is_dir()


def test_the_cluster_says_where_process_0_s_supervisor_is(monkeypatch):
  """Under SLURM, where no variable does."""
  keys = ["config=base", "elastic=true", "batch_size=8", "num_simulated_devices=2"]
  variables = slurm(1, 1234) | {"SLURM_STEP_NODELIST": "host[3-4]"}
  monkeypatch.setattr(os, "environ", os.environ | variables)
  monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "maxbatch.train", *keys])
  replaced = []
  monkeypatch.setattr(os, "execv", lambda _, command: replaced.extend(command))
  train._become_supervisor(load_config(keys), keys)
  assert replaced[1:5] == ["-m", "maxbatch.hardware.supervisor", "-m", "maxbatch.train"]
  place = ["coordinator_address=host3:1234", "num_processes=2", "process_id=1"]
  assert replaced[5:] == [*keys, *place]


RL = """dataset_path=stdlib dataset_cache_directory= num_simulated_devices=2 steps=30
  checkpoint_period=1000 rl_task=format num_generations=4 batch_size=4 micro_batch_size=4
  accumulation=streamed max_target_length=16 max_prefill_predict_length=8 warm_start_steps=0
  eval_samples=1 eval_interval=-1 rollout_staleness=1 warmup_steps=0 eval_fraction=0.05 dropout_rate=0"""


class RunRL(soak.Run):
  """One of reinforcement learning."""

  command = "maxbatch.train_rl"


class UndisturbedRL(Undisturbed, RunRL):
  """The same without a supervisor."""


def test_reinforcement_learning_goes_on_as_if_nothing_had_happened(tmp_path):
  undisturbed = UndisturbedRL(tmp_path, "undisturbed", 1, RL.split())
  run = RunRL(tmp_path, "run", 1, RL.split())
  try:
    assert run.wait_for(lambda: run.step() >= 8), run.said()
    soak.Fault(run, [0], random.Random(0)).process_dies()
    assert run.wait() == [0], run.said()
    assert undisturbed.wait() == [0], undisturbed.said()
  finally:
    run.kill()
    undisturbed.kill()
  (restart,) = run.events("restart")
  assert (restart["source"], restart["step"] > 0) == ("memory", True)
  names = ("step", "samples", "loss", "rl/reward", "grad_norm")
  ours, theirs = (
    [{name: one[name] for name in names if name in one} for one in read_metrics(each.path)]
    for each in (run, undisturbed)
  )
  assert len(ours) > 30
  assert "rl/reward" in ours[-1]
  assert ours == theirs
