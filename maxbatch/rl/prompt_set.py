"""The prompts of a run: where they come from, and what identifies them."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from maxbatch.config.find import shown
from maxbatch.config.schema import Config, DataConfig
from maxbatch.data import file_datasets
from maxbatch.data.formats.format import Bad, Record, text_of
from maxbatch.data.object_store import is_url
from maxbatch.data.record_files import FORMATS
from maxbatch.data.registry import build_tokenizer
from maxbatch.data.sources import SourceFile, Sources
from maxbatch.data.tokenize import check_unchanged, too_many
from maxbatch.errors import UserError
from maxbatch.rl.prompts import Prompt, Prompts
from maxbatch.rl.tasks import TASKS_VERSION, task_named
from maxbatch.sampling.requests import PromptEncoder


@dataclasses.dataclass(frozen=True)
class PromptData:
  """What a run samples for, and what it is evaluated on."""

  train: Prompts
  validation: Prompts
  num_skipped: int = 0
  """Bad records that were skipped."""


def _all_fit(text: str) -> str:
  """Describes prompts of which none is too long."""
  del text
  return ""


def read_prompts(data: DataConfig, problem: Callable[[str], str] = _all_fit) -> PromptData:
  """Reads the records that the keys of the data name.

  Without files for validation, the last eval_fraction of the records is.

  Args:
    data: the keys.
    problem: why a text cannot be a prompt; empty: it can.

  Raises:
    UserError: a file or column is missing, or more records are bad than max_bad_records.
  """
  columns, of_eval = data.train_data_columns, data.eval_data_columns
  if not columns or not of_eval:
    raise UserError(
      "train_data_columns=[] or eval_data_columns=[]: the first of them is the prompt; for example "
      "train_data_columns=[question,answer] eval_data_columns=[question,answer]"
    )
  find = {"grain": file_datasets.find_grain, "hf": file_datasets.find_hf}.get(data.dataset_type)
  single = dataclasses.replace(
    data, train_data_columns=columns[:1], eval_data_columns=of_eval[:1], weights_column=""
  )
  given = find(single) if find else None
  if given is None:
    raise UserError(
      f"dataset_type={data.dataset_type}: prompts are read from files of records; for example "
      "dataset_type=grain grain_train_files=prompts.jsonl train_data_columns=[question,answer], or "
      "rl_task=format, which needs none"
    )
  results: list[Prompt] = []
  problems = list(_read(given.train, columns, problem, results))
  validation: list[Prompt] = []
  if given.validation:
    problems += _read(given.validation, of_eval, problem, validation)
  elif data.eval_fraction:
    held_out = max(round(len(results) * data.eval_fraction), 1)
    results, validation = results[:-held_out], results[-held_out:]
  if len(problems) > data.max_bad_records:
    raise too_many(len(problems), data.max_bad_records, problems[0])
  if not results:
    raise UserError(f"{given.train.key}={given.train.path}: there is no prompt to train on")
  return PromptData(_numbered(results), _numbered(validation), len(problems))


def _numbered(prompts: list[Prompt]) -> Prompts:
  return Prompts(prompts.__getitem__, len(prompts))


def _read(
  sources: Sources,
  columns: tuple[str, ...],
  problem: Callable[[str], str],
  prompts: list[Prompt],
) -> Iterator[str]:
  """Adds the prompts of the files; what is wrong with records that are skipped."""
  form = FORMATS[sources.format]
  for file in sources.files:
    if is_url(file.path):
      raise UserError(
        f"{sources.key}: {file.path} is in an object store, and prompts are read from a disk; copy "
        "it, and name the copy"
      )
    for records in _records(sources, file, columns):
      prompt = _prompt(records, columns)
      reason = prompt.reason if isinstance(prompt, Bad) else problem(prompt.text)
      if reason:
        where = form.named(sources.key, file, records[0].place)
        yield f"{sources.key}: {file.path}, {where}: {reason}"
      elif isinstance(prompt, Prompt):
        prompts.append(prompt)
    check_unchanged(sources.key, file)


def _records(
  sources: Sources, file: SourceFile, columns: tuple[str, ...]
) -> Iterator[tuple[Record, ...]]:
  """Yields the records of a file, each once for every column: formats read one column at a time."""
  read = FORMATS[sources.format].read
  passes = [read(sources.key, file, column, 0, sys.maxsize) for column in columns]
  yield from zip(*passes, strict=True)


def _prompt(records: tuple[Record, ...], columns: tuple[str, ...]) -> Prompt | Bad:
  """Returns the prompt of a record, or why there is none."""
  text = text_of(records[0])
  if isinstance(text, Bad):
    return text
  if not text:
    return Bad(f"the column {columns[0]} is empty, and is to be the prompt")
  values: dict[str, Any] = {}
  for name, record in zip(columns[1:], records[1:], strict=True):
    if isinstance(record.value, Bad):
      return record.value
    is_bytes = isinstance(record.value, bytes)
    value = text_of(record) if is_bytes else record.value
    if isinstance(value, Bad):
      return value
    values[name] = value.decode() if isinstance(value, bytes) else value
  return Prompt(text.decode(), values)


@dataclasses.dataclass(frozen=True)
class PromptSet:
  """What a run samples for, and what it is evaluated on."""

  train: Prompts
  validation: Sequence[Prompt]
  """The first eval_samples; none: there is no evaluation."""
  fingerprint: str
  """Equal exactly when the prompts to train on are."""
  validation_fingerprint: str
  description: str
  num_skipped: int = 0
  """Bad records that were skipped."""


_LOOKED_AT = 64
"""Prompts of a task that are looked at before a run begins, whether they are too long."""


def prompt_set(config: Config) -> PromptSet:
  """Returns the prompts of the task that rl_task names, or of the data.

  Raises:
    UserError: there are none, or there is no end to those to evaluate on.
  """
  name, wanted, data = config.rl.rl_task, config.run.eval_samples, config.data
  if not name:
    return _of_files(config)
  task, seed = task_named(name), data.data_shuffle_seed
  if wanted == -1:
    raise UserError(
      f"eval_samples=-1: the prompts of rl_task={name} have no end; for example eval_samples=64"
    )
  held_out = [task.prompt(seed, number, "validation") for number in range(wanted)]
  problem, train = too_long(config), task.prompts(seed)
  for prompt in (*held_out, *map(train.at, range(_LOOKED_AT))):
    if said := problem(prompt.text):
      raise UserError(f"rl_task={name}: {said}")
  own = f"{name}-{seed}-{TASKS_VERSION}"
  return PromptSet(
    train=train,
    validation=held_out,
    fingerprint=own,
    validation_fingerprint=f"{own}-{wanted}",
    description=f"rl_task={name}: prompts without end, seed {seed}; {wanted} others to evaluate on",
  )


def too_long(config: Config) -> Callable[[str], str]:
  """Says of a prompt why it is too long; nothing where it is not."""
  places = config.rl.max_prefill_predict_length
  encode = PromptEncoder(config.data, build_tokenizer(config.data))

  def problem(text: str) -> str:
    count = len(encode(text))
    if count <= places:
      return ""
    return (
      f"the prompt {shown(text)} has {count} tokens, and max_prefill_predict_length={places}; for "
      f"example max_prefill_predict_length={count}"
    )

  return problem


def _of_files(config: Config) -> PromptSet:
  result, wanted = read_prompts(config.data, too_long(config)), config.run.eval_samples
  train = [result.train.at(number) for number in range(result.train.count)]
  count = result.validation.count if wanted == -1 else min(wanted, result.validation.count)
  held_out = [result.validation.at(number) for number in range(count)]
  return PromptSet(
    train=result.train,
    validation=held_out,
    fingerprint=_hashed(train),
    validation_fingerprint=_hashed(held_out),
    description=f"{len(train):,} prompts; {len(held_out):,} others to evaluate on",
    num_skipped=result.num_skipped,
  )


def _hashed(prompts: Iterable[Prompt]) -> str:
  digest = hashlib.sha256()
  for prompt in prompts:
    digest.update(json.dumps([prompt.text, dict(prompt.columns)], default=str).encode())
  return digest.hexdigest()[:16]
