"""Faults at random, and whether a run that meets them ends as the undisturbed one does.

python scripts/soak.py FOLDER [--faults 200] [--seed 0] [--devices 2 3 4] [--steps 120]

One small run is trained again and again. Each start of it has one fault: a process is killed, stopped
or signalled, reads a broken file, finds its disk full, or the newest checkpoint is damaged before the
next start. It is started again, with as many processes or others, until it is complete. Then every
record is compared with the undisturbed run's, and the last checkpoint's fingerprints too, bit for
bit, where the mesh never changed. Prints a line for each fault and run; exit code 1 if anything was not as it must be.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import jax

from maxbatch.checkpoints.find import completed_steps, newest_record
from maxbatch.run_folder.metrics import read_metrics

REPOSITORY = pathlib.Path(__file__).parents[1]
TRAIN = [sys.executable, "-m", "maxbatch.train"]
FAULTY = [sys.executable, str(REPOSITORY / "scripts" / "faulty_train.py")]
BATCH, SAVE_EVERY = 12, 5
FURTHEST = 24
"""So many steps after its start a run meets its fault at the latest."""
PATIENCE_SECONDS = 300
HEARTBEAT_SECONDS = 15
SIZES = (
  "base_emb_dim=16 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2 head_dim=8 "
  "base_mlp_dim=32 vocab_size=264 max_target_length=16 generate_length=0 eval_samples=12 "
  "eval_interval=-1 lr_schedule_type=constant log_period=1000 dropout_rate=0.1 "
  f"batch_size={BATCH} checkpoint_period={SAVE_EVERY} max_num_checkpoints_to_keep=3 "
  f"jax_distributed_heartbeat_timeout_seconds={HEARTBEAT_SECONDS} hang_timeout_seconds=120"
)
OF_EXACT = ("step", "samples", "tokens", "global_batch_to_train", "learning_rate")
QUICK_START = {
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
FAILED = 4
PROCESSES = {1: [1], 2: [2], 3: [3], 4: [2, 4]}
"""By which numbers of processes so many devices are shared."""
Size = tuple[int, int]
"""Processes, and the devices of all of them."""


@dataclasses.dataclass
class Start:
  """Processes of one start, and where the run stood before it."""

  processes: list[subprocess.Popen[str]]
  begins: int
  records: int | None
  """The file of records that it found; it replaces that by one of its own."""

  @property
  def codes(self) -> list[int | None]:
    """Exit codes; None where a process goes on."""
    return [process.poll() for process in self.processes]


def file_number(path: pathlib.Path) -> int | None:
  """What tells a file from its successor; None where there is none."""
  return path.stat().st_ino if path.exists() else None


class Soak:
  """A folder in which the run is trained; see the module."""

  def __init__(self, folder: pathlib.Path, seed: int, devices: Sequence[int], steps: int):
    self.folder, self.random, self.devices = folder, random.Random(seed), list(devices)
    self.steps = steps
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"the number {n} follows {n - 1}\n" for n in range(300))
    (folder / "text.txt").write_text(text)
    self.wrong: list[str] = []
    self.kinds: dict[str, int] = {}

  def undisturbed(self, devices: int) -> pathlib.Path:
    """The folder of the run that nothing happens to."""
    name = f"undisturbed-{devices}"
    if not (self.folder / name / "done").exists():
      started = self.start((PROCESSES[devices][0], devices), name, TRAIN)
      self.wait(started)
      if any(started.codes):
        raise SystemExit(f"the undisturbed run failed: {started.codes}")
      (self.folder / name / "done").touch()
    return self.folder / name

  def start(self, size: Size, name: str, command: Sequence[str]) -> Start:
    """Starts so many processes of the run of this name."""
    count, devices = size
    with socket.socket() as free:
      free.bind(("localhost", 0))
      port = free.getsockname()[1]
    keys = [
      "config=base",
      *SIZES.split(),
      f"steps={self.steps}",
      f"num_simulated_devices={devices}",
    ]
    keys += [f"base_output_directory={self.folder}", f"run_name={name}"]
    keys += [f"dataset_path={self.folder / 'text.txt'}"]
    keys += [f"dataset_cache_directory={self.folder / 'cache'}"]
    keys += [f"coordinator_address=localhost:{port}", f"num_processes={count}"]
    begins = (completed_steps(self.folder / name / "checkpoints") or [0])[-1]
    records = file_number(self.folder / name / "metrics.jsonl")
    processes = [
      subprocess.Popen(
        [*command, *keys, f"process_id={number}"],
        cwd=REPOSITORY,
        stdout=(self.folder / f"{name}.out").open("a"),
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | QUICK_START,
      )
      for number in range(count)
    ]
    return Start(processes, begins, records)

  def wait(self, started: Start) -> None:
    """Until all have ended; those that do not are killed, which is not as it must be."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while None in started.codes and time.monotonic() < deadline:
      time.sleep(0.05)
    for number, process in enumerate(started.processes):
      if process.poll() is None:
        self.wrong.append(f"process {number} did not end")
        process.kill()
        process.wait()

  def until_step(self, started: Start, name: str, step: int) -> bool:
    """Waits until the run has ended a step; whether it is under way then."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while None in started.codes and time.monotonic() < deadline:
      path = self.folder / name / "metrics.jsonl"
      if file_number(path) not in (None, started.records):
        with contextlib.suppress(ValueError, IndexError):  # Of a line that is being written.
          if json.loads(path.read_bytes().splitlines()[-1])["step"] >= step:
            return all(code is None for code in started.codes)
      time.sleep(0.02)
    return False

  def one_run(self, name: str, devices: int | None, most_faults: int) -> int:
    """Trains one run to its end, with a fault in each start; how many there were.

    Args:
      name: of the run.
      devices: of its mesh; None: another one at each start.
      most_faults: after so many it is left alone.
    """
    faults = 0
    while True:
      mesh = devices or self.random.choice(self.devices)
      count = self.random.choice(PROCESSES[mesh])
      size, step = (count, mesh), self.random.randint(1, FURTHEST)
      kind = self.random.choice(list(FAULTS)) if faults < most_faults else "none"
      victim = self.random.randrange(count)
      began = time.monotonic()
      started = FAULTS[kind](self, name, size, victim, step) if kind != "none" else None
      if started is None:
        started = self.start(size, name, TRAIN)
      self.wait(started)
      complete = self.is_complete(name)
      codes = started.codes
      met = kind != "none" and (any(codes) or (kind.startswith("SIGTERM") and not complete))
      faults += met
      if met:
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
      self.check_codes(kind, victim, codes, complete)
      print(
        f"{name} {kind if met else f'no fault ({kind})'} process {victim} of {count} on {mesh} devices "
        f"from step "
        f"{started.begins}: exit codes {codes}, {time.monotonic() - began:.0f} s",
        flush=True,
      )
      if complete and not any(codes):
        return faults

  def is_complete(self, name: str) -> bool:
    """Whether the last step is saved."""
    return completed_steps(self.folder / name / "checkpoints")[-1:] == [self.steps]

  def check_codes(
    self, kind: str, victim: int, codes: Sequence[int | None], complete: bool
  ) -> None:
    """Survivors leave with the agreed exit code, or with 0 where all stopped in order."""
    survivors = [code for number, code in enumerate(codes) if code != -signal.SIGKILL]
    if len(set(survivors)) > 1 and not complete:
      self.wrong.append(f"{kind} in process {victim}: exit codes {codes}")
    if any(code not in (0, FAILED) for code in survivors):
      self.wrong.append(f"{kind} in process {victim}: exit codes {codes}")

  def compare(self, name: str, devices: int | None) -> str:
    """Every record with the undisturbed run's; of one mesh, the fingerprints of all parameters."""
    other = self.undisturbed(devices or self.devices[0])
    ours, theirs = (read_metrics(path) for path in (self.folder / name, other))
    if [[one[key] for key in OF_EXACT if key in one] for one in ours] != [
      [one[key] for key in OF_EXACT if key in one] for one in theirs
    ]:
      self.wrong.append(f"{name}: steps or samples differ from the undisturbed run's")
    pairs = zip(ours, theirs, strict=False)
    apart = max(
      (abs(mine["loss"] - its["loss"]) for mine, its in pairs if "loss" in mine), default=math.inf
    )
    if apart > (0.0 if devices else 1e-4):
      self.wrong.append(f"{name}: losses differ by {apart}")
    if not devices:
      return f"samples the same, losses within {apart:.1e}"
    records = [newest_record(path / "checkpoints") for path in (self.folder / name, other)]
    leaves = [record and record["leaves"] for record in records]
    if leaves[0] != leaves[1]:
      self.wrong.append(f"{name}: the last state differs from the undisturbed run's")
      return "differs"
    return "bit for bit the same"


def by_signal(number: signal.Signals) -> Callable[[Soak, str, Size, int, int], Start]:
  """A signal to one process while it trains."""

  def strike(soak: Soak, name: str, size: Size, victim: int, step: int) -> Start:
    started = soak.start(size, name, TRAIN)
    if soak.until_step(started, name, started.begins + step):
      process = started.processes[victim]
      process.send_signal(number)
      if number == signal.SIGSTOP:
        others = [one for one in started.processes if one is not process]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(one.poll() is None for one in others) and time.monotonic() < deadline:
          time.sleep(0.05)
        process.send_signal(signal.SIGCONT)
    return started

  return strike


def to_all(soak: Soak, name: str, size: Size, victim: int, step: int) -> Start:
  """SIGTERM to every process, as schedulers send it, one a moment after the other."""
  started = soak.start(size, name, TRAIN)
  if soak.until_step(started, name, started.begins + step):
    for process in started.processes:
      process.send_signal(signal.SIGTERM)
      time.sleep(soak.random.random() / 20)
  return started


def from_within(fault: str) -> Callable[[Soak, str, Size, int, int], Start]:
  """A fault that one process finds in what it reads or saves."""

  def strike(soak: Soak, name: str, size: Size, victim: int, step: int) -> Start:
    begins = (completed_steps(soak.folder / name / "checkpoints") or [0])[-1]
    at = (begins + step) * BATCH
    if fault == "disk is full":
      at = ((begins + step) // SAVE_EVERY + 1) * SAVE_EVERY
    return soak.start(size, name, [*FAULTY, fault, str(victim), str(at)])

  return strike


def damage(change: Callable[[Soak, bytearray], bytearray]) -> Callable[..., Start]:
  """A process is killed, and a file of the newest checkpoint changed before the next start."""

  def strike(soak: Soak, name: str, size: Size, victim: int, step: int) -> Start:
    started = by_signal(signal.SIGKILL)(soak, name, size, victim, step)
    soak.wait(started)
    checkpoints = soak.folder / name / "checkpoints"
    steps = completed_steps(checkpoints)
    if len(steps) > 1:  # One must be left to fall back to.
      files = list((checkpoints / str(steps[-1])).glob("state/**/d/*"))
      file = soak.random.choice(sorted(files))
      file.write_bytes(change(soak, bytearray(file.read_bytes())))
    return started

  return strike


def flip(soak: Soak, content: bytearray) -> bytearray:
  """One bit of it another one."""
  content[soak.random.randrange(len(content))] ^= 1 << soak.random.randrange(8)
  return content


def cut(soak: Soak, content: bytearray) -> bytearray:
  """Without its end."""
  return content[: soak.random.randrange(len(content))]


FAULTS: dict[str, Callable[[Soak, str, Size, int, int], Start]] = {
  "SIGKILL": by_signal(signal.SIGKILL),
  "SIGTERM": by_signal(signal.SIGTERM),
  "SIGTERM to all": to_all,
  "SIGSTOP": by_signal(signal.SIGSTOP),
  "loader refuses": from_within("loader refuses"),
  "loader crashes": from_within("loader crashes"),
  "disk is full": from_within("disk is full"),
  "flipped bit": damage(flip),
  "truncated file": damage(cut),
}


def main(arguments: Sequence[str]) -> int:
  """Trains runs until so many faults have happened; the exit code."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--faults", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--steps", type=int, default=120)
  parser.add_argument("--devices", type=int, nargs="+", default=[2, 3, 4])
  given = parser.parse_args(arguments)
  jax.config.update("jax_platforms", "cpu")  # Checkpoints are read here too.
  soak = Soak(given.folder.absolute(), given.seed, given.devices, given.steps)
  faults, runs = 0, 0
  while faults < given.faults:
    runs += 1
    # Every third run has another mesh at each start.
    others = runs % 3 == 0 and len(soak.devices) > 1
    devices = None if others else soak.random.choice(soak.devices)
    name = f"run-{given.seed}-{runs}"
    shutil.rmtree(soak.folder / name, ignore_errors=True)
    faults += soak.one_run(name, devices, given.faults - faults)
    print(f"{name}: {soak.compare(name, devices)}; {faults} faults so far", flush=True)
    if not soak.wrong:
      shutil.rmtree(soak.folder / name / "checkpoints", ignore_errors=True)
  print(f"{faults} faults in {runs} runs: {soak.kinds}")
  for line in soak.wrong:
    print(f"WRONG: {line}")
  return int(bool(soak.wrong))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
