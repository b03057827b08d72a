"""What must be equal for a run to resume from a checkpoint, and what may have changed."""

from collections.abc import Mapping

from maxbatch.config.load import to_flat_dict
from maxbatch.config.resume import CHANGEABLE, FIXED
from maxbatch.config.schema import Config
from maxbatch.data.dataset import Dataset
from maxbatch.data.stream import STREAM_VERSION


def identity(config: Config, dataset: Dataset) -> dict[str, object]:
  """What a resume may not change: keys, what is in the files, and the order of samples."""
  data = config.data
  # Bytes have no contents that could change, and checkpoints of earlier versions have no such entry.
  has_contents = data.tokenizer_type != "byte"
  tokenizer = {"tokenizer": dataset.tokenizer_version} if has_contents else {}
  return (
    fixed_keys(config)
    | tokenizer
    | {
      "stream_version": STREAM_VERSION,
      "dataset": _contents(
        dataset.fingerprint, {"dataset_path": data.dataset_path}, dataset.train_files
      ),
      "validation": _contents(
        dataset.validation_fingerprint,
        {"dataset_path": data.dataset_path, "eval_dataset_path": data.eval_dataset_path},
        dataset.validation_files,
      ),
    }
  )


def fixed_keys(config: Config) -> dict[str, object]:
  """The keys that a resume may not change, as values that JSON holds."""
  return {key: value for key, value in to_flat_dict(config).items() if key in FIXED}


def settings(config: Config) -> dict[str, object]:
  """The keys that it may, likewise."""
  return {key: value for key, value in to_flat_dict(config).items() if key in CHANGEABLE}


def _contents(fingerprint: str, paths: Mapping[str, str], files: Mapping[str, int]) -> object:
  """A part of a dataset: equal if its fingerprint is; the rest says what has changed otherwise."""
  return {"fingerprint": fingerprint, "paths": dict(paths), "files": dict(files)}
