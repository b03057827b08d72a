"""Whether the rows of a step, or of an evaluation, are those that were read for its samples, in their places.

The place of a row in the step's array says, by the plan, which sample it is; its checksum says which
sample was read, and with which tokens. So rows that were swapped, lost, repeated or changed between
the file and the device show in the very step that trains on them.

k microbatches, B rows of a microbatch over all devices, T tokens.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.batch.row_plan import row_of_step
from maxbatch.data.rows import TOKEN_FIELDS, Rows, row_checksums
from maxbatch.errors import RowsError

NONE_WRONG = np.iinfo(np.int32).max


def first_wrong_row(rows: Rows) -> jax.Array | None:
  """Returns the place m·B + b of the first row that is not what was read for its sample, as int32.

  NONE_WRONG if all are right; None without checksums: the host that has read the rows checks them, if no
  other gets them (data/placement.py), or no loader made them, so that nothing is known of them.
  Microbatches (k, B, T) beyond the step's are zeros; rows may also be a batch (B, T).
  """
  if rows.checksums is None:
    return None
  arrays = {name: array for name in TOKEN_FIELDS if (array := rows._asdict()[name]) is not None}
  result = row_checksums(arrays, rows.sample_ids)
  places = jnp.arange(result.size, dtype=jnp.int32).reshape(result.shape)
  return jnp.min(jnp.where(result == rows.checksums, NONE_WRONG, places))


def check_rows(
  wrong: Sequence[int | None],
  where: str,
  first_sample: int,
  micro_batch: int,
  hosts: Callable[[int], str],
  saved: Callable[[], str],
) -> None:
  """Checks what the dispatches of a step found, or the batches of an evaluation.

  Args:
    wrong: `first_wrong_row` of each dispatch, one if fused, else one per microbatch; or the host's.
    where: `step 3` or `validation`, for the message.
    first_sample: of the step.
    micro_batch: rows of a microbatch.
    hosts: says of a column of a microbatch who read it and who uses it.
    saved: says what is saved.

  Raises:
    RowsError: a row is not what was read for its sample.
  """
  for dispatch, place in enumerate(wrong):
    if place is not None and place != NONE_WRONG:
      row, column = row_of_step(dispatch, place, micro_batch)
      raise RowsError(
        f"{where}: row {row} (sample {first_sample + row}), {hosts(column)}, is not what was read: "
        f"on the way it was swapped, lost, repeated or changed; {saved()}"
      )
