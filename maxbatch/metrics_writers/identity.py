"""Under which name a service finds a run again."""

import hashlib
import re
from pathlib import Path

_LONGEST = 40


def run_identity(folder: Path) -> str:
  """The same at every start of a run in this folder, and another one for other folders."""
  name = re.sub(r"[^A-Za-z0-9_-]", "-", folder.name)[:_LONGEST]
  return (
    f"{name}-{hashlib.sha256(str(folder.absolute()).encode(errors='replace')).hexdigest()[:12]}"
  )
