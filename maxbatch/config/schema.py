"""Every configuration key with its type and its range.

One frozen dataclass per section; functions take the narrowest section they need. Keys are flat:
each belongs to exactly one section. Defaults and meanings live in `configs/base.yml`, whose keys
equal these fields (a test holds the two together).
"""

import dataclasses
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal

from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class Range:
  """The closed interval a number must lie in; `also` names one value allowed outside it."""

  low: float | None = None
  high: float | None = None
  also: float | None = None
  offers_also: bool = True
  """Whether a message may offer `also`, which some keys need another key for."""
  limit: float | None = None
  """What a machine can hold: said only to who exceeds it."""

  def holds(self, value: float | Fraction) -> bool:
    """Whether `value` is allowed."""
    if self.also is not None and value == self.also:
      return True
    if self.exceeded_by(value):
      return False
    return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

  def exceeded_by(self, value: float | Fraction) -> bool:
    """Whether `value` is more than a machine can hold."""
    return self.limit is not None and value > self.limit

  def __str__(self) -> str:
    low = "" if self.low is None else f"at least {_digits(self.low)}"
    high = "" if self.high is None else f"at most {_digits(self.high)}"
    text = " and ".join(part for part in (low, high) if part)
    return text if self.also is None else f"{text}, or {_digits(self.also)}"


def _digits(edge: float) -> str:
  """A whole number in full, else as short as it goes."""
  return str(edge) if isinstance(edge, int) else f"{edge:g}"


@dataclasses.dataclass(frozen=True)
class FileName:
  """A text that names a file or folder, or files by a glob: no longer than file systems take."""

  words: str = "a name that a file system can hold"

  def holds(self, value: str) -> bool:
    """Whether `value` is such a name."""
    encoded = value.encode(errors="replace")
    return len(encoded) <= 4000 and all(len(part) <= 255 for part in encoded.split(b"/"))

  def nearest(self, value: str) -> str:
    """The beginning of `value`."""
    return "/".join(part[:40] for part in value[:80].split("/"))


@dataclasses.dataclass(frozen=True)
class RelativePath(FileName):
  """A text that names a folder inside another one: no step upwards, and no control character."""

  words: str = "the name of a folder inside another one, without .. and control characters"

  def holds(self, value: str) -> bool:
    """Whether `value` is such a name."""
    parts = value.split("/")
    short = all(len(part.encode(errors="replace")) <= 200 for part in parts) and len(parts) <= 8
    return short and value.isprintable() and not {"", ".", ".."} & set(parts)

  def nearest(self, value: str) -> str:
    """What is left of `value` without what does not work in it."""
    printable = "".join(char if char.isprintable() else "_" for char in value)
    parts = [part[:40] for part in printable.split("/") if part not in ("", ".", "..")]
    return "/".join(parts[:8]) or "my_run"


@dataclasses.dataclass(frozen=True)
class Address(FileName):
  """A text that names a port of a host, or nothing."""

  words: str = "HOST:PORT"
  longest: int = 253
  """Characters of a host's name."""

  def holds(self, value: str) -> bool:
    """Whether `value` is such an address."""
    host, _, port = value.rpartition(":")
    numbered = port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16
    return not value or (self._is_host(host) and numbered)

  def nearest(self, value: str) -> str:
    """`value` with a port."""
    host = value.partition(":")[0]
    return f"{host if self._is_host(host) else 'localhost'}:1234"

  def _is_host(self, text: str) -> bool:
    name = re.fullmatch(r"[\w.-]+|\[[\da-f:.]+\]", text, re.ASCII | re.IGNORECASE)
    return name is not None and len(text) <= self.longest


@dataclasses.dataclass(frozen=True)
class Example:
  """A value that works, for messages, where none can be made of what is wrong."""

  text: str


# A size, a count or an index on a device is an int32.
_INT32 = 2**31 - 1
# JSON and floats count exactly so far: samples and tokens of whole runs.
_EXACT = 2**53
# No machine has more, and a plan lists the hosts one by one.
_DEVICES = 2**20
# More does not fit in a float32.
_FLOAT32 = 3e38

Path = Annotated[str, FileName()]
Positive = Annotated[int, Range(low=1, limit=_INT32)]
NonNegative = Annotated[int, Range(low=0, limit=_INT32)]
PositiveOrUnset = Annotated[int, Range(low=1, limit=_INT32, also=-1)]
Budget = Annotated[int, Range(low=1, limit=_EXACT, also=-1, offers_also=False)]
CountOrUnset = Annotated[int, Range(low=1, limit=_EXACT, also=-1)]
CountOrZeroOrUnset = Annotated[int, Range(low=0, limit=_EXACT, also=-1)]
Exact = Annotated[Fraction, Range(low=0, limit=_INT32)]
ExactOrUnset = Annotated[Fraction, Range(low=0, limit=_INT32, also=-1)]
Weight = Annotated[Fraction, Range(low=0, limit=_EXACT)]
DevicesOrUnset = Annotated[int, Range(low=1, limit=_DEVICES, also=-1)]
Hosts = Annotated[int, Range(low=1, limit=_DEVICES)]
Seconds = Annotated[int, Range(low=1, limit=1_000_000)]
Seed = Annotated[int, Range(low=0, high=2**32 - 1)]
"""jax takes the last 32 bits of a seed: beyond them another seed would give the same numbers."""
Probability = Annotated[float, Range(low=0, high=1)]
NonNegativeFloat = Annotated[float, Range(low=0, limit=_FLOAT32)]
DType = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Explore:
  """`explore`, or `{explore: {min: 1, max: 16}}`: the sizes that are tried."""

  min: Positive = 1
  max: PositiveOrUnset = -1


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Where the run lives, how long it lasts and what it shows."""

  run_name: Annotated[str, RelativePath()]
  base_output_directory: Path
  steps: Annotated[int, Range(low=1, limit=_INT32, also=-1, offers_also=False)]
  total_samples: Budget
  total_tokens: Budget
  schedule_unit: Literal["steps", "samples", "tokens"]
  log_period: Positive
  metrics: tuple[str, ...]
  eval_interval: CountOrUnset
  eval_samples: PositiveOrUnset
  # A sample to look at; the tokens are computed one by one.
  generate_length: Annotated[int, Range(low=0, high=100_000)]
  prompt: str
  decode_sampling_temperature: NonNegativeFloat

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
class BatchConfig:
  """The sizes from which BatchPlan derives every other size."""

  batch_size: PositiveOrUnset
  global_batch_to_train: PositiveOrUnset
  tokens_per_step: CountOrUnset
  per_device_batch_size: ExactOrUnset
  micro_batch_size: ExactOrUnset | Literal["none", "auto"] | Explore
  gradient_accumulation_steps: PositiveOrUnset
  expansion_factor_real_data: Annotated[Fraction, Range(limit=_INT32)]
  loading_hosts: tuple[Annotated[int, Range(low=0, limit=_INT32)], ...]
  eval_per_device_batch_size: Exact
  max_target_length: Positive
  accumulation: Literal["fused", "streamed"]
  enable_rampup_batch_size: bool
  per_device_batch_size_start: Exact
  per_device_batch_size_increment: Exact
  global_rampup_samples: Annotated[int, Range(low=1, limit=_EXACT)]
  batch_schedule: (
    Annotated[
      tuple[tuple[Annotated[int, Range(low=0, limit=_EXACT)], ...], ...],
      Example("[[0, 32], [10000, 64]]"),
    ]
    | Literal["gns", "file"]
  )
  batch_schedule_file: Path
  batch_schedule_type: str
  batch_schedule_unit: Literal["steps", "samples", "tokens"]
  batch_schedule_length: CountOrUnset
  batch_size_start: PositiveOrUnset
  batch_size_increment: PositiveOrUnset
  gns_max_batch_size: PositiveOrUnset


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The devices and how the mesh axes divide them: ici inside a slice, dcn between slices."""

  # Each has threads of its own; a host cannot start more.
  num_simulated_devices: Annotated[int, Range(low=0, limit=1024, also=-1)]
  ici_data_parallelism: PositiveOrUnset
  ici_fsdp_parallelism: PositiveOrUnset
  ici_tensor_parallelism: PositiveOrUnset
  ici_pipeline_parallelism: PositiveOrUnset
  dcn_data_parallelism: PositiveOrUnset
  dcn_fsdp_parallelism: PositiveOrUnset
  dcn_tensor_parallelism: PositiveOrUnset
  dcn_pipeline_parallelism: PositiveOrUnset


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
  """How several processes find each other, and for how long they wait."""

  coordinator_address: Annotated[str, Address()]
  num_processes: PositiveOrUnset
  process_id: Annotated[int, Range(low=0, limit=_INT32, also=-1)]
  skip_jax_distributed_system: bool
  jax_distributed_initialization_timeout: Seconds
  jax_distributed_heartbeat_timeout_seconds: Seconds
  hang_timeout_seconds: Annotated[int, Range(low=0, limit=1_000_000)]


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """How microbatches pass through the stages of a pipeline, which are the mesh axis `stage`."""

  pipeline_schedule: Literal["none", "gpipe", "circular", "1f1b", "interleaved_1f1b"]
  num_pipeline_microbatches: PositiveOrUnset
  num_pipeline_repeats: PositiveOrUnset
  num_layers_per_pipeline_stage: PositiveOrUnset
  pipeline_delay_activation_forwarding: bool
  pipeline_stash: Literal["input", "residuals"]


@dataclasses.dataclass(frozen=True)
class CompileConfig:
  """What is done before a run or instead of one: checks, compilation, the choice of microbatch."""

  validate_only: bool
  compile_only: bool
  compile_topology: str
  compile_topology_num_slices: Annotated[int, Range(low=1, high=1024)]
  save_compiled_step: Path
  compiled_step: Path
  jax_cache_dir: Path
  device_memory_gb: NonNegativeFloat


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The model's shape and how it is computed."""

  model_name: Path
  decoder_block: str
  vocab_size: Positive
  base_emb_dim: Positive
  base_num_decoder_layers: Annotated[int, Range(low=1, high=10_000)]
  base_num_query_heads: Positive
  base_num_kv_heads: Positive
  head_dim: Positive
  base_mlp_dim: Positive
  mlp_activation: Literal["gelu", "swiglu"]
  normalization: Literal["rmsnorm", "layernorm"]
  normalization_layer_epsilon: NonNegativeFloat
  position_embedding: Literal["rope", "learned"]
  rope_max_timescale: Annotated[float, Range(low=1, limit=_FLOAT32)]
  sliding_window_size: NonNegative
  logits_via_embedding: bool
  use_qk_norm: bool
  attention_qkv_bias: bool
  attention_out_bias: bool
  mlp_bias: bool
  dropout_rate: Annotated[float, Range(low=0, high=0.99)]
  init_weights_seed: Seed
  dtype: DType
  weight_dtype: DType
  attention: Literal["auto", "dot_product", "flash"]
  scan_layers: bool
  remat_policy: Literal["none", "minimal", "full", "explore"]
  num_vocab_tiling: NonNegative
  z_loss_multiplier: NonNegativeFloat


@dataclasses.dataclass(frozen=True)
class NoiseConfig:
  """How the gradient noise scale is measured and reported, and how it may steer the batch."""

  gns: Literal["off", "norm", "all"]
  gns_from_microbatches: bool
  gns_window_steps: Annotated[int, Range(low=8, limit=_INT32)]
  gns_calibrate_every: NonNegative
  gns_report_every: NonNegative
  gns_dwell_tokens: CountOrZeroOrUnset
  gns_windows_before_growth: Positive
  gns_dry_run: bool


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """What is trained on and how it is read."""

  dataset_type: str
  dataset_path: Path
  eval_dataset_path: Path
  eval_fraction: Annotated[float, Range(low=0, high=0.9)]
  dataset_cache_directory: Path
  tokenizer_type: str
  tokenizer_path: Path
  add_bos: bool
  add_eos: bool
  bos_token: str
  eos_token: str
  pad_token: str
  data_shuffle_seed: Seed
  packing: bool
  max_bad_records: NonNegative
  num_epoch: Annotated[int, Range(low=1, limit=_INT32, also=-1)]
  # Files of records, by MaxText's names.
  train_data_columns: tuple[str, ...]
  eval_data_columns: tuple[str, ...]
  tokenize_train_data: bool
  tokenize_eval_data: bool
  grain_file_type: str
  grain_train_files: Path
  grain_eval_files: Path
  hf_path: Path
  hf_name: str
  hf_data_dir: Path
  hf_train_files: Path
  hf_eval_files: Path
  train_split: str
  hf_eval_split: str
  # Each is a process.
  grain_worker_count: Annotated[int, Range(low=0, limit=256)]
  # Several sources, and documents as rows.
  dataset_mixture: Annotated[
    tuple[tuple[Path, Weight], ...], Example("[[texts, 0.7], [code, 0.3]]")
  ]
  mixture_schedule: Annotated[tuple[tuple[Weight, ...], ...], Example("[[10000, 0.5, 0.5]]")]
  grain_train_mixture_config_path: Path
  grain_packing_type: Literal["concat_then_split", "first_fit", "best_fit"]
  use_truncation: bool
  block_cross_document_attention: bool
  use_chat_template: bool
  sft_train_on_completion_only: bool

  @property
  def segmented(self) -> bool:
    """Whether rows say which tokens belong to one document."""
    return self.packing and self.block_cross_document_attention


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """The optimizer and its learning rate."""

  opt_type: str
  learning_rate: NonNegativeFloat
  lr_schedule_type: str
  learning_rate_schedule_steps: CountOrUnset
  learning_rate_batch_coupling: Literal["auto", "none", "linear", "sqrt"]
  warmup_steps: CountOrZeroOrUnset
  warmup_steps_fraction: Probability
  learning_rate_final_fraction: Probability
  wsd_decay_steps_fraction: Probability
  gradient_clipping_threshold: NonNegativeFloat
  adam_b1: Annotated[float, Range(low=0, high=0.99999)]
  adam_b2: Annotated[float, Range(low=0, high=0.999999)]
  adam_eps: NonNegativeFloat
  adam_weight_decay: NonNegativeFloat
  sgd_momentum: Annotated[float, Range(low=0, high=0.99999)]


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When checkpoints are written, how many stay, and what a resume accepts."""

  enable_checkpointing: bool
  async_checkpointing: bool
  checkpoint_format: str
  checkpoint_period: Annotated[int, Range(low=1, limit=_EXACT)]
  max_num_checkpoints_to_keep: Positive
  checkpoint_keep_period: PositiveOrUnset
  allow_changed_resume: bool


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run, by section."""

  run: RunConfig
  batch: BatchConfig
  mesh: MeshConfig
  distributed: DistributedConfig
  pipeline: PipelineConfig
  compile: CompileConfig
  model: ModelConfig
  noise: NoiseConfig
  data: DataConfig
  optimizer: OptimizerConfig
  checkpoint: CheckpointConfig


def sections() -> dict[str, type]:
  """Section name to section class, in the order of `Config`."""
  return {field.name: field.type for field in dataclasses.fields(Config)}  # pyright: ignore


def fields() -> dict[str, tuple[str, dataclasses.Field]]:
  """Every key, mapped to its section's name and its field."""
  return {
    field.name: (name, field)
    for name, section in sections().items()
    for field in dataclasses.fields(section)
  }


def to_flat(config: Config) -> dict[str, object]:
  """Every key with its value. No other place reads keys by computed names."""
  return {key: value for section in vars(config).values() for key, value in vars(section).items()}


def from_flat(values: Mapping[str, object]) -> Config:
  """The configuration of which `to_flat` gives `values`."""
  built = {
    name: section(**{field.name: values[field.name] for field in dataclasses.fields(section)})
    for name, section in sections().items()
  }
  return Config(**built)
