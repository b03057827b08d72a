"""Mixtures from keys, or from MaxText's file: names, paths and weights, checked; and their datasets, joined."""

import contextlib
import dataclasses
import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.find import user_path
from maxbatch.config.schema import DataConfig
from maxbatch.config.value import exact_number, plain
from maxbatch.data.mixture import (
  LARGEST_TOTAL,
  SMALLEST_SHARE,
  VERSION,
  JoinedRows,
  MixedRows,
  Mixture,
  MixturePhase,
  described,
  whole_weights,
)
from maxbatch.data.object_store import is_url
from maxbatch.data.rows import Dataset, SourceRows
from maxbatch.data.sources import STDLIB
from maxbatch.errors import UserError

_FILE_EXAMPLE = (
  '{"texts": {"path": "texts", "weight": 0.7}, "code": {"path": "code", "weight": 0.3}}'
)
_EXAMPLE = "dataset_mixture=[[texts, 0.7], [code, 0.3]]"


class MixedPaths(NamedTuple):
  """A mixture, and where its sources are."""

  key: str
  paths: tuple[str, ...]
  mixture: Mixture

  @contextlib.contextmanager
  def naming(self, source: str) -> Iterator[None]:
    """Names the source in errors, since its path is the value of no key; a context."""
    try:
      yield
    except UserError as error:
      raise UserError(f"{self.key}, source {source}: {error}") from error


def mixed_paths(data: DataConfig) -> MixedPaths | None:
  """Returns the mixture that the keys describe, if they do. Raises UserError: keys that exclude
  each other, a file that cannot be read, or invalid weights."""
  if data.grain_train_mixture_config_path:
    key = f"grain_train_mixture_config_path={data.grain_train_mixture_config_path}"
    named = _from_file(key, data.grain_train_mixture_config_path)
    names, paths, weights = zip(*((name, *each) for name, each in named.items()), strict=True)
  elif data.dataset_mixture or (data.dataset_type == "grain" and ";" in data.grain_train_files):
    key = "dataset_mixture" if data.dataset_mixture else "grain_train_files"
    pairs = data.dataset_mixture or [
      _weighted(data.grain_train_files, each) for each in data.grain_train_files.split(";")
    ]
    paths, weights = zip(*pairs, strict=True)
    names = source_names(paths)
  elif data.mixture_schedule:
    raise UserError(
      f"mixture_schedule={plain(data.mixture_schedule)} changes the weights of a mixture, but "
      f"there is none; for example {_EXAMPLE}, or mixture_schedule=[]"
    )
  else:
    return None
  _check_alone(data, key)
  places = [_place(path) for path in paths]
  if twice := [path for path, place in zip(paths, places, strict=True) if places.count(place) > 1]:
    raise UserError(f"{key}: {twice[-1]} is given twice; give it once, with the sum of the weights")
  return MixedPaths(key, paths, Mixture(names, _phases(data, key, names, weights)))


def _check_alone(data: DataConfig, key: str) -> None:
  if data.grain_train_mixture_config_path and data.dataset_mixture:
    raise UserError(f"{key} and dataset_mixture: one of them; for example dataset_mixture=[]")
  path_key, path = path_of(data)
  if path not in ("", STDLIB) and key != path_key:
    default = STDLIB if path_key == "dataset_path" else '""'
    raise UserError(
      f"{key} takes the place of {path_key}={path}, which would not be read; set "
      f"{path_key}={default}, or make it one of the mixture's sources"
    )


def _place(path: str) -> str:
  return path.rstrip("/") if is_url(path) else os.path.normpath(os.path.expanduser(path))


def path_of(data: DataConfig) -> tuple[str, str]:
  """Returns the key that says what is trained on, and its value."""
  if data.dataset_type == "grain":
    return "grain_train_files", data.grain_train_files
  if data.dataset_type == "hf":
    return "hf_path", data.hf_path
  return "dataset_path", data.dataset_path


def has_one_validation(data: DataConfig) -> bool:
  """Returns whether one validation set is given for all sources."""
  if data.dataset_type == "grain":
    return bool(data.grain_eval_files)
  if data.dataset_type == "hf":
    return bool(data.hf_eval_files)
  return bool(data.eval_dataset_path)


def _weighted(files: str, each: str) -> tuple[str, Fraction]:
  """Reads one item of MaxText's `path,0.3;path,0.7`."""
  path, _, text = each.rpartition(",")
  try:
    weight = exact_number(text.strip())
  except ValueError:
    weight = Fraction(-1)
  if not path or weight < 0:
    raise UserError(
      f"grain_train_files={files}: {each!r} must be a path, a comma and a weight of at least 0; "
      "for example grain_train_files='texts/*.jsonl,0.7;code/*.jsonl,0.3'"
    )
  return path.strip(), weight


def _from_file(key: str, path: str) -> Mapping[str, tuple[str, Fraction]]:
  try:
    content = json.loads(
      user_path(path).read_text(encoding="utf-8"),
      parse_float=_number,
      parse_int=_number,
      object_pairs_hook=_without_repetition,
    )
  except OSError as error:
    raise UserError(
      f"{key} cannot be read: {error.strerror or error}; give a JSON file that is on this machine, "
      f"for example {_FILE_EXAMPLE}"
    ) from error
  except (ValueError, RecursionError) as error:
    raise UserError(f"{key} is not JSON ({error}); for example {_FILE_EXAMPLE}") from error
  if not isinstance(content, dict) or not content:
    raise UserError(f"{key} must hold an object with a source for each name; {_FILE_EXAMPLE}")
  return {str(name): _entry(key, name, entry) for name, entry in content.items()}


def _number(text: str) -> Fraction:
  """Reads an exact number: 0.7 is 7/10, and not the binary number next to it."""
  try:
    return exact_number(text)
  except ValueError as error:
    raise ValueError(f"{text[:20]} is too large or too long a number") from error


def _without_repetition(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
  """Returns the JSON object of the pairs. Raises ValueError for a name that is repeated."""
  names = [name for name, _ in pairs]
  if twice := [name for name in names if names.count(name) > 1]:
    raise ValueError(f"{twice[0]} is there twice")
  return dict(pairs)


def _entry(key: str, name: str, entry: object) -> tuple[str, Fraction]:
  if not name.strip() or not name.isprintable():
    raise UserError(
      f"{key}: {name!r} cannot be shown in logs and metrics; for example {_FILE_EXAMPLE}"
    )
  fields = entry if isinstance(entry, dict) else {}
  path, weight = fields.get("path"), fields.get("weight")
  number = weight if isinstance(weight, Fraction) else Fraction(-1)
  if number >= 0 and isinstance(path, str) and set(fields) == {"path", "weight"}:
    return path, number
  raise UserError(
    f"{key}: {name} must be an object with path, a text, and weight, a number of at least 0, and "
    f"nothing else; for example {_FILE_EXAMPLE}"
  )


def _phases(
  data: DataConfig, key: str, names: Sequence[str], weights: Sequence[Fraction]
) -> tuple[MixturePhase, ...]:
  phases = [MixturePhase(0, _whole(key, names, weights))]
  for start, *changed in data.mixture_schedule:
    entry = f"mixture_schedule: {plain((start, *changed))}"
    if len(changed) != len(names):
      weights_of = " ".join(f"{name}'s" for name in names)
      raise UserError(
        f"{entry} must be a sample and {len(names)} weights ({weights_of}); for example "
        f"[{start}, {', '.join(['1'] * len(names))}]"
      )
    last = phases[-1].first_sample
    if start.denominator > 1 or start <= last:
      raise UserError(
        f"{entry} must begin at a whole sample after {last}, where the weights before it begin; "
        f"for example {plain((Fraction(last + 10_000), *changed))}"
      )
    phases.append(MixturePhase(int(start), _whole(entry, names, changed)))
  idle = [name for i, name in enumerate(names) if not any(phase.weights[i] for phase in phases)]
  if idle:
    raise UserError(f"{key}: the weight of {', '.join(idle)} is always 0; leave it out")
  return tuple(phases)


def _whole(where: str, names: Sequence[str], weights: Sequence[Fraction]) -> tuple[int, ...]:
  """Returns the weights as whole numbers. Raises UserError: a share is too small."""
  if not any(weights):
    raise UserError(f"{where}: all weights are 0; at least one source needs a weight above 0")
  whole = whole_weights(weights)
  if sum(whole) > LARGEST_TOTAL:
    raise UserError(
      f"{where}: as whole numbers the weights are {', '.join(map(str, whole))}, which must be at "
      f"most {LARGEST_TOTAL:,} together; give weights of fewer digits"
    )
  share, name = min((Fraction(w, sum(whole)), n) for w, n in zip(whole, names, strict=True) if w)
  if share < SMALLEST_SHARE:
    raise UserError(
      f"{where}: the share of {name} is {float(share):.3g} of the samples, and must be at least "
      f"1/{SMALLEST_SHARE.denominator:,}; give it a larger weight, or leave it out"
    )
  return whole


def source_names(paths: Sequence[str]) -> tuple[str, ...]:
  """Returns short names for the paths: as many of their last parts as tell them apart."""
  parts = [_parts(path) for path in paths]
  for depth in range(1, max(map(len, parts)) + 1):
    names = tuple("_".join(each[-depth:]) for each in parts)
    if len(set(names)) == len(names):
      return names
  return tuple(f"{'_'.join(each[-1:])}_{number}" for number, each in enumerate(parts, 1))


def _parts(path: str) -> list[str]:
  """Returns the parts of a path that are names, without wildcards and extensions."""
  parts = [part for part in re.split(r"[/\\]+", path) if part and not glob.has_magic(part)]
  if not parts:
    parts = [path]
  elif path.endswith(parts[-1]) and parts[-1].split(".")[0]:
    parts[-1] = parts[-1].split(".")[0]
  return [re.sub(r"[^\w.-]+", "_", part).strip("_") or "source" for part in parts]


def build(
  data: DataConfig, mixed: MixedPaths, build_one: Callable[[DataConfig], Dataset]
) -> Dataset:
  """Builds the mixture of the datasets that `build_one` makes of each source's path.

  Validation is by source, unless a key names a set for all. Raises UserError: names a bad source.
  """
  datasets: dict[str, Dataset] = {}
  for name, path in zip(mixed.mixture.names, mixed.paths, strict=True):
    with mixed.naming(name):
      datasets[name] = build_one(alone(data, path))
  train = MixedRows(tuple(each.train for each in datasets.values()), mixed.mixture)
  phases = [(phase.first_sample, phase.weights) for phase in mixed.mixture.phases]
  # What a source says of validation is the same for all where one set is given.
  dataset = dataclasses.replace(
    next(iter(datasets.values())),
    train=train,
    # The order of the sources decides on their seeds.
    fingerprint=_digest([VERSION, phases, [each.fingerprint for each in datasets.values()]]),
    description=_description(train, datasets),
    num_skipped_records=sum(each.num_skipped_records for each in datasets.values()),
    train_files=_files({name: each.train_files for name, each in datasets.items()}),
  )
  return dataset if has_one_validation(data) else _validated(dataset, mixed.mixture, datasets)


def alone(data: DataConfig, path: str) -> DataConfig:
  """Returns the keys for one source alone, without the mixture."""
  key, _ = path_of(data)
  none = {"dataset_mixture": (), "mixture_schedule": (), "grain_train_mixture_config_path": ""}
  return dataclasses.replace(data, **none, **{key: path})


def _validated(dataset: Dataset, mixture: Mixture, datasets: Mapping[str, Dataset]) -> Dataset:
  shares = dict(zip(mixture.names, mixture.phases[-1].shares, strict=True))
  held_out = {name: each.validation for name, each in datasets.items() if each.validation}
  total = sum(shares[name] for name in held_out)
  # The loss of the whole is that of the last phase's mixture, from its sources alone.
  parts = tuple(
    SourceRows(name, float(shares[name] / total) if total else 1 / len(held_out), rows)
    for name, rows in held_out.items()
  )
  return dataclasses.replace(
    dataset,
    validation=JoinedRows(tuple(held_out.values())) if held_out else None,
    validation_by_source=parts,
    validation_fingerprint=_digest(
      {name: each.validation_fingerprint for name, each in datasets.items()}
    ),
    validation_files=_files({name: each.validation_files for name, each in datasets.items()}),
  )


def _digest(content: object) -> str:
  return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _files(files: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
  return {f"{name}: {file}": size for name, each in files.items() for file, size in each.items()}


def _description(train: MixedRows, datasets: Mapping[str, Dataset]) -> str:
  lines = described(train.mixture, [len(rows) for rows in train.sources])
  for name, dataset in datasets.items():
    first, *more = dataset.description.splitlines()
    lines += [f"{name}: {first}", *(f"  {line}" for line in more)]
  return "\n".join(lines)
