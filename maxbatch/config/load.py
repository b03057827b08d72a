"""From command-line arguments to a Config: which files are read, and which value wins.

Later wins: the root file (usually base.yml), then configs/models/NAME.yml or what a Hugging Face
config.json says, then the files that build on the root, then the command line. So a key that you
set yourself always beats the model's.
The model file is read when model_name is set after the root, or by a file called base.yml; any
other root gives every key itself, the model's included, as a written-out config.yml does.

What was set and has no effect in a run is named at the end (`without_effect`).
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from ml_collections import ConfigDict

from maxbatch.config import schema
from maxbatch.config.declare import Besides, Key, Section, When, declared
from maxbatch.config.find import (
  COMMAND_LINE,
  Entry,
  base_config_path,
  config_path,
  did_you_mean,
  model_path,
  read_argument,
  read_file,
)
from maxbatch.config.registry import (
  PlugIn,
  declared_keys,
  instances,
  named_plugins,
  naming_keys,
  replaced_plugin,
)
from maxbatch.config.schema import Config, keys_of, replaced, to_flat
from maxbatch.config.value import convert, holds_text, plain
from maxbatch.errors import UserError
from maxbatch.hugging_face.registry import read_folder

Keys = Mapping[str, object]
_MOST = 3
_OF_MAXTEXT = {
  "capacity_factor": "experts have no capacity, since the tokens that it drops depend on how a batch is split",
  "sparse_matmul": "a token is multiplied by its own experts and no others",
  "megablox": "the devices of the mesh decide how tokens are multiplied by their experts",
}
"""Why some of MaxText's keys have no counterpart here."""


def suggested_fixes(
  config: Config,
  offers: Sequence[Keys],
  beside: Iterable[Keys],
  is_valid: Callable[[Config], bool],
) -> list[str]:
  """Returns the first offers that work, at most three, as they are written on a command line.

  Args:
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


Layer = dict[str, Entry]

DERIVED = "derived"
"""Where a run's config.yml keeps what follows from its keys; ignored when it is read back."""


def load_config(arguments: Sequence[str]) -> schema.Config:
  """Returns the Config that `config=FILE key=value ...` describes.

  Raises:
    UserError: a file, key or value is not as it must be; the message says what works.
  """
  root_path, layers, others = _read_layers(arguments)
  own = {key for layer in [*layers, others] for key in layer} - {*schema.fields()}
  plugins = named_plugins(layers, imports=bool(own))
  known = _Known(declared_keys(plugins), layers)
  layers[-1].update({key: known.read(key, text) for key, text in others.items()})
  defaults = {key: one.default for key, one in known.plugin_keys.items()}
  # Types are checked when a value is read; one key may take a number in one file, a word in another.
  merged = ConfigDict(defaults | _root_values(root_path, known.values(layers[0])), type_safe=False)
  merged.lock()
  for layer in layers[1:]:
    merged.update(known.values(layer))
  values = merged.to_dict()
  return schema.from_flat(values, instances(plugins, values))


def plugins_of(arguments: Sequence[str]) -> tuple[PlugIn, ...]:
  """Returns the plug-ins with keys that arguments name, or the file that they name.

  Raises:
    UserError: that file, or a plug-in, cannot be read.
  """
  keys = {argument.partition("=")[0]: argument for argument in arguments if "=" in argument}
  naming = [keys[key] for key in ("config", "model_name", *naming_keys()) if key in keys]
  if not naming:
    return ()
  base = [] if "config" in keys else ["config=base"]
  return named_plugins(_read_layers([*base, *naming])[1], imports=False)


def to_flat_dict(config: schema.Config | Section) -> dict[str, object]:
  """Returns every key of a configuration, or of a section, with a value that YAML can hold.

  Loading those of a whole configuration as a file gives it back.

  Exact numbers are whole numbers where they are, decimals where short ones exist, else `1/3`.
  """
  return {key: plain(value) for key, value in schema.to_flat(config).items()}


@dataclasses.dataclass(frozen=True)
class _Known:
  """The keys that there are in a configuration."""

  plugin_keys: Mapping[str, Key]
  layers: Sequence[Layer]
  """All of it, for messages."""

  def read(self, key: str, text: str) -> Entry:
    """Returns the entry of an argument; UserError for an unknown key."""
    return read_argument(key, text, holds_text(self._type(key, COMMAND_LINE)))

  def values(self, layer: Layer) -> dict[str, object]:
    """Returns the values of a layer; UserError for an unknown key or a wrong value."""
    return {key: convert(entry, self._type(key, entry.where)) for key, entry in layer.items()}

  def _type(self, key: str, where: str) -> object:
    """Returns the type that `key` declares, or raises UserError with the nearest name."""
    fields, own = schema.fields(), self.plugin_keys
    if key in fields:
      return fields[key][1].type
    if key in own:
      return own[key].type
    if replaced := replaced_plugin(key, self.layers):
      plugin, by = replaced
      raise UserError(
        f"{where}: {key} is a key of {plugin.given}, which {by.assigned(by.text)} ({by.where}) "
        f"replaces; leave out {key}, or name that plug-in again."
      )
    special = "config" if where == COMMAND_LINE else "base_config"
    if reason := _OF_MAXTEXT.get(key):
      raise UserError(f"{where}: there is no key {key!r}: {reason}; leave it out.")
    hint = did_you_mean(key.rpartition(".")[2], [*fields, *own, special])
    if key in schema.sections():
      first = next(iter(declared(schema.sections()[key])))
      hint = f" Keys are flat, without sections: {first} and so on."
    raise UserError(f"{where}: there is no key {key!r}.{hint} --help all lists every key.")


def _read_layers(arguments: Sequence[str]) -> tuple[Path, list[Layer], dict[str, str]]:
  """Returns the root file's path, all entries, of which later win, and the arguments that are no keys
  of maxbatch's."""
  name, overrides, others = _read_arguments(arguments)
  path, root, children = _read_chain(config_path(name))
  layers = [*children, overrides]
  return path, [root, *_model_layers(path, root, layers), *layers], others


def _read_arguments(arguments: Sequence[str]) -> tuple[str, Layer, dict[str, str]]:
  """Returns the value of config=, the other arguments, and those that are no keys of maxbatch's.

  Of one key given twice the later wins.
  """
  names: list[str] = []
  overrides: Layer = {}
  others: dict[str, str] = {}
  for argument in arguments:
    key, equals, text = argument.partition("=")
    _check_argument(argument, key, equals)
    if key == "config":
      names.append(text)
    elif (name := _current_name(key)) in schema.fields():
      overrides[name] = read_argument(name, text, holds_text(schema.fields()[name][1].type))
    else:
      others[key] = text
  if not any(names):
    raise UserError("No configuration given. Write config=base, or config= and your own file.")
  if len(set(names)) > 1:
    given = " and ".join(f"config={name}" for name in names)
    raise UserError(f"{given}: only one file can be given; let one name the other as base_config.")
  return names[0], overrides, others


def _check_argument(argument: str, key: str, equals: str) -> None:
  if key.startswith("-"):
    bare = argument.lstrip("-")
    raise UserError(
      f"{argument}: options have no dashes; write {bare if equals else bare + '=...'}"
    )
  if not equals or not key:
    is_file = argument.endswith((".yml", ".yaml"))
    meant = f"config={argument}" if is_file else f"{key or 'steps'}=VALUE"
    raise UserError(f"{argument!r} is not of the form key=value. Did you mean {meant}?")
  if key == "base_config":
    raise UserError(f"{argument}: base_config belongs in a file; on the command line use config=")


def _read_chain(path: Path) -> tuple[Path, Layer, list[Layer]]:
  """Returns the root file, its entries, and those of the files that build on it, in order."""
  visited: list[Path] = []
  layers: list[Layer] = []
  while True:
    seen = [other.resolve() for other in visited]
    visited.append(path)
    if path.resolve() in seen:
      circle = visited[seen.index(path.resolve()) :]
      raise UserError(
        f"base_config refers to itself: {' -> '.join(map(str, circle))}. "
        "Let one of them say `base_config: base`."
      )
    layer = _with_current_names(read_file(path))
    layer.pop(DERIVED, None)
    base = layer.pop("base_config", None)
    layers.insert(0, layer)
    if base is None:
      return path, layers[0], layers[1:]
    if not base.text:
      raise UserError(f"{base.where}: base_config has no value. Write `base_config: base`.")
    path = base_config_path(str(convert(base, str)), path, base.given)


@functools.cache
def say_old_name(old: str, new: str) -> None:
  """Prints, once, on standard error, what an old name is called now."""
  print(f"note: {old} is called {new} now; the old name still works", file=sys.stderr, flush=True)


def _with_current_names(layer: Layer) -> Layer:
  """Returns the entries of a file by the names that keys have now."""
  result: Layer = {}
  for key, entry in layer.items():
    name = _current_name(key)
    if name != key and name in layer:
      raise UserError(
        f"{entry.where}: {key} is the old name of {name}, which {layer[name].where} gives too; "
        f"keep {name}"
      )
    result[name] = dataclasses.replace(entry, key=name)
  return result


def _current_name(key: str) -> str:
  """Returns the name that a key has now, and says so where another is given."""
  name = schema.old_names().get(key, key)
  if name != key:
    say_old_name(key, name)
  return name


def _root_values(path: Path, values: dict[str, object]) -> dict[str, object]:
  """Returns the values of the root file, which gives every key."""
  missing = [key for key in schema.fields() if key not in values]
  if missing:
    more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
    raise UserError(
      f"{path}: no value for {', '.join(missing[:6])}{more}. A file without base_config gives "
      "every key itself; add the line `base_config: base` to take the others from base.yml."
    )
  return values


def _model_layers(path: Path, root: Layer, layers: Sequence[Layer]) -> list[Layer]:
  """Returns the entries of the model's file or of its config.json, as zero or one layer."""
  named = [layer["model_name"] for layer in layers if "model_name" in layer]
  if path.name == "base.yml" and "model_name" in root:
    named.insert(0, root["model_name"])
  if not named:
    return []
  entry = named[-1]
  path = model_path(str(convert(entry, str)), entry.folder, entry.given)
  if path.is_dir():
    return [_folder_layer(path)]
  model = read_file(path)
  for key in ("model_name", "base_config"):
    if key in model:
      raise UserError(
        f"{model[key].where}: {key} cannot be set in a model's file; remove the line."
      )
  return [model]


def _folder_layer(folder: Path) -> Layer:
  """Returns what a Hugging Face config.json says, in our keys."""
  family, options = read_folder(folder)
  theirs = {key: f", {name}" for name, key in family.same.items()}
  return {
    # JSON is YAML.
    key: Entry(
      key=key,
      node=yaml.compose(json.dumps(value), yaml.SafeLoader),
      where=f"{folder / 'config.json'}{theirs.get(key, '')}",
      folder=folder,
    )
    for key, value in options.items()
  }


def without_effect(config: Config) -> list[str]:
  """Returns lines about keys that have another value than their default, and no effect.

  Raises:
    UserError: one without which the run would not be what its keys say.
  """
  values = to_flat(config)
  by_reason: dict[tuple[str, str], dict[str, object]] = {}
  for key, one in keys_of(config).items():
    if values[key] == one.default:
      continue
    for condition in one.read_when:
      where, instead = _obstacles(key, condition, values)
      if where and condition.refuses:
        raise UserError(
          f"{assigned({key: values[key]})} has no effect with {where}; leave it out, or set "
          f"{assigned({key: one.default})}; it has one with {instead}"
        )
      if where:
        by_reason.setdefault((where, instead), {})[key] = values[key]
        break
  return [
    f"Without effect: {assigned(keys)}, with {where}; there is one with {instead}"
    for (where, instead), keys in by_reason.items()
  ]


def _obstacles(own: str, condition: When, values: Mapping[str, object]) -> tuple[str, str]:
  """Returns the keys, beside its own, for which no alternative holds, and what would do."""
  missing = [
    {key: allowed for key, allowed in each.items() if not _allows(key, allowed, values[key])}
    for each in condition.alternatives
  ]
  if not all(missing):
    return "", ""
  where = {key: values[key] for each in missing for key in each if key != own}
  return assigned(where), assigned({key: _example(allowed) for key, allowed in missing[0].items()})


def _allows(key: str, allowed: object, value: object) -> bool:
  if key in naming_keys() and isinstance(value, str) and ":" in value:
    return True
  if isinstance(allowed, Besides):
    return value not in allowed.excluded
  return value in (allowed if isinstance(allowed, list) else [allowed])


def _example(allowed: object) -> object:
  if isinstance(allowed, Besides):
    return allowed.like
  return allowed[0] if isinstance(allowed, list) else allowed
