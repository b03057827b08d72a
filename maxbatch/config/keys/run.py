"""Keys of where a run lives, how long it lasts, how it starts and what it saves."""

import dataclasses
from typing import Annotated, Literal

from maxbatch.config.declare import (
  CHANGEABLE,
  EXACT,
  INT32,
  PER_START,
  Address,
  Budget,
  CountOrUnset,
  Name,
  NonNegative,
  NonNegativeFloat,
  NucleusProbability,
  Path,
  Positive,
  PositiveOrUnset,
  Probability,
  Range,
  RelativePath,
  Seconds,
  Section,
  key,
)
from maxbatch.config.keys.read_when import (
  CHECKPOINTS,
  ELASTIC,
  PROCESSES,
  PROFILER,
  SAMPLE_TEXT,
  TOPOLOGY,
)
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class RunConfig(Section, heading="the run"):
  """Where the run lives, how long it lasts and what it shows."""

  run_name: Annotated[str, RelativePath()] = key("first_run", PER_START)
  """Name of the run's folder; starting again with the same name resumes the run."""
  base_output_directory: Path = key("runs", PER_START)
  """Parent folder of all runs: {base_output_directory}/{run_name}/."""
  steps: Annotated[int, Range(low=1, limit=INT32, also=-1, offers_also=False)] = key(
    400, CHANGEABLE
  )
  """Budget in optimizer steps; set exactly one of steps, total_samples and total_tokens."""
  total_samples: Budget = key(-1, CHANGEABLE)
  """Budget in samples (rows of max_target_length tokens); -1: not used."""
  total_tokens: Budget = key(-1, CHANGEABLE)
  """Budget in tokens, padding included; -1: not used."""
  schedule_unit: Literal["steps", "samples", "tokens"] = key("steps", CHANGEABLE)
  """Unit of eval_interval, checkpoint_period, warmup_steps and learning_rate_schedule_steps: steps,
  or, where the batch size changes, samples or tokens."""
  log_period: Positive = key(20, CHANGEABLE)
  """Steps between log lines when the output is not a terminal."""
  metrics: tuple[Name, ...] = key((), CHANGEABLE)
  """Metrics beside loss and grad_norm: accuracy, log_z (means over tokens, in evaluations too),
  param_norm, update_norm, or module:attribute of your own."""
  metrics_writers: tuple[Name, ...] = key(("jsonl", "tensorboard"), CHANGEABLE)
  """Where records go: jsonl (always: resumes read it), tensorboard, wandb, mlflow, or
  module:attribute; one that fails is dropped, and training continues."""
  eval_interval: CountOrUnset = key(100, CHANGEABLE)
  """Interval of evaluation on the validation set, in schedule_unit; -1: only at the end."""
  eval_samples: PositiveOrUnset = key(256, CHANGEABLE)
  """Samples per evaluation, independent of the batch size; -1: the whole validation set."""
  write_report: bool = key(True, CHANGEABLE)
  """Write report.html, a page about the run, at evaluations (at most 1/50 of the time) and at the
  end; false: only maxbatch report writes it."""
  # A sample to look at.
  generate_length: Annotated[int, Range(low=0, high=100_000)] = key(160, CHANGEABLE)
  """Tokens of sample text to generate before and after training, and at evaluations; 0: none."""
  prompt: str = key("def ", CHANGEABLE, SAMPLE_TEXT)
  """Prompt of the sample text."""
  decode_sampling_temperature: NonNegativeFloat = key(0.8, CHANGEABLE)
  """Sampling temperature of the sample text and of `maxbatch sample`; 0: greedy."""
  decode_sampling_top_k: NonNegative = key(0, CHANGEABLE)
  """Sample only from this many of the most likely tokens (top-k); 0: from all."""
  decode_sampling_nucleus_p: NucleusProbability = key(1.0, CHANGEABLE)
  """Sample only from the smallest set of most likely tokens with this total probability (top-p); 1:
  from all."""
  decode_sampling_min_p: Probability = key(0.0, CHANGEABLE)
  """Sample only from tokens with at least this fraction of the most likely token's probability
  (min-p); 0: from all."""

  def __post_init__(self) -> None:
    """Raises UserError for a folder that is none of a file system, and a prompt that is no UTF-8."""
    scheme, is_url, _ = self.base_output_directory.partition("://")
    if is_url:
      raise UserError(
        f"base_output_directory={self.base_output_directory}: a run is written to a file system, "
        f"and {scheme}:// names none; for example base_output_directory=runs, or the folder where "
        "that storage is mounted"
      )
    try:
      self.prompt.encode(errors="surrogateescape").decode()
    except UnicodeError:
      raise UserError(
        f"prompt={self.prompt[:100]!a} is not text in UTF-8; for example "
        f"prompt={self.prompt.encode(errors='ignore').decode()}"
      ) from None


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Section, heading="many processes"):
  """How several processes find each other, and for how long they wait."""

  coordinator_address: Annotated[str, Address()] = key("", PER_START, PROCESSES)
  """HOST:PORT on which process 0 listens; empty: from SLURM, Open MPI, Kubernetes, a TPU pod or
  JAX_COORDINATOR_ADDRESS."""
  num_processes: PositiveOrUnset = key(-1, PER_START, PROCESSES)
  """Number of processes that train together; -1: from the environment."""
  process_id: Annotated[int, Range(low=0, limit=INT32, also=-1)] = key(-1, PER_START, PROCESSES)
  """Number of this process, from 0; -1: from the environment."""
  skip_jax_distributed_system: bool = key(False, PER_START)
  """Train in this process alone, even if the environment names others."""
  jax_distributed_initialization_timeout: Seconds = key(300, PER_START, PROCESSES)
  """Seconds to wait at the start for all processes to join."""
  jax_distributed_heartbeat_timeout_seconds: Seconds = key(40, PER_START, PROCESSES)
  """Seconds without a heartbeat after which a process counts as dead, and the others end."""
  hang_timeout_seconds: Annotated[int, Range(low=0, limit=1_000_000)] = key(1800, PER_START)
  """Seconds without a finished step, evaluation batch or save after which a run counts as hung:
  every process writes its stacks, and all end; 0: never."""
  elastic: bool = key(False, PER_START)
  """Go on with the same batch on the hosts that are left when one dies or hangs, from copies of the
  state in their memory (docs/staying_up.md)."""
  min_devices: Positive = key(1, PER_START, ELASTIC)
  """Fewest devices to go on with; with fewer, the run waits for hosts for
  jax_distributed_initialization_timeout, then ends."""
  max_restarts_per_hour: NonNegative = key(20, PER_START, ELASTIC)
  """Restarts within an hour after which a fault ends the run: what fails so often will not mend."""
  state_copy_period: PositiveOrUnset = key(-1, PER_START, ELASTIC)
  """Steps between copies of the state in memory; -1: as many that copying takes less than 1% of the
  time, as measured."""


@dataclasses.dataclass(frozen=True)
class CompileConfig(Section, heading="before a run"):
  """What is done before a run or instead of one: checks, compilation, the choice of microbatch."""

  validate_only: bool = key(False, PER_START)
  """Check everything that needs no compilation, then stop."""
  compile_only: bool = key(False, PER_START)
  """Compile the training step, write compile_report.txt and .json, then stop."""
  compile_topology: str = key("", PER_START)
  """TPU slice or GPUs to compile for without having them (v5e-256, v5p-128, h100-64, b200-8, …);
  empty: the devices of this machine."""
  compile_topology_num_slices: Annotated[int, Range(low=1, high=1024)] = key(1, PER_START, TOPOLOGY)
  """Number of those TPU slices, connected by the data center network."""
  compile_topology_network_gbps: NonNegativeFloat = key(0.0, PER_START, TOPOLOGY)
  """Gb/s of a device's network to those of other hosts (GPUs) or slices (TPUs), for estimated times;
  0: as published (docs/compile.md)."""
  compiler_flags: str = key("none", PER_START)
  """XLA flags of steps and evaluations: none; published (for dense models on this chip); a set's
  name (docs/yardstick.md); '--xla_…=…'; explore: tries all sets."""
  save_compiled_step: Path = key("", PER_START)
  """File to save the compiled training step to: a new one, or one that holds such a step; empty:
  none."""
  compiled_step: Path = key("", PER_START)
  """File of a saved compiled step to load instead of compiling; refused if it belongs to another
  configuration; empty: none."""
  jax_cache_dir: Path = key("", PER_START)
  """Folder of JAX's persistent compilation cache; empty: in the user's cache folder; none: no
  cache."""
  device_memory_gb: NonNegativeFloat = key(0.0, PER_START)
  """Memory limit per device, GiB, that runs and micro_batch_size: auto respect; 0: the device's
  own, or a CPU's share of what the machine or container allows."""


@dataclasses.dataclass(frozen=True)
class ProfilingConfig(Section, heading="profiling"):
  """Which steps the profiler traces."""

  profiler: Literal["xplane", ""] = key("", PER_START)
  """Profiler that traces some steps: xplane, jax's, into {run_name}/profile; the report compares
  the longest operations with estimates; empty: off."""
  skip_first_n_steps_for_profiler: NonNegative = key(1, PER_START, PROFILER)
  """Steps of a start before the first traced one; the first step takes longer than others."""
  profiler_steps: Positive = key(5, PER_START, PROFILER)
  """Number of traced steps; more: a larger trace."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section, heading="checkpoints"):
  """What a run begins with, when checkpoints are written, how many stay, what a resume accepts."""

  enable_checkpointing: bool = key(True, CHANGEABLE)
  """Save checkpoints, and resume from them."""
  async_checkpointing: bool = key(True, CHANGEABLE, CHECKPOINTS)
  """Save checkpoints in the background while training continues."""
  checkpoint_format: str = key("orbax", CHANGEABLE, CHECKPOINTS)
  """How arrays are written: orbax, safetensors (one process only), or module:attribute of your own.
  Each checkpoint is read in its own format."""
  checkpoint_period: Annotated[int, Range(low=1, limit=EXACT)] = key(100, CHANGEABLE, CHECKPOINTS)
  """Interval of checkpoints, in schedule_unit; the last step is always saved."""
  max_num_checkpoints_to_keep: Positive = key(3, CHANGEABLE, CHECKPOINTS)
  """Number of newest checkpoints to keep."""
  checkpoint_keep_period: PositiveOrUnset = key(-1, CHANGEABLE, CHECKPOINTS)
  """Keep checkpoints at multiples of this many steps forever; -1: none."""
  allow_changed_resume: bool = key(False, PER_START, CHECKPOINTS)
  """Resume even if data, seeds, model or optimizer differ from the checkpoint's; other keys may
  always change, and changes are printed."""
  load_parameters_path: Path = key("", PER_START)
  """Initialize from another run's parameters (runs/NAME or runs/NAME/checkpoints/STEP) at step 0,
  unless this run has a checkpoint; empty: random."""
  load_full_state_path: Path = key("", PER_START)
  """Initialize from parameters, optimizer state, step and samples of another run, given likewise;
  empty: no."""
