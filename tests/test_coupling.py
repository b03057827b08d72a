"""Models that couple the samples of a batch are found, and are never split."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from initial_states import initial_state
from support import GPT2, TINY, config, in_microbatches, mesh, relative_errors, uneven_rows

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.config.schema import Config
from maxbatch.core.terms import Ratio
from maxbatch.errors import UserError
from maxbatch.models import registry
from maxbatch.models.layers import Outputs, fold, parameter
from maxbatch.models.registry import Parameters
from maxbatch.modes.compile_only import validate
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.step import Trainer, rows_shardings, step_function
from maxbatch.tuning import coupling

KEY = jax.random.key(7)


class Normalized(nnx.Module):
  """Token embeddings, a linear map, and a normalization of each feature over `axes` of (B, T)."""

  def __init__(self, rngs, config, axes, only_in_training):
    V, D = config.vocab_size, config.base_emb_dim
    self.embedding = parameter(rngs, 0.02, (V, D), ("vocab", "embed"))
    self.kernel = parameter(rngs, 0.02, (D, D), ("embed", "mlp"))
    self.axes, self.only_in_training = axes, only_in_training

  def __call__(self, rows, keys_B) -> Any:
    x_BTD = self.embedding[...][rows.inputs] @ self.kernel[...]
    if self.only_in_training and keys_B is None:
      return x_BTD
    mean = x_BTD.mean(self.axes, keepdims=True)
    spread = jnp.sqrt(x_BTD.var(self.axes, keepdims=True) + 1e-3)
    return (x_BTD - mean) / spread

  def output_matrix(self):
    return self.embedding[...].T


def register(monkeypatch, name, axes=(0, 1), only_in_training=False, validate=lambda config: None):
  def create(rngs, config, length):
    del length
    validate(config)
    return Normalized(rngs, config, axes, only_in_training)

  monkeypatch.setattr(registry, "MODELS", {**registry.MODELS, name: create})


@pytest.fixture
def batch_norm(monkeypatch):
  register(monkeypatch, "batch_norm")


def cause(**keys) -> str | None:
  run = config(**keys)
  return coupling.coupling(run.model, run.batch.max_target_length, packing=run.data.packing)


FSDP = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": -1}
"""All devices see a batch as one."""


def resolve(**keys) -> Config:
  """What becomes of a run on 8 devices."""
  run = config(**keys)
  return coupling.resolve_accumulation(run, topology(run.mesh, 8))


def passes(run: Config) -> int:
  return plan_batches(run.batch, run.run, topology(run.mesh, 8)).gradient_accumulation_steps


def test_batch_normalization_couples(batch_norm):
  assert cause(decoder_block="batch_norm") == "statistics"
  assert cause(decoder_block="batch_norm", packing="false", dtype="bfloat16") == "statistics"


def test_normalization_within_a_sample_does_not(monkeypatch):
  register(monkeypatch, "sample_norm", axes=(1,))
  assert not cause(decoder_block="sample_norm")


def test_coupling_in_training_alone_is_found_too(monkeypatch):
  register(monkeypatch, "training_norm", only_in_training=True)
  assert cause(decoder_block="training_norm", dropout_rate=0.1) == "statistics"
  assert not cause(decoder_block="training_norm", dropout_rate=0)


@pytest.mark.parametrize(("axes", "cause"), [((0, 1), "product"), ((1,), None)])
def test_a_balance_loss_of_the_model_couples_if_it_is_of_the_batch(monkeypatch, axes, cause):
  class Balanced(Normalized):
    """With f·P over `axes` of (B, T), of each row by itself or of the batch."""

    def __call__(self, rows, keys_B):
      x_BTD, count = super().__call__(rows, keys_B), float(len(rows.inputs))
      share, used = jax.nn.softmax(x_BTD), (x_BTD > 0).astype(jnp.float32)
      product = share.mean(axes, keepdims=True) * used.mean(axes, keepdims=True)
      balance = Ratio(product.sum() * count / len(product), jnp.float32(count))
      return Outputs(x_BTD, {"balance": balance})

  def create(rngs, config, length):
    del length
    return Balanced(rngs, config, (2,), only_in_training=False)

  monkeypatch.setattr(registry, "MODELS", {**registry.MODELS, "balanced": create})
  assert coupling.coupling(config(decoder_block="balanced").model, 16) == cause


def test_dropout_shared_by_the_batch_couples(monkeypatch):
  def by_place(key, sample_ids_B):
    return fold(jnp.broadcast_to(key, sample_ids_B.shape), len(sample_ids_B))

  monkeypatch.setattr("maxbatch.training.loss.sample_keys", by_place)
  assert cause(dropout_rate=0.2) == "keys"


@pytest.mark.parametrize(
  "keys",
  [
    {},
    GPT2,
    {"packing": "false"},
    GPT2 | {"packing": "false"},
    {"use_qk_norm": "true", "sliding_window_size": 3},
    {"dropout_rate": 0.3, "z_loss_multiplier": 0.1},
    {"remat_policy": "full", "scan_layers": "false", "num_vocab_tiling": 4},
    {"remat_policy": "minimal", "dtype": "bfloat16"},
    {"base_num_query_heads": 12, "base_num_kv_heads": 3, "head_dim": 6, "attention": "flash"},
    {"base_num_query_heads": 6, "base_num_kv_heads": 1, "max_target_length": 1},
  ],
  ids=lambda keys: "-".join(keys) or "llama",
)
def test_no_shipped_model_couples(keys):
  assert {"transformer"} == coupling.SHIPPED, "give a new model its options here"
  assert not cause(**keys)


@pytest.mark.parametrize("name", ["llama2-7b", "llama3-8b", "gpt2-small"])
def test_the_probe_of_a_large_model_is_small(name):
  large = dataclasses.replace(config(model_name=name, base_emb_dim=4096).model)
  leaves = jax.tree.leaves(registry.build_model(coupling.tiny(large), 16).shapes())
  assert sum(leaf.size for leaf in leaves) < 20_000


def test_every_option_is_probed_as_it_is_configured():
  sizes = {"vocab_size", "attention", "remat_policy"}
  sizes |= {key for key in TINY if key.startswith("base_")} | {"head_dim", "kv_lora_rank"}
  sizes |= {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
  model = config(**GPT2, use_qk_norm="true", dropout_rate=0.1, remat_policy="full").model
  small = dataclasses.asdict(coupling.tiny(model))
  given = dataclasses.asdict(model)
  assert {key for key in given if given[key] != small[key]} <= sizes


@pytest.mark.parametrize(
  ("keys", "printed"),
  [
    (
      {"gradient_accumulation_steps": 4},
      "gradient_accumulation_steps=4 takes 4 microbatches; for example gradient_accumulation_steps=1",
    ),
    (
      {"micro_batch_size": 2, "batch_size": 64},
      "micro_batch_size=2 takes 4 microbatches; for example micro_batch_size=none",
    ),
    (
      {"per_device_batch_size": 0.5, "ici_tensor_parallelism": 2, "batch_size": 8},
      "per_device_batch_size=0.5 takes 2 microbatches; for example per_device_batch_size=-1 "
      "micro_batch_size=none",
    ),
    (
      {"micro_batch_size": 1, "batch_schedule": "[[0, 8], [800, 16]]"},
      "micro_batch_size=1 takes 2 microbatches; for example micro_batch_size=none",
    ),
    (
      {"micro_batch_size": "auto", "gradient_accumulation_steps": 2},
      "gradient_accumulation_steps=2 takes 2 microbatches; for example gradient_accumulation_steps=1",
    ),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_passes_asked_for_by_number_are_refused(batch_norm, keys, printed):
  with pytest.raises(UserError) as refusal:
    resolve(decoder_block="batch_norm", **FSDP, **keys)
  assert str(refusal.value).endswith(f"so its step cannot be split, but {printed}")
  assert str(refusal.value).startswith("decoder_block=batch_norm couples the samples of a batch")


@pytest.mark.parametrize(
  "keys",
  [
    {"gradient_accumulation_steps": 1},
    {"micro_batch_size": "none", "batch_size": 64},
    {"per_device_batch_size": -1, "micro_batch_size": "none", "batch_size": 8},
    {"micro_batch_size": "none", "batch_schedule": "[[0, 8], [800, 16]]"},
  ],
  ids=lambda keys: "-".join(keys),
)
def test_the_ways_out_work_and_one_pass_is_not_probed(batch_norm, monkeypatch, keys):
  monkeypatch.setattr(coupling, "coupling", lambda *_, **__: pytest.fail("probed"))
  run = resolve(decoder_block="batch_norm", **FSDP, **keys)
  assert run == config(decoder_block="batch_norm", **FSDP, **keys)
  assert passes(run) == 1


@pytest.mark.parametrize("asked", ["auto", "explore", "{explore: {min: 1, max: 4}}"])
def test_a_choice_becomes_none_with_a_warning(batch_norm, capfd, asked):
  run = resolve(decoder_block="batch_norm", micro_batch_size=asked, batch_size=64, **FSDP)
  assert run == config(decoder_block="batch_norm", micro_batch_size="none", batch_size=64, **FSDP)
  assert passes(run) == 1
  out, err = capfd.readouterr()
  assert out == ""
  assert err.startswith("warning: decoder_block=batch_norm couples the samples")
  asked = "explore: {min" if asked.startswith("{") else asked
  assert f"micro_batch_size=none instead of micro_batch_size={asked}" in err.replace("={e", "=e")
  assert len(err.splitlines()) == 1


@functools.cache
def gradients(axes: tuple[int, int, int]) -> Parameters:
  """Of a batch of a model with batch normalization, on data × fsdp × tensor devices."""
  settings = config(decoder_block="batch_norm", opt_type="sgd")
  model = registry.build_model(settings.model, 16)
  trainer = Trainer(model, make_optimizer(settings.optimizer, model.axes(), 1), mesh(*axes), KEY)
  rows = in_microbatches(uneven_rows(32, 16), 1, 1)
  rows = jax.device_put(rows, rows_shardings(rows, trainer.mesh))
  start = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
  before = initial_state(trainer, start)
  step = step_function(trainer, rows)
  after, _ = step(before, rows, trainer.microbatches(1), np.float32(1.0))
  return jax.tree.map(lambda new, old: new - old, jax.device_get(after.params), start)


@pytest.mark.parametrize(
  ("axes", "keys", "offered"),
  [
    ((2, 1, 1), {}, "ici_data_parallelism=1 ici_fsdp_parallelism=2"),
    (
      (2, 2, 1),
      {"ici_fsdp_parallelism": 2, "gradient_accumulation_steps": 2},
      "gradient_accumulation_steps=1 ici_data_parallelism=1 ici_fsdp_parallelism=4",
    ),
  ],
  ids=["data", "data-fsdp"],
)
def test_replicas_would_train_something_else_and_are_refused(batch_norm, axes, keys, offered):
  whole = gradients((1, 1, 1))
  assert max(relative_errors(gradients(axes), whole).values()) > 0.01
  assert max(relative_errors(gradients((1, axes[0] * axes[1], 1)), whole).values()) < 1e-5

  def resolve(**keys: object) -> Config:
    run = config(decoder_block="batch_norm", **keys)
    return coupling.resolve_accumulation(run, topology(run.mesh, axes[0] * axes[1]))

  with pytest.raises(UserError, match="ici_data_parallelism=-1 makes 2 replicas") as refusal:
    resolve(**keys)
  assert str(refusal.value).endswith(f"; for example {offered}")
  keys |= dict(key.split("=") for key in offered.split())
  assert resolve(**keys) == config(decoder_block="batch_norm", **keys)


def test_a_choice_does_not_help_replicas(batch_norm):
  with pytest.raises(UserError, match="makes 8 replicas"):
    resolve(decoder_block="batch_norm", micro_batch_size="auto", batch_size=64)


def test_validate_only_refuses_what_the_run_refuses(batch_norm):
  with pytest.raises(UserError, match="ici_data_parallelism=-1 makes 8 replicas"):
    validate(config(decoder_block="batch_norm"), say=lambda line: None)


def test_slices_and_a_pipeline_split_a_step_too(batch_norm):
  keys = {"decoder_block": "batch_norm", "dcn_data_parallelism": 2, "ici_fsdp_parallelism": 2}
  run = config(**keys, pipeline_schedule="1f1b", ici_pipeline_parallelism=2)
  with pytest.raises(UserError) as refusal:
    coupling.resolve_accumulation(run, topology(run.mesh, 8, num_slices=2))
  assert str(refusal.value).endswith(
    "pipeline_schedule=1f1b divides a microbatch between stages and ici_data_parallelism=-1 with "
    "dcn_data_parallelism=2 makes 2 replicas; for example pipeline_schedule=none "
    "num_pipeline_microbatches=-1 ici_data_parallelism=1 ici_fsdp_parallelism=4 "
    "ici_pipeline_parallelism=1 dcn_data_parallelism=1 dcn_fsdp_parallelism=2"
  )


def test_an_uncoupled_model_keeps_its_passes_and_its_choice(capfd):
  for keys in ({"gradient_accumulation_steps": 4}, {"micro_batch_size": "auto", "batch_size": 64}):
    assert resolve(**keys) == config(**keys)
  assert capfd.readouterr() == ("", "")


def test_a_model_that_cannot_be_made_small_is_told_and_left_alone(monkeypatch, capfd):
  def validate(config):
    if config.base_emb_dim < 32:
      raise UserError("base_emb_dim must be at least 32")

  register(monkeypatch, "wide", validate=validate)
  keys = {"decoder_block": "wide", "gradient_accumulation_steps": 4}
  assert resolve(**keys) == config(**keys)
  printed = (
    "warning: decoder_block=wide could not be tried at a small size: base_emb_dim must be at"
  )
  assert capfd.readouterr().err.startswith(printed)


def test_programs_are_few():
  compiled = []

  def listen(event: str, duration_secs: float, **_: object) -> None:
    if event.endswith("backend_compile_duration"):
      compiled.append(duration_secs)

  jax.monitoring.register_event_duration_secs_listener(listen)
  run = config(base_num_decoder_layers=7)
  coupling.coupling(run.model, 16)
  jax.monitoring.unregister_event_duration_listener(listen)
  assert len(compiled) <= 12
