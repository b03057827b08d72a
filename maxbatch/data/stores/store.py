"""What an object store offers: its file system by fsspec, and what its answers mean."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

CONNECT_SECONDS = 10
READ_SECONDS = 30
"""Without a byte of an answer; then the request is given up."""


@dataclasses.dataclass(frozen=True)
class ObjectStore:
  """A kind of object store."""

  name: str
  open: Callable[[str], Any]
  """Its fsspec file system, which sends every request once; of what needs it, for errors.

  Raises UserError where its package is not installed."""
  errors: Callable[[], tuple[type[Exception], ...]]
  """What the file system raises for an answer, or for none."""
  is_final: Callable[[Exception], bool]
  """Whether the same request would fail again."""
  endpoint: Callable[[Any], str]
  """Whom the file system asks."""
  version: Callable[[Mapping[str, Any]], str]
  """Of what is listed of an object: changes with its contents."""
  md5: Callable[[Mapping[str, Any]], str]
  """Likewise: the MD5 of its contents, if it says so."""
  has_md5: Callable[[Any, str], bool]
  """Of (file system, object): whether `md5` is one; some stores say something else in its place."""
  credentials: str
  """Where they are read, for a person who has none."""
