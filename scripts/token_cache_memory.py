"""Tokenizes a large synthetic corpus and measures memory: python scripts/token_cache_memory.py FOLDER [--gigabytes 10]

Writes JSON Lines of documents of 25 to 20,000 letters, in files of a gigabyte, builds the token cache
of bytes, opens it again and reads rows at random. Prints seconds, and the most memory that each
process has held. FOLDER needs room for three times the corpus; what is there is used again.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import threading
import time
from collections.abc import Sequence

import numpy as np

from maxbatch.config.load import load_config
from maxbatch.data.registry import build_dataset

GIGABYTE = 10**9
WORDS = [
  "batch",
  "size",
  "of",
  "a",
  "sample",
  "and",
  "the",
  "rows",
  "that",
  "hosts",
  "read",
  "once",
]
NUM_ROWS, LENGTH = 2_000, 2_048


def write_file(path: pathlib.Path, seed: int) -> None:
  """A gigabyte of documents. It repeats itself, which no reader notices."""
  generator = random.Random(seed)
  records = [
    " ".join(generator.choices(WORDS, k=generator.choice([5, 50, 500, 4_000])))
    for _ in range(4_000)
  ]
  block = "".join(json.dumps({"text": text}) + "\n" for text in records).encode()
  unfinished = path.with_suffix(".part")
  with unfinished.open("wb") as file:
    for _ in range(GIGABYTE // len(block) + 1):
      file.write(block)
  unfinished.rename(path)


class PeakMemory(threading.Thread):
  """Looks every half second how much memory this process and its children have held at most."""

  def __init__(self) -> None:
    super().__init__(daemon=True)
    self.kibibytes: dict[int, int] = {}
    self.is_done = threading.Event()

  def run(self) -> None:
    while not self.is_done.wait(0.5):
      for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
          lines = status.read_text().splitlines()
        except OSError:  # It has ended.
          continue
        said = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if os.getpid() in (int(said["Pid"]), int(said["PPid"])) and "VmHWM" in said:
          self.kibibytes[int(said["Pid"])] = int(said["VmHWM"].split()[0])


def main(arguments: Sequence[str] | None = None) -> None:
  """Makes the corpus, tokenizes and reads it."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("folder", type=pathlib.Path)
  parser.add_argument("--gigabytes", type=int, default=10)
  given = parser.parse_args(arguments)
  texts = given.folder / "texts"
  texts.mkdir(parents=True, exist_ok=True)
  for number in range(given.gigabytes):
    if not (path := texts / f"{number:04}.jsonl").exists():
      write_file(path, number)
  size = sum(path.stat().st_size for path in texts.glob("*.jsonl"))

  data = dataclasses.replace(
    load_config(["config=base"]).data,
    dataset_type="grain",
    grain_train_files=str(texts / "*.jsonl"),
    dataset_cache_directory=str(given.folder / "cache"),
  )
  memory = PeakMemory()
  memory.start()
  for what in ("tokenized", "opened again"):
    began = time.perf_counter()
    dataset = build_dataset(data, LENGTH)
    seconds = time.perf_counter() - began
    print(f"{what}: {size / GIGABYTE:.1f} GB in {seconds:.1f} s, {size / seconds / 1e6:.0f} MB/s")
  memory.is_done.set()
  memory.join()
  own = memory.kibibytes.pop(os.getpid()) / 1024
  worker = max(memory.kibibytes.values(), default=0) / 1024
  print(f"at most {own:.0f} MiB in this process, {worker:.0f} MiB in a worker")
  rows = np.random.default_rng(0).integers(0, len(dataset.train), NUM_ROWS)
  began = time.perf_counter()
  for some in np.split(rows, NUM_ROWS // 20):
    dataset.train.rows(some)
  print(f"{NUM_ROWS} rows of {len(dataset.train):,} at random: {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
  main()
