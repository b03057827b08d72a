"""Which parameters of a model train: the others are frozen, without gradients or optimizer state."""

import difflib
import fnmatch
import heapq
from collections.abc import Collection, Sequence

from maxbatch.config.schema import ModelConfig
from maxbatch.errors import UserError

Path = tuple[str, ...]
"""A parameter's path: names of modules, then its own."""

ADAPTER = ("lora_a", "lora_b")
"""Names of LoRA's matrices in their Projection."""
_SHOWN = 4


def frozen_paths(
  paths: Collection[Path], patterns: Sequence[str], config: ModelConfig
) -> frozenset[Path]:
  """Returns the parameters that stay as they are: those that no pattern matches, but for adapters.

  Raises:
    UserError: a pattern matches nothing.
  """
  names = {"/".join(path): path for path in paths}
  if not patterns and not config.lora_rank:
    return frozenset()
  trained = {path for path in paths if path[-1] in ADAPTER}
  for pattern in patterns:
    results = [path for name, path in names.items() if fnmatch.fnmatchcase(name, pattern)]
    if not results:
      raise UserError(_no_match(pattern, names))
    trained |= set(results)
  return frozenset(paths) - trained


def _no_match(pattern: str, names: Collection[str]) -> str:
  """Returns the nearest of the parameters and of the modules that hold them."""
  parents = {
    name.rsplit("/", depth)[0] for name in names for depth in range(1, name.count("/") + 1)
  }
  known = [*sorted(names), *(f"{parent}/*" for parent in sorted(parents))]
  scored = [
    (difflib.SequenceMatcher(None, pattern.lower(), each.lower()).ratio(), each) for each in known
  ]
  near = [each for _, each in heapq.nlargest(_SHOWN, scored)]
  return (
    f"trainable: {pattern!r} matches no parameter; nearest: {', '.join(near)}. A pattern is matched "
    f"with the whole path, of which `*` is any part; for example trainable=[{near[0]!r}]"
  )
