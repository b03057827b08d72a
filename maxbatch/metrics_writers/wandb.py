"""Weights & Biases. WANDB_PROJECT, WANDB_MODE=offline and its other variables mean what they mean there."""

import html
import os
from typing import Any

from maxbatch.data.optional import library
from maxbatch.metrics_writers.identity import run_identity
from maxbatch.run_folder.writer import POSITIONS, Opening, Record


class WandbWriter:
  """A run of that service; one that resumes goes on in the same one."""

  def __init__(self, opening: Opening):
    """Begins it, with the configuration."""
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
    """See `Writer.write`."""
    self._run.log(record)

  def write_text(self, name: str, step: int, text: str) -> None:
    """See `Writer.write_text`."""
    self._run.log({f"text/{name}": self._html(_as_html(text)), "step": step})

  def close(self) -> None:
    """See `Writer.close`."""
    self._run.finish()


def _as_html(text: str) -> str:
  return f"<pre>{html.escape(text)}</pre>"
