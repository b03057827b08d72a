"""Which files of records a path means, of which format they are, and whether all are there.

Formats of records by name: the values of grain_file_type.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from maxbatch.config.find import did_you_mean, shown
from maxbatch.data.formats.arrow import ARROW, PARQUET
from maxbatch.data.formats.format import JSONL, RecordFormat
from maxbatch.data.formats.tf_records import ARRAY_RECORD, TFRECORD
from maxbatch.data.sources import SourceFile, Sources, Wanted, listed
from maxbatch.errors import UserError, first_of

FORMATS: dict[str, RecordFormat] = {
  "arrayrecord": ARRAY_RECORD,
  "parquet": PARQUET,
  "tfrecord": TFRECORD,
  "jsonl": JSONL,
  "arrow": ARROW,
}

_ABOUT_THE_DATA = {"dataset_info.json", "dataset_dict.json", "state.json", "dataset_infos.json"}
"""Files of a Hugging Face dataset that hold no records."""


def format_of(name: str) -> str:
  """Returns the format that a file's name implies; empty if none."""
  lower = name.lower().rpartition("/")[2]
  if lower in _ABOUT_THE_DATA:
    return ""
  result = (name for name, each in FORMATS.items() if re.search(each.suffix, lower))
  return next(result, "")


AUTO = "auto"
_NUMBERED = re.compile(r"^(.*?)(\d+)-of-(\d+)(.*)$")
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Columns:
  """What of a record is the document, and what it holds."""

  key: str
  names: tuple[str, ...]
  tokenize: bool
  weights: str = ""
  """What says which tokens count; empty: all do."""

  def of(self, sources: Sources, form: str) -> Sources:
    """Returns the sources as files of that format, of which these columns are read."""
    return dataclasses.replace(
      sources,
      format=form,
      column=self.names[0],
      is_tokenized=not self.tokenize,
      weights_column=self.weights,
    )


def resolve_records(key: str, path: str, columns: Columns, form: str, form_key: str) -> Sources:
  """Finds the files of records that `path`, the value of the configuration key `key`, stands for.

  Args:
    form: the format's name, or "auto": as the names of the files say.
    form_key: the key that gives it, for errors.

  Raises UserError: nothing is there, several formats are mixed, or a numbered file is missing.
  """
  if len(columns.names) != 1 or not columns.names[0]:
    raise UserError(
      f"{columns.key}={list(columns.names)}: a document is one column; for example "
      f"{columns.key}=[text]"
    )
  if form not in (AUTO, *FORMATS):
    raise UserError(
      f"{form_key}={shown(form)}: there is no such format.{did_you_mean(form, FORMATS)} "
      f"Known: {AUTO}, {', '.join(FORMATS)}."
    )
  _refuse_mixture(key, path)
  result = listed(key, path, _wanted(form))
  if form == AUTO:
    form = _format(result, form_key)
  _check_all_are_there(key, result.files)
  return columns.of(result, form)


def _wanted(form: str) -> Wanted:
  what = "files of records" if form == AUTO else f"{form} files"

  def reason_to_skip(name: str) -> str:
    own = format_of(name)
    if own and form in (AUTO, own):
      return ""
    return Path(name).suffix or "without a suffix"

  def offer(key: str, path: str, others: Sequence[Path]) -> str:
    example = next((file for file in others if file.is_file()), None)
    if example is None or form == AUTO:
      return f"what is read by name is {', '.join(FORMATS)}, other names by a glob and the format"
    return (
      f"if they are {form}, name them with a glob: {key}='{path.rstrip('/')}/*{example.suffix}'"
    )

  return Wanted(what, reason_to_skip, "'data/*.parquet'", offer)


def _refuse_mixture(key: str, path: str) -> None:
  """Refuses what MaxText's keys may also hold."""
  if ";" in path or re.search(r",\d*\.?\d+$", path):
    raise UserError(
      f"{key}={path}: a mixture is two or more paths with weights in grain_train_files, or in "
      f"dataset_mixture; here give one file, folder or glob, for example "
      f"{key}={re.split('[;,]', path)[0]}"
    )


def _format(result: Sources, form_key: str) -> str:
  examples: dict[str, list[str]] = collections.defaultdict(list)
  for file in result.files:
    examples[format_of(file.name)].append(file.name)
  unknown = examples.pop("", [])
  if unknown:
    raise UserError(
      f"{result.key}={result.path}: the name of {unknown[0]} does not say its format; give it, for "
      f"example {form_key}=parquet (or {', '.join(name for name in FORMATS if name != 'parquet')})"
    )
  if len(examples) > 1:
    mixed = sorted(examples.items())
    seen = ", ".join(f"{len(names)} {form} ({names[0]})" for form, names in mixed)
    raise UserError(
      f"{result.key}={result.path} mixes formats: {seen}; give a glob that names one of them, or "
      f"{form_key}={min(examples)}"
    )
  return next(iter(examples))


def _check_all_are_there(key: str, files: Sequence[SourceFile]) -> None:
  """Refuses a set of files numbered 00000-of-00004 and so on of which one is missing."""
  there: dict[tuple[str, str, str], set[int]] = collections.defaultdict(set)
  digits: dict[tuple[str, str, str], int] = {}
  for file in files:
    if match := _NUMBERED.match(file.name):
      before, number, count, after = match.groups()
      there[before, count, after].add(int(number))
      digits[before, count, after] = len(number)
  for (before, count, after), numbers in there.items():
    first = 0 if 0 in numbers else 1  # Some count from 1.
    missing = sorted(set(range(first, first + int(count))) - numbers)
    if missing and len(numbers) > 1:
      width = digits[before, count, after]
      names = [f"{before}{number:0{width}}-of-{count}{after}" for number in missing]
      raise UserError(
        f"{key}: {len(missing)} of {count} numbered files are missing: {first_of(names, _SHOWN)}; fetch them, or "
        "name the files that are meant one by one, for example in a folder of links"
      )
