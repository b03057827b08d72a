"""Hosts that die, hang, come back and are cut off, and whether an elastic run ends as the undisturbed one.

python scripts/soak_hosts.py FOLDER [--faults 200] [--seed 0] [--hosts 3] [--steps 300] [--mtbf SECONDS]

Each process stands for a host. A run with elastic=true meets one fault after the other while it trains,
and is never started again as a whole. When it has ended, every record is compared with the undisturbed
run's: samples and batch always alike, losses bit for bit as long as all hosts were there, else within
1e-5: at this learning rate, runs of 400 steps that nothing disturbs are within 6e-7 of each other on one
and on three devices (at 3e-3, 4e-5: there rounding errors grow). Every fault must be in events.jsonl, and
no more than the steps since the last copy be repeated.
Prints a line for each fault and run; exit code 1 if anything was not as it must be.

With --mtbf faults come at random times, so many seconds after each other on average, and not after some steps.
Beside each run's goodput stands what the simulator of `maxbatch plan mtbf=` makes of the same times.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from maxbatch.advice.goodput import measured
from maxbatch.estimate.failures import Recovery, simulate
from maxbatch.run_folder.metrics import read_metrics

REPOSITORY = pathlib.Path(__file__).parents[1]
BATCH, COPY_PERIOD, ROWS_EACH = 12, 5, 5
HEARTBEAT_SECONDS = 12
PATIENCE_SECONDS = 600
SIZES = (
  "base_emb_dim=24 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2 head_dim=12 "
  "base_mlp_dim=48 vocab_size=264 max_target_length=16 generate_length=0 eval_fraction=0 "
  "lr_schedule_type=constant learning_rate=1e-3 log_period=1000 dropout_rate=0.1 write_report=false metrics_writers=[jsonl] "
  f"batch_size={BATCH} checkpoint_period=60 elastic=true state_copy_period={COPY_PERIOD} "
  f"max_restarts_per_hour=100000 jax_distributed_heartbeat_timeout_seconds={HEARTBEAT_SECONDS} "
  "hang_timeout_seconds=60 jax_distributed_initialization_timeout=100"
)
OF_EXACT = ("step", "samples", "tokens", "global_batch_to_train", "learning_rate")
QUICK_START = {
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


def free_ports(count: int) -> int:
  """Returns the first of so many neighbouring ports that nobody listens at."""
  while True:
    first = random.SystemRandom().randrange(20_000, 30_000)
    held = []
    try:
      for port in range(first, first + count):
        held.append(socket.create_server(("", port)))
      return first
    except OSError:
      continue
    finally:
      for one in held:
        one.close()


def children(pid: int) -> list[int]:
  """Returns the processes that a process has started."""
  path = pathlib.Path(f"/proc/{pid}/task/{pid}/children")
  return [int(one) for one in path.read_text().split()] if path.exists() else []


def training_of(supervisor: int) -> int | None:
  """Returns the training process of a supervisor: the one that has its memory. The next one waits beside it."""
  for one in children(supervisor):
    try:
      links = [os.readlink(link) for link in pathlib.Path(f"/proc/{one}/fd").iterdir()]
    except OSError:  # It has just ended.
      continue
    if any("memfd" in link for link in links):
      return one
  return None


class Run:
  """One run: a supervisor for each host, whose output is in a file of its own."""

  command = "maxbatch.train"

  def __init__(self, folder: pathlib.Path, name: str, hosts: int, keys: Sequence[str]) -> None:
    """Starts it."""
    folder.mkdir(parents=True, exist_ok=True)
    for output in folder.glob(f"{name}.*.out"):
      output.unlink()
    (folder / "text.txt").write_text(
      "".join(f"the number {n} follows {n - 1}\n" for n in range(300))
    )
    self.folder, self.name, self.hosts = folder, name, hosts
    self.path = folder / name
    shutil.rmtree(self.path, ignore_errors=True)
    self.port = free_ports(hosts)
    paths = f"base_output_directory={folder} run_name={name} dataset_path={folder / 'text.txt'}"
    self.keys = [
      *f"config=base {SIZES} {paths}".split(),
      f"dataset_cache_directory={folder / 'cache'}",
    ]
    self.keys += [f"num_simulated_devices={hosts}", *keys]
    self.supervisors = [self.start(number) for number in range(hosts)]

  def start(self, number: int) -> subprocess.Popen[bytes]:
    """Starts the process of a host, as the cluster does."""
    place = [f"coordinator_address=localhost:{self.port}", f"num_processes={self.hosts}"]
    with (self.folder / f"{self.name}.{number}.out").open("ab") as output:
      return subprocess.Popen(
        [sys.executable, "-m", self.command, *self.keys, *place, f"process_id={number}"],
        cwd=REPOSITORY,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | QUICK_START,
      )

  def training(self, number: int) -> int | None:
    """Returns the training process of a host."""
    return training_of(self.supervisors[number].pid)

  def step(self) -> int:
    """Returns the last step that is recorded."""
    try:
      return json.loads((self.path / "metrics.jsonl").read_bytes().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):
      return -1

  def events(self, kind: str) -> list[dict[str, Any]]:
    """Returns the events of a kind."""
    path = self.path / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]

  def ended(self) -> bool:
    """Returns whether all supervisors have ended."""
    return all(one.poll() is not None for one in self.supervisors)

  def wait_for(self, what: Any, seconds: float = PATIENCE_SECONDS) -> bool:
    """Waits until something is the case; whether it is, before the run has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not self.ended():
      if what():
        return True
      time.sleep(0.02)
    return False

  def wait(self) -> list[int | None]:
    """Waits for the end; the exit codes, None where a supervisor had to be killed."""
    self.wait_for(lambda: False)
    codes = [one.poll() for one in self.supervisors]
    self.kill()
    return codes

  def kill(self) -> None:
    """Ends whatever is left of it."""
    for one in self.supervisors:
      one.kill()
      one.wait()

  def said(self) -> str:
    """Returns what all have printed."""
    paths = sorted(self.folder.glob(f"{self.name}.*.out"))
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths)


def send(pid: int | None, number: signal.Signals) -> None:
  """Sends a signal, if the process is there."""
  if pid is not None:
    try:
      os.kill(pid, number)
    except ProcessLookupError:
      return


class Fault:
  """What happens to some hosts, and what follows."""

  def __init__(self, run: Run, victims: Sequence[int], rng: random.Random) -> None:
    """Takes the hosts that meet it."""
    self.run, self.victims, self.random = run, victims, rng

  def process_dies(self) -> None:
    """The training process is killed."""
    for one in self.victims:
      send(self.run.training(one), signal.SIGKILL)

  def process_hangs(self) -> None:
    """The training process stands still for good."""
    for one in self.victims:
      send(self.run.training(one), signal.SIGSTOP)

  def host_dies(self, after: float = 0.0) -> None:
    """The host is gone, and comes back some time after the others go on."""
    before = len(self.run.events("restart"))
    for one in self.victims:
      self.run.supervisors[one].kill()
      self.run.supervisors[one].wait()
    self.run.wait_for(lambda: len(self.run.events("restart")) > before)
    time.sleep(after)
    for one in self.victims:
      if not self.run.ended():
        self.run.supervisors[one] = self.run.start(one)

  def host_comes_back_late(self) -> None:
    """The host is gone for a while."""
    self.host_dies(after=self.random.uniform(1, 8))

  def host_comes_back_at_once(self) -> None:
    """The host is started again before the others have missed it."""
    for one in self.victims:
      self.run.supervisors[one].kill()
      self.run.supervisors[one].wait()
      self.run.supervisors[one] = self.run.start(one)

  def host_is_cut_off(self) -> None:
    """Nothing is heard of the host for longer than the limit; then it is there again."""
    before = len(self.run.events("restart"))
    stopped = [(self.run.supervisors[one].pid, self.run.training(one)) for one in self.victims]
    for pids in stopped:
      for pid in pids:
        send(pid, signal.SIGSTOP)
    self.run.wait_for(lambda: len(self.run.events("restart")) > before)
    for pids in stopped:
      for pid in reversed(pids):
        send(pid, signal.SIGCONT)

  def storage_is_lost(self) -> None:
    """All that was saved is gone, and then the training process."""
    shutil.rmtree(self.run.path / "checkpoints", ignore_errors=True)
    self.process_dies()


KINDS = {
  "process dies": Fault.process_dies,
  "process hangs": Fault.process_hangs,
  "host comes back late": Fault.host_comes_back_late,
  "host comes back at once": Fault.host_comes_back_at_once,
  "host is cut off": Fault.host_is_cut_off,
  "storage is lost": Fault.storage_is_lost,
}
SAME_MESH = ("process dies", "process hangs", "storage is lost")


def compare(run: Run, undisturbed: Run, *, exact: bool) -> list[str]:
  """Returns what differs from the undisturbed run."""
  ours, theirs = (read_metrics(one.path) for one in (run, undisturbed))
  wrong = []
  if [[one[key] for key in OF_EXACT if key in one] for one in ours] != [
    [one[key] for key in OF_EXACT if key in one] for one in theirs
  ]:
    wrong.append("steps or samples differ from the undisturbed run's")
  pairs = [(a["loss"], b["loss"]) for a, b in zip(ours, theirs, strict=False) if "loss" in a]
  apart = max((abs(a - b) for a, b in pairs), default=1.0)
  if apart > (0.0 if exact else 1e-5):
    wrong.append(f"losses differ by {apart}")
  return wrong


def last_copy(run: Run) -> int:
  """Returns the step of the copy before the last, which all hosts must have; 0: there is none.

  Of the latest start: before its first copies what it came from may be where it was before, on one host alone.
  """
  started = max((event["time"] for event in run.events("restart")), default=0.0)
  steps = [event["step"] for event in run.events("copied") if event["time"] > started]
  return steps[-2] if len(steps) > 1 else 0


def goodputs(run: Run, *, at_random: bool) -> str:
  """Says what share of a run's time counted, and what the simulator says with the run's own times.

  A host that comes back is a restart too. Steps and copies take their mean, and restarts come from storage as
  often as in the run. Unless faults come at random times they wait until all train again.
  """
  sources = [event["source"] for event in run.events("restart")]
  restarts, from_storage = len(sources), sources.count("storage")
  said = re.findall(r"Goodput: ([\d.]+)% of ([\d,.]+) s; lost \(s\): (.*)", run.said())
  times, save_steps = measured(str(run.path)), int(re.findall(r"checkpoint_period=(\d+)", SIZES)[0])
  steps = [one["step_seconds"] for one in read_metrics(run.path) if "step_seconds" in one]
  copies = [event["seconds"] for event in run.events("copied")]
  if not (said and restarts and steps and copies):
    return "too short for a goodput"
  step, copy = statistics.fmean(steps), statistics.fmean(copies)
  share, seconds = float(said[-1][0]), float(said[-1][1].replace(",", ""))
  lost = dict(one.rsplit(" ", 1) for one in said[-1][2].split(", "))
  causes = ("restart", "start", "compile", "other")
  restart = sum(float(lost.get(cause, "0").replace(",", "")) for cause in causes) / restarts
  between = seconds / restarts - (0 if at_random else restart)
  simulated = simulate(
    run.hosts,
    run.hosts * between,
    Recovery(times.save_seconds or 0.0, restart),
    save_steps * step,
    Recovery(copy, restart),
    COPY_PERIOD * step,
    storage_share=from_storage / restarts,
    during_restarts=at_random,
  )
  return (
    f"goodput {share:.1f}% of {seconds:,.0f} s, simulated {100 * simulated:.1f}% with a step of "
    f"{step:.3f} s, copies of {copy:.3f} s, restarts of {restart:.1f} s, one every {seconds / restarts:.1f} s "
    f"and {from_storage} of {restarts} from storage"
  )


def one_run(
  run: Run,
  faults: int,
  rng: random.Random,
  kinds: Sequence[str],
  wrong: list[str],
  mtbf_seconds: float,
) -> dict[str, int]:
  """Has a run meet so many faults, or as many as it lasts for; how many of each kind.

  To `wrong` is added what went back further than to the copy before the last, though a host has met the
  fault alone.
  """
  met: collections.Counter[str] = collections.Counter()
  while sum(met.values()) < faults:
    goal = run.step() + rng.randint(COPY_PERIOD + 2, 3 * COPY_PERIOD)
    if mtbf_seconds:
      run.wait_for(lambda: False, rng.expovariate(1 / mtbf_seconds))
    if run.ended() or not (mtbf_seconds or run.wait_for(lambda goal=goal: run.step() >= goal)):
      break
    if not all(run.training(one) for one in range(run.hosts)) and rng.random() < 0.7:
      run.wait_for(lambda: all(run.training(one) for one in range(run.hosts)), 30)
    kind = rng.choice(list(kinds))
    two = rng.random() < 0.2 and run.hosts > 2
    victims = rng.sample(range(run.hosts), 2 if two else 1)
    whole = all(run.training(one) for one in range(run.hosts)) and not two
    copied, before, began = last_copy(run), run.step(), time.monotonic()
    starts = len(run.events("restart"))
    KINDS[kind](Fault(run, victims, rng))
    if not run.wait_for(lambda starts=starts: len(run.events("restart")) > starts):
      break
    met[kind] += 1
    event = run.events("restart")[starts]
    if whole and event["step"] < copied:
      wrong.append(
        f"{kind} at step {before}: from step {event['step']}, though {copied} was copied"
      )
    print(
      f"{run.name} {kind}, process {' and '.join(map(str, victims))}, at step {before}: "
      f"{event['text']}; {time.monotonic() - began:.1f} s",
      flush=True,
    )
  return met


def main(arguments: Sequence[str]) -> int:
  """Trains runs until so many faults have happened; the exit code."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--faults", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--hosts", type=int, default=3)
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--mtbf", type=float, default=0.0)
  parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
  given = parser.parse_args(arguments)
  rng, folder = random.Random(given.seed), given.folder.absolute()
  keys = [f"steps={given.steps}", f"ici_fsdp_parallelism={-1}", "ici_data_parallelism=1"]
  # Of three hosts two are left with 15 rows, and one of padding.
  keys.append(f"batch_size={ROWS_EACH * given.hosts}")
  undisturbed = Run(folder, f"undisturbed-{given.hosts}", given.hosts, keys)
  wrong, faults, runs, met = [], 0, 0, collections.Counter[str]()
  if any(undisturbed.wait()):
    print(undisturbed.said())
    return 1
  while faults < given.faults and not wrong:
    runs += 1
    run = Run(folder, f"run-{given.seed}-{runs}", given.hosts, keys)
    try:
      here = one_run(run, given.faults - faults, rng, given.kinds, wrong, given.mtbf)
      codes = run.wait()
    finally:
      run.kill()
    faults += sum(here.values())
    met.update(here)
    exact = set(here) <= set(SAME_MESH)
    wrong += [f"exit codes {codes}"] if any(codes) else []
    wrong += compare(run, undisturbed, exact=exact)
    how = "bit for bit" if exact else "within 1e-5"
    print(
      f"{run.name}: {'; '.join(wrong) or f'as undisturbed, {how}'}; {faults} faults so far; "
      f"{goodputs(run, at_random=given.mtbf > 0)}",
      flush=True,
    )
    if wrong:
      print(run.said())
    else:
      shutil.rmtree(run.path, ignore_errors=True)
    if not here and not wrong:
      wrong.append("no fault was met: raise --steps")
  print(f"{faults} faults in {runs} runs: {dict(met)}")
  for line in wrong:
    print(f"WRONG: {line}")
  return int(bool(wrong))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
