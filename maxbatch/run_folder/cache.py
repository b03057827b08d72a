"""Where files are kept that outlive a run: token caches, compiled programs, remembered choices."""

import os
from pathlib import Path


def cache_folder(dataset_cache_directory: str) -> Path:
  """Where caches are kept: the key's value, or the user's cache folder when it is empty."""
  if dataset_cache_directory:
    return Path(dataset_cache_directory).expanduser().absolute()
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return Path(base, "maxbatch").absolute()
