"""Datasets by name. A new one is a file with a `build` like these, a line here, and a test."""

from collections.abc import Callable

from maxbatch.config.schema import DataConfig
from maxbatch.data import synthetic, text
from maxbatch.data.dataset import Dataset

DATASETS: dict[str, Callable[[DataConfig, int], Dataset]] = {
  "text": text.build,
  "synthetic": synthetic.build,
}


def build_dataset(data: DataConfig, max_target_length: int) -> Dataset:
  """The dataset that `dataset_type` names, in rows of `max_target_length` tokens.

  Raises:
    UserError: its input cannot be used; names it.
  """
  return DATASETS[data.dataset_type](data, max_target_length)
