"""Every configuration key with its type and its range.

One frozen dataclass per section; functions take the narrowest section they need. Keys are flat:
each belongs to exactly one section. Defaults and meanings live in `configs/base.yml`, whose keys
equal these fields (a test holds the two together).
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal

from maxbatch.config.allowed import (
  EXACT,
  FLOAT32,
  INT32,
  Address,
  Budget,
  CountOrUnset,
  CountOrZeroOrUnset,
  Exact,
  ExactOrUnset,
  Example,
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
  Seed,
  Weight,
)
from maxbatch.config.precision_schema import PrecisionConfig
from maxbatch.config.rl_schema import RLConfig
from maxbatch.errors import UserError


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
  steps: Annotated[int, Range(low=1, limit=INT32, also=-1, offers_also=False)]
  total_samples: Budget
  total_tokens: Budget
  schedule_unit: Literal["steps", "samples", "tokens"]
  log_period: Positive
  metrics: tuple[str, ...]
  metrics_writers: tuple[str, ...]
  eval_interval: CountOrUnset
  eval_samples: PositiveOrUnset
  write_report: bool
  # A sample to look at.
  generate_length: Annotated[int, Range(low=0, high=100_000)]
  prompt: str
  decode_sampling_temperature: NonNegativeFloat
  decode_sampling_top_k: NonNegative
  decode_sampling_nucleus_p: NucleusProbability
  decode_sampling_min_p: Probability

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
  expansion_factor_real_data: Annotated[Fraction, Range(limit=INT32)]
  loading_hosts: tuple[Annotated[int, Range(low=0, limit=INT32)], ...]
  eval_per_device_batch_size: Exact
  max_target_length: Positive
  accumulation: Literal["fused", "streamed"]
  enable_rampup_batch_size: bool
  per_device_batch_size_start: Exact
  per_device_batch_size_increment: Exact
  global_rampup_samples: Annotated[int, Range(low=1, limit=EXACT)]
  batch_schedule: (
    Annotated[
      tuple[tuple[Annotated[int, Range(low=0, limit=EXACT)], ...], ...],
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
  process_id: Annotated[int, Range(low=0, limit=INT32, also=-1)]
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
  compiler_flags: str
  save_compiled_step: Path
  compiled_step: Path
  jax_cache_dir: Path
  device_memory_gb: NonNegativeFloat


RematPlace = Literal["remat", "device", "offload"]
"""What becomes of a tensor until the backward pass."""


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
  mlp_activation: Literal["gelu", "swiglu", "geglu"]
  normalization: Literal["rmsnorm", "zero_centered_rmsnorm", "layernorm"]
  normalization_layer_epsilon: NonNegativeFloat
  use_pre_norm: bool
  use_post_attn_norm: bool
  use_post_ffw_norm: bool
  position_embedding: Literal["rope", "learned"]
  max_position_embeddings: PositiveOrUnset
  rope_type: Literal["default", "llama3.1"]
  rope_max_timescale: Annotated[float, Range(low=1, limit=FLOAT32)]
  local_rope_max_timescale: Annotated[float, Range(low=1, limit=FLOAT32, also=-1)]
  rope_linear_scaling_factor: Annotated[float, Range(low=1, limit=FLOAT32)]
  rope_factor: Annotated[float, Range(low=1, limit=FLOAT32)]
  rope_low_freq_factor: NonNegativeFloat
  rope_high_freq_factor: NonNegativeFloat
  original_max_position_embeddings: Positive
  sliding_window_size: NonNegative
  layer_types: tuple[Literal["sliding_attention", "full_attention"], ...]
  query_pre_attn_scalar: NonNegative
  attn_logits_soft_cap: NonNegativeFloat
  final_logits_soft_cap: NonNegativeFloat
  scale_embedding: bool
  logits_via_embedding: bool
  use_qk_norm: bool
  qk_norm_across_heads: bool
  attention_qkv_bias: bool
  attention_out_bias: bool
  mlp_bias: bool
  dropout_rate: Annotated[float, Range(low=0, high=0.99)]
  init_weights_seed: Seed
  attention: Literal["auto", "dot_product", "flash"]
  scan_layers: bool
  remat_policy: Literal[
    "none",
    "minimal_with_context",
    "minimal",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "minimal_offloaded",
    "qkv_proj_offloaded",
    "full",
    "custom",
    "explore",
  ]
  decoder_layer_input: RematPlace
  query_proj: RematPlace
  key_proj: RematPlace
  value_proj: RematPlace
  context: RematPlace
  attention_out: RematPlace
  out_proj: RematPlace
  mlpwi: RematPlace
  mlpwi_0: RematPlace
  mlpwi_1: RematPlace
  mlpwo: RematPlace
  num_vocab_tiling: NonNegative
  z_loss_multiplier: NonNegativeFloat
  lora_rank: NonNegative
  lora_alpha: Annotated[float, Range(low=1e-6, limit=FLOAT32, also=-1)]
  lora_targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class NoiseConfig:
  """How the gradient noise scale is measured and reported, and how it may steer the batch."""

  gns: Literal["off", "norm", "all"]
  gns_from_microbatches: bool
  gns_window_steps: Annotated[int, Range(low=8, limit=INT32)]
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
  num_epoch: Annotated[int, Range(low=1, limit=INT32, also=-1)]
  # Files of records, by MaxText's names.
  train_data_columns: tuple[str, ...]
  eval_data_columns: tuple[str, ...]
  tokenize_train_data: bool
  tokenize_eval_data: bool
  weights_column: str
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
  # Each thread has a load, and so has each place of a buffer.
  grain_num_threads: Annotated[int, Range(low=1, limit=256)]
  grain_prefetch_buffer_size: Annotated[int, Range(low=1, limit=10_000)]
  grain_per_worker_buffer_size: Annotated[int, Range(low=1, limit=10_000)]
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
  """The optimizer, its learning rate, and which parameters it changes."""

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
  mu_dtype: Literal["float32", "bfloat16"]
  optimizer_memory_host_offload: bool
  trainable: Annotated[tuple[str, ...], Example('["layers/attention/*", "head"]')]


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What a run begins with, when checkpoints are written, how many stay, what a resume accepts."""

  enable_checkpointing: bool
  async_checkpointing: bool
  checkpoint_format: str
  checkpoint_period: Annotated[int, Range(low=1, limit=EXACT)]
  max_num_checkpoints_to_keep: Positive
  checkpoint_keep_period: PositiveOrUnset
  allow_changed_resume: bool
  load_parameters_path: Path
  load_full_state_path: Path


@dataclasses.dataclass(frozen=True)
class ProfilingConfig:
  """Which steps the profiler traces."""

  profiler: Literal["xplane", ""]
  skip_first_n_steps_for_profiler: NonNegative
  profiler_steps: Positive


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
  precision: PrecisionConfig
  noise: NoiseConfig
  profiling: ProfilingConfig
  data: DataConfig
  optimizer: OptimizerConfig
  checkpoint: CheckpointConfig
  rl: RLConfig


def sections() -> dict[str, type]:
  """Section name to section class, in the order of `Config`."""
  return {field.name: field.type for field in dataclasses.fields(Config)}  # pyright: ignore


@functools.cache
def fields() -> Mapping[str, tuple[str, dataclasses.Field]]:
  """Every key, mapped to its section's name and its field."""
  return types.MappingProxyType(
    {
      field.name: (name, field)
      for name, section in sections().items()
      for field in dataclasses.fields(section)
    }
  )


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
