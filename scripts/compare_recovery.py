"""What a killed process costs a run of four, here and in MaxText, which is started again by hand.

python scripts/compare_recovery.py FOLDER [--peer PYTHON] [--kills 2]

Four processes of this machine train the default job's model, with a batch of 16 and a checkpoint every 20
steps. Between two checkpoints one is killed. Lost are the seconds from then until a step is recorded that had
not been, less that step; beside them stand the seconds of all processors meanwhile. PYTHON is one of an
environment with MaxText 0.2.5. Its run is started again the moment in which the process is killed, with its
compilation cache; nobody has to notice anything. Its rows are random numbers; ours are read.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import soak_hosts

PROCESSES, BATCH, STEPS, PERIOD, AFTER = 4, 16, 100_000, 20, 10
PATIENCE_SECONDS = 600
OURS = (
  f"config=base elastic=true batch_size={BATCH} steps={STEPS} num_simulated_devices={PROCESSES} "
  f"checkpoint_period={PERIOD} eval_fraction=0 generate_length=0 write_report=false "
  "metrics_writers=[jsonl]"
)
THEIRS = (
  "run_name=peer dataset_type=synthetic hardware=cpu attention=dot_product enable_goodput_recording=false "
  f"steps={STEPS} per_device_batch_size={BATCH // PROCESSES} max_target_length=128 vocab_size=259 "
  "base_emb_dim=128 base_num_decoder_layers=4 base_num_query_heads=4 base_num_kv_heads=4 head_dim=32 "
  f"base_mlp_dim=512 enable_checkpointing=true checkpoint_period={PERIOD} save_config_to_gcs=false"
)


def wait_until(what: Callable[[], bool]) -> float:
  """Waits until something is the case; when it was."""
  deadline = time.monotonic() + PATIENCE_SECONDS
  while not what():
    if time.monotonic() > deadline:
      raise TimeoutError(f"nothing has happened for {PATIENCE_SECONDS} s")
    time.sleep(0.02)
  return time.monotonic()


def due(step: int) -> bool:
  """Returns whether a step is half way between two checkpoints, and not of the first ones."""
  return step > PERIOD and step % PERIOD == AFTER


def processor_seconds(pid: int, *, with_own: bool = False) -> float:
  """Returns the processor time of all that a process has started, and these have, also once ended."""
  fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  ticks = sum(
    map(int, fields[11 if with_own else 13 : 15])
  )  # its own, then of children that have ended
  total = ticks / os.sysconf("SC_CLK_TCK")
  for one in soak_hosts.children(pid):
    with contextlib.suppress(OSError):  # It has just ended.
      total += processor_seconds(one, with_own=True)
  return total


def measured(step: Callable[[], int], kill: Callable[[], None]) -> tuple[float, float]:
  """Returns the seconds that one kill costs, and those of all processors."""
  wait_until(lambda: due(step()))
  before = step()
  began, processors = time.monotonic(), processor_seconds(os.getpid())
  kill()
  again = wait_until(lambda: step() > before)
  processors = processor_seconds(os.getpid()) - processors
  after = step()
  later = wait_until(lambda: step() >= after + 3)
  return again - began - (later - again) / (step() - after), processors


class Ours:
  """A run with elastic=true: its supervisors do all the rest."""

  def __init__(self, folder: pathlib.Path) -> None:
    """Starts it."""
    self.path, port = folder / "ours", soak_hosts.free_ports(PROCESSES)
    shutil.rmtree(self.path, ignore_errors=True)
    keys = f"{OURS} base_output_directory={folder} run_name=ours jax_cache_dir={folder}/our_cache"
    place = f"coordinator_address=localhost:{port} num_processes={PROCESSES}"
    with (folder / "ours.out").open("wb") as output:
      self.supervisors = [
        subprocess.Popen(
          [sys.executable, "-m", "maxbatch.train", *f"{keys} {place} process_id={own}".split()],
          cwd=soak_hosts.REPOSITORY,
          stdout=output,
          stderr=subprocess.STDOUT,
          env=os.environ | {"PYTHONPATH": str(soak_hosts.REPOSITORY)},
        )
        for own in range(PROCESSES)
      ]

  def step(self) -> int:
    """Returns the last step that is recorded."""
    try:
      return json.loads((self.path / "metrics.jsonl").read_bytes().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):
      return -1

  def kill(self) -> None:
    """Kills the training process of one host."""
    soak_hosts.send(soak_hosts.training_of(self.supervisors[1].pid), signal.SIGKILL)

  def end(self) -> None:
    """Ends all."""
    for one in self.supervisors:
      one.kill()
      one.wait()


class Theirs:
  """A run of MaxText."""

  def __init__(self, folder: pathlib.Path, python: str) -> None:
    """Starts it."""
    self.folder, self.python = folder, python
    shutil.rmtree(folder / "theirs", ignore_errors=True)
    self.output = folder / "theirs.out"
    self.output.unlink(missing_ok=True)
    where = "import importlib.util as u; print(u.find_spec('maxtext').origin)"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    self.base = pathlib.Path(found.stdout.strip()).parent / "configs" / "base.yml"
    self.processes = self.start()

  def start(self) -> list[subprocess.Popen[bytes]]:
    """Starts all processes, as a scheduler or a person does."""
    paths = (
      f"base_output_directory={self.folder / 'theirs'} jax_cache_dir={self.folder}/their_cache"
    )
    command = [self.python, "-m", "maxtext.trainers.pre_train.train", str(self.base)]
    variables = {
      "JAX_COORDINATOR_ADDRESS": "127.0.0.1",
      "JAX_PROCESS_COUNT": str(PROCESSES),
      "PROCESSES_IN_JOB": str(PROCESSES),
      "JOB_INDEX": "0",
      "JAX_PLATFORMS": "cpu",
      "PYTHONUNBUFFERED": "1",
    }
    with self.output.open("ab") as output:
      return [
        subprocess.Popen(
          [*command, *f"{THEIRS} {paths}".split()],
          stdout=output if own == 0 else subprocess.DEVNULL,
          stderr=subprocess.STDOUT,
          env=os.environ | variables | {"JOB_COMPLETION_INDEX": str(own)},
        )
        for own in range(PROCESSES)
      ]

  def step(self) -> int:
    """Returns the last step that process 0 has said is completed."""
    said = re.findall(rb"completed step: (\d+)", self.output.read_bytes())
    return int(said[-1]) if said else -1

  def kill(self) -> None:
    """Kills one process; the others are ended at once, and all started again from the last checkpoint."""
    self.processes[1].kill()
    self.end()
    self.processes = self.start()

  def end(self) -> None:
    """Ends all."""
    for one in self.processes:
      one.kill()
      one.wait()


def main(arguments: Sequence[str]) -> int:
  """Prints a table."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--peer", default="")
  parser.add_argument("--kills", type=int, default=2)
  given = parser.parse_args(arguments)
  folder = given.folder.absolute()
  folder.mkdir(parents=True, exist_ok=True)
  sides: dict[str, Callable[[], Ours | Theirs]] = {"maxbatch, `elastic=true`": lambda: Ours(folder)}
  if given.peer:
    sides["MaxText 0.2.5, started again at once"] = lambda: Theirs(folder, given.peer)
  lost = dict[str, list[tuple[float, float]]]()
  for name, begin in sides.items():
    run = begin()
    try:
      lost[name] = [measured(run.step, run.kill) for _ in range(given.kills)]
    finally:
      run.end()
  print("| | seconds lost | median | processor seconds |\n|---|---|---|---|")
  for name, each in lost.items():
    seconds, processors = zip(*each, strict=True)
    listed = (", ".join(f"{one:.1f}" for one in those) for those in (seconds, processors))
    print(f"| {name} | {next(listed)} | {statistics.median(seconds):.1f} | {next(listed)} |")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
