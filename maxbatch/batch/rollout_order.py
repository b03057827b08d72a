"""In which order microbatches are sampled and trained on: a function of their numbers alone.

Microbatches are numbered through all batches. Before microbatch i is trained on, those up to
`sampled_before(i)` are sampled: the rewards of one, and the training on the one before it, then go on
while the next is sampled. A batch is sampled by the policy that its lag says, so that none is sampled
before that policy is there.
"""


def sampled_before(microbatch: int, num_microbatches: int, staleness: int) -> int:
  """Returns the last microbatch that is sampled before this one is trained on.

  The policy that samples lags `staleness` batches behind.
  """
  ahead = microbatch + 1 + staleness * num_microbatches
  return min(ahead, last_with_a_policy(microbatch, num_microbatches, staleness))


def last_with_a_policy(microbatch: int, num_microbatches: int, staleness: int) -> int:
  """Returns the last microbatch whose policy is there before this one is trained on.

  Args: as `sampled_before`.
  """
  newest_batch = microbatch // num_microbatches + staleness
  return (newest_batch + 1) * num_microbatches - 1


def saved_policies(batch: int, staleness: int, *, and_own: bool) -> list[int]:
  """Returns the policies that a checkpoint in `batch` needs beside its parameters, always as many.

  Each is named by the batch before whose first step it stood, the oldest first. `and_own`: whether that
  of before this batch is among them, since the parameters may be later.
  """
  return [max(0, batch - lag) for lag in range(staleness, -1 if and_own else 0, -1)]
