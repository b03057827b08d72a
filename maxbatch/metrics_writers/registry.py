"""The key metrics_writers: where records go beside metrics.jsonl.

To add one: a class as `Writer` has it (run_folder/metrics.py), and a line in WRITERS.

Services that show a run's records: MLflow, and Weights & Biases.

Their variables mean what they mean there: MLFLOW_TRACKING_URI, WANDB_PROJECT and so on.
"""

import hashlib
import html
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxbatch.config.declare import PlugIns
from maxbatch.config.registry import library, registered
from maxbatch.errors import UserError
from maxbatch.run_folder.metrics import (
  POSITIONS,
  Guarded,
  Opening,
  Record,
  TensorBoardWriter,
  Writer,
  WriterFactory,
  let_go,
)

_LONGEST = 40


def run_identity(folder: Path) -> str:
  """Returns an identity that is the same at every start of a run in this folder alone."""
  name = re.sub(r"[^A-Za-z0-9_-]", "-", folder.name)[:_LONGEST]
  digest = hashlib.sha256(str(folder.absolute()).encode(errors="replace"))
  return f"{name}-{digest.hexdigest()[:12]}"


_EXPERIMENT = "maxbatch"
_IDENTITY = "maxbatch.run"
_LONGEST_VALUE = 500
_AT_ONCE = 100


class MlflowWriter:
  """A run of that service; one that resumes goes on in the same one."""

  def __init__(self, opening: Opening):
    what = "metrics_writers=mlflow"
    self._entities = library("mlflow.entities", what, "mlflow")
    tracking = library("mlflow.tracking", what, "mlflow")
    own = (opening.folder.absolute() / "mlflow").as_uri()
    if not os.environ.get("MLFLOW_TRACKING_URI"):
      # Files are what needs no server; mlflow wants that to be said.
      os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    self._client: Any = tracking.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", own))
    self._run_id = self._found_or_made(opening)
    keys = opening.keys.items()
    values = [self._entities.Param(key, str(value)[:_LONGEST_VALUE]) for key, value in keys]
    if opening.last is None:  # They cannot be given twice.
      for begin in range(0, len(values), _AT_ONCE):
        self._client.log_batch(self._run_id, params=values[begin : begin + _AT_ONCE])

  def write(self, record: Record) -> None:
    now, step = int(1000 * time.time()), int(record["step"])
    metrics = [self._entities.Metric(key, float(value), now, step) for key, value in record.items()]
    self._client.log_batch(self._run_id, metrics=metrics)

  def write_text(self, name: str, step: int, text: str) -> None:
    self._client.log_text(self._run_id, text, f"{name}/{step:08}.txt")

  def close(self) -> None:
    self._client.set_terminated(self._run_id)

  def _found_or_made(self, opening: Opening) -> str:
    experiment = self._client.get_experiment_by_name(_EXPERIMENT)
    number = experiment.experiment_id if experiment else self._client.create_experiment(_EXPERIMENT)
    identity = run_identity(opening.folder)
    if opening.last is not None:
      tag = f"tags.`{_IDENTITY}` = '{identity}'"
      result = self._client.search_runs([number], tag, max_results=1)
      if result:
        self._client.update_run(result[0].info.run_id, status="RUNNING")
        return result[0].info.run_id
    made = self._client.create_run(number, tags={_IDENTITY: identity}, run_name=opening.folder.name)
    return made.info.run_id


class WandbWriter:
  """A run of that service; one that resumes goes on in the same one."""

  def __init__(self, opening: Opening):
    wandb = library("wandb", "metrics_writers=wandb", "wandb")
    self._run: Any = wandb.init(
      project=os.environ.get("WANDB_PROJECT", "maxbatch"),
      name=opening.folder.name,
      id=run_identity(opening.folder),
      resume="allow",
      dir=str(opening.folder),
      config=dict(opening.keys),
      settings=wandb.Settings(console="off", silent=True),
    )
    for name in POSITIONS:
      self._run.define_metric(name)
    self._run.define_metric("*", step_metric="step")
    self._html = wandb.Html

  def write(self, record: Record) -> None:
    self._run.log(record)

  def write_text(self, name: str, step: int, text: str) -> None:
    self._run.log({f"text/{name}": self._html(f"<pre>{html.escape(text)}</pre>"), "step": step})

  def close(self) -> None:
    self._run.finish()


JSONL, TENSORBOARD = "jsonl", "tensorboard"
WRITERS: Mapping[str, WriterFactory] = {
  TENSORBOARD: TensorBoardWriter,
  "wandb": WandbWriter,
  "mlflow": MlflowWriter,
}


def chosen_writers(names: Sequence[str], plugins: PlugIns = ()) -> dict[str, WriterFactory]:
  """Returns the writers of these names, beside metrics.jsonl. Raises UserError: one is unknown."""
  known = {JSONL: TensorBoardWriter, **WRITERS}
  results = {name: registered("metrics_writers", name, known, plugins) for name in names}
  if results.pop(JSONL, None) is None:
    raise UserError(
      f"{_listed(names)}: {JSONL} must be among them, since a resume, the summary and the report read "
      f"metrics.jsonl; for example {_listed([JSONL, *names])}"
    )
  return results


def _listed(names: Sequence[str]) -> str:
  return f"metrics_writers=[{', '.join(names)}]"


def open_writers(names: Sequence[str], opening: Opening, plugins: PlugIns = ()) -> list[Writer]:
  """Opens the writers of these names; without those whose service cannot be reached, with a
  warning. Raises UserError as `chosen_writers`, or a package is not installed; OSError:
  TensorBoard's files cannot be made."""
  chosen = chosen_writers(names, plugins)
  opened = (_opened(name, factory, opening) for name, factory in chosen.items())
  return [writer for writer in opened if writer is not None]


def _opened(name: str, factory: WriterFactory, opening: Opening) -> Writer | None:
  try:
    writer = factory(opening)
  except UserError:
    raise
  except Exception as error:  # Networks and services fail in ways that no list of classes has.
    if name == TENSORBOARD:
      raise
    opening.report(let_go(name, error))
    return None
  return writer if name == TENSORBOARD else Guarded(name, writer, opening.report)
