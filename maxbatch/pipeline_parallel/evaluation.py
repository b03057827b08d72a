"""How a batch is cut into microbatches where it is only evaluated, under a pipeline.

The batch of an evaluation has a key of its own, and need not divide as training's does: the last
microbatch is filled up with rows of no weight.
"""

from typing import NamedTuple

from maxbatch.batch.arithmetic import samples_of
from maxbatch.pipeline_parallel.sizes import Pipeline


class EvalMicrobatches(NamedTuple):
  """Microbatches of a batch, and the rows of each in a group of devices."""

  microbatches: int
  rows: int

  @property
  def capacity(self) -> int:
    """Rows of all of them, in a group of devices."""
    return samples_of(self.microbatches, self.rows)


def eval_microbatches(pipeline: Pipeline, rows: int) -> EvalMicrobatches:
  """Microbatches as large as in training, or smaller where these would not fill the stages.

  Args:
    pipeline: of the run.
    rows: samples of the batch in each group of devices that see different samples, at least 1.
  """
  to_fill = pipeline.hop * pipeline.stages
  count = max(-(-rows // pipeline.rows), min(rows, to_fill))
  # Once there are so many, equal ones leave the least to fill up.
  each = -(-rows // count)
  return EvalMicrobatches(-(-rows // each), each)
