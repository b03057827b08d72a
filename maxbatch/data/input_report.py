"""The input function report: what is known of a run's data before a row of it is read.

Nothing is made. What would hold up a run, or leave hosts without work, is named.
"""

import contextlib
import dataclasses
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxbatch.batch.host_loads import HostLoad, host_loads
from maxbatch.command_line.screen import file_size, section
from maxbatch.config.schema import DataConfig
from maxbatch.core.keys import counted
from maxbatch.core.plan import BatchPlan
from maxbatch.data.corpus import recipe_of, with_validation
from maxbatch.data.document_rows import layout_of
from maxbatch.data.file_datasets import Given, split
from maxbatch.data.mixed import alone, mixed_paths
from maxbatch.data.object_store import is_url
from maxbatch.data.registry import FILES, build_tokenizer
from maxbatch.data.sources import Document, Sources
from maxbatch.data.token_cache import SHARD_BYTES, can_be_divided, shard_jobs
from maxbatch.data.token_shard import ShardJob, open_shard
from maxbatch.data.tokenize import Recipe, tokenize
from maxbatch.data.tokenizer import Tokenizer, token_dtype
from maxbatch.run_folder.paths import token_caches

_KEPT_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class TokenizeRate:
  """Of one core."""

  tokens_per_second: float
  text_bytes_per_second: float
  """Rate of the text itself, decompressed and without the format around it."""


def tokenize_rate(
  recipe: Recipe,
  documents: Sequence[Document],
  seconds: float,
  clock: Callable[[], float] = time.perf_counter,
) -> TokenizeRate:
  """Tokenizes documents for `seconds`, or all. Raises UserError: names one that cannot be read."""
  began = clock()
  sink = _Sink(lambda: clock() - began > seconds)
  with contextlib.suppress(_EnoughError):
    tokenize(recipe, documents, sink, io.BytesIO(), lambda _: None, io.BytesIO())
  spent = max(clock() - began, 1e-9)
  dtype = token_dtype(recipe.tokenizer)
  sample = np.frombuffer(sink.kept[: len(sink.kept) // dtype.itemsize * dtype.itemsize], dtype)
  text = recipe.tokenizer.decode(sample).encode(errors="replace")
  tokens_per_second = sink.num_bytes / dtype.itemsize / spent
  return TokenizeRate(tokens_per_second, tokens_per_second * len(text) / max(sample.size, 1))


class _EnoughError(Exception):
  """The time is over."""


class _Sink(io.BytesIO):
  def __init__(self, is_over: Callable[[], bool]):
    super().__init__()
    self._is_over = is_over
    self.num_bytes, self.kept = 0, b""

  def write(self, content, /) -> int:
    view = memoryview(content).cast("B")
    self.num_bytes += view.nbytes
    self.kept += bytes(view[: _KEPT_BYTES - len(self.kept)])
    if self._is_over():
      raise _EnoughError
    return view.nbytes


_SAMPLE_SECONDS = 0.3
_SLOW_BYTES = 2**20
"""Less than this is tokenized before anyone could read how long it takes."""
_PACKING = {
  "concat_then_split": "documents one after the other, divided where a row ends",
  "first_fit": "whole documents, first fit",
  "best_fit": "whole documents, best fit",
}


@dataclasses.dataclass(frozen=True)
class SourceReport:
  """The files of one source, and how much of them the token cache has."""

  name: str
  """In a mixture; empty where there is one source alone."""
  path: str
  format: str
  num_files: int
  size_bytes: int
  largest_undivided: tuple[str, int]
  """The largest file of which no part can be read alone: name and bytes, if it matters."""
  num_shards: int
  """Shards of the training token cache: the number of processes that can tokenize at once."""
  cold_bytes: int
  """Bytes of files that are tokenized before the first step; for training and validation."""
  num_tokens: int
  """For training, as far as they are in the cache."""
  num_documents: int
  rate: TokenizeRate | None
  """Rate of one core; None where it was not measured."""

  @property
  def cold_seconds(self) -> float:
    """About how long this machine tokenizes before the first step; 0 where that is not known."""
    if self.rate is None or not self.rate.text_bytes_per_second:
      return 0.0
    cores = min(os.cpu_count() or 1, self.num_shards)
    return self.cold_bytes / self.rate.text_bytes_per_second / cores


@dataclasses.dataclass(frozen=True)
class InputReport:
  """The data of a run, who loads them, and what is missing."""

  dataset_type: str
  tokenizer: str
  rows: str
  sources: tuple[SourceReport, ...]
  """Empty where the dataset is not made of files, or these are not known."""
  loads: tuple[HostLoad, ...]
  samples_per_load: int
  missing: tuple[str, ...]

  def as_dict(self) -> dict[str, Any]:
    result = dataclasses.asdict(self)
    result["sources"] = [
      dataclasses.asdict(one) | {"cold_seconds": one.cold_seconds} for one in self.sources
    ]
    return result

  @property
  def headline(self) -> str:
    """The data in one line."""
    if not self.sources:
      return f"dataset_type={self.dataset_type}: its files, if any, are not known beforehand"
    cold = sum(one.cold_bytes for one in self.sources)
    state = f"{file_size(cold)} to tokenize first" if cold else "tokenized already"
    num_files = sum(one.num_files for one in self.sources)
    return (
      f"{counted(num_files, 'file')}, {file_size(sum(s.size_bytes for s in self.sources))}, {state}"
    )

  def lines(self) -> list[str]:
    lines = [_source_line(one) for one in self.sources]
    lines += [f"tokens: {self.tokenizer}", f"rows: {self.rows}"]
    lines += [f"loads: {line}" for line in map(_load_line, self.loads)]
    lines.append(f"a load is {counted(self.samples_per_load, 'sample')} of all hosts together")
    return lines + [f"missing: {line}" for line in self.missing]

  def __str__(self) -> str:
    return section("Input function", [self.headline, *self.lines()])


def input_report(
  data: DataConfig, plan: BatchPlan, num_hosts: int, *, measure: bool = True
) -> InputReport:
  """Looks at the files that a run would read.

  Args:
    measure: tokenize for a moment what is not in the cache, to tell how long all of it takes.

  Raises UserError: a file is not there, or cannot be used.
  """
  tokenizer = build_tokenizer(data)
  sources = tuple(
    _source(one, tokenizer, name, given, measure=measure) for name, one, given in given_files(data)
  )
  loads = tuple(host_loads(plan, num_hosts))
  return InputReport(
    dataset_type=data.dataset_type,
    tokenizer=f"{data.tokenizer_type}, vocabulary of {tokenizer.vocab_size:,}",
    rows=_rows(data, plan.max_target_length),
    sources=sources,
    loads=loads,
    samples_per_load=plan.global_batch_to_load,
    missing=tuple(_missing(sources, loads)),
  )


def given_files(data: DataConfig) -> Iterator[tuple[str, DataConfig, Given]]:
  """Yields every source of the data: its name, its keys and its files."""
  find = FILES.get(data.dataset_type)
  if find is None:
    return
  mixture = mixed_paths(data)
  if mixture is None:
    if (given := find(data)) is not None:
      yield "", data, given
    return
  for name, path in zip(mixture.mixture.names, mixture.paths, strict=True):
    one = alone(data, path)
    with mixture.naming(name):
      given = find(one)
    if given is not None:
      yield name, one, given


def shards_of(
  data: DataConfig, tokenizer: Tokenizer, given: Given
) -> tuple[list[ShardJob], list[ShardJob]]:
  """Returns the token cache's shards for training, and for validation; see `shard_jobs`."""
  folder = token_caches(data.dataset_cache_directory)
  sources, validation = given.train, given.validation
  parts = with_validation(sources, validation) if validation else split(sources, data.eval_fraction)
  train = shard_jobs(parts.train, folder, "train", recipe_of(data, tokenizer, sources))
  if not parts.validation:
    return train, []
  recipe = recipe_of(data, tokenizer, validation or sources)
  return train, shard_jobs(parts.validation, folder, "validation", recipe)


def _source(
  data: DataConfig, tokenizer: Tokenizer, name: str, given: Given, *, measure: bool
) -> SourceReport:
  train, validation = shards_of(data, tokenizer, given)
  jobs = [*train, *validation]
  shards = {job.path: open_shard(job.path, check=False, warn=False) for job in jobs}
  cold = [job for job in [*train, *validation] if shards[job.path] is None]
  cold_bytes = sum(job.size_bytes for job in cold)
  cached = [shard for job in train if (shard := shards[job.path]) is not None]
  rate = None
  # Objects of a store would be copied as a whole first.
  if measure and cold_bytes > _SLOW_BYTES and not is_url(given.train.path):
    documents = [document for job in cold for document in job.documents]
    rate = tokenize_rate(recipe_of(data, tokenizer, given.train), documents, _SAMPLE_SECONDS)
  return SourceReport(
    name=name,
    path=given.train.path,
    format=given.train.format,
    num_files=len(given.train.files),
    size_bytes=given.train.size_bytes,
    largest_undivided=_largest_undivided(given.train),
    num_shards=len(train),
    cold_bytes=cold_bytes,
    num_tokens=sum(shard.num_tokens for shard in cached),
    num_documents=sum(shard.num_documents for shard in cached),
    rate=rate,
  )


def _largest_undivided(sources: Sources) -> tuple[str, int]:
  is_divisible = can_be_divided(sources)
  sizes = {file.name: file.size_bytes for file in sources.files if not is_divisible(file)}
  largest = max(sizes, key=sizes.__getitem__, default="")
  return (largest, sizes[largest]) if largest and sizes[largest] > SHARD_BYTES else ("", 0)


def _rows(data: DataConfig, length: int) -> str:
  layout = layout_of(data, length)
  what = _PACKING[data.grain_packing_type] if data.packing else "one document a row"
  cut = ", the beginning of longer ones alone" if layout and layout.truncate else ""
  return f"{what}{cut}, of {length:,} tokens; shuffled over all files, differently in every epoch"


def _missing(sources: Sequence[SourceReport], loads: Sequence[HostLoad]) -> Iterator[str]:
  """Yields what would hold up a run or leave hosts without work, and what helps."""
  loading = sum(load.num_hosts for load in loads if load.samples)
  # A factor above 1 lets another number of hosts load than the example names.
  no_factor = "" if all(load.samples for load in loads) else "expansion_factor_real_data=-1 "
  for one in sources:
    of_source = f"{one.name}: " if one.name else ""
    if one.cold_bytes:
      yield of_source + _cold(one)
    file, size = one.largest_undivided
    if file and one.cold_bytes:
      pieces = -(-size // SHARD_BYTES)
      yield (
        f"{of_source}no part of {file} ({file_size(size)}) can be read alone, so that one process "
        f"tokenizes it while others wait; for example {pieces:,} files of {file_size(SHARD_BYTES)}"
      )
    if one.num_shards < loading:
      yield (
        f"{of_source}fewer shards ({one.num_shards:,}) than loading hosts ({loading:,}), so that "
        f"hosts read the same file; for example {no_factor}"
        f"loading_hosts={list(range(one.num_shards))}"
      )


def _cold(one: SourceReport) -> str:
  what = f"the token cache is cold: {file_size(one.cold_bytes)} are tokenized before the first step"
  if one.rate is None or not one.cold_seconds:
    return what
  least = "at least" if one.format in ("parquet", "arrow") or one.largest_undivided[0] else "about"
  cores = counted(min(os.cpu_count() or 1, one.num_shards), "core")
  return (
    f"{what}, {least} {one.cold_seconds:,.0f} s on {cores} of this machine "
    f"({one.rate.text_bytes_per_second / 1e6:.3g} MB/s each, measured)"
  )


def _source_line(one: SourceReport) -> str:
  name = f"{one.name}: " if one.name else ""
  cached = ""
  if one.num_tokens:
    cached = f"; {one.num_tokens:,} training tokens of {counted(one.num_documents, 'document')}"
  return (
    f"{name}{one.path}: {one.format}, {counted(one.num_files, 'file')}, {file_size(one.size_bytes)}, "
    f"{counted(one.num_shards, 'shard')} of the token cache{cached}"
  )


def _load_line(load: HostLoad) -> str:
  several = load.num_hosts > 1
  hosts = f"hosts {load.first_host} to {load.last_host}" if several else f"host {load.first_host}"
  if not load.samples:
    return f"{hosts}, nothing"
  return f"{hosts}, {counted(load.samples, 'row')} per step{' each' if several else ''}"
