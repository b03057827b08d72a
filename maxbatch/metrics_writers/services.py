"""Services that show a run's records: MLflow, and Weights & Biases.

Their variables mean what they mean there: MLFLOW_TRACKING_URI (else a folder of the run's),
WANDB_PROJECT, WANDB_MODE=offline and so on.
"""

import hashlib
import html
import os
import re
import time
from pathlib import Path
from typing import Any

from maxbatch.data.optional import library
from maxbatch.run_folder.writer import POSITIONS, Opening, Record

_LONGEST = 40


def run_identity(folder: Path) -> str:
  """Returns an identity that is the same at every start of a run in this folder, and another one
  for other folders."""
  name = re.sub(r"[^A-Za-z0-9_-]", "-", folder.name)[:_LONGEST]
  return (
    f"{name}-{hashlib.sha256(str(folder.absolute()).encode(errors='replace')).hexdigest()[:12]}"
  )


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
    values = [
      self._entities.Param(key, str(value)[:_LONGEST_VALUE]) for key, value in opening.keys.items()
    ]
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
      result = self._client.search_runs(
        [number], f"tags.`{_IDENTITY}` = '{identity}'", max_results=1
      )
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
