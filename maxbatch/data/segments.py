"""Segment ids and positions of packed rows.

R rows, T tokens per row.
"""

import numpy as np


def segments(begins_RT: np.ndarray, filled_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Segment numbers and positions, int32[R, T] each, of rows of packed documents.

  Segments count 1, 2, 3 … by document within the row, 0 is padding; positions restart at 0 with
  each document. A row that begins inside a document counts that rest as its first segment.

  Args:
    begins_RT: bool, where a document begins; changed in place.
    filled_R: the tokens of each row that are no padding, which is at its end.
  """
  length = begins_RT.shape[1]
  begins_RT[:, 0] = True
  # Documents are few, tokens are many: what belongs to a document is repeated for its tokens.
  firsts = np.flatnonzero(begins_RT)
  num_tokens = np.diff(firsts, append=begins_RT.size)
  rows = firsts // length
  numbers = np.arange(1, len(firsts) + 1) - np.searchsorted(rows, rows)
  segment_ids_RT = np.repeat(numbers.astype(np.int32), num_tokens).reshape(begins_RT.shape)
  places = np.arange(begins_RT.size, dtype=np.int32)
  positions_RT = (places - np.repeat(firsts.astype(np.int32), num_tokens)).reshape(begins_RT.shape)
  for array_RT in (segment_ids_RT, positions_RT):
    clear_padding(array_RT, filled_R)
  return segment_ids_RT, positions_RT


def clear_padding(array_RT: np.ndarray, filled_R: np.ndarray) -> None:
  """Sets to 0 what comes after the first `filled_R` of each row."""
  length = array_RT.shape[1]
  for row in np.flatnonzero(filled_R < length).tolist():
    array_RT[row, filled_R[row] :] = 0
