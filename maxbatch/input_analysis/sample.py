"""The run's rows to measure with: all of them, or those of a part that can be tokenized in time."""

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from maxbatch.config.schema import DataConfig
from maxbatch.data.corpus import recipe_of
from maxbatch.data.dataset import RowSource
from maxbatch.data.document_rows import document_rows
from maxbatch.data.input_report import InputReport, given_files, shards_of
from maxbatch.data.mixture import MixedRows
from maxbatch.data.mixture_keys import mixed_paths
from maxbatch.data.object_store import is_url
from maxbatch.data.registry import build_dataset, build_tokenizer
from maxbatch.data.sources import Document, SourceFile
from maxbatch.data.split import Given
from maxbatch.data.token_cache import can_be_divided, open_or_build
from maxbatch.data.token_shard import ShardJob
from maxbatch.data.tokenize import source_bytes
from maxbatch.data.tokenizer import Tokenizer
from maxbatch.errors import UserError


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
  """The training rows, tokenized if that takes no longer than `seconds`, else those of a part.

  Of an object store all are taken, however long it takes: there is no part before all is copied.

  The part is tokenized in a folder that is there as long as the context.

  Raises:
    UserError: an input cannot be used, or its smallest part takes too long.
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
  data: DataConfig,
  tokenizer: Tokenizer,
  given: Given,
  length: int,
  share: float,
  folder: Path,
) -> RowSource:
  """The rows of about that share of the training documents of one source."""
  jobs, _ = shards_of(data, tokenizer, given)
  documents = _documents(
    jobs, share * sum(job.size_bytes for job in jobs), can_be_divided(given.train)
  )
  if documents:
    folder.mkdir()
    cache = open_or_build(documents, folder, "train", recipe_of(data, tokenizer, given.train))
    if cache.num_tokens > length:
      return document_rows(cache, data, tokenizer, length, folder, "train")
  raise UserError(
    f"{given.train.key}={given.train.path}: even a part of it takes longer to tokenize than there is "
    "time; give more, for example seconds=600, or tokenize all of it first: python -m maxbatch.train "
    "with validate_only=true"
  )


def _documents(
  jobs: Sequence[ShardJob], most_bytes: float, is_divisible: Callable[[SourceFile], bool]
) -> tuple[Document, ...]:
  """The first documents of the shards up to a number of bytes, or the first piece of a longer one."""
  found: list[Document] = []
  total = 0
  for document in (document for job in jobs for document in job.documents):
    if source_bytes(document) > most_bytes and not found and is_divisible(document.file):
      times = math.ceil(source_bytes(document) / most_bytes)
      document = dataclasses.replace(
        document, piece=document.piece * times, num_pieces=document.num_pieces * times
      )
    if total + source_bytes(document) <= most_bytes:
      found.append(document)
      total += source_bytes(document)
  return tuple(found)
