"""The names of a run's files, a contract with other tools that read them; and of the user's caches."""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Self

from maxbatch.config.find import user_path
from maxbatch.config.schema import RunConfig
from maxbatch.errors import UserError


class Inside:
  """Where a file, or folder, of a run lies."""

  def __init__(self, *parts: str):
    self._parts = parts

  def __get__(self, folder: "RunFolder", owner: object) -> Path:
    return folder.path.joinpath(*self._parts)


@dataclasses.dataclass(frozen=True)
class RunFolder:
  """`{base_output_directory}/{run_name}/` and what lies in it."""

  path: Path

  @classmethod
  def of(cls, run: RunConfig) -> Self:
    """Returns the folder where a run writes; ~ is the user's home."""
    return cls(user_path(run.base_output_directory) / run.run_name)

  def free_name(self) -> str:
    """Returns a run_name like this one under which nothing is there yet."""
    numbered = (f"{self.path.name}-{number}" for number in itertools.count(2))
    return next(name for name in numbered if not self.path.with_name(name).exists())

  lock = Inside("lock")
  """Which process trains here; held while it does."""
  config = Inside("config.yml")
  """Every key of the latest start, and what was derived from them."""
  starts = Inside("starts")
  """The same of every start, in files numbered from 1."""

  def next_start(self) -> Path:
    """Returns the file of a start that has none yet."""
    numbers = [int(path.stem) for path in self.starts.glob("*.yml") if path.stem.isdecimal()]
    return self.starts / f"{max(numbers, default=0) + 1}.yml"

  metrics = Inside("metrics.jsonl")
  """One JSON object per step."""
  events = Inside("events.jsonl")
  """What happened to the run, one JSON object per event."""
  generations = Inside("generations")
  """A file for each start of the processes of a run with elastic=true."""
  report = Inside("report.html")
  """The run as a page, for people."""

  def process_log(self, process: int) -> Path:
    """Returns the file of what one of several processes prints, its warnings and its errors."""
    return self.path / "logs" / f"process_{process:05}.log"

  tensorboard = Inside("tensorboard")
  tensorboard_over_samples = Inside("tensorboard", "over_samples")
  """Likewise, of the curves over samples."""
  tensorboard_over_tokens = Inside("tensorboard", "over_tokens")
  """Likewise, over tokens."""
  checkpoints = Inside("checkpoints")
  """A folder for each step that was saved."""
  hugging_face = Inside("hugging_face")
  """What a Hugging Face folder held beside the weights that the run began with."""
  compile_report_text = Inside("compile_report.txt")
  """What the compiler found, for people."""
  compile_report_json = Inside("compile_report.json")
  """The same for programs."""
  precision_report_text = Inside("precision_report.txt")
  """Exponents by layer, and which formats they fit in."""
  precision_report_json = Inside("precision_report.json")
  """The same for programs, with all counts."""
  profile = Inside("profile")
  """A trace of some steps, for xprof and TensorBoard."""
  profile_json = Inside("profile.json")
  """What the trace says: the longest operations, and the time of each part of the model."""
  exploration = Inside("exploration.json")
  exploration_log = Inside("exploration.log")
  """Every size that was tried, ranked, as JSON."""
  text_before_training = Inside("text_before_training.txt")
  """What the model wrote before its first step."""
  examples_before = Inside("examples_before_training.txt")
  """What a policy completed before reinforcement learning."""
  examples_after = Inside("examples_after_training.txt")
  """Likewise, at the latest evaluation."""
  batch_schedule = Inside("batch_schedule.yml")
  """The batches that a run chose, which another run can follow."""


def token_caches(dataset_cache_directory: str) -> Path:
  """Returns the folder of datasets' tokens: the key's value, or a folder of the user's if it is
  empty. Raises UserError: it is no folder of a file system."""
  if "://" in dataset_cache_directory:
    raise UserError(
      f"dataset_cache_directory={dataset_cache_directory}: tokens are mapped into memory from a file "
      "system; give a folder, for example dataset_cache_directory=tokens, or '' for the user's own"
    )
  return _given_or_own(dataset_cache_directory, "tokens")


def compiled_programs(jax_cache_dir: str) -> Path:
  """Returns the folder of compiled programs: the key's value; if empty, one of the user's."""
  return _given_or_own(jax_cache_dir, "compiled")


def remembered_choices() -> Path:
  """Returns the folder in which chosen microbatches are remembered."""
  return _given_or_own("", "microbatch")


def remembered_steps() -> Path:
  """Returns the folder in which it is remembered what compiled steps took."""
  return _given_or_own("", "compiled_steps")


def _given_or_own(given: str, name: str) -> Path:
  if given:
    return user_path(given).absolute()
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return Path(base, "maxbatch", name).absolute()
