"""How fast documents become tokens on one core, by doing it for a moment and keeping nothing."""

import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Sequence

import numpy as np

from maxbatch.data.sources import Document
from maxbatch.data.tokenize import Recipe, tokenize
from maxbatch.data.tokenizer import token_dtype

_KEPT_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class TokenizeRate:
  """Of one core."""

  tokens_per_second: float
  text_bytes_per_second: float
  """Of the text itself, decompressed and without what a format has around it."""


def tokenize_rate(
  recipe: Recipe,
  documents: Sequence[Document],
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> TokenizeRate:
  """Tokenizes documents until `seconds` are over, or all are done.

  Raises:
    UserError: a document cannot be read; names it.
  """
  began = clock()
  sink = _Sink(lambda: clock() - began > seconds)
  with contextlib.suppress(_EnoughError):
    tokenize(recipe, documents, sink, io.BytesIO(), lambda _: None, io.BytesIO())
  spent = max(clock() - began, 1e-9)
  dtype = token_dtype(recipe.tokenizer)
  sample = np.frombuffer(sink.kept[: len(sink.kept) // dtype.itemsize * dtype.itemsize], dtype)
  text = recipe.tokenizer.decode(sample).encode(errors="replace")
  tokens_per_second = sink.num_bytes / dtype.itemsize / spent
  return TokenizeRate(tokens_per_second, tokens_per_second * len(text) / max(sample.size, 1))


class _EnoughError(Exception):
  """The time is over."""


class _Sink(io.BytesIO):
  """Counts what is written, and keeps its beginning."""

  def __init__(self, is_over: Callable[[], bool]):
    super().__init__()
    self._is_over = is_over
    self.num_bytes, self.kept = 0, b""

  def write(self, content, /) -> int:
    view = memoryview(content).cast("B")
    self.num_bytes += view.nbytes
    self.kept += bytes(view[: _KEPT_BYTES - len(self.kept)])
    if self._is_over():
      raise _EnoughError
    return view.nbytes
