"""The rows a model is fed: one pytree from the loader to the loss.

B rows, T tokens per row; with leading microbatch dim k while a whole step is in one array.
"""

from typing import NamedTuple

import jax


class Rows(NamedTuple):
  """Samples as arrays."""

  inputs: jax.Array
  """int32[..., B, T]: token ids."""
  targets: jax.Array
  """int32[..., B, T]: the token after each input."""
  weights: jax.Array
  """float32[..., B, T]: 1 where the target counts towards the loss, 0 for padding."""
  sample_ids: jax.Array
  """int32[..., B]: index of the sample in the stream, by the plan; dropout masks derive from it.
  −1 where a row only fills up a step."""
  segment_ids: jax.Array | None = None
  """int32[..., B, T]: tokens see only tokens of the same segment; None: the row is one segment."""
  positions: jax.Array | None = None
  """int32[..., B, T]: position inside the segment; None: 0 … T−1."""
  checksums: jax.Array | None = None
  """uint32[..., B]: of each row as it was read, for its sample (data/checksums.py); None: no loader
  made the rows."""
