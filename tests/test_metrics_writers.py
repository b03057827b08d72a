"""Records and texts reach the services that a run names, offline; one that fails is let go."""

import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from maxbatch.errors import UserError
from maxbatch.metrics_writers.registry import chosen_writers, open_writers, run_identity
from maxbatch.run_folder.metrics import MetricsLog, Opening, Record, read_metrics

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
HOSTILE = "# <script>alert(1)</script>\n\ud800"


def record(step: int) -> Record:
  return {"step": step, "samples": 4 * step, "tokens": 64 * step, "loss": 1 / (1 + step)}


def opened(folder: Path, names: Sequence[str], said: list[str], step: int = 0) -> MetricsLog:
  writers = functools.partial(open_writers, names)
  return MetricsLog(
    folder, step, said.append, open_others=writers, keys={"steps": 3, "prompt": "def"}
  )


def test_tensorboard_shows_texts(tmp_path):
  with opened(tmp_path / "run", ["jsonl", "tensorboard"], []) as log:
    log.write(record(1))
    log.write_text("text", 1, HOSTILE)
    log.write_text("plan", 0, "Batch plan\n  num_devices = 8")
  board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
  assert set(board.Tags()["tensors"]) == {"text", "plan"}
  [shown] = board.Tensors("plan")
  assert shown.tensor_proto.string_val[0] == b"    Batch plan\n      num_devices = 8\n"
  assert board.SummaryMetadata("plan").plugin_data.plugin_name == "text"


def test_without_tensorboard_there_is_none(tmp_path):
  with opened(tmp_path / "run", ["jsonl"], []) as log:
    log.write(record(1))
  assert not (tmp_path / "run" / "tensorboard").exists()
  assert read_metrics(tmp_path / "run") == [record(1)]


def test_wandb_offline(tmp_path, monkeypatch):
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")
  said: list[str] = []
  with opened(tmp_path / "my run", ["jsonl", "wandb"], said) as log:
    log.write(record(1))
    log.write_text("text", 1, "def hello")
  assert said == []
  [written] = (tmp_path / "my run" / "wandb").glob("offline-run-*/run-*.wandb")
  assert written.stem == f"run-{run_identity(tmp_path / 'my run')}"
  end = time.monotonic() + PATIENCE_SECONDS
  while b"tokens" not in written.read_bytes():  # A process of wandb's writes it, soon after.
    assert time.monotonic() < end
    time.sleep(0.05)
  assert b"prompt" in written.read_bytes()
  [text] = written.parent.glob("files/media/html/text/*.html")
  assert "def hello" in text.read_text()


def test_mlflow_in_files(tmp_path, monkeypatch):
  monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
  said: list[str] = []
  for first in (1, 3):  # The second start goes on with the same run.
    with opened(tmp_path / "run", ["jsonl", "mlflow"], said, first - 1) as log:
      log.write(record(first))
      log.write(record(first + 1))
      log.write_text("text", first, "def hello")
  assert said == []
  [losses] = (tmp_path / "run" / "mlflow").glob("*/*/metrics/loss")
  assert [line.split()[1:] for line in losses.read_text().splitlines()] == [
    ["0.5", "1"], ["0.3333333333333333", "2"], ["0.25", "3"], ["0.2", "4"]
  ]  # fmt: skip
  [text] = (tmp_path / "run" / "mlflow").glob("*/*/artifacts/text/00000003.txt")
  assert text.read_text() == "def hello"
  [steps] = (tmp_path / "run" / "mlflow").glob("*/*/params/steps")
  assert steps.read_text() == "3"


class Failing:
  """Fails at its second record, or where its name says."""

  def __init__(self, opening: Opening):
    if opening.folder.name == "unreachable":
      raise ConnectionError("no route")
    self.records = 0

  def write(self, one: Record) -> None:
    self.records += 1
    if self.records == 2:
      raise RuntimeError("quota")

  def write_text(self, name: str, step: int, text: str) -> None:
    raise AssertionError

  def close(self) -> None:
    raise AssertionError


@pytest.mark.parametrize(("name", "why"), [("run", "RuntimeError: quota"), ("unreachable", "ConnectionError: no route")])  # fmt: skip
def test_one_that_fails_is_let_go_alone(tmp_path, monkeypatch, name, why):
  monkeypatch.syspath_prepend(str(Path(__file__).parent))
  said: list[str] = []
  with opened(tmp_path / name, ["jsonl", f"{__name__}:Failing", "tensorboard"], said) as log:
    for step in range(1, 4):
      log.write(record(step))
    log.write_text("text", 3, "x")
  [line] = said
  assert line.startswith(
    f"warning: metrics_writers={__name__}:Failing has failed ({why}); training"
  )
  assert [one["step"] for one in read_metrics(tmp_path / name)] == [1, 2, 3]
  board = EventAccumulator(str(tmp_path / name / "tensorboard")).Reload()
  assert [event.step for event in board.Scalars("loss")] == [1, 2, 3]


def test_what_is_refused():
  with pytest.raises(UserError, match=r"must be among them.*metrics_writers=\[jsonl, wandb\]"):
    chosen_writers(["wandb"])
  with pytest.raises(UserError, match="Did you mean tensorboard"):
    chosen_writers(["jsonl", "tensorbord"])


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  with pytest.raises(UserError, match=r"pip install 'maxbatch\[wandb\]'"):
    opened(tmp_path / "run", ["jsonl", "wandb"], [])
