"""Where files are kept that outlive a run: token caches, compiled programs, remembered choices."""

import os
from pathlib import Path

from maxbatch.errors import UserError


def token_caches(dataset_cache_directory: str) -> Path:
  """Where datasets' tokens are kept: the key's value, or a folder of the user's if it is empty.

  Raises:
    UserError: it is no folder of a file system.
  """
  if "://" in dataset_cache_directory:
    raise UserError(
      f"dataset_cache_directory={dataset_cache_directory}: tokens are mapped into memory from a file "
      "system; give a folder, for example dataset_cache_directory=tokens, or '' for the user's own"
    )
  return _given_or_own(dataset_cache_directory, "tokens")


def compiled_programs(jax_cache_dir: str) -> Path:
  """Where compiled programs are kept: the key's value, or a folder of the user's if it is empty."""
  return _given_or_own(jax_cache_dir, "compiled")


def remembered_choices() -> Path:
  """Where chosen microbatches are remembered."""
  return _given_or_own("", "microbatch")


def remembered_steps() -> Path:
  """Where it is remembered what compiled steps took."""
  return _given_or_own("", "compiled_steps")


def _given_or_own(given: str, name: str) -> Path:
  if given:
    return Path(given).expanduser().absolute()
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return Path(base, "maxbatch", name).absolute()
