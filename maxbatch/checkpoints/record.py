"""What is written beside a checkpoint's arrays, and how two of these records are compared.

A record is a JSON object: step, samples, plan, identity, notes of what steers the run, the format
of the arrays, and every leaf's shape, dtype and fingerprint, under one checksum. Differences
are reported one per line.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from maxbatch.batch.plan import Position
from maxbatch.checkpoints.fingerprint import fingerprints, named_leaves

_ABSENT = "(absent)"
_SHOWN = 8


def make_record(
  state: object,
  position: Position,
  plan: Mapping[str, object],
  identity: Mapping[str, object],
  notes: Mapping[str, object],
  checkpoint_format: str,
) -> dict[str, Any]:
  """The record of `state`, sealed. Waits until the state is computed.

  Raises:
    TypeError: `plan`, `identity` or `notes` holds something that is not JSON.
  """
  leaves = named_leaves(state)
  prints = fingerprints(state)
  described = {name: _shape(leaf) | {"fingerprint": prints[name]} for name, leaf in leaves.items()}
  fields = {"identity": dict(identity), "plan": dict(plan), "notes": dict(notes)}
  fields |= {"leaves": described, "checkpoint_format": checkpoint_format}
  fields = json.loads(json.dumps(dataclasses.asdict(position) | fields))
  return fields | {"checksum": _checksum(fields)}


def format_name(record: dict[str, Any]) -> str:
  """The checkpoint_format that the arrays were written with."""
  # Checkpoints of earlier versions do not say: there was one format.
  return record.get("checkpoint_format", "orbax")


def is_intact(record: object) -> bool:
  """Whether what was read is a record as it was written, by its checksum."""
  if not isinstance(record, dict):
    return False
  fields = {key: value for key, value in record.items() if key != "checksum"}
  try:
    return record.get("checksum") == _checksum(fields)
  except RecursionError:  # Nested deeper than what was written ever is.
    return False


def identity_differences(record: dict[str, Any], identity: Mapping[str, object]) -> list[str]:
  """What differs between the run that wrote the record and this one, a line per key."""
  return _differences(record["identity"], json.loads(json.dumps(dict(identity))))


def state_differences(record: dict[str, Any], leaves: Mapping[str, Any]) -> list[str]:
  """Which of `leaves` (by name, with shape and dtype) the checkpoint has otherwise or not at all,
  and which it has besides; a line per leaf."""
  current = {name: _spelled(_shape(leaf)) for name, leaf in leaves.items()}
  saved = {name: _spelled(leaf) for name, leaf in record["leaves"].items()}
  return _differences(saved, current)


def changed_leaves(record: dict[str, Any], arrays: object) -> list[str]:
  """The names of the arrays that are not what was saved, by their fingerprints."""
  leaves = record["leaves"]
  return [
    name for name, sum_ in fingerprints(arrays).items() if sum_ != leaves[name]["fingerprint"]
  ]


def listed(lines: list[str]) -> str:
  """The lines indented for a message, the first few of many."""
  more = len(lines) - _SHOWN
  shown = [f"  {line}" for line in lines[:_SHOWN]]
  return "\n".join([*shown, f"  and {more} more"] if more > 0 else shown)


def _checksum(fields: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _shape(leaf: Any) -> dict[str, Any]:
  return {"shape": list(leaf.shape), "dtype": jnp.dtype(leaf.dtype).name}


def _spelled(leaf: Mapping[str, Any]) -> str:
  return f"{leaf['dtype']}{leaf['shape']}"


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
  """One line per key whose value differs, keys that only one side has included."""
  return [
    f"{key} is {saved.get(key, _ABSENT)} in the checkpoint and {current.get(key, _ABSENT)} now"
    for key in sorted(saved.keys() | current.keys())
    if saved.get(key, _ABSENT) != current.get(key, _ABSENT)
  ]
