"""The names of a run's files, a contract with other tools that read them; and of the user's caches."""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Self

from maxbatch.config.schema import RunConfig
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class RunFolder:
  """`{base_output_directory}/{run_name}/` and what lies in it."""

  path: Path

  @classmethod
  def of(cls, run: RunConfig) -> Self:
    """Where a run writes; ~ is the user's home."""
    return cls(Path(run.base_output_directory).expanduser() / run.run_name)

  def free_name(self) -> str:
    """A run_name like this one under which nothing is there yet."""
    numbered = (f"{self.path.name}-{number}" for number in itertools.count(2))
    return next(name for name in numbered if not self.path.with_name(name).exists())

  @property
  def lock(self) -> Path:
    """Which process trains here; held while it does."""
    return self.path / "lock"

  @property
  def config(self) -> Path:
    """Every key of the latest start, and what was derived from them."""
    return self.path / "config.yml"

  @property
  def starts(self) -> Path:
    """The same of every start, in files numbered from 1."""
    return self.path / "starts"

  def next_start(self) -> Path:
    """The file of a start that has none yet."""
    numbers = [int(path.stem) for path in self.starts.glob("*.yml") if path.stem.isdecimal()]
    return self.starts / f"{max(numbers, default=0) + 1}.yml"

  @property
  def metrics(self) -> Path:
    """One JSON object per step."""
    return self.path / "metrics.jsonl"

  @property
  def events(self) -> Path:
    """What happened to the run, one JSON object per event."""
    return self.path / "events.jsonl"

  @property
  def report(self) -> Path:
    """The run as a page, for people."""
    return self.path / "report.html"

  def process_log(self, process: int) -> Path:
    """What one of several processes said, its warnings and its errors."""
    return self.path / "logs" / f"process_{process:05}.log"

  @property
  def tensorboard(self) -> Path:
    """A folder of event files."""
    return self.path / "tensorboard"

  @property
  def tensorboard_over_samples(self) -> Path:
    """Likewise, of the curves over samples."""
    return self.tensorboard / "over_samples"

  @property
  def tensorboard_over_tokens(self) -> Path:
    """Likewise, over tokens."""
    return self.tensorboard / "over_tokens"

  @property
  def checkpoints(self) -> Path:
    """A folder for each step that was saved."""
    return self.path / "checkpoints"

  @property
  def hugging_face(self) -> Path:
    """What a Hugging Face folder held beside the weights that the run began with."""
    return self.path / "hugging_face"

  @property
  def compile_report_text(self) -> Path:
    """What the compiler found, for people."""
    return self.path / "compile_report.txt"

  @property
  def compile_report_json(self) -> Path:
    """The same for programs."""
    return self.path / "compile_report.json"

  @property
  def precision_report_text(self) -> Path:
    """Exponents by layer, and which formats they fit in."""
    return self.path / "precision_report.txt"

  @property
  def precision_report_json(self) -> Path:
    """The same for programs, with all counts."""
    return self.path / "precision_report.json"

  @property
  def profile(self) -> Path:
    """A trace of some steps, for xprof and TensorBoard."""
    return self.path / "profile"

  @property
  def profile_json(self) -> Path:
    """What the trace says: the longest operations, and the time of each part of the model."""
    return self.path / "profile.json"

  @property
  def exploration(self) -> Path:
    """Every size that was tried, ranked, as JSON."""
    return self.path / "exploration.json"

  @property
  def text_before_training(self) -> Path:
    """What the model wrote before its first step."""
    return self.path / "text_before_training.txt"

  @property
  def examples_before(self) -> Path:
    """What a policy completed before reinforcement learning."""
    return self.path / "examples_before_training.txt"

  @property
  def examples_after(self) -> Path:
    """Likewise, at the latest evaluation."""
    return self.path / "examples_after_training.txt"

  @property
  def batch_schedule(self) -> Path:
    """The batches that a run chose, which another run can follow."""
    return self.path / "batch_schedule.yml"


def token_caches(dataset_cache_directory: str) -> Path:
  """Where datasets' tokens are kept: the key's value, or a folder of the user's if it is empty.

  Raises:
    UserError: it is no folder of a file system.
  """
  if "://" in dataset_cache_directory:
    raise UserError(
      f"dataset_cache_directory={dataset_cache_directory}: tokens are mapped into memory from a file "
      "system; give a folder, for example dataset_cache_directory=tokens, or '' for the user's own"
    )
  return _given_or_own(dataset_cache_directory, "tokens")


def compiled_programs(jax_cache_dir: str) -> Path:
  """Where compiled programs are kept: the key's value, or a folder of the user's if it is empty."""
  return _given_or_own(jax_cache_dir, "compiled")


def remembered_choices() -> Path:
  """Where chosen microbatches are remembered."""
  return _given_or_own("", "microbatch")


def remembered_steps() -> Path:
  """Where it is remembered what compiled steps took."""
  return _given_or_own("", "compiled_steps")


def _given_or_own(given: str, name: str) -> Path:
  if given:
    return Path(given).expanduser().absolute()
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return Path(base, "maxbatch", name).absolute()
