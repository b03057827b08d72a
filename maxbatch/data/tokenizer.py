"""What turns text into token ids and back; by default one token per byte."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

Ids = Sequence[int] | np.ndarray


class Tokenizer(Protocol):
  """What a tokenizer offers. The special ids stand for no text; they may be one and the same."""

  @property
  def vocab_size(self) -> int:
    """Number of ids, the special ones included: every id is in [0, vocab_size)."""
    ...

  @property
  def bos_id(self) -> int:
    """Begins every document."""
    ...

  @property
  def eos_id(self) -> int:
    """Ends every document."""
    ...

  @property
  def pad_id(self) -> int:
    """Fills up the last row; never a target that counts."""
    ...

  @property
  def version(self) -> str:
    """Changes whenever some text gets other ids, so that token caches are built again.

    A number that you raise, or a hash of the vocabulary's file.
    """
    ...

  def encode(self, text: bytes) -> np.ndarray:
    """Returns the ids, integers [n], of a piece of a document, without begin or end.

    Args:
      text: UTF-8, whole lines where lines are shorter than a megabyte. Where eval_fraction
        divides a single file, a character may be divided too: decode with errors="replace".
    """
    ...

  def decode(self, ids: Ids) -> str:
    """Returns the text of `ids`; special ids stand for none."""
    ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
  """Bytes as tokens: nothing to train or to download, and every text can be written back."""

  vocab_size: int = 259
  bos_id: int = 256
  eos_id: int = 257
  pad_id: int = 258
  version: str = "bytes-1"

  def encode(self, text: bytes) -> np.ndarray:
    """Returns the bytes of `text` as uint16."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)

  def decode(self, ids: Ids) -> str:
    """Returns the text of `ids`; broken UTF-8 becomes U+FFFD. See `Tokenizer.decode`."""
    array = np.asarray(ids).reshape(-1)
    return array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes().decode(errors="replace")


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
  """Returns the smallest of uint16 and uint32, little-endian, that holds every id."""
  return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def ordinary_ids(tokenizer: Tokenizer) -> np.ndarray:
  """Returns the ids that stand for text, ascending: all but the special ones."""
  special = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
  return np.setdiff1d(np.arange(tokenizer.vocab_size, dtype=token_dtype(tokenizer)), special)
