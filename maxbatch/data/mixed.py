"""A mixture as a dataset: each source built as a dataset of its own, then joined."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping

from maxbatch.config.schema import DataConfig
from maxbatch.data.dataset import Dataset, SourceRows
from maxbatch.data.mixture import VERSION, JoinedRows, MixedRows, Mixture, described
from maxbatch.data.mixture_keys import MixedPaths, has_one_validation, path_of


def build(
  data: DataConfig, mixed: MixedPaths, build_one: Callable[[DataConfig], Dataset]
) -> Dataset:
  """The mixture of the datasets that `build_one` makes of each source's path.

  Validation is by source, unless a key names one set for all.

  Raises:
    UserError: a source cannot be used; names it.
  """
  datasets: dict[str, Dataset] = {}
  for name, path in zip(mixed.mixture.names, mixed.paths, strict=True):
    with mixed.naming(name):
      datasets[name] = build_one(alone(data, path))
  train = MixedRows(tuple(each.train for each in datasets.values()), mixed.mixture)
  # What a source says of validation is the same for all where one set is given.
  dataset = dataclasses.replace(
    next(iter(datasets.values())),
    train=train,
    fingerprint=_fingerprint(mixed.mixture, datasets),
    description=_description(train, datasets),
    num_skipped_records=sum(each.num_skipped_records for each in datasets.values()),
    train_files=_files({name: each.train_files for name, each in datasets.items()}),
  )
  return dataset if has_one_validation(data) else _validated(dataset, mixed.mixture, datasets)


def alone(data: DataConfig, path: str) -> DataConfig:
  """The keys of one source, which is no mixture itself."""
  key, _ = path_of(data)
  none = {"dataset_mixture": (), "mixture_schedule": (), "grain_train_mixture_config_path": ""}
  return dataclasses.replace(data, **none, **{key: path})


def _validated(dataset: Dataset, mixture: Mixture, datasets: Mapping[str, Dataset]) -> Dataset:
  """The dataset with the validation rows of each source that has any."""
  shares = dict(zip(mixture.names, mixture.phases[-1].shares, strict=True))
  held_out = {name: each.validation for name, each in datasets.items() if each.validation}
  total = sum(shares[name] for name in held_out)
  # The loss of the whole is that of the last phase's mixture, from its sources alone.
  parts = tuple(
    SourceRows(name, float(shares[name] / total) if total else 1 / len(held_out), rows)
    for name, rows in held_out.items()
  )
  return dataclasses.replace(
    dataset,
    validation=JoinedRows(tuple(held_out.values())) if held_out else None,
    validation_by_source=parts,
    validation_fingerprint=_digest(
      {name: each.validation_fingerprint for name, each in datasets.items()}
    ),
    validation_files=_files({name: each.validation_files for name, each in datasets.items()}),
  )


def _fingerprint(mixture: Mixture, datasets: Mapping[str, Dataset]) -> str:
  """Of the sources, their order, which decides on their seeds, and their weights."""
  phases = [(phase.first_sample, phase.weights) for phase in mixture.phases]
  return _digest([VERSION, phases, [each.fingerprint for each in datasets.values()]])


def _digest(content: object) -> str:
  return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()


def _files(files: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
  """The files of all sources, each under its source's name."""
  return {f"{name}: {file}": size for name, each in files.items() for file, size in each.items()}


def _description(train: MixedRows, datasets: Mapping[str, Dataset]) -> str:
  lines = described(train.mixture, [len(rows) for rows in train.sources])
  for name, dataset in datasets.items():
    first, *more = dataset.description.splitlines()
    lines += [f"{name}: {first}", *(f"  {line}" for line in more)]
  return "\n".join(lines)
