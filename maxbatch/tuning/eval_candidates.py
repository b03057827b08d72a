"""The sizes that evaluation batches may be chosen from; results do not depend on which it is."""

import dataclasses
from fractions import Fraction
from typing import Any, ClassVar

from maxbatch.batch.from_config import eval_plan, plan_batches
from maxbatch.config.schema import BatchConfig, Config
from maxbatch.core.keys import text
from maxbatch.core.solve import per_device_size
from maxbatch.core.topology import Topology
from maxbatch.tuning.candidates import (
  MOST_TOKENS,
  Candidate,
  in_range,
  is_open,
  powers_of_two,
  written,
)


@dataclasses.dataclass(frozen=True)
class EvalCandidate(Candidate):
  """A size of evaluation batches; a step is one evaluation, its batch the samples that count."""

  key: ClassVar[str] = "eval_per_device_batch_size"
  unit_of_microbatch: ClassVar[str] = "samples per device and evaluation batch"

  def applied_to(self, config: Config) -> Config:
    """Returns the configuration with this choice made."""
    batch = dataclasses.replace(config.batch, eval_per_device_batch_size=self.size)
    return dataclasses.replace(config, batch=batch)

  def suggested_batches(self) -> tuple[int, ...]:
    """Returns none: nothing depends on how an evaluation is divided."""
    return ()

  def as_dict(self) -> dict[str, Any]:
    """Returns plain values."""
    return {
      self.key: text(self.size),
      "evaluation_batches": self.num_microbatches,
      "evaluation_samples": self.batch,
    }


def is_eval_open(batch: BatchConfig) -> bool:
  """Returns whether the evaluation batch is to be chosen."""
  return not isinstance(batch.eval_per_device_batch_size, Fraction)


def asked_to_evaluate(batch: BatchConfig) -> str:
  """Returns eval_per_device_batch_size and its value, as it is written."""
  return written(EvalCandidate.key, batch.eval_per_device_batch_size)


def eval_sizes_of(config: Config, topology: Topology) -> tuple[EvalCandidate, ...]:
  """Returns the sizes that evaluation batches can have, ascending: 1, 2, 4, … samples of each group of
  devices, up to all that are evaluated, and training's microbatch.

  Args:
    config: its microbatch is known, or is to be chosen and then counts as the smallest.

  Raises:
    UserError: none lies in the range.
  """
  batch, run = config.batch, config.run
  most = Fraction(MOST_TOKENS, batch.max_target_length)
  sizes = powers_of_two(per_device_size(1, topology), most)
  if run.eval_samples > 0:
    enough = [size for size in sizes if size * topology.num_devices >= run.eval_samples]
    sizes = sizes[: sizes.index(enough[0]) + 1] if enough else sizes
  if not is_open(batch):
    own = plan_batches(batch, run, topology, config.optimizer).per_device_batch_size
    sizes += [own] if own < sizes[-1] and own not in sizes else []
  results = []
  for size in sorted(sizes):
    plan = eval_plan(batch, run, topology, size)
    results.append(
      EvalCandidate(
        per_device=size,
        num_microbatches=plan.num_microbatches,
        micro_batch=plan.micro_batch_to_train,
        batch=run.eval_samples if run.eval_samples > 0 else plan.global_batch_to_train,
        max_target_length=plan.max_target_length,
      )
    )
  return in_range(batch.eval_per_device_batch_size, results)
