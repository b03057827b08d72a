"""What must be equal for a run to resume from a checkpoint, and what may have changed."""

from collections.abc import Mapping

from maxbatch.config.declare import CHANGEABLE, FIXED, Resume
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config, resume_classes
from maxbatch.data.dataset import Dataset
from maxbatch.data.stream import STREAM_VERSION

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
  """What a resume may not change: keys, what is in the files, and the order of samples."""
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
  """The keys that a resume may not change, as values that JSON holds."""
  return _of_class(config, FIXED)


def settings(config: Config) -> dict[str, object]:
  """The keys that it may, likewise."""
  return _of_class(config, CHANGEABLE)


def _of_class(config: Config, resume: Resume) -> dict[str, object]:
  classes = resume_classes(config)
  return {key: value for key, value in to_flat_dict(config).items() if classes[key] == resume}


def _contents(fingerprint: str, paths: Mapping[str, object], files: Mapping[str, int]) -> object:
  """A part of a dataset: equal if its fingerprint is; the rest says what has changed otherwise."""
  return {"fingerprint": fingerprint, "paths": dict(paths), "files": dict(files)}
