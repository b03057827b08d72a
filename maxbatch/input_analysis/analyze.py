"""The whole analysis of one configuration, within a budget of time."""

import contextlib
import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from maxbatch.config.schema import Config, DataConfig
from maxbatch.core.plan import BatchPlan
from maxbatch.data.corpus import recipe_of
from maxbatch.data.document_rows import document_rows
from maxbatch.data.file_datasets import Given
from maxbatch.data.input_report import InputReport, given_files, input_report, shards_of
from maxbatch.data.mixed import mixed_paths
from maxbatch.data.mixture import MixedRows
from maxbatch.data.object_store import is_url
from maxbatch.data.placement import RowPlacement
from maxbatch.data.reading import ReadOrder
from maxbatch.data.registry import build_dataset, build_tokenizer
from maxbatch.data.rows import RowSource
from maxbatch.data.sources import Document, SourceFile
from maxbatch.data.token_cache import can_be_divided, open_or_build
from maxbatch.data.token_shard import ShardJob
from maxbatch.data.tokenize import source_bytes
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import UserError
from maxbatch.hardware.devices import Target, machine_bytes
from maxbatch.hardware.sharding import make_mesh, sharding
from maxbatch.input_analysis.measure import (
  Measured,
  Setting,
  Stage,
  measure,
  setting_of,
  settings_to_measure,
  stages,
  transfer,
)
from maxbatch.input_analysis.need import Need
from maxbatch.input_analysis.recommend import Bounds, loading_options, recommend, slurm
from maxbatch.input_analysis.report import InputAnalysis
from maxbatch.training.build import streams


@dataclasses.dataclass(frozen=True)
class SampledRows:
  """Rows, and what part of the data they are."""

  rows: RowSource
  note: str
  """Empty where they are all."""


@contextlib.contextmanager
def rows_to_measure(
  data: DataConfig, length: int, report: InputReport, seconds: float
) -> Iterator[SampledRows]:
  """Yields the training rows, tokenized if that takes at most `seconds`, else those of a part.

  Of an object store all are taken, however long it takes: there is no part before all is copied.

  The part is in a folder of this context. Raises UserError: an input cannot be used in that time.
  """
  cold = sum(one.cold_seconds for one in report.sources)
  if cold <= seconds or any(is_url(one.path) for one in report.sources):
    yield SampledRows(build_dataset(data, length).train, "")
    return
  with tempfile.TemporaryDirectory(prefix="maxbatch-") as name:
    rows = [
      _part(one, build_tokenizer(one), given, length, seconds / cold, Path(name) / str(number))
      for number, (_, one, given) in enumerate(given_files(data))
    ]
    mixture = mixed_paths(data)
    note = f"rows of a part that is tokenized for the measurement, since all takes {cold:,.0f} s"
    yield SampledRows(MixedRows(tuple(rows), mixture.mixture) if mixture else rows[0], note)


def _part(
  data: DataConfig, tokenizer: Tokenizer, given: Given, length: int, share: float, folder: Path
) -> RowSource:
  """Returns the rows of about that share of the training documents of one source."""
  jobs, _ = shards_of(data, tokenizer, given)
  most = share * sum(job.size_bytes for job in jobs)
  documents = _documents(jobs, most, can_be_divided(given.train))
  if documents:
    folder.mkdir()
    cache = open_or_build(documents, folder, "train", recipe_of(data, tokenizer, given.train))
    if cache.num_tokens > length:
      return document_rows(cache, data, tokenizer, length, folder, "train")
  raise UserError(
    f"{given.train.key}={given.train.path}: tokenizing even a part of it exceeds the time limit; "
    "raise it, for example seconds=600, or tokenize all of it first: maxbatch train "
    "with validate_only=true"
  )


def _documents(
  jobs: Sequence[ShardJob], most_bytes: float, is_divisible: Callable[[SourceFile], bool]
) -> tuple[Document, ...]:
  """Returns the first documents of the shards up to a number of bytes, or the first piece of a
  longer one."""
  result: list[Document] = []
  total = 0
  for document in (document for job in jobs for document in job.documents):
    if source_bytes(document) > most_bytes and not result and is_divisible(document.file):
      times = math.ceil(source_bytes(document) / most_bytes)
      document = dataclasses.replace(
        document, piece=document.piece * times, num_pieces=document.num_pieces * times
      )
    if total + source_bytes(document) <= most_bytes:
      result.append(document)
      total += source_bytes(document)
  return tuple(result)


_LOAD_BYTES = 64 * 2**20
"""Bytes of the loads that are measured; a rate needs no larger ones."""
_MEMORY_SHARE = 0.25
"""Share of a host's memory that loads may take."""
_MOST_SECONDS = 4.0


@dataclasses.dataclass(frozen=True)
class Request:
  """What is asked."""

  config: Config
  plan: BatchPlan
  num_hosts: int
  tasks_per_node: int
  margin: float
  target: Target | None
  """The devices that are here; None: others."""


class _Budget:
  """Seconds for measurements, and the clock that they are measured with."""

  def __init__(self, seconds: float, clock: Callable[[], float]):
    self.clock, self._deadline = clock, clock() + seconds

  @property
  def seconds_left(self) -> float:
    return max(self._deadline - self.clock(), 0.0)


def analyze(
  request: Request, need: Need, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> InputAnalysis:
  """Measures what there is time for, and recommends.

  Args:
    seconds: for all measurements together, more than 0.

  Raises UserError: the data or the keys cannot be used.
  """
  config, plan, budget = request.config, request.plan, _Budget(seconds, clock)
  options = loading_options(plan, request.num_hosts, streamed=streams(config))
  result = input_report(config.data, plan, request.num_hosts)
  began = clock()
  with rows_to_measure(
    config.data, plan.max_target_length, result, budget.seconds_left / 4
  ) as sampled:
    open_seconds = clock() - began
    order = ReadOrder(sampled.rows, config.data.data_shuffle_seed)
    row_bytes = sum(array.nbytes for array in order(np.zeros(1, np.int64)).values())
    size = max(1, min(options[-1].samples_per_step, _LOAD_BYTES // row_bytes))
    costs = list(_stages(request, budget, order, size))
    measured, left_out = _settings(config.data, budget, order, size)
  bounds = Bounds(request.margin, need.step_seconds, row_bytes, _MEMORY_SHARE * machine_bytes())
  best = recommend(measured, options, bounds)
  return InputAnalysis(
    run_name=config.run.run_name,
    need=need,
    bounds=bounds,
    num_hosts=request.num_hosts,
    num_cores=os.cpu_count() or 1,
    input_function=result,
    open_seconds=open_seconds,
    stages=tuple(costs),
    measured=tuple(measured),
    left_out=tuple(left_out),
    options=tuple(options),
    found=best,
    slurm=slurm(best.setting, request.num_hosts, request.tasks_per_node),
    notes=tuple(_notes(request, sampled.note)),
  )


def _stages(request: Request, budget: _Budget, order: ReadOrder, size: int) -> Iterator[Stage]:
  yield from stages(order, size, min(1.0, budget.seconds_left / 10), budget.clock)
  if request.target is not None:
    shape = (1, request.plan.micro_batch_to_train, request.plan.max_target_length)
    mesh = make_mesh(request.plan.topology, request.target.devices)
    tokens = sharding((None, "batch", "length"), shape, mesh)
    place = RowPlacement(tokens, row_dim=1, num_rows=shape[1])
    yield transfer(order, place, min(1.0, budget.seconds_left / 10))


def _settings(
  data: DataConfig, budget: _Budget, order: ReadOrder, size: int
) -> tuple[list[Measured], list[Setting]]:
  """Measures what there is time for, one setting at least; returns that, and what is left out."""
  left = settings_to_measure(setting_of(data), os.cpu_count() or 1)
  result: list[Measured] = []
  while left and (budget.seconds_left > 0 or not result):
    seconds = min(_MOST_SECONDS, budget.seconds_left / len(left) / 2)
    result.append(measure(order, left.pop(0), size, seconds, budget.clock))
  return result, left


def _notes(request: Request, sample: str) -> Iterator[str]:
  if sample:
    yield sample
  if request.target is None:
    yield "the devices are not here: bringing rows to them is not measured; reading is, on this machine"
