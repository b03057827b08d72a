"""The record of the batches a run chose, as a file that people read and a run can follow again.

    batch_schedule:
    - [0, 32, "the first batch"]
    - [6400, 64, "the noise scale is at least 69 samples"]

From so many consumed samples on, a step takes so many samples. The reason may be left out.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence

import yaml

from maxbatch.config.yaml_errors import plain_words
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import write_whole
from maxbatch.run_folder.paths import RunFolder

_KEY = "batch_schedule"
_EXAMPLE = f"""a file that works:
{_KEY}:
- [0, 32, "the first batch"]
- [6400, 64, "a reason for people"]"""
_HEADER = """\
# Written by the run: [samples, batch, reason]. From so many consumed samples on, a step takes so
# many samples. A run that is given these pairs takes the same steps.
"""


@dataclasses.dataclass(frozen=True)
class Change:
  """From `samples` consumed on, a step takes `batch` samples."""

  samples: int
  batch: int
  reason: str = ""


def with_change(changes: Sequence[Change], change: Change) -> tuple[Change, ...]:
  """The record with one more change; what was recorded from its place on is taken back.

  A run that is restored decides anew what it had decided after its checkpoint.
  """
  return (*(earlier for earlier in changes if earlier.samples < change.samples), change)


def kept_until(changes: Sequence[Change], samples: int) -> tuple[Change, ...]:
  """The changes that are in force in a run restored after `samples` samples."""
  return tuple(change for change in changes if change.samples <= samples)


def write_changes(folder: pathlib.Path, changes: Sequence[Change]) -> pathlib.Path:
  """Writes the record; readers see the file before or the file after, never a part.

  Raises:
    OSError: the folder cannot be written.
  """
  file = RunFolder(folder).batch_schedule
  text = "".join(f"- [{_entry(change)}]\n" for change in changes)
  write_whole(file, f"{_HEADER}{_KEY}:\n{text}")
  return file


def _entry(change: Change) -> str:
  sizes = f"{change.samples}, {change.batch}"
  if not change.reason:
    return sizes
  # In double quotes: otherwise PyYAML leaves some line breaks unescaped and reads them as spaces.
  quoted = yaml.safe_dump(change.reason, default_style='"', allow_unicode=True, width=float("inf"))
  return f"{sizes}, {quoted.rstrip()}"


def read_changes(file: pathlib.Path) -> tuple[Change, ...]:
  """The changes of a file, written by a run or by hand.

  Raises:
    UserError: it cannot be read or is no schedule; the message names the entry and the rule.
  """
  rows = _rows(file)
  changes = [_change(file, number, row) for number, row in enumerate(rows, 1)]
  if not changes:
    raise _refusal(file, f"{_KEY} is empty, and a schedule has at least one entry")
  if changes[0].samples != 0:
    raise _refusal(file, f"entry 1 begins at {changes[0].samples} samples, and the first at 0")
  for number, (before, after) in enumerate(itertools.pairwise(changes), 2):
    if after.samples <= before.samples:
      rule = f"must begin after the {before.samples} samples of the entry before it"
      raise _refusal(file, f"entry {number}, {_shown(rows[number - 1])}, {rule}")
  return tuple(changes)


def _rows(file: pathlib.Path) -> list[object]:
  """What stands under the one key."""
  content = _content(file)
  if not isinstance(content, dict) or list(content) != [_KEY]:
    raise _refusal(file, f"the file must have one key, {_KEY}")
  if not isinstance(content[_KEY], list):
    raise _refusal(file, f"{_KEY} must be a list of entries")
  return content[_KEY]


def _content(file: pathlib.Path) -> object:
  try:
    text = file.read_text(encoding="utf-8")
    root = yaml.compose(text, yaml.SafeLoader)
    # Loading would keep the last of two, silently.
    if isinstance(root, yaml.MappingNode) and len(root.value) > 1:
      raise _refusal(file, f"the file must have one key, {_KEY}, and has {len(root.value)}")
    return yaml.safe_load(text)
  except OSError as error:
    raise _refusal(file, f"cannot be read: {error.strerror}") from error
  except yaml.YAMLError as error:
    raise _refusal(file, plain_words(error)) from error
  except (ValueError, RecursionError) as error:
    # Bytes that are no text, a date that is none, a number too long, brackets too deep.
    raise _refusal(file, f"not valid YAML: {error}") from error


def _change(file: pathlib.Path, number: int, row: object) -> Change:
  """One entry, checked by itself."""
  where = f"entry {number}, {_shown(row)},"
  if not isinstance(row, list) or len(row) not in (2, 3):
    raise _refusal(file, f"{where} must be [samples, batch] or [samples, batch, reason]")
  samples, batch, reason = [*row, ""][:3]
  if type(samples) is not int or samples < 0:
    raise _refusal(file, f"{where} must begin with a whole number of samples, 0 or more")
  if type(batch) is not int or batch < 1:
    raise _refusal(file, f"{where} must have a whole number of samples as its batch, 1 or more")
  if not isinstance(reason, str):
    raise _refusal(file, f"{where} must have a text as its reason: put it in quotes")
  return Change(samples, batch, reason)


def _shown(row: object) -> str:
  text = str(row)
  return text if len(text) <= 60 else f"{text[:57]}…"


def _refusal(file: pathlib.Path, problem: str) -> UserError:
  return UserError(f"{file}: {problem.removesuffix('.')}; {_EXAMPLE}")
