"""Packages that take seconds to import, in files that each process of the suite collects."""

import importlib
from typing import Any


class WhenUsed:
  """`import name`, done when one of its public attributes is first asked for."""

  def __init__(self, name: str):
    self._name = name

  def __getattr__(self, attribute: str) -> Any:
    # pytest looks at every name of a file, for attributes that mark its fixtures.
    if attribute.startswith("_"):
      raise AttributeError(attribute)
    return getattr(importlib.import_module(self._name), attribute)
