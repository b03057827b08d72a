"""What is written beside a checkpoint's arrays, and how two of these records are compared.

A record is a JSON object: step, samples, plan, identity (what a resume may not change), settings
(what it may), notes of what steers the run, the format of the arrays, and every leaf's shape, dtype
and fingerprint, under one checksum. Differences are reported one per line.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from maxbatch.checkpoints.fingerprint import VERSION, VERSIONS, fingerprints, named_leaves
from maxbatch.config.declare import CHANGEABLE, FIXED, Resume
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config, keys_of, old_names
from maxbatch.core.plan import Position
from maxbatch.data.mixture import STREAM_VERSION
from maxbatch.data.rows import Dataset
from maxbatch.errors import UserError, first_of
from maxbatch.hugging_face.model_keys import PLAIN

PARAMETERS = "params/"
"""What the names of a model's parameters begin with."""
_TRAINED_ON = (
  "dataset_path",
  "grain_train_files",
  "hf_path",
  "hf_train_files",
  "dataset_mixture",
  "mixture_schedule",
  "grain_train_mixture_config_path",
  "grain_packing_type",
  "use_truncation",
  "block_cross_document_attention",
  "use_chat_template",
  "sft_train_on_completion_only",
)
_EVALUATED_ON = ("eval_dataset_path", "grain_eval_files", "hf_eval_files")
"""The keys that explain why a dataset has another fingerprint."""


def identity(config: Config, dataset: Dataset) -> dict[str, object]:
  """Returns what a resume may not change: keys, what is in the files, and the order of samples."""
  values = to_flat_dict(config)
  train = {key: values[key] for key in _TRAINED_ON}
  validation = train | {key: values[key] for key in _EVALUATED_ON}
  # Only a file's contents could change; checkpoints of earlier versions have no such entry.
  tokenizer = {"tokenizer": dataset.tokenizer_version} if config.data.tokenizer_path else {}
  return (
    fixed_keys(config)
    | tokenizer
    | {
      "stream_version": STREAM_VERSION,
      "dataset": _contents(dataset.fingerprint, train, dataset.train_files),
      "validation": _contents(dataset.validation_fingerprint, validation, dataset.validation_files),
    }
  )


def fixed_keys(config: Config) -> dict[str, object]:
  """Returns the keys that a resume may not change, as values that JSON holds."""
  return _of_class(config, FIXED)


def settings(config: Config) -> dict[str, object]:
  """Returns the keys that a resume may change, as values that JSON holds."""
  return _of_class(config, CHANGEABLE)


def _of_class(config: Config, resume: Resume) -> dict[str, object]:
  keys = keys_of(config)
  return {key: value for key, value in to_flat_dict(config).items() if keys[key].resume == resume}


def _contents(fingerprint: str, paths: Mapping[str, object], files: Mapping[str, int]) -> object:
  """Describes a part of a dataset: equal if its fingerprint is; the rest says what changed."""
  return {"fingerprint": fingerprint, "paths": dict(paths), "files": dict(files)}


ORIGIN = "origin"
"""In the notes of a checkpoint of parameters alone: where they come from."""
_ABSENT = "(absent)"
_SHOWN = 8
_FILES_SHOWN = 3
_FINGERPRINT = "fingerprint"
"""What decides whether two values of an identity are equal that have it; the rest explains them."""

_OFF: dict[str, Any] = {
  "trainable": [],
  "batch_by_group": [],
  "lora_rank": 0,
  "lora_alpha": -1,
  "lora_targets": [],
}
"""What trained in runs of versions without these keys."""

_CONSEQUENCES = {
  "stream_version": ": samples would come in another order, some again and some not at all"
}
"""Consequences of differences that no key makes."""


def make_record(
  state: object,
  position: Position,
  plan: Mapping[str, object],
  identity: Mapping[str, object],
  settings: Mapping[str, object],
  notes: Mapping[str, object],
  checkpoint_format: str,
) -> dict[str, Any]:
  """Makes the record of `state`, sealed, once the state is computed. Raises TypeError: `plan`,
  `identity`, `settings` or `notes` holds something that is not JSON."""
  described = describe_leaves(named_leaves(state), fingerprints(state))
  fields = {"identity": dict(identity), "plan": dict(plan), "notes": dict(notes)}
  fields |= {"settings": dict(settings)}
  return sealed(position, described, checkpoint_format, fields)


def describe_leaves(leaves: Mapping[str, Any], prints: Mapping[str, int]) -> dict[str, Any]:
  return {name: _shape(leaf) | {"fingerprint": prints[name]} for name, leaf in leaves.items()}


def sealed(
  position: Position, leaves: Mapping[str, Any], checkpoint_format: str, more: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns a record with its checksum.

  Args:
    leaves: from `describe_leaves`.
    more: the other fields, of JSON values.
  """
  fields = {"leaves": dict(leaves), "fingerprint_version": VERSION, **more}
  fields |= {"checkpoint_format": checkpoint_format}
  fields = json.loads(json.dumps(dataclasses.asdict(position) | fields))
  return fields | {"checksum": _checksum(fields)}


def is_parameters_only(record: Mapping[str, Any]) -> bool:
  return ORIGIN in record.get("notes", {})


def format_name(record: dict[str, Any]) -> str:
  # Checkpoints of earlier versions do not say: there was one format.
  return record.get("checkpoint_format", "orbax")


def is_intact(record: object) -> bool:
  """Returns whether what was read is a record as it was written, by its checksum."""
  if not isinstance(record, dict):
    return False
  fields = {key: value for key, value in record.items() if key != "checksum"}
  try:
    return record.get("checksum") == _checksum(fields)
  except RecursionError:  # Nested deeper than what was written ever is.
    return False


def identity_differences(record: dict[str, Any], identity: Mapping[str, object]) -> list[str]:
  """Lists what differs between the run that wrote the record and this one, a line per key."""
  saved, current = record["identity"], json.loads(json.dumps(dict(identity)))
  if "settings" not in record:
    # Written by an earlier version, which compared fewer keys.
    current = {key: value for key, value in current.items() if key in saved}
  # An option that the version which wrote it did not have was off.
  off = json.loads(json.dumps(dict(PLAIN))) | _OFF
  current = {
    key: value
    for key, value in current.items()
    if key in saved or key not in off or value != off[key]
  }
  return _differences(saved, current)


def changed_settings(record: Mapping[str, Any], settings: Mapping[str, object]) -> dict[str, str]:
  """Returns the keys with other values than in the run that wrote the record: key: old → new.

  Keys that only one of the two versions of the program has are not compared.
  """
  saved = {old_names().get(key, key): value for key, value in record.get("settings", {}).items()}
  current = json.loads(json.dumps(dict(settings)))
  return {
    key: f"{key}: {_shown(saved[key])} → {_shown(value)}"
    for key, value in current.items()
    if key in saved and saved[key] != value
  }


def state_differences(record: dict[str, Any], leaves: Mapping[str, Any]) -> list[str]:
  """Lists which of `leaves` (by name, with shape and dtype) the checkpoint has otherwise or not at
  all, and which it has besides; a line per leaf."""
  current = {name: _spelled(_shape(leaf)) for name, leaf in leaves.items()}
  saved = {name: _spelled(leaf) for name, leaf in record["leaves"].items()}
  return _differences(saved, current)


def fingerprint_version(record: Mapping[str, Any]) -> int:
  """Returns the formula of a record's fingerprints. Raises UserError: it is of a newer version."""
  version = record.get("fingerprint_version", 1)
  if version not in VERSIONS:
    raise UserError(
      f"the fingerprints of checkpoint step {record['step']} are of version {version}, and this "
      f"version of maxbatch knows {VERSIONS}; take the version that wrote it, or a newer one"
    )
  return version


def changed_leaves(record: dict[str, Any], arrays: object) -> list[str]:
  """Lists the arrays that are not what was saved. Raises UserError: a newer version wrote them."""
  leaves = record["leaves"]
  result = fingerprints(arrays, fingerprint_version(record))
  return [name for name, sum_ in result.items() if sum_ != leaves[name]["fingerprint"]]


def listed(lines: Sequence[str]) -> str:
  """Indents the lines for a message, the first few of many."""
  more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
  return "\n".join(f"  {line}" for line in [*lines[:_SHOWN], *more])


def _checksum(fields: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _shape(leaf: Any) -> dict[str, Any]:
  return {"shape": list(leaf.shape), "dtype": jnp.dtype(leaf.dtype).name}


def _spelled(leaf: Mapping[str, Any]) -> str:
  return f"{leaf['dtype']}{leaf['shape']}"


def _shown(value: object) -> str:
  return '""' if value == "" else str(value)


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
  """Yields one line per key whose value differs, keys that only one side has included."""
  keys = sorted(saved.keys() | current.keys())
  pairs = {key: (saved.get(key, _ABSENT), current.get(key, _ABSENT)) for key in keys}
  return [
    _difference(key, before, now)
    for key, (before, now) in pairs.items()
    if _decisive(before) != _decisive(now)
  ]


def _decisive(value: Any) -> Any:
  return value[_FINGERPRINT] if isinstance(value, dict) else value


def _difference(key: str, before: Any, now: Any) -> str:
  if not (isinstance(before, dict) and isinstance(now, dict)):
    line = f"{key} is {_decisive(before)} in the checkpoint and {_decisive(now)} now"
    return line + _CONSEQUENCES.get(key, "")
  paths = [
    f"{name} was {_shown(before['paths'].get(name))} and is {_shown(path)}"
    for name, path in now["paths"].items()
    # An earlier version may not have had the key.
    if before["paths"].get(name, path) != path
  ]
  files = _changed_files(before["files"], now["files"])
  how = "; ".join(paths + files) or "the same paths, names and sizes, with other contents"
  return f"{key} is not that of the checkpoint: {how}"


def _changed_files(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
  gone = [f"{name} ({size:,} bytes)" for name, size in before.items() if name not in now]
  new = [f"{name} ({size:,} bytes)" for name, size in now.items() if name not in before]
  other = {name: size for name, size in before.items() if now.get(name, size) != size}
  resized = [f"{name} ({now[name]:,} bytes, was {size:,})" for name, size in other.items()]
  kinds = {"gone": gone, "new": new, "changed": resized}
  return [f"{kind}: {first_of(names, _FILES_SHOWN)}" for kind, names in kinds.items() if names]
