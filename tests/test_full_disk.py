"""A run whose disk fills up, or whose folder becomes read-only, goes on, says so, and can end."""

import contextlib
import json
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from preloaded import started
from processes import ONE_DEVICE, PATIENCE_SECONDS, small_run
from several_processes import TRAIN
from small_disk import fill, read_only, small

from maxbatch.run_folder.metrics import MetricsLog, read_metrics


class Run:
  """A training run in a process of its own, with its output in a file."""

  def __init__(self, disk: pathlib.Path, elsewhere: pathlib.Path):
    self.folder, self._output = disk / "first_run", elsewhere / "output.txt"
    arguments = small_run(disk, elsewhere / "words.txt", elsewhere / "cache")
    keys = "steps=1000000 log_period=10 checkpoint_period=40 warmup_steps=0 eval_fraction=0"
    command = [*TRAIN, *arguments, ONE_DEVICE, *keys.split()]
    with self._output.open("w") as output:
      self.process = started(command, stdout=output, stderr=subprocess.STDOUT)

  @property
  def output(self) -> str:
    return self._output.read_text()

  def printed_steps(self) -> int:
    steps = [line.split()[1] for line in self.output.splitlines() if line.startswith("step ")]
    return int(steps[-1].split("/")[0]) if steps else 0

  def wait_until(self, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
      assert self.process.poll() is None, self.output
      assert time.monotonic() < end, self.output
      time.sleep(0.05)

  def wait_for_steps(self, number: int) -> None:
    """Until so many more steps are printed."""
    target = self.printed_steps() + number
    self.wait_until(lambda: self.printed_steps() >= target)

  def stop(self) -> int:
    self.process.send_signal(signal.SIGTERM)
    return self.process.wait(timeout=PATIENCE_SECONDS)


@contextlib.contextmanager
def running(disk: pathlib.Path, elsewhere: pathlib.Path) -> Iterator[Run]:
  run = Run(disk, elsewhere)
  try:
    run.wait_until(lambda: (disk / "first_run" / "checkpoints" / "40").is_dir())
    yield run
  finally:
    run.process.kill()
    run.process.wait()


def test_a_full_disk_is_said_and_waited_for(tmp_path):
  with small(tmp_path / "disk", 8192) as disk, running(disk, tmp_path) as run:
    filler = fill(disk)
    run.wait_until(lambda: "metrics.jsonl cannot be written to (No space left" in run.output)
    run.wait_until(lambda: "warning: checkpoint step" in run.output)
    run.wait_for_steps(200)
    filler.unlink()
    run.wait_until(
      lambda: "metrics.jsonl can be written to again; nothing is missing" in run.output
    )
    assert run.stop() == 0, run.output
    steps = [record["step"] for record in read_metrics(run.folder)]
    assert steps == list(range(len(steps)))
    assert (run.folder / "checkpoints" / str(steps[-1])).is_dir()
    assert "misses" not in run.output


def test_a_run_on_a_full_disk_ends_and_says_what_is_missing(tmp_path):
  with small(tmp_path / "disk", 8192) as disk, running(disk, tmp_path) as run:
    fill(disk)
    run.wait_until(lambda: "metrics.jsonl cannot be written to (No space left" in run.output)
    run.wait_for_steps(200)
    assert run.stop() == 2, run.output
    written = read_metrics(run.folder)[-1]["step"]
    assert f"metrics.jsonl misses the records of steps {int(written) + 1} to " in run.output
    assert "The end of this run is not saved." in run.output
    assert "Traceback" not in run.output, run.output


def test_a_run_whose_folder_becomes_read_only_goes_on_and_ends(tmp_path):
  with small(tmp_path / "disk", 8192) as disk, running(disk, tmp_path) as run:
    with read_only(disk):
      run.wait_until(lambda: "warning: checkpoint step" in run.output)
      run.wait_for_steps(100)
      assert run.stop() == 2, run.output
    assert "Read-only file system" in run.output
    assert "The end of this run is not saved." in run.output
    assert "Traceback" not in run.output, run.output


def test_records_follow_when_there_is_room_again(tmp_path):
  said: list[str] = []
  with small(tmp_path / "disk", 256) as disk:
    record = {"samples": 0, "tokens": 0, "loss": 1.5}
    with MetricsLog(disk / "run", 0, said.append) as log:
      log.write({"step": 0, **record})
      filler = fill(disk)
      for step in range(1, 100):
        log.write({"step": step, **record})
      # The records, and the curves over steps, samples and tokens.
      files = [line.split()[1] for line in said]
      assert len(files) == len(set(files)) == 4
      assert f"{disk}/run/metrics.jsonl" in files
      filler.unlink()
      log.write({"step": 100, **record})
      again = sorted(f"{file} can be written to again; nothing is missing" for file in files)
      assert sorted(said[4:]) == again
    lines = (disk / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(101))


@pytest.mark.parametrize("last", [1, 60])
def test_what_never_found_room_is_named(tmp_path, last):
  said: list[str] = []
  with small(tmp_path / "disk", 256) as disk:
    with MetricsLog(disk / "run", 0, said.append) as log:
      log.write({"step": 0, "samples": 0, "tokens": 0})
      fill(disk)
      # Longer than what is left of the file's last page.
      for step in range(1, last + 1):
        log.write({"step": step, "samples": 0, "tokens": 0, "padding" * 1000: 1})
    assert f"{disk}/run/metrics.jsonl misses the records of steps 1 to {last}" in "\n".join(said)
    assert [record["step"] for record in read_metrics(disk / "run")] == [0]
