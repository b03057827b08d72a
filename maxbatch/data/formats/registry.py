"""Formats of records by name: the values of grain_file_type."""

import re

from maxbatch.data.formats.arrow import ARROW, PARQUET
from maxbatch.data.formats.format import RecordFormat
from maxbatch.data.formats.jsonl import JSONL
from maxbatch.data.formats.tf_records import ARRAY_RECORD, TFRECORD

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
