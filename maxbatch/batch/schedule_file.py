"""batch_schedule.yml: the batches that a run chose, readable, and followed by batch_schedule=file.

    batch_schedule:
    - [0, 32, "the first batch"]
    - [6400, 64, "the noise scale is at least 69 samples"]

An entry is [samples, batch, reason]: the first step that begins at or after `samples` consumed
samples takes `batch` samples. The reason is optional.
"""

import dataclasses
import itertools
import pathlib
import reprlib
from collections.abc import Sequence

import yaml

from maxbatch.config.find import plain_words
from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import write_whole
from maxbatch.run_folder.paths import RunFolder

_KEY = "batch_schedule"
_EXAMPLE = f"""a file that works:
{_KEY}:
- [0, 32, "the first batch"]
- [6400, 64, "an optional reason"]"""
_HEADER = """\
# Written by the run: [samples, batch, reason]. From this number of consumed samples on, a step
# takes `batch` samples. To repeat the same steps: batch_schedule=file batch_schedule_file=THIS_FILE
"""


@dataclasses.dataclass(frozen=True)
class Change:
  """From `samples` consumed on, a step takes `batch` samples."""

  samples: int
  batch: int
  reason: str = ""


def with_change(changes: Sequence[Change], change: Change) -> tuple[Change, ...]:
  """Returns the changes with one more; those at or after its position are dropped.

  A restored run repeats the decisions that it had made after its checkpoint.
  """
  return (*(earlier for earlier in changes if earlier.samples < change.samples), change)


def changes_until(changes: Sequence[Change], samples: int) -> tuple[Change, ...]:
  """Returns the changes up to `samples` consumed samples, for a run that is restored there."""
  return tuple(change for change in changes if change.samples <= samples)


def write_changes(folder: pathlib.Path, changes: Sequence[Change]) -> pathlib.Path:
  """Writes the changes to `folder` atomically: a reader sees the old file or the new one.

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
  """Returns the changes in a file that a run or a person wrote.

  Raises:
    UserError: the file cannot be read or is no schedule; the message names the entry and the rule.
  """
  rows = _rows(file)
  changes = [_change(file, number, row) for number, row in enumerate(rows, 1)]
  if not changes:
    raise _refusal(file, f"{_KEY} is empty and must have at least one entry")
  if changes[0].samples != 0:
    raise _refusal(file, f"entry 1 begins at {changes[0].samples} samples and must begin at 0")
  for number, (before, after) in enumerate(itertools.pairwise(changes), 2):
    if after.samples <= before.samples:
      rule = f"must begin after the {before.samples} samples of the entry before it"
      raise _refusal(file, f"entry {number}, {_shown(rows[number - 1])}, {rule}")
  return tuple(changes)


def _rows(file: pathlib.Path) -> list[object]:
  """Returns the unchecked entries under the key batch_schedule."""
  content = _content(file)
  if not isinstance(content, dict) or list(content) != [_KEY]:
    raise _refusal(file, f"the file must have one key, {_KEY}")
  if not isinstance(content[_KEY], list):
    raise _refusal(file, f"{_KEY} must be a list of entries")
  return content[_KEY]


def _content(file: pathlib.Path) -> object:
  try:
    if file.is_fifo():
      raise _refusal(file, "this is a pipe, not a file")
    text = file.read_text(encoding="utf-8")
    root = yaml.compose(text, yaml.SafeLoader)
    # safe_load would silently keep the last of two equal keys.
    if isinstance(root, yaml.MappingNode) and len(root.value) > 1:
      raise _refusal(file, f"the file must have one key, {_KEY}, and has {len(root.value)}")
    return yaml.safe_load(text)
  except UserError:
    raise
  except OSError as error:
    raise _refusal(file, f"cannot be read: {error.strerror}") from error
  except yaml.YAMLError as error:
    raise _refusal(file, plain_words(error)) from error
  except (ValueError, RecursionError) as error:
    # Not UTF-8, an impossible date, a number with too many digits, or brackets nested too deep.
    raise _refusal(file, f"not valid YAML: {error}") from error


def _change(file: pathlib.Path, number: int, row: object) -> Change:
  """Returns one entry, checked on its own."""
  where = f"entry {number}, {_shown(row)},"
  if not isinstance(row, list) or len(row) not in (2, 3):
    raise _refusal(file, f"{where} must be [samples, batch] or [samples, batch, reason]")
  samples, batch, reason = [*row, ""][:3]
  if type(samples) is not int or samples < 0:
    raise _refusal(file, f"{where} must begin with a whole number of samples, 0 or more")
  if type(batch) is not int or batch < 1:
    raise _refusal(file, f"{where} must have a whole number of samples as its batch, 1 or more")
  if not isinstance(reason, str):
    raise _refusal(file, f"{where} must have a string as its reason; put it in quotes")
  return Change(samples, batch, reason)


def _shown(row: object) -> str:
  # Not str(row): that of YAML's aliases of aliases has no end.
  text = reprlib.repr(row)
  return text if len(text) <= 60 else f"{text[:57]}…"


def _refusal(file: pathlib.Path, problem: str) -> UserError:
  return UserError(f"{file}: {problem.removesuffix('.')}; {_EXAMPLE}")
