"""Signals outside the training steps: a sentence, an exit code, no waiting, nothing harmed."""

import os
import pathlib
import signal
import sys
import time
from types import ModuleType
from typing import Any

import pytest
import several_processes
from first_devices import use_first_devices
from preloaded import started
from processes import ONE_DEVICE, small_run
from several_processes import Ended, wait
from support import stop_at

from maxbatch.data.loader import ChainedLoader
from maxbatch.modes import pretraining
from maxbatch.modes import run as run_module
from maxbatch.train import main

SENTENCE = "interrupted; what was saved before is kept"

# A run that gets SIGTERM in the named function, which would then take ten minutes more.
DRIVER = """
import os, signal, sys, time
from maxbatch import train
from maxbatch.compile import step_cache
from maxbatch.modes import run
where = sys.argv[1]
def long_one(*_):
  try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
  except KeyboardInterrupt:
    if where != "eval_rows":
      raise
    time.sleep(600)  # an exception that is lost on its way
place = {"compiled_step": step_cache}.get(where, run)
assert hasattr(place, where)
setattr(place, where, long_one)
train.leave_together(train.main(sys.argv[2:]))
"""


@pytest.fixture(scope="module", autouse=True)
def _one_device():
  with pytest.MonkeyPatch.context() as patch:
    use_first_devices(patch, 1)
    yield


def arguments(folder: pathlib.Path, steps: int) -> list[str]:
  run = small_run(folder, folder / "words.txt", folder / "cache")
  return [*run, f"steps={steps}"]


def interrupted(folder: pathlib.Path, where: str) -> Ended:
  given = [where, *arguments(folder, 4), ONE_DEVICE]
  return wait([started([sys.executable, "-c", DRIVER, *given])])[0]


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  files = [path for path in folder.rglob("*") if path.is_file()]
  return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def records(folder: pathlib.Path) -> list[dict[str, float]]:
  return several_processes.records(folder / "first_run")


@pytest.mark.parametrize(
  ("place", "where", "number", "exit_code"),
  [
    (pretraining, "build_dataset", signal.SIGINT, 130),
    (run_module, "first_record", signal.SIGTERM, 143),
  ],
)
def test_before_the_first_step(
  tmp_path, monkeypatch, capsys, place: ModuleType, where: str, number: int, exit_code: int
):
  def long_one(*_: object) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)

  with monkeypatch.context() as patch:
    patch.setattr(place, where, long_one)
    assert main(arguments(tmp_path, 2)) == exit_code
  assert capsys.readouterr().err.strip() == SENTENCE
  assert main(arguments(tmp_path, 2)) == 0
  assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]


def test_before_the_first_step_although_the_signal_is_lost_on_its_way(tmp_path):
  done = interrupted(tmp_path, "eval_rows")
  assert (done.exit_code, done.errors.strip()) == (143, SENTENCE)
  assert main(arguments(tmp_path, 2)) == 0
  assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]


def test_while_a_resumed_run_compiles(tmp_path):
  assert main(arguments(tmp_path, 2)) == 0
  checkpoints = tmp_path / "first_run" / "checkpoints"
  saved, before = contents(checkpoints), records(tmp_path)
  done = interrupted(tmp_path, "compiled_step")
  assert "Resuming after step 2" in done.output
  assert (done.exit_code, done.errors.strip()) == (143, SENTENCE)
  assert contents(checkpoints) == saved
  assert records(tmp_path) == before
  assert main(arguments(tmp_path, 4)) == 0
  assert [record["step"] for record in records(tmp_path)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_in_a_step_stops_at_once(tmp_path, monkeypatch, capsys, number, exit_code):
  def twice(*_: object) -> None:
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)

  monkeypatch.setattr(ChainedLoader, "waited_seconds", twice)
  assert main(arguments(tmp_path, 2)) == exit_code
  assert capsys.readouterr().err.strip() == SENTENCE


def test_the_handlers_of_before_are_put_back(tmp_path):
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  assert main(arguments(tmp_path, 1)) == 0
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


KILLED_IN_EVALUATION = """
import os, pathlib, signal, sys, time
from maxbatch import train
from maxbatch.data.loader import ChainedLoader
from maxbatch.training import loop
waited, evaluate, steps = ChainedLoader.waited_seconds, loop.evaluate, []
def stopped(loader):
  steps.append(len(steps) + 1)
  if len(steps) == 3:
    os.kill(os.getpid(), signal.SIGTERM)
  return waited(loader)
def killed(*arguments):
  if len(steps) < 3:
    return evaluate(*arguments)
  end = time.monotonic() + 600
  while not pathlib.Path(sys.argv[1]).exists() and time.monotonic() < end:
    time.sleep(0.01)
  os.kill(os.getpid(), signal.SIGKILL)
ChainedLoader.waited_seconds, loop.evaluate = stopped, killed
train.main(sys.argv[2:])
"""


def test_a_signal_saves_before_it_evaluates(tmp_path):
  """A cluster sends SIGTERM, and kills what has not ended half a minute later."""
  whole = tmp_path / "whole"
  whole.mkdir()
  assert main(arguments(whole, 5)) == 0
  saved = tmp_path / "first_run" / "checkpoints" / "3"
  given = [str(saved), *arguments(tmp_path, 5), ONE_DEVICE]
  (killed,) = wait([started([sys.executable, "-c", KILLED_IN_EVALUATION, *given])])
  assert killed.exit_code == -signal.SIGKILL, killed.errors
  assert saved.is_dir()
  assert main(arguments(tmp_path, 5)) == 0
  for result, expected in zip(records(tmp_path), records(whole), strict=True):
    assert result == pytest.approx(expected, rel=1e-4)  # The killed one was optimised otherwise.


def test_an_evaluation_that_is_not_finite_loses_no_save(tmp_path, monkeypatch, capsys):
  keys = ["checkpoint_period=2", "eval_interval=2"]
  evaluate_batch = run_module.compiled_eval

  def not_finite_at_4(*given: Any) -> Any:
    evaluation, calls = evaluate_batch(*given), []

    def of_batch(params: Any, rows: Any) -> Any:
      calls.append(rows)
      sums = evaluation(params, rows)
      return sums if len(calls) < 3 else sums._replace(loss=sums.loss * float("nan"))

    return of_batch

  with monkeypatch.context() as patch:
    patch.setattr(run_module, "compiled_eval", not_finite_at_4)
    assert main([*arguments(tmp_path, 6), *keys]) == 3
  assert "the validation loss is nan" in (error := capsys.readouterr().err)
  assert "the last good checkpoint is step 4" in error
  assert [record["step"] for record in records(tmp_path)] == [0, 1, 2, 3, 4]
  assert main([*arguments(tmp_path, 6), *keys]) == 0
  assert "Resuming after step 4" in capsys.readouterr().out


def test_a_run_of_a_hundred_million_steps_begins_and_stops_at_once(tmp_path, monkeypatch, capsys):
  stop_at(monkeypatch, 2)
  began = time.monotonic()
  assert main([*arguments(tmp_path, 100_000_000), "log_period=1"]) == 0
  assert time.monotonic() - began < 60
  assert "step 1/100000000 " in capsys.readouterr().out
  assert [record["step"] for record in records(tmp_path)] == [0, 1, 2]
