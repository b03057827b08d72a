"""Everything that a compiled step is made from, key by key: the header of its file.

Every configuration key is in one of three groups, and a test refuses one that is in none: baked
into the program, felt by it only through sizes derived from it, or without any effect on it.
"""

import hashlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from maxbatch.batch.plan import BatchPlan
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.data import rows
from maxbatch.hardware import sharding
from maxbatch.models import (
  attention,
  dot_product,
  dropout,
  flash,
  layers,
  probes,
  registry,
  transformer,
)
from maxbatch.models.registry import MODELS
from maxbatch.pipeline_parallel import schedule, slots, timetable_arrays
from maxbatch.training import (
  accumulate,
  build,
  layer_order,
  loss,
  metrics,
  optimizer,
  partial_sums,
  pipelined_evaluation,
  pipelined_step,
  stage_parts,
  stage_residuals,
  stash,
  state,
  step,
  tick,
)
from maxbatch.training.step import Trainer

MICRO_BATCHES = "micro_batch_to_train"

BAKED = (
  "decoder_block",
  "vocab_size",
  "base_emb_dim",
  "base_num_decoder_layers",
  "base_num_query_heads",
  "base_num_kv_heads",
  "head_dim",
  "base_mlp_dim",
  "mlp_activation",
  "normalization",
  "normalization_layer_epsilon",
  "position_embedding",
  "rope_max_timescale",
  "sliding_window_size",
  "logits_via_embedding",
  "use_qk_norm",
  "attention_qkv_bias",
  "attention_out_bias",
  "mlp_bias",
  "dropout_rate",
  "init_weights_seed",
  "dtype",
  "weight_dtype",
  "attention",
  "scan_layers",
  "remat_policy",
  "num_vocab_tiling",
  "z_loss_multiplier",
  "gns",
  "gns_from_microbatches",
  "metrics",
  "max_target_length",
  "accumulation",
  "pipeline_schedule",
  "num_pipeline_microbatches",
  "num_pipeline_repeats",
  "num_layers_per_pipeline_stage",
  "pipeline_delay_activation_forwarding",
  "pipeline_stash",
  "dataset_type",
  "packing",
  "opt_type",
  "gradient_clipping_threshold",
  "adam_b1",
  "adam_b2",
  "adam_eps",
  "adam_weight_decay",
  "sgd_momentum",
)
"""In the header by name."""

DERIVED: dict[str, tuple[str, ...]] = {
  # The batch of every phase, cut into passes: the arrays' shapes, and what is streamed when.
  "micro_batch_to_train": (
    "batch_size",
    "global_batch_to_train",
    "tokens_per_step",
    "per_device_batch_size",
    "micro_batch_size",
  ),
  "microbatch_capacity": ("gradient_accumulation_steps", "gns_max_batch_size"),
  "streamed_passes": (
    "enable_rampup_batch_size",
    "per_device_batch_size_start",
    "per_device_batch_size_increment",
    "global_rampup_samples",
    "batch_schedule",
    "batch_schedule_file",
    "batch_schedule_type",
    "batch_schedule_unit",
    "batch_schedule_length",
    "batch_size_start",
    "batch_size_increment",
  ),
  "num_devices": (
    "num_simulated_devices",
    "compile_topology",
    "compile_topology_num_slices",
  ),
  "mesh": (
    "ici_data_parallelism",
    "ici_fsdp_parallelism",
    "ici_tensor_parallelism",
    "ici_pipeline_parallelism",
  ),
  "mesh_between_slices": (
    "dcn_data_parallelism",
    "dcn_fsdp_parallelism",
    "dcn_tensor_parallelism",
    "dcn_pipeline_parallelism",
  ),
}
"""Header key to the keys that the program feels only through it (and through others of these)."""

FREE = (
  # Where the run lives, how long it lasts, what it shows.
  "run_name",
  "base_output_directory",
  "steps",
  "total_samples",
  "total_tokens",
  "schedule_unit",
  "log_period",
  "eval_interval",
  "eval_samples",
  "generate_length",
  "prompt",
  "decode_sampling_temperature",
  # Evaluation is another program; loading is the host's.
  "eval_per_device_batch_size",
  "expansion_factor_real_data",
  # What is done with compiled programs; device_memory_gb only helps to choose a microbatch.
  "validate_only",
  "compile_only",
  "save_compiled_step",
  "compiled_step",
  "jax_cache_dir",
  "device_memory_gb",
  # The name of a file with shapes, each of which counts for itself.
  "model_name",
  # What is read, and in which order: the program is given rows.
  "dataset_path",
  "eval_dataset_path",
  "eval_fraction",
  "dataset_cache_directory",
  "data_shuffle_seed",
  "grain_worker_count",
  # The learning rate of a step is an argument of the program.
  "learning_rate",
  "lr_schedule_type",
  "learning_rate_schedule_steps",
  "learning_rate_batch_coupling",
  "warmup_steps",
  "warmup_steps_fraction",
  "learning_rate_final_fraction",
  "wsd_decay_steps_fraction",
  # What is made of the norms that a step reports; calibrating steps are another program.
  "gns_window_steps",
  "gns_calibrate_every",
  "gns_report_every",
  "gns_dwell_tokens",
  "gns_windows_before_growth",
  "gns_dry_run",
  # Checkpoints hold the state, whatever steps it.
  "enable_checkpointing",
  "async_checkpointing",
  "checkpoint_period",
  "max_num_checkpoints_to_keep",
  "checkpoint_keep_period",
  "allow_changed_resume",
)
"""Not in the header: the program is the same whatever they are."""

STEP_MODULES = (
  accumulate,
  attention,
  dot_product,
  dropout,
  pipelined_evaluation,
  flash,
  stage_residuals,
  layers,
  loss,
  metrics,
  optimizer,
  partial_sums,
  stage_parts,
  build,
  probes,
  registry,
  rows,
  timetable_arrays,
  pipelined_step,
  schedule,
  sharding,
  slots,
  layer_order,
  stash,
  state,
  step,
  tick,
  transformer,
)
"""The code that the program is traced from."""

_JAX_SETTINGS = (
  "jax_enable_x64",
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
)
_FLAG_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_FLAGS_WITHOUT_EFFECT = ("--xla_dump", "--xla_force_host_platform_device_count")


def header(config: Config, plan: BatchPlan, trainer: Trainer) -> dict[str, object]:
  """What this run's compiled steps are made from, in values that JSON holds.

  Args:
    config: the run's keys, those of the batch already chosen.
    plan: the plan that is run: after a resume, the one from there on.
    trainer: the run's model, optimizer and mesh.
  """
  return {
    **_keys(config, trainer),
    **_sizes(config, plan, trainer),
    **_devices(plan, trainer),
    **_versions(trainer),
    "source": source_hash(config),
    **{name: jax.config.values[name] for name in _JAX_SETTINGS},
    **{name: _flags(os.environ.get(name, "")) for name in _FLAG_VARIABLES},
  }


def _keys(config: Config, trainer: Trainer) -> dict[str, object]:
  values = to_flat_dict(config)
  keys = {name: values[name] for name in BAKED}
  # `auto` is resolved by now; the seed is baked in only as the key of dropout.
  keys["attention"] = trainer.model.config.attention
  keys["init_weights_seed"] = config.model.init_weights_seed if config.model.dropout_rate else None
  return keys


def _sizes(config: Config, plan: BatchPlan, trainer: Trainer) -> dict[str, object]:
  streamed = config.batch.accumulation == "streamed"
  return {
    MICRO_BATCHES: list(plan.micro_batches),
    "microbatch_capacity": None if streamed else plan.microbatch_capacity,
    # A pipeline's timetable has room for the largest step, not for the capacity.
    "pipeline_passes": trainer.pipeline.max_num_microbatches if trainer.pipeline else None,
    "streamed_passes": _streamed_passes(plan) if streamed else None,
  }


def _streamed_passes(plan: BatchPlan) -> object:
  """Dispatches per step, or [first step, dispatches] of each phase where they differ."""
  num_microbatches = [[phase.first.step, phase.num_microbatches] for phase in plan.phases]
  return (
    num_microbatches
    if len({num_microbatches for _, num_microbatches in num_microbatches}) > 1
    else num_microbatches[0][1]
  )


def _devices(plan: BatchPlan, trainer: Trainer) -> dict[str, object]:
  devices = list(trainer.mesh.devices.flat)
  return {
    "platform": devices[0].platform,
    "device_kind": devices[0].device_kind,
    "cpu": _cpu() if devices[0].platform == "cpu" else None,
    "num_devices": len(devices),
    "num_processes": len({device.process_index for device in devices}),
    "mesh": str(plan.topology),
    "mesh_between_slices": list(plan.topology.dcn),
  }


def _versions(trainer: Trainer) -> dict[str, object]:
  device = trainer.mesh.devices.flat[0]
  on_tpu = device.platform == "tpu"
  return {
    "jax": importlib.metadata.version("jax"),
    "jaxlib": importlib.metadata.version("jaxlib"),
    "libtpu": _version("libtpu") if on_tpu else None,
    "compiler": device.client.platform_version,
  }


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _cpu() -> str:
  """The processor's instructions, which a program compiled on it may use."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    return platform.processor()
  known = [line for line in lines if line.startswith(("flags", "Features"))][:1]
  return f"{platform.machine()} with instructions {_short_hash(line.encode() for line in known)}"


def source_hash(config: Config) -> str:
  """Of the code that the step is traced from, the registered model's included: 12 hex digits."""
  model = sys.modules[MODELS[config.model.decoder_block].create.__module__]
  modules: dict[str, Any] = {module.__name__: module for module in (*STEP_MODULES, model)}
  return _short_hash(Path(modules[name].__file__).read_bytes() for name in sorted(modules))


def _short_hash(parts: Iterable[bytes]) -> str:
  digest = hashlib.sha256()
  for part in parts:
    digest.update(part)
  return digest.hexdigest()[:12]


def _flags(text: str) -> str:
  """A variable's flags in order, without those that change no program."""
  return " ".join(sorted(f for f in text.split() if not f.startswith(_FLAGS_WITHOUT_EFFECT)))
