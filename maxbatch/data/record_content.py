"""What the column of a record holds: a document's text, its token ids, or neither."""

import numpy as np

from maxbatch.data.formats.format import MAX_RECORD_BYTES, Bad, Record


def text_of(record: Record) -> bytes | Bad:
  """The document's text in UTF-8, or why it is none."""
  value = record.value
  if isinstance(value, Bad):
    return value
  try:
    content = value.encode() if isinstance(value, str) else value
    if isinstance(value, bytes):
      value.decode()
  except UnicodeEncodeError as error:
    return Bad(f"character {error.start} is a lone surrogate, which is no Unicode")
  except UnicodeDecodeError as error:
    return Bad(f"not text: byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8")
  if not isinstance(content, bytes):
    return Bad(_instead_of(value, "text", "tokenize_train_data=false"))
  if len(content) > MAX_RECORD_BYTES:
    return Bad(f"longer than {MAX_RECORD_BYTES:,} bytes; a longer document can be a file of text")
  if b"\0" in content:
    return Bad(f"not text: a NUL byte at {content.index(0)}")
  return content


def ids_of(record: Record, vocab_size: int) -> np.ndarray | Bad:
  """The document's token ids as they are, or why they are none."""
  value = record.value
  if isinstance(value, Bad):
    return value
  try:
    ids = np.asarray(value) if isinstance(value, list | np.ndarray) else None
  except ValueError:  # Lists of different lengths in a list.
    ids = None
  if ids is not None and ids.shape == (0,):
    return ids.astype(np.int64)
  if ids is None or ids.dtype.kind not in "iu" or ids.ndim != 1:
    return Bad(_instead_of(value, "a list of token ids", "tokenize_train_data=true"))
  wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
  if wrong.size:
    return Bad(
      f"token id {ids[wrong[0]]} at {wrong[0]} is not below the tokenizer's {vocab_size} ids"
    )
  return ids


def _instead_of(value: object, wanted: str, key: str) -> str:
  if value is None:
    return f"null instead of {wanted}"
  is_other = isinstance(value, list | np.ndarray | str | bytes)
  if isinstance(value, list) and value and isinstance(value[0], dict):
    return f"a list of messages instead of {wanted} (use_chat_template=true reads it)"
  name = "a list" if isinstance(value, list | np.ndarray) else type(value).__name__
  return f"{name} instead of {wanted}" + (f" ({key} reads it)" if is_other else "")
