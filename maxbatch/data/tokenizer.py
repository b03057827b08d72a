"""Bytes as tokens: nothing to train, nothing to download, and every text can be written back."""

import numpy as np

BOS = 256
EOS = 257
PAD = 258
VOCAB_SIZE = 259
# Part of every cache key: a change of the ids above must not meet an old cache.
TOKENIZER_VERSION = "bytes-1"


def encode(data: bytes) -> np.ndarray:
  """The bytes of `data` as uint16 tokens, without begin or end."""
  return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)


def decode(ids: np.ndarray | list[int]) -> str:
  """The text of `ids`; begin, end and pad are dropped, broken UTF-8 becomes U+FFFD."""
  array = np.asarray(ids).reshape(-1)
  return array[(array >= 0) & (array < BOS)].astype(np.uint8).tobytes().decode(errors="replace")
