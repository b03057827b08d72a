"""How an evaluation batch is divided into microbatches for the pipeline.

The evaluation batch has a key of its own and need not be divisible as the training batch must be:
the last microbatch is padded with rows of weight zero.
"""

from typing import NamedTuple

from maxbatch.batch.arithmetic import samples_of
from maxbatch.pipeline_parallel.sizes import Pipeline


class EvalMicrobatches(NamedTuple):
  """The number of microbatches, and the rows of each in one group of devices."""

  microbatches: int
  rows: int

  @property
  def capacity(self) -> int:
    """Rows of all microbatches in one data-parallel group, padding included."""
    return samples_of(self.microbatches, self.rows)


def eval_microbatches(pipeline: Pipeline, rows: int) -> EvalMicrobatches:
  """Microbatches as large as in training, or smaller if there were too few to fill the stages.

  Args:
    pipeline: the pipeline of the run.
    rows: samples of the batch in each group of devices with the same samples, at least 1.
  """
  min_microbatches = pipeline.forwarding_delay * pipeline.stages
  count = max(-(-rows // pipeline.rows), min(rows, min_microbatches))
  # For this number of microbatches, equal sizes need the least padding.
  rows_each = -(-rows // count)
  return EvalMicrobatches(-(-rows // rows_each), rows_each)
