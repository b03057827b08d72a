"""How a run trains: on text (pretraining.py) or by reinforcement learning (maxbatch/rl/method.py)."""

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from maxbatch.batch.from_config import follows_noise_scale, resumed_plan
from maxbatch.checkpoints.checkpointer import Restored
from maxbatch.compile.compile_step import Sampler
from maxbatch.config.schema import Config
from maxbatch.core.phases import Position
from maxbatch.core.plan import BatchPlan
from maxbatch.core.topology import Topology
from maxbatch.data.rows import Dataset
from maxbatch.hardware.devices import Target
from maxbatch.models.registry import Model
from maxbatch.modes.initialization import Initialization
from maxbatch.run_folder.paths import RunFolder
from maxbatch.training.job import Job
from maxbatch.training.noise_run import Meter
from maxbatch.training.objective import Loss
from maxbatch.training.step import Trainer
from maxbatch.tuning.candidates import Candidate
from maxbatch.tuning.search import CompilingProber

_ORIGIN = Position(0, 0)


class Purpose(enum.Enum):
  """What a run is prepared for."""

  RUN = "run"
  VALIDATE = "validate_only"
  """Nothing is compiled: sizes that are to be chosen are the smallest."""
  COMPILE = "compile_only"
  """The data need not be here."""


Check = tuple[str, str, Sequence[str]]
"""What was checked, the result, and lines below it."""
Passed = Callable[[Check], None]
"""Takes note of a check that has passed."""


class Training(Protocol):
  """What differs between the ways to train a resolved run; all else of a run they share."""

  @property
  def loss(self) -> Loss:
    """The loss that a step minimizes."""
    ...

  @property
  def num_saved_policies(self) -> int:
    """Parameters of earlier steps without which a run cannot go on."""
    ...

  @property
  def sampler(self) -> Sampler | None:
    """The sampler of what the steps train on; None: they read rows."""
    ...

  def extra_bytes(self, trainer: Trainer) -> Mapping[str, int]:
    """Returns the bytes that each device which trains holds beside the state and its rows, by name."""
    ...

  def dataset(self) -> Dataset:
    """Reads what is trained on.

    Raises:
      UserError: it cannot be read, or not for as long as the run is.
    """
    ...

  def examine(self, trainer: Trainer, passed: Passed) -> Dataset:
    """Reads the same, with every check of it that needs no compilation."""
    ...

  def meter(self, model: Model) -> Meter:
    """Returns what measures the noise scale."""
    ...

  def setup(self, job: Job, restored: Restored | None) -> contextlib.AbstractContextManager[Job]:
    """Yields the job with the loader and the hooks of this way to train, which end with the context.

    Args:
      restored: the checkpoint that it resumes from; None: it begins.
    """
    ...


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
  """A run on its devices, with nothing left to choose."""

  given: Config
  """As its keys say, with what they leave open."""
  config: Config
  target: Target
  plan: BatchPlan
  """From the run's first step, wherever it resumes."""
  training: Training
  saved: Mapping[str, Any] | None = None
  """The record of the checkpoint to resume from; None if the run begins."""
  begins: Position = _ORIGIN
  """Where a run without one begins to count."""
  initialization: Initialization | None = None
  """What it begins with; None: what the keys say."""
  notes: Sequence[str] = ()
  """Lines about sizes that only a run chooses."""
  checks: Sequence[Check] = ()
  """What was checked beside the batch plan."""

  @property
  def folder(self) -> RunFolder:
    """The run's folder, which may not be there yet."""
    return RunFolder.of(self.config.run)

  @property
  def plan_ahead(self) -> BatchPlan:
    """The plan from where the run is, if its newest checkpoint turns out to be whole."""
    if self.saved is None:
      return self.plan.starting_at(self.begins) if self.begins != _ORIGIN else self.plan
    steers = follows_noise_scale(self.config.batch) and not self.config.noise.gns_dry_run
    steered = steers and bool(self.saved.get("notes", {}).get("steering"))
    position = Position(self.saved["step"], self.saved["samples"])
    return resumed_plan(self.plan, self.saved["plan"], position, steered=steered)


class Method(Protocol):
  """A way to train: how a configuration's sizes are resolved, and what then trains."""

  def resolve(
    self, config: Config, target: Target, purpose: Purpose, *, retune: bool = False
  ) -> ResolvedRun:
    """Returns the run with all chosen that was to be chosen on these devices.

    Args:
      retune: choose anew what the keys leave open, whatever is remembered.

    Raises:
      UserError: keys contradict each other, or nothing fits.
    """
    ...

  def explored(
    self, config: Config, target: Target
  ) -> tuple[Config, CompilingProber[Candidate], Callable[[Config, Topology], Sequence[Candidate]]]:
    """Returns what micro_batch_size=explore tries: the run, what tries a size of it, and its sizes.

    Raises:
      UserError: the run has no sizes to explore.
    """
    ...
