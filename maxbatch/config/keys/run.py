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
  samples or tokens; use samples or tokens when the batch size changes."""
  log_period: Positive = key(20, CHANGEABLE)
  """Steps between log lines when the output is not a terminal."""
  metrics: tuple[Name, ...] = key((), CHANGEABLE)
  """Metrics to record besides loss and grad_norm: accuracy and log_z (means over tokens, of
  evaluations too), param_norm, update_norm, or module:attribute of your own; each costs a little
  time."""
  metrics_writers: tuple[Name, ...] = key(("jsonl", "tensorboard"), CHANGEABLE)
  """Where records go: jsonl (always: a resume reads it), tensorboard, wandb, mlflow, or
  module:attribute of your own; one that fails is let go, and training goes on."""
  eval_interval: CountOrUnset = key(100, CHANGEABLE)
  """Interval of evaluation on the validation set, in schedule_unit; -1: only at the end."""
  eval_samples: PositiveOrUnset = key(256, CHANGEABLE)
  """Samples per evaluation, independent of the batch size; -1: the whole validation set."""
  write_report: bool = key(True, CHANGEABLE)
  """Write report.html, a page about the run, at evaluations (where that takes less than 1/50 of the
  time) and at the end, in a process of its own; false: only python -m maxbatch.report writes it."""
  # A sample to look at.
  generate_length: Annotated[int, Range(low=0, high=100_000)] = key(160, CHANGEABLE)
  """Tokens of sample text to generate before and after training, and at evaluations; 0: none."""
  prompt: str = key("def ", CHANGEABLE, SAMPLE_TEXT)
  """Prompt of that text."""
  decode_sampling_temperature: NonNegativeFloat = key(0.8, CHANGEABLE)
  """Sampling temperature of texts, these and those of `python -m maxbatch.sample`; 0: greedy."""
  decode_sampling_top_k: NonNegative = key(0, CHANGEABLE)
  """Sample only from so many of the likeliest tokens; 0: from all."""
  decode_sampling_nucleus_p: NucleusProbability = key(1.0, CHANGEABLE)
  """Sample only from the fewest of the likeliest tokens that have this probability together
  (top-p); 1: from all."""
  decode_sampling_min_p: Probability = key(0.0, CHANGEABLE)
  """Sample only from tokens at least so likely as this times the likeliest one; 0: from all."""

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
  """HOST:PORT at which process 0 waits for the others, a free port of its host; empty: what SLURM,
  Open MPI, Kubernetes, a TPU pod or JAX_COORDINATOR_ADDRESS says."""
  num_processes: PositiveOrUnset = key(-1, PER_START, PROCESSES)
  """Number of processes that train together; -1: what the environment says."""
  process_id: Annotated[int, Range(low=0, limit=INT32, also=-1)] = key(-1, PER_START, PROCESSES)
  """Which of them this one is, from 0; -1: what the environment says."""
  skip_jax_distributed_system: bool = key(False, PER_START)
  """Train with this process alone, whatever the environment says of others."""
  jax_distributed_initialization_timeout: Seconds = key(300, PER_START, PROCESSES)
  """Seconds to wait at the start until all processes have come."""
  jax_distributed_heartbeat_timeout_seconds: Seconds = key(40, PER_START, PROCESSES)
  """Seconds without a sign of life after which a process counts as dead, and the others end."""
  hang_timeout_seconds: Annotated[int, Range(low=0, limit=1_000_000)] = key(1800, PER_START)
  """Seconds in which no step ends, nor a batch of an evaluation or a save, after which a run counts
  as hanging: every process writes the stacks of its threads and all end; 0: never."""


@dataclasses.dataclass(frozen=True)
class CompileConfig(Section, heading="before a run"):
  """What is done before a run or instead of one: checks, compilation, the choice of microbatch."""

  validate_only: bool = key(False, PER_START)
  """Check everything that needs no compilation, then stop."""
  compile_only: bool = key(False, PER_START)
  """Compile the training step, write compile_report.txt and .json, then stop."""
  compile_topology: str = key("", PER_START)
  """TPU slice to compile for without having it (v5e-256, v5p-128, v6e-64, ...); empty: the present
  devices."""
  compile_topology_num_slices: Annotated[int, Range(low=1, high=1024)] = key(1, PER_START, TOPOLOGY)
  """Number of these slices, connected by the data center network."""
  compiler_flags: str = key("none", PER_START)
  """Flags of XLA's compiler for steps and evaluations: none, published (what is published for dense
  models on this generation of TPUs), the name of another set (docs/yardstick.md), flags themselves,
  '--xla_…=…', or both; explore, with micro_batch_size: explore: tries every set."""
  save_compiled_step: Path = key("", PER_START)
  """File to save the compiled training step to, new or such a file already; empty: none."""
  compiled_step: Path = key("", PER_START)
  """File of a saved compiled step to load instead of compiling; refused if it was compiled for
  another configuration; empty: none."""
  jax_cache_dir: Path = key("", PER_START)
  """Folder of JAX's persistent compilation cache; empty: the user's cache folder; none: no
  cache."""
  device_memory_gb: NonNegativeFloat = key(0.0, PER_START)
  """Memory limit per device in GiB, to which a run is held and micro_batch_size: auto chooses; 0:
  the device's own; a CPU's share of what the machine, or a container's limit, allows."""


@dataclasses.dataclass(frozen=True)
class ProfilingConfig(Section, heading="profiling"):
  """Which steps the profiler traces."""

  profiler: Literal["xplane", ""] = key("", PER_START)
  """Trace some steps with jax's profiler: xplane, into {run_name}/profile; the report shows the
  longest operations beside the compile report's estimate; empty: off."""
  skip_first_n_steps_for_profiler: NonNegative = key(1, PER_START, PROFILER)
  """Steps of a start before the first one that is traced; the first takes longer than others."""
  profiler_steps: Positive = key(5, PER_START, PROFILER)
  """Steps that are traced; more: a larger trace."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section, heading="checkpoints"):
  """What a run begins with, when checkpoints are written, how many stay, what a resume accepts."""

  enable_checkpointing: bool = key(True, CHANGEABLE)
  """Save checkpoints, and resume from them."""
  async_checkpointing: bool = key(True, CHANGEABLE, CHECKPOINTS)
  """Save checkpoints in the background while training continues."""
  checkpoint_format: str = key("orbax", CHANGEABLE, CHECKPOINTS)
  """How arrays are written: orbax; or module:attribute of your own. Each checkpoint is read as it
  was written."""
  checkpoint_period: Annotated[int, Range(low=1, limit=EXACT)] = key(100, CHANGEABLE, CHECKPOINTS)
  """Interval of checkpoints, in schedule_unit; the last step is always saved."""
  max_num_checkpoints_to_keep: Positive = key(3, CHANGEABLE, CHECKPOINTS)
  """Number of newest checkpoints to keep."""
  checkpoint_keep_period: PositiveOrUnset = key(-1, CHANGEABLE, CHECKPOINTS)
  """Keep checkpoints at multiples of this many steps for good; -1: none."""
  allow_changed_resume: bool = key(False, PER_START, CHECKPOINTS)
  """Resume although data, seeds, model or optimizer differ from the checkpoint's; other keys may
  change anyway, and what changed is printed."""
  load_parameters_path: Path = key("", PER_START)
  """Begin with the parameters of another run (runs/NAME, or runs/NAME/checkpoints/STEP), at step 0
  with a new optimizer; counts only for a run that has no checkpoint of its own; empty: random
  ones."""
  load_full_state_path: Path = key("", PER_START)
  """Begin with parameters, optimizer state, step and samples of another run, named likewise; empty:
  none."""
