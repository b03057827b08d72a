"""Finds models that depend on how a batch is split, before they are split: check_split on a tiny one.

Batch normalization and the like make a sample's loss depend on the samples beside it. A step of
such a model in several microbatches, over replicas that each see rows of their own, or in a pipeline
trains something else than the same step in one piece. fsdp and tensor parallelism divide arrays, not
the batch's meaning: there the sums over rows go over all devices.
"""

import dataclasses
import sys
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from maxbatch.batch.from_config import plan_batches
from maxbatch.config.schema import BatchConfig, Config, ModelConfig
from maxbatch.core.check_split import check_split
from maxbatch.core.keys import counted, text
from maxbatch.core.plan import BatchPlan
from maxbatch.core.split_causes import CAUSES, Cause
from maxbatch.core.terms import Ratio, Terms
from maxbatch.core.topology import Topology
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.models.registry import MODELS, Model, Parameters, build_model, model_named
from maxbatch.training.loss import row_keys, row_sums
from maxbatch.tuning.candidates import asked, is_open

SHIPPED = frozenset(MODELS)
"""Models known not to couple samples, by test: looking again would cost every start a second."""

_ROWS, _LENGTH, _VOCABULARY, _HEAD_DIM, _LAYERS = 4, 16, 32, 4, 2
_SPREAD = 0.5
"""Standard deviation of the parameters: large enough that every part of the model matters."""


def resolve_accumulation(
  config: Config, topology: Topology, plan: BatchPlan | None = None
) -> Config:
  """Returns the configuration, held to one microbatch per step if the model cannot be split into several.

  A model that is not SHIPPED is looked at where keys split its step, or the microbatch is to be
  chosen. A choice is then made at once, `micro_batch_size=none`, with a warning on stderr. `plan` is
  the run's, where it is known already.

  Raises:
    UserError: the model couples samples and keys split its step; or there is no plan.
  """
  chooses = is_open(config.batch) and config.batch.gradient_accumulation_steps <= 1
  if plan is None and not is_open(config.batch):
    plan = plan_batches(config.batch, config.run, topology, config.optimizer)
  splits = _splits(config, plan, topology)
  if config.model.decoder_block in SHIPPED or not (chooses or splits):
    return config
  # An unknown name is refused here as where the run builds its model.
  model_named(config.model)
  try:
    cause = coupling(config.model, config.batch.max_target_length, packing=config.data.segmented)
  except UserError as error:
    _warn(f"decoder_block={config.model.decoder_block} could not be tried at a small size: {error}")
    return config
  if cause is None:
    return config
  coupled = _coupled(config, cause)
  if splits:
    reasons, offers = zip(*splits, strict=True)
    raise UserError(f"{coupled}, but {' and '.join(reasons)}; for example {' '.join(offers)}")
  _warn(f"{coupled}: micro_batch_size=none instead of {asked(config.batch)}")
  batch = dataclasses.replace(config.batch, micro_batch_size="none")
  return dataclasses.replace(config, batch=batch)


def coupling(config: ModelConfig, length: int, *, packing: bool = True) -> Cause | None:
  """Returns why the model's loss, its own terms or their gradient depend on how a batch is split;
  None: they do not.

  On the first device: the registered model with every option as configured, dropout too (its masks
  belong to the samples), but with tiny sizes, in float32.

  Args:
    config: the model.
    length: tokens per sample.
    packing: whether rows hold several documents.

  Raises:
    UserError: the model cannot be built.
  """
  model = build_model(tiny(config), min(length, _LENGTH))

  def loss(parameters: Parameters, rows: Rows, keys_B: jax.Array | None) -> tuple[Terms, Any]:
    del keys_B
    drawn_B = row_keys(model, jax.random.key(0), rows)
    sums, terms, _ = row_sums(model, parameters, rows, drawn_B, is_training=True)
    return {"loss": Ratio(sums.loss.sum(), rows.weights.sum()), **terms}, {}

  rows = _rows(min(length, _LENGTH), packing)
  result = check_split(loss, _parameters(model), rows, devices=jax.local_devices()[:1]).findings
  # Steps hold no rows of zeros that a term of the model could count.
  return next((finding.cause for finding in result if finding.cause != "padding"), None)


def tiny(config: ModelConfig) -> ModelConfig:
  """Returns the same kind of model, a few thousand parameters large."""
  kv_heads = min(config.base_num_kv_heads, 2)
  heads = kv_heads * max(1, config.base_num_query_heads // config.base_num_kv_heads)
  return dataclasses.replace(
    config,
    vocab_size=min(config.vocab_size, _VOCABULARY),
    base_emb_dim=heads * _HEAD_DIM,
    base_num_decoder_layers=min(config.base_num_decoder_layers, _LAYERS),
    base_num_query_heads=heads,
    base_num_kv_heads=kv_heads,
    head_dim=_HEAD_DIM,
    q_lora_rank=min(config.q_lora_rank, _HEAD_DIM),
    kv_lora_rank=_HEAD_DIM,
    qk_nope_head_dim=_HEAD_DIM,
    qk_rope_head_dim=_HEAD_DIM,
    v_head_dim=_HEAD_DIM,
    first_num_dense_layers=min(config.first_num_dense_layers, _LAYERS - 1),
    base_mlp_dim=2 * heads * _HEAD_DIM,
    lora_rank=min(config.lora_rank, kv_heads * _HEAD_DIM),
    max_position_embeddings=-1,
    # How the same values are computed; the kernels have smallest sizes.
    attention="dot_product",
    remat_policy="none",
  )


def _parameters(model: Model) -> Parameters:
  """Returns random ones for all, so that no bias is zero and no scale one."""
  random = np.random.default_rng(0)
  return jax.tree.map(
    lambda leaf: random.normal(0.0, _SPREAD, leaf.shape).astype(leaf.dtype), model.shapes()
  )


def _rows(length: int, packing: bool) -> Rows:
  """Returns different rows (B, T), each of two documents when packed."""
  tokens = np.random.default_rng(1).integers(0, _VOCABULARY, (_ROWS, length + 1)).astype(np.int32)
  weights = np.ones((_ROWS, length), np.float32)
  weights[1, length // 2 :] = 0.0
  fields: dict[str, Any] = {
    "inputs": tokens[:, :-1],
    "targets": tokens[:, 1:],
    "weights": weights,
    "sample_ids": np.arange(_ROWS, dtype=np.int32),
  }
  if packing:
    place, cut = np.arange(length, dtype=np.int32), max(1, length // 2)
    every_row = np.ones((_ROWS, 1), np.int32)
    fields["segment_ids"] = every_row * (1 + (place >= cut)).astype(np.int32)
    fields["positions"] = every_row * (place % cut)
  return Rows(**fields)


def _splits(config: Config, plan: BatchPlan | None, topology: Topology) -> list[tuple[str, str]]:
  """Returns everything that splits a step: which keys do so, and keys that do not.

  Args:
    config: the run.
    plan: its batches; None while its microbatch is to be chosen.
    topology: its devices.
  """
  results = []
  most = max(config.batch.gradient_accumulation_steps, _most_microbatches(plan) if plan else 1)
  if most > 1:
    given, instead = _asks_for_microbatches(config.batch)
    results.append((f"{given} takes {counted(most, 'microbatch', 'microbatches')}", instead))
  schedule, replicas = config.pipeline.pipeline_schedule, topology.shape["data"]
  if schedule != "none":
    given = f"pipeline_schedule={schedule} divides a microbatch between stages"
    results.append((given, "pipeline_schedule=none num_pipeline_microbatches=-1"))
  if replicas > 1:
    results.append((f"{_data_keys(config, topology)} makes {replicas} replicas", ""))
  if schedule != "none" or replicas > 1:
    reason, instead = results[-1]
    results[-1] = reason, f"{instead} {_over_fsdp(topology)}".strip()
  return results


def _data_keys(config: Config, topology: Topology) -> str:
  given = f"ici_data_parallelism={config.mesh.ici_data_parallelism}"
  if topology.num_slices == 1:
    return given
  return f"{given} with dcn_data_parallelism={config.mesh.dcn_data_parallelism}"


def _over_fsdp(topology: Topology) -> str:
  """Returns keys that give the devices of replicas and stages to fsdp."""
  keys = []
  for prefix, sizes in {"ici": topology.ici, "dcn": topology.dcn}.items():
    data, fsdp, stage = sizes["data"], sizes["fsdp"], sizes["stage"]
    if data * stage > 1:
      keys += [f"{prefix}_data_parallelism=1", f"{prefix}_fsdp_parallelism={data * fsdp * stage}"]
    if stage > 1:
      keys.append(f"{prefix}_pipeline_parallelism=1")
  return " ".join(keys)


def _most_microbatches(plan: BatchPlan) -> int:
  return max(point.num_microbatches for point in plan.schedule.points)


def _asks_for_microbatches(batch: BatchConfig) -> tuple[str, str]:
  """Returns the key that several microbatches come from, with its value; and what gives one."""
  if batch.gradient_accumulation_steps > 1:
    value = batch.gradient_accumulation_steps
    return f"gradient_accumulation_steps={value}", "gradient_accumulation_steps=1"
  if isinstance(batch.micro_batch_size, Fraction) and batch.micro_batch_size != -1:
    return f"micro_batch_size={text(batch.micro_batch_size)}", "micro_batch_size=none"
  if batch.per_device_batch_size != -1:
    given = f"per_device_batch_size={text(batch.per_device_batch_size)}"
    return given, "per_device_batch_size=-1 micro_batch_size=none"
  return "the batch schedule", "batch_schedule=[] batch_schedule_type=constant"


def _coupled(config: Config, cause: Cause) -> str:
  return (
    f"decoder_block={config.model.decoder_block} couples the samples of a batch (what {_ROWS} rows "
    f"give depends on how they are split; likely cause: {CAUSES[cause].what}), so its step cannot be "
    "split"
  )


def _warn(line: str) -> None:
  print(f"warning: {line}", file=sys.stderr, flush=True)
