"""Measurements one after the other in one start: python tests/many_branches.py FILE [key=value …].

FILE has a line of arguments for each measurement, or those of process 0 | those of process 1. Branch x2 of
run_name=diverging diverges. A program of several processes is compiled by the first of them alone.
"""

import pathlib
import sys
from typing import Any
from unittest import mock

from compiled_once import compile_once

from maxbatch.critical_batch import main
from maxbatch.errors import TrainingDivergedError
from maxbatch.hardware.processes import leave_together
from maxbatch.modes import run
from maxbatch.training.job import Job

train = run.train


def diverging(job: Job, *more: Any) -> Any:
  """Trains, or finds, in all processes alike, that the branch diverges."""
  if job.run.run_name == "x2" and "diverging-" in job.run.base_output_directory:
    raise TrainingDivergedError("step 6: loss=nan")
  return train(job, *more)


if __name__ == "__main__":
  compile_once()
  code, own = 0, int(sys.argv[-1].removeprefix("process_id="))
  with mock.patch("maxbatch.modes.run.train", diverging):
    for line in pathlib.Path(sys.argv[1]).read_text().splitlines():
      code = main([*line.split("|")[own if "|" in line else 0].split(), *sys.argv[2:]])
      print(f"exit code {code}", flush=True)
  leave_together(code)
