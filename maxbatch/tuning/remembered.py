"""A choice remembered in a file, under everything it depends on: with anything changed, forgotten.

One JSON file per key, to be read by people too: what the choice depends on, the choice, the probes
it rests on, and when it was made.
"""

import dataclasses
import datetime
import hashlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.run_folder.atomic import write_whole

_PARTS = ("depends_on", "choice", "probes", "when")
_KEY = "micro_batch_size"
"""What is chosen, unless said otherwise: the first part of the file's name."""


@dataclasses.dataclass(frozen=True)
class Remembered:
  """What a file says."""

  choice: dict[str, Any]
  probes: list[dict[str, Any]]
  when: str
  """UTC, as in ISO 8601."""


def file_of(folder: pathlib.Path, depends_on: Mapping[str, Any], key: str = _KEY) -> pathlib.Path:
  """The file of the choice that depends on these things, whether it exists or not."""
  digest = hashlib.sha256(_canonical(depends_on).encode()).hexdigest()[:16]
  return folder / f"{key}-{digest}.json"


def recall(
  folder: pathlib.Path, depends_on: Mapping[str, Any], key: str = _KEY
) -> tuple[Remembered | None, str | None]:
  """The choice made under the same things, if there is one; else why a file there is of no use.

  Nothing there is (None, None): no reason is needed for what was never remembered.
  """
  file = file_of(folder, depends_on, key)
  try:
    content = json.loads(file.read_text(encoding="utf-8"))
  except FileNotFoundError:
    return None, None
  except OSError as error:
    return None, f"{file} cannot be read: {error.strerror}"
  except ValueError:
    return None, f"{file} is no JSON"
  problem = _problem(content, depends_on)
  if problem:
    return None, f"{file} {problem}"
  return Remembered(content["choice"], content["probes"], content["when"]), None


def remember(
  folder: pathlib.Path,
  depends_on: Mapping[str, Any],
  choice: Mapping[str, Any],
  probes: Sequence[Mapping[str, Any]],
  key: str = _KEY,
) -> pathlib.Path:
  """Writes the choice; readers see the file before or the file after, never a part.

  Raises:
    OSError: the folder cannot be written.
  """
  file = file_of(folder, depends_on, key)
  when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  content = dict(zip(_PARTS, (_plain(depends_on), choice, list(probes), when), strict=True))
  write_whole(file, json.dumps(content, indent=2, default=str) + "\n")
  return file


def forget(folder: pathlib.Path, depends_on: Mapping[str, Any], key: str = _KEY) -> bool:
  """Deletes the choice; whether there was one.

  Raises:
    OSError: the file cannot be deleted.
  """
  file = file_of(folder, depends_on, key)
  there = file.exists()
  file.unlink(missing_ok=True)
  return there


def _problem(content: Any, depends_on: Mapping[str, Any]) -> str | None:
  """What is wrong with a file's content."""
  if not isinstance(content, dict):
    return "is not a remembered choice"
  missing = [part for part in _PARTS if part not in content]
  if missing:
    return f"lacks {', '.join(missing)}"
  kinds = (dict, dict, list, str)
  for part, kind in zip(_PARTS, kinds, strict=True):
    if not isinstance(content[part], kind):
      return f"has a damaged {part}"
  # The name holds only the key's digest: an edited or a misplaced file would pass for another's.
  return None if content["depends_on"] == _plain(depends_on) else "depends on something else"


def _canonical(depends_on: Mapping[str, Any]) -> str:
  """The same text for the same things, whatever their order."""
  return json.dumps(depends_on, sort_keys=True, default=str)


def _plain(depends_on: Mapping[str, Any]) -> dict[str, Any]:
  """As it is read back from a file."""
  return json.loads(_canonical(depends_on))
