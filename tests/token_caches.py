"""Token caches written by hand."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxbatch.data.token_cache import TokenCache
from maxbatch.data.token_shard import TokenShard


def written_cache(
  path: Path, tokens: Sequence[int], *, starts: Sequence[int] = (0,), shards: int = 1
) -> TokenCache:
  """A cache of uint16 tokens, in which documents begin at `starts`, in that many shards."""
  ends = [len(tokens) * number // shards for number in range(shards + 1)]
  made = []
  for number, (first, last) in enumerate(itertools.pairwise(ends)):
    place = path.with_stem(f"{path.stem}{number}")
    np.array(tokens[first:last], "<u2").tofile(place)
    inside = [start - first for start in starts if first <= start < last]
    np.array(inside, "<i8").tofile(place.with_suffix(".documents"))
    made.append(TokenShard(str(place), last - first, "", len(inside)))
  return TokenCache(tuple(made), "")


def starts_of(cache: TokenCache) -> list[int]:
  """Where its documents begin."""
  _, starts = cache.document_starts(np.array([0]), np.array([cache.num_tokens]))
  return starts.tolist()
