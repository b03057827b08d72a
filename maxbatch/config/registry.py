"""What a key names: something registered under a name, or `module:attribute` of the user's own.

Every registry is a dict from name to what it builds, in a file of the folder that uses it. What the
user names may declare keys of its own (`Keys`, below), with which it is then called.

Libraries that only some data need: imported when a run uses them, so that others start fast.

Keys that plug-ins declare: what `key=module:attribute` names may have an attribute `Keys`.

That is a frozen dataclass with fields as in config/keys/; the plug-in gets one as `keys`.
"""

import dataclasses
import functools
import importlib.util
import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml

from maxbatch.config.declare import Key, Name, PlugIns, declared
from maxbatch.config.find import Entry, did_you_mean, shown
from maxbatch.config.schema import Config, fields, sections, to_flat
from maxbatch.config.value import convert, describe, plain
from maxbatch.errors import UserError


def library(name: str, what: str, extra: str = "data") -> Any:
  """Imports the module `name` of an optional package.

  Args:
    what: what needs it, for the message: a key and its value, or a file.
    extra: the extra of maxbatch that installs it.

  Raises UserError: it is not installed, or cannot be imported.
  """
  try:
    return pkgutil.resolve_name(f"{name}:")
  except ImportError as error:
    package = name.partition(".")[0]
    raise UserError(
      f"{what} needs the package {package}, which cannot be imported ({error}); install it with "
      f"pip install 'maxbatch[{extra}]'"
    ) from error


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


RESERVED = ("config", "base_config", "derived")
"""Names in files and on command lines that are no keys."""


@dataclasses.dataclass(frozen=True)
class PlugIn:
  """A plug-in that declares keys."""

  key: str
  """The key of maxbatch's that names it."""
  name: str
  """`module:attribute`."""
  keys: type

  @property
  def given(self) -> str:
    """Returns it as the command line names it."""
    return f"{self.key}={self.name}"


def naming_keys() -> tuple[str, ...]:
  """Returns the keys that can name a plug-in."""
  return tuple(key for key, (_, one) in fields().items() if one.type in (Name, tuple[Name, ...]))


def names_plugin(config: Config) -> bool:
  """Returns whether a key names code that is not maxbatch's, with keys of its own or without."""
  values, own = to_flat(config), f"{__name__.partition('.')[0]}."
  for key in naming_keys():
    value = values[key]
    for name in map(str, value if isinstance(value, tuple) else (value,)):
      if ":" in name and not name.startswith(own):
        return True
  return False


def named_plugins(layers: Sequence[Mapping[str, Entry]], *, imports: bool) -> tuple[PlugIn, ...]:
  """Returns the plug-ins with keys that a configuration names.

  Args:
    layers: its files and its command line; later wins.
    imports: whether every plug-in is imported, as a key that is not maxbatch's asks for; else only
      those in whose file there is the word Keys or with_keys.

  Raises:
    UserError: one cannot be imported, its Keys declare no keys, or a key of theirs is declared twice.
  """
  results: list[PlugIn] = []
  for key in naming_keys():
    entries = [layer[key] for layer in layers if key in layer]
    results += _of_entry(entries[-1], imports=imports) if entries else ()
  _check_distinct(results)
  return tuple(results)


def replaced_plugin(key: str, layers: Sequence[Mapping[str, Entry]]) -> tuple[PlugIn, Entry] | None:
  """Returns the plug-in that declares `key` and that a later layer replaces, and what replaces it."""
  for name in naming_keys():
    entries = [layer[name] for layer in layers if name in layer]
    for entry in entries[:-1]:
      for one in _of_entry(entry, imports=True):
        if key in declared(one.keys):
          return one, entries[-1]
  return None


def declared_keys(plugins: Sequence[PlugIn]) -> dict[str, Key]:
  """Returns every key that they declare."""
  return {key: one for plugin in plugins for key, one in declared(plugin.keys).items()}


def instances(plugins: Sequence[PlugIn], values: Mapping[str, object]) -> dict[str, PlugIns]:
  """Returns, by section, each plug-in with the values of its keys."""
  by_section: dict[str, dict[str, object]] = {}
  for one in plugins:
    own = one.keys(**{key: values[key] for key in declared(one.keys)})
    by_section.setdefault(fields()[one.key][0], {})[one.name] = own
  return {section: tuple(each.items()) for section, each in by_section.items()}


def _of_entry(entry: Entry, *, imports: bool) -> Iterator[PlugIn]:
  value = convert(entry, fields()[entry.key][1].type)
  for name in map(str, value if isinstance(value, tuple) else (value,)):
    if ":" in name and (imports or _mentions_keys(*name.split(":", 1))):
      keys = getattr(imported(entry.key, name), "Keys", None)
      if keys is not None:
        plugin = PlugIn(entry.key, name, keys)
        _check(plugin)
        yield plugin


def _mentions_keys(module: str, attribute: str) -> bool:
  """Returns whether a plug-in may declare keys, without importing it: that may take long, need jax
  where a plan does without, or fail where a run is only read."""
  loaded = sys.modules.get(module)
  if loaded is not None and hasattr(loaded, attribute):
    return hasattr(getattr(loaded, attribute), "Keys")
  try:
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
  except (ImportError, ValueError, OSError):
    return False  # The registry says what is wrong with it.
  return re.search(r"\b(Keys|with_keys)\b", source) is not None


def _check(plugin: PlugIn) -> None:
  """Raises UserError unless every field of a plug-in's Keys declares a key with a valid default."""
  cls = plugin.keys
  is_frozen = dataclasses.is_dataclass(cls) and vars(cls)["__dataclass_params__"].frozen
  names = {field.name for field in dataclasses.fields(cls)} if is_frozen else set()
  undeclared = names - {*declared(cls)} if is_frozen else names
  if not is_frozen or undeclared:
    raise UserError(
      f"{plugin.given}: its Keys must be a frozen dataclass, each field declared as in `top_k: int "
      f"= key(2, FIXED)`{', which ' + min(undeclared) + ' is not' if undeclared else ''}"
    )
  for key, one in declared(cls).items():
    try:
      describe(one.type)
    except (KeyError, TypeError):
      raise UserError(
        f"{plugin.given}: its key {key} has the type {one.type}, and must be bool, int, float, "
        "Fraction, str, Literal or a tuple of these, with a range as in Annotated[int, "
        "Range(low=1)]"
      ) from None
    node = yaml.compose(json.dumps(plain(one.default)), yaml.SafeLoader)
    convert(Entry(key, node, f"{plugin.given}, its default", Path()), one.type)


def _check_distinct(plugins: Sequence[PlugIn]) -> None:
  """Raises UserError for a key that maxbatch has too, or plug-ins with other Keys."""
  seen: dict[str, PlugIn] = {}
  for plugin in plugins:
    for key in declared(plugin.keys):
      if key in fields() or key in sections() or key in RESERVED:
        raise UserError(
          f"{plugin.given} declares the key {key}, which maxbatch already has; rename it, for "
          f"example {plugin.name.rpartition(':')[2].lower()}_{key}"
        )
      first = seen.setdefault(key, plugin)
      if first.keys is not plugin.keys:
        raise UserError(
          f"{first.given} and {plugin.given} both declare the key {key}; rename one of them, "
          f"for example {plugin.name.rpartition(':')[2].lower()}_{key}"
        )
