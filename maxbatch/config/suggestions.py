"""What to change so that a configuration works, found by trying it."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from maxbatch.config.schema import Config, replaced, to_flat
from maxbatch.config.value import plain

Keys = Mapping[str, object]
_MOST = 3


def suggested_fixes(
  config: Config,
  offers: Sequence[Keys],
  beside: Iterable[Keys],
  is_valid: Callable[[Config], bool],
) -> list[str]:
  """Returns the first offers that work, at most three, as they are written on a command line.

  Args:
    config: what does not work.
    offers: changes to try, the nearest first; those that change nothing are passed over.
    beside: further changes; the first of them with which any offer works is the one taken.
    is_valid: whether a configuration works.
  """
  flat = to_flat(config)

  def changes(keys: Keys) -> dict[str, object]:
    return {key: value for key, value in keys.items() if flat[key] != value}

  for more in beside:
    tried = [changes({**more, **offer}) for offer in offers if changes(offer)]
    results = [assigned(keys) for keys in tried if is_valid(replaced(config, keys))]
    if results:
      return list(dict.fromkeys(results))[:_MOST]
  return []


def assigned(keys: Keys) -> str:
  """Returns `a=1 b=-1`, as on a command line."""
  return " ".join(f"{key}={_text(value)}" for key, value in keys.items())


def _text(value: object) -> str:
  return str(value).lower() if isinstance(value, bool) else str(plain(value))
