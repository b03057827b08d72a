"""What a key names: something registered under a name, or `module:attribute` of the user's own.

Every registry is a dict from name to what it builds, in a file of the folder that uses it.
"""

import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar

from maxbatch.config.find import did_you_mean
from maxbatch.config.yaml_file import shown
from maxbatch.errors import UserError

T = TypeVar("T")


def registered(key: str, name: str, known: Mapping[str, T]) -> T:
  """The thing that `key=name` means.

  A name with a colon, `my_data:build`, is imported: `build` of the module `my_data`, found as
  Python finds modules, in the working directory (`python -m`) and in PYTHONPATH.

  Raises:
    UserError: nothing of that name is registered, or it cannot be imported; offers the nearest
      name. Exceptions that the module raises while it is imported pass through.
  """
  if name in known:
    return known[name]
  if ":" in name:
    return _imported(key, name, known)
  raise UserError(
    f"{key}={shown(name)}: there is no such {key.removesuffix('s')}.{did_you_mean(name, known)} "
    f"Known: {', '.join(known)}."
  )


def _imported(key: str, name: str, known: Mapping[str, object]) -> Any:
  """What `module:attribute` means; it takes the place of a registered thing."""
  module_name, _, attribute = name.partition(":")
  module = _module(f"{key}={name}", module_name)
  if hasattr(module, attribute):
    found = getattr(module, attribute)
    if not callable(found) and all(map(callable, known.values())):
      raise UserError(
        f"{key}={name} is {type(found).__name__}, and must be a function or a class, as "
        f"{key}={next(iter(known))} names"
      )
    return found
  public = [each for each in vars(module) if not each.startswith("_")]
  raise UserError(
    f"{key}={name}: {module_name} has no {attribute or 'name after the colon'}."
    f"{did_you_mean(attribute, public)} Write {key}={module_name}:NAME with the name of "
    "something defined there."
  )


def _module(given: str, name: str) -> ModuleType:
  if not all(part.isidentifier() for part in name.split(".")):
    raise UserError(
      f"{given}: {name!r} is not the name of a module; write it as in an import statement, for "
      "example my_folder.my_file:build"
    )
  try:
    return pkgutil.resolve_name(f"{name}:")
  except ImportError as error:
    # An import inside the module that fails is another mistake than a name that does not exist.
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{name}.".startswith(f"{missing}."):
      raise UserError(
        f"{given}: importing {name} failed: {error}; install what it imports, or correct the import"
      ) from error
    raise UserError(
      f"{given}: there is no module {missing} in the working directory or in PYTHONPATH; start "
      "the command in the folder of the file, or set PYTHONPATH to that folder"
    ) from None
