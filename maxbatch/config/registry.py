"""What a key names: something registered under a name, or `module:attribute` of the user's own.

Every registry is a dict from name to what it builds, in a file of the folder that uses it. What the
user names may declare keys of its own (config/plugins.py), with which it is then called.
"""

import functools
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeVar

from maxbatch.config.declare import PlugIns
from maxbatch.config.find import did_you_mean
from maxbatch.config.yaml_file import shown
from maxbatch.errors import UserError

T = TypeVar("T")


def registered(key: str, name: str, known: Mapping[str, T], plugins: PlugIns | None = None) -> T:
  """Returns the thing that `key=name` means.

  A name with a colon, `my_data:build`, is imported: `build` of the module `my_data`, found as
  Python finds modules, in the working directory (`python -m`) and in PYTHONPATH. If it declares keys,
  then as an argument `keys` it is given those of `plugins`, its section's: when it is called, or, where
  what is registered is not called, at once, to return such a thing.

  Raises:
    UserError: nothing of that name is registered, or it cannot be imported; offers the nearest
      name. Exceptions that the module raises while it is imported pass through.
  """
  if name in known:
    return known[name]
  if ":" in name:
    return _of_the_user(key, name, known, plugins)
  raise UserError(
    f"{key}={shown(name)}: there is no such {key.removesuffix('s')}.{did_you_mean(name, known)} "
    f"Known: {', '.join(known)}."
  )


def _of_the_user(key: str, name: str, known: Mapping[str, object], plugins: PlugIns | None) -> Any:
  """Returns what `module:attribute` means; it takes the place of a registered thing."""
  result, is_called = imported(key, name), all(map(callable, known.values()))
  if is_called and not callable(result):
    raise UserError(
      f"{key}={name} is {type(result).__name__}, and must be a function or a class, as "
      f"{key}={next(iter(known))} names"
    )
  if not hasattr(result, "Keys"):
    return result
  if plugins is None:
    raise UserError(f"{key}={name} declares Keys; what {key} names cannot have keys of its own")
  if name not in dict(plugins):
    raise UserError(
      f"{key}={name} got its Keys after the configuration was read; declare them in its "
      "module, as in Keys = Base.Keys"
    )
  return _with_keys(result, dict(plugins)[name], is_called)


@functools.lru_cache(64)
def _with_keys(result: Any, keys: object, is_called: bool) -> Any:
  """Returns what is made with keys: the same for the same keys, as caches compare."""
  return functools.partial(result, keys=keys) if is_called else result(keys=keys)


def imported(key: str, name: str) -> Any:
  """Returns what `module:attribute` means.

  Raises:
    UserError: there is no such thing.
  """
  module_name, _, attribute = name.partition(":")
  module = _module(f"{key}={name}", module_name)
  if hasattr(module, attribute):
    return getattr(module, attribute)
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
