"""Measures how fast rows come to the device and documents become tokens, beside peers in one run.

  python scripts/benchmark_input.py --tokenizer FOLDER [--peer COMMAND] [--columns text ids]
    [--packing first_fit] [--length 2048] [--rows 32] [--rounds 3] [--seconds 10] [--folder FOLDER]

rows      rows per second that the training loop gets with one worker process: from our token cache,
          and from the peer, which tokenizes and packs as it reads; of the same documents as text and as
          token ids, in Parquet and in ArrayRecord, with the same tokenizer, packing, length and step
first     our first epoch, with an empty cache: its rows divided by the seconds of tokenizing them, on
          all cores, and of reading them; and the same with the processor's seconds, as on one core
start     seconds from the configuration to the first row: with an empty cache, and a second time
tokens    megabytes of text tokenized per second of the processor: ours, and `datasets.map` of batches
          with the tokenizers library, each on one core

FOLDER has a tokenizer.json and its tokenizer_config.json. COMMAND is a shell command in which {seconds}
and {keys} are filled in, and which prints the last line of scripts/maxtext_input.py. Documents are
the functions and classes of the Python standard library; needs the extra `hf`. Every measurement is a
process of its own; in each round all of them take their turns.
"""

import argparse
import io
import itertools
import json
import os
import pkgutil
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import jax
import make_example_data
import numpy as np
import tokenizers
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.batch.row_plan import StepRows
from maxbatch.config.load import load_config
from maxbatch.data.file_datasets import train_columns
from maxbatch.data.formats import tf_records
from maxbatch.data.loader import train_loader
from maxbatch.data.record_files import resolve_records
from maxbatch.data.registry import build_dataset, build_tokenizer
from maxbatch.data.sources import Document
from maxbatch.data.tokenize import Recipe, tokenize

ALL_MODULES = 10**6
MOST_STEPS = 10**5
ONE_CORE = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Measured = dict[str, float]


def write_array_records(folder: Path, documents: Sequence[Any], column: str) -> None:
  """The documents as tf.train.Example, which is what MaxText reads, in as many files as Parquet's."""
  # A compiled module, of which type checkers see nothing.
  module: Any = pkgutil.resolve_name("array_record.python.array_record_module:")
  folder.mkdir(parents=True, exist_ok=True)
  for number in range(make_example_data.FILES):
    writer = module.ArrayRecordWriter(str(folder / f"{number:05}.array_record"), "group_size:1")
    for document in documents[number :: make_example_data.FILES]:
      example = tf_records.example_class()()
      feature = example.features.feature[column]
      if isinstance(document, str):
        feature.bytes_list.value.append(document.encode())
      else:
        feature.int64_list.value.extend(document)
      writer.write(example.SerializeToString())
    writer.close()


WRITERS = {"parquet": make_example_data.write_parquet, "arrayrecord": write_array_records}


def write_files(options: argparse.Namespace) -> None:
  """The same documents in every format, as text and as the ids of its tokens."""
  result = make_example_data.definitions(ALL_MODULES)
  texts = [each.code for each in result if not each.is_method]
  inner = tokenizers.Tokenizer.from_file(str(Path(options.tokenizer) / "tokenizer.json"))
  # MaxText packs no piece that is longer than a row.
  ids = [
    each.ids[first : first + options.length]
    for each in inner.encode_batch(texts)
    for first in range(0, len(each.ids), options.length)
  ]
  for column, documents in {"text": texts, "ids": ids}.items():
    for form, write in WRITERS.items():
      write(options.folder / form / column, documents, column)


def shared_keys(options: argparse.Namespace, form: str, column: str) -> dict[str, object]:
  """The keys that mean the same to both sides."""
  return {
    "dataset_type": "grain",
    "grain_file_type": form,
    "grain_train_files": options.folder / form / column / "*",
    "train_data_columns": f"[{column}]",
    "tokenize_train_data": str(column == "text").lower(),
    "grain_worker_count": 1,
    "grain_packing_type": options.packing,
    "packing": "true",
    "use_truncation": "false",
    "tokenizer_type": "huggingface",
    "tokenizer_path": options.tokenizer,
    "max_target_length": options.length,
    "per_device_batch_size": options.rows,
    "enable_checkpointing": "false",
    "num_epoch": 10**6,
    "steps": MOST_STEPS,
  }


def own_rows(seconds: float, length: int, rows: int, keys: Sequence[str]) -> Measured:
  """Rows of our pipeline, in this process and its worker; without seconds its start alone."""
  began, processor = time.perf_counter(), _processor_seconds()
  data = load_config(["config=base", *keys]).data
  dataset = build_dataset(data, length)
  dataset.train.rows(np.zeros(1, np.int64))
  results = {"start": time.perf_counter() - began, "processor": _processor_seconds() - processor}
  results["epoch"] = len(dataset.train)
  if not seconds:
    return results
  mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
  steps = [StepRows(number * rows, 1) for number in range(MOST_STEPS)]
  with train_loader(
    dataset.train,
    data.data_shuffle_seed,
    steps,
    micro_batch=rows,
    capacity=1,
    sharding=NamedSharding(mesh, PartitionSpec(None, "data")),
    worker_count=data.grain_worker_count,
  ) as loader:
    batches = (batch.inputs for batch in loader)
    results["rows_per_second"] = _rate(batches, rows, seconds)
  return results


def _processor_seconds() -> float:
  used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
  return sum(each.ru_utime + each.ru_stime for each in used)


def _rate(batches: Iterator[jax.Array], rows: int, seconds: float) -> float:
  """Rows per second, once the first batch is there and what was read ahead of it is used up."""
  for batch in itertools.islice(batches, 16):
    jax.block_until_ready(batch)
  began = now = time.perf_counter()
  count = 0
  while now - began < seconds:
    jax.block_until_ready(next(batches))
    count, now = count + 1, time.perf_counter()
  return count * rows / (now - began)


def own_tokens(files: str, tokenizer: str) -> Measured:
  """Seconds of the processor for tokenizing files of Parquet, ours."""
  keys = {"dataset_type": "grain", "tokenizer_type": "huggingface", "tokenizer_path": tokenizer}
  data = load_config(["config=base", *(f"{key}={value}" for key, value in keys.items())]).data
  sources = resolve_records("grain_train_files", files, train_columns(data), "parquet", "")
  recipe, documents = Recipe(sources, build_tokenizer(data)), tuple(map(Document, sources.files))

  def run() -> None:
    tokenize(recipe, documents, io.BytesIO(), io.BytesIO(), lambda _: None)

  return {"processor": _best_time(run)}


def their_tokens(files: str, tokenizer: str) -> Measured:
  """The same with `datasets.map`, which writes its cache, to memory if that is where /tmp is."""
  inner = tokenizers.Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
  datasets.disable_progress_bars()
  with tempfile.TemporaryDirectory() as cache:
    data = datasets.Dataset.from_parquet(files, cache_dir=cache)
    assert isinstance(data, datasets.Dataset)

    def run() -> None:
      data.map(
        lambda batch: {"ids": [each.ids for each in inner.encode_batch(batch["text"])]},
        batched=True,
        remove_columns=["text"],
        load_from_cache_file=False,
        new_fingerprint="none",  # Else it hashes the tokenizer, which a long corpus hides.
      )

    return {"processor": _best_time(run)}


def _best_time(run: Callable[[], None]) -> float:
  """Of three, since other programs on the cores only ever slow it down, and a first to warm up."""
  run()
  times = []
  for _ in range(3):
    began = time.process_time()
    run()
    times.append(time.process_time() - began)
  return min(times)


MEASURES = {"own_rows": own_rows, "own_tokens": own_tokens, "their_tokens": their_tokens}


def measured(name: str, *arguments: object, env: dict[str, str] | None = None) -> Measured:
  """One of MEASURES in a process of its own."""
  command = [sys.executable, __file__, "--measure", name, json.dumps(arguments, default=str)]
  return _last_line(command, os.environ | (env or {}))


def peer_rows(options: argparse.Namespace, form: str, column: str) -> Measured:
  """The peer's rows, by its own program."""
  keys = shlex.join(f"{key}={value}" for key, value in shared_keys(options, form, column).items())
  return _last_line(options.peer.format(seconds=options.seconds, keys=keys), os.environ)


def _last_line(command: Sequence[str] | str, env: Any) -> Measured:
  done = subprocess.run(
    command, shell=isinstance(command, str), capture_output=True, text=True, env=env
  )
  lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
  if not lines:
    raise SystemExit(f"{command} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
  return json.loads(lines[-1])


def rows_table(options: argparse.Namespace) -> None:
  """Rows per second, the first epoch and the start, by what is in the files."""
  print(
    "| files | ours, rows/s | peer, rows/s | ratio | first epoch, rows/s | on one core "
    "| start, s | second start, s |\n|---|---|---|---|---|---|---|---|"
  )
  for column, form in itertools.product(options.columns, WRITERS):
    cold, warm, peer = [], [], []
    for _ in range(options.rounds):
      with tempfile.TemporaryDirectory(dir=options.folder) as cache:
        own = {"dataset_cache_directory": cache, "eval_fraction": 0}
        keys = shared_keys(options, form, column) | own
        shape = (options.length, options.rows, [f"{key}={value}" for key, value in keys.items()])
        cold.append(measured("own_rows", 0, *shape))
        warm.append(measured("own_rows", options.seconds, *shape))
      if options.peer:
        peer.append(peer_rows(options, form, column))
    ours = [each["rows_per_second"] for each in warm]
    theirs = [each["rows_per_second"] for each in peer]
    first = [
      each["epoch"] / (each["start"] + each["epoch"] / rate)
      for each, rate in zip(cold, ours, strict=True)
    ]
    one_core = [
      each["epoch"] / (each["processor"] + each["epoch"] / rate)
      for each, rate in zip(cold, ours, strict=True)
    ]
    starts = [[each["start"] for each in side] for side in (cold, warm)]
    cells = [spread(ours), *_beside(ours, theirs), spread(first), spread(one_core)]
    print(
      f"| {form}, {column} | {' | '.join(cells)} | {' | '.join(map(spread, starts))} |", flush=True
    )


def tokens_table(options: argparse.Namespace) -> None:
  """Megabytes of text per second of the processor."""
  files = str(options.folder / "parquet" / "text" / "*")
  table = datasets.Dataset.from_parquet(files)
  assert isinstance(table, datasets.Dataset)
  megabytes = sum(len(text.encode()) for text in table["text"]) / 1e6
  results: dict[str, list[float]] = {"own_tokens": [], "their_tokens": []}
  for _, name in itertools.product(range(options.rounds), results):
    spent = measured(name, files, options.tokenizer, env=ONE_CORE)["processor"]
    results[name].append(megabytes / spent)
  ours, theirs = results.values()
  print("\n| ours, MB/s of a core | datasets.map | ratio |\n|---|---|---|")
  print(f"| {spread(ours)} | {' | '.join(_beside(ours, theirs))} |")


def _beside(ours: Sequence[float], theirs: Sequence[float]) -> list[str]:
  if not theirs:
    return ["-", "-"]
  return [spread(theirs), spread([a / b for a, b in zip(ours, theirs, strict=True)])]


def spread(values: Sequence[float]) -> str:
  """Median with the range."""
  return f"{statistics.median(values):,.3g} ({min(values):,.3g}-{max(values):,.3g})"


def main() -> None:
  """Measures and prints Markdown tables."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--tokenizer", help="folder of a tokenizer.json")
  parser.add_argument("--peer", help="the peer's shell command")
  parser.add_argument("--columns", nargs="+", default=["text", "ids"], help="what the files hold")
  parser.add_argument("--packing", default="first_fit", help="grain_packing_type of both")
  parser.add_argument("--length", type=int, default=2048, help="tokens of a row")
  parser.add_argument("--rows", type=int, default=32, help="rows of a step")
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--seconds", type=float, default=10, help="of reading, in each measurement")
  parser.add_argument("--folder", type=Path, help="where files are written; else a temporary one")
  parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.measure:
    name, arguments = options.measure
    print(json.dumps(MEASURES[name](*json.loads(arguments))))
    return
  datasets.disable_progress_bars()
  with tempfile.TemporaryDirectory() as folder:
    options.folder = (options.folder or Path(folder)).resolve()
    write_files(options)
    rows_table(options)
    tokens_table(options)


if __name__ == "__main__":
  main()
