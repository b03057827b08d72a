"""The precision report of a run: at its beginning and its end, of the same microbatch."""

import dataclasses
import json
from typing import Any

import jax

from maxbatch.config.schema import Config
from maxbatch.core.plan import Position
from maxbatch.data.rows import Rows
from maxbatch.hardware.agreement import write_shared_file
from maxbatch.models.registry import Parameters
from maxbatch.precision.report import report_text, report_values
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.exponents import exponents
from maxbatch.training.loop import Job


@dataclasses.dataclass
class PrecisionReport:
  """The report, which grows by a part each time it is written."""

  job: Job
  folder: RunFolder
  rows: Rows
  texts: list[str] = dataclasses.field(default_factory=list)
  values: list[dict[str, Any]] = dataclasses.field(default_factory=list)

  def write(self, parameters: Parameters, step: int) -> None:
    """Adds what these parameters make of the microbatch; all processes must call it."""
    trainer = self.job.trainer
    found = exponents(trainer, trainer.by_layer(parameters), self.rows)
    tokens = self.rows.inputs.size
    self.texts.append(report_text(found, step, tokens))
    self.values.append(report_values(found, step, tokens))
    write_shared_file(self.folder.precision_report_text, "\n\n\n".join(self.texts) + "\n")
    write_shared_file(self.folder.precision_report_json, json.dumps(self.values) + "\n")
    self.job.outputs.progress.say(f"Written: {self.folder.precision_report_text}")


def precision_report(
  config: Config, job: Job, folder: RunFolder, position: Position
) -> PrecisionReport | None:
  """The report of a run, of the first microbatch from `position` on; None unless it is asked for."""
  if not config.precision.precision_report:
    return None
  with job.train_rows(job.plan, position) as loader:
    rows = next(loader)
  return PrecisionReport(job, folder, jax.tree.map(lambda x: x[0], rows))
