"""Datasets of dataset_type=grain from files, as a run builds them."""

import dataclasses
from pathlib import Path

import pytest
from support import base

from maxbatch.data.registry import build_dataset
from maxbatch.data.rows import Dataset
from maxbatch.errors import UserError

LENGTH = 4
"""Tokens of a row."""


def build(place: Path, path: Path | str, **keys: object) -> Dataset:
  """The dataset of a file, a folder or a URL, whose cache is in `place`; nothing is held out."""
  given = {
    "dataset_type": "grain",
    "grain_train_files": str(path),
    "dataset_cache_directory": str(place / "cache"),
    "eval_fraction": 0.0,
  }
  return build_dataset(dataclasses.replace(base().data, **(given | keys)), LENGTH)


def refusal(place: Path, path: Path | str, **keys: object) -> str:
  """Why it cannot be built."""
  with pytest.raises(UserError) as caught:
    build(place, path, **keys)
  return str(caught.value)
