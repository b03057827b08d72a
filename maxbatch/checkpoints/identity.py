"""What must be equal for a run to resume from a checkpoint."""

import dataclasses

from maxbatch.config.schema import Config

_FREE_MODEL_KEYS = frozenset(
  {"model_name", "attention", "scan_layers", "remat_policy", "num_vocab_tiling", "dtype"}
)
"""How the model is computed or called; it is the same model either way."""


def identity(config: Config, dataset_fingerprint: str) -> dict[str, object]:
  """Dataset, seeds and model of a run, by configuration key."""
  model = {
    key: value
    for key, value in dataclasses.asdict(config.model).items()
    if key not in _FREE_MODEL_KEYS
  }
  return model | {
    "dataset": dataset_fingerprint,
    "data_shuffle_seed": config.data.data_shuffle_seed,
    "packing": config.data.packing,
    "max_target_length": config.batch.max_target_length,
    "opt_type": config.optimizer.opt_type,
  }
