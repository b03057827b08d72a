"""The metrics of a step of completions, from its sums."""

import jax

from maxbatch.rl.grpo import LARGEST_GAP, GrpoSums, quotients
from maxbatch.training.metrics import token_values


def metric_values(sums: GrpoSums) -> dict[str, jax.Array]:
  """Returns the metrics by their names in metrics.jsonl."""
  return token_values(quotients(sums), 1.0) | {LARGEST_GAP: sums.largest_gap}
