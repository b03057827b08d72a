"""What a key names among several registered things: a model, an optimizer, a schedule."""

from collections.abc import Mapping
from typing import TypeVar

from maxbatch.config.find import did_you_mean
from maxbatch.errors import UserError

T = TypeVar("T")


def registered(key: str, name: str, known: Mapping[str, T]) -> T:
  """The thing that `key=name` means.

  Raises:
    UserError: nothing of that name is registered; offers the nearest name.
  """
  if name in known:
    return known[name]
  raise UserError(
    f"{key}={name}: there is no such {key}.{did_you_mean(name, known)} Known: {', '.join(known)}."
  )
