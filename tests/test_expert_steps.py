"""A mixture of experts: the same training, biases and counts however a step's batch is divided."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from initial_states import initial_state, random_parameters
from support import SMALLEST, config, error, in_microbatches, mesh, uneven_rows

from maxbatch.batch.from_config import mesh_of, plan_batches
from maxbatch.checkpoints.checkpointer import Checkpointer, Position
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.models.experts import BALANCE, LOAD, NEAR_TIES
from maxbatch.models.registry import Parameters, build_model
from maxbatch.training.build import build_trainer
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, LAYERS, E, K = 16, 24, 4, 4, 2
RATE = np.float32(1000)
"""Beside an update as large as that, rounding of the parameters themselves is nothing. A third of the rows
is padding, and is a whole microbatch of 3."""
SIZES = {**SMALLEST, "base_num_decoder_layers": LAYERS, "opt_type": "sgd"}
SIZES |= {"gradient_clipping_threshold": 0, "num_experts": E, "num_experts_per_tok": K}
SIZES |= {"base_moe_mlp_dim": 8, "load_balance_loss_weight": 0.5}
"""With a balance loss that matters beside the cross entropy."""
BALANCES = {
  "bias": {"routed_bias": "true", "routed_score_func": "sigmoid", "router_z_loss_weight": 0.1},
  "global": {"load_balance_loss_type": "global"}
  | {"mlp_activation": "clamped_swiglu", "mlp_bias": "true", "router_logit_bias": "true"}
  | {"lora_rank": 2, "lora_targets": "[gate,up,down,router]"},
  "last_step": {"load_balance_loss_type": "last_step"},
}
BALANCES["global, of all parameters"] = {"load_balance_loss_type": "global"}
BALANCES["first layers without experts"] = {"routed_bias": "true", "base_num_decoder_layers": 6} | {
  "first_num_dense_layers": 2,
  "layer_types": "[sliding_attention, full_attention, full_attention]",
  "sliding_window_size": 3,
}
"""Layers that differ by their number, too."""
BALANCES["global, one step late"] = BALANCES["global"] | BALANCES["last_step"]
BIAS = ("layers", "mlp", "router", "bias")


def trainer(axes: tuple[int, ...] = (), dispatches: int = 0, **keys: object) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  settings = config(**SIZES | keys)
  model = build_model(settings.model, T, trainable=("*",))
  optimizer = make_optimizer(settings.optimizer, model.axes(), dispatches or 1)
  parts = model, optimizer, mesh(*axes), jax.random.key(7)
  return Trainer(*parts, streamed=dispatches > 0)


@functools.cache
def parameters(balance: str) -> Parameters:
  made = random_parameters(trainer(**BALANCES[balance]).model, seed=4)
  router = made["layers"]["mlp"]["router"]
  if "bias" in router:
    router["bias"] = 0.1 * router["bias"]
  if "load" in router:
    router["load"] = np.full((LAYERS, E), [0.9, 0.6, 0.4, 0.1], np.float32)
  return made


def stepped(
  parts: Trainer, k: int, begun: Parameters, rows: Rows | None = None
) -> tuple[Parameters, StepMetrics]:
  """The parameters after a step of k microbatches, and what it reports."""
  fed = in_microbatches(rows or uneven_rows(ROWS, T), k, k)
  pieces = [fed]
  if parts.streamed:
    pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)]
  pieces = [jax.device_put(piece, rows_shardings(piece, parts.mesh)) for piece in pieces]
  state, metrics = initial_state(parts, begun), None
  of_step = parts.microbatches(k, parts.denominators(pieces, state.parameters))
  function = step_function(parts, pieces[0])
  for piece in pieces:
    state, metrics = function(state, piece, of_step, RATE)
  return jax.device_get((parts.by_layer(state.params), metrics))


@functools.cache
def whole(balance: str) -> tuple[Parameters, StepMetrics]:
  return stepped(trainer(**BALANCES[balance]), 1, parameters(balance))


def assert_same(found: tuple[Parameters, StepMetrics], balance: str) -> None:
  (params, metrics), (expected, whole_metrics) = found, whole(balance)
  # No token is so near to another expert that rounding could send it there.
  assert whole_metrics.metrics[NEAR_TIES] == 0
  before = parameters(balance)
  updates, of_whole = (jax.tree.map(np.subtract, after, before) for after in (params, expected))
  assert error(updates, of_whole) < 1e-6
  assert set(metrics.metrics) == set(whole_metrics.metrics)
  for name, value in metrics.metrics.items():
    expected_value = whole_metrics.metrics[name]
    assert np.ravel(value) == pytest.approx(np.ravel(expected_value), rel=1e-6), name
    if name.startswith("moe/load/"):
      # What is counted is the same and not only close.
      np.testing.assert_array_equal(counts_of(value), counts_of(expected_value))
  for name in ("bias", "load"):
    router, of_whole = (each["layers"]["mlp"]["router"] for each in (params, expected))
    assert (name in router) is (name in of_whole)
    if name in router:
      np.testing.assert_array_equal(router[name], of_whole[name])
  assert metrics.loss == pytest.approx(whole_metrics.loss, rel=1e-6)
  assert metrics.grad_norm == pytest.approx(whole_metrics.grad_norm, rel=1e-6)


def counts_of(load_E: Any) -> np.ndarray:
  """The tokens that a load was divided from."""
  tokens = np.count_nonzero(uneven_rows(ROWS, T).weights)
  counts = np.asarray(load_E) * tokens * K / E
  np.testing.assert_allclose(counts, counts.round(), atol=1e-3)
  return counts.round().astype(int)


@pytest.mark.parametrize(
  ("axes", "k", "streamed", "balance", "remat_policy"),
  [
    ((2, 2, 2), 3, False, "bias", "full"),
    ((1, 1, 1), 3, True, "bias", "none"),
    ((2, 2, 2), 3, False, "global", "none"),
    ((1, 2, 1), 3, True, "global", "none"),
    ((2, 1, 1), 2, False, "last_step", "none"),
    ((2, 1, 2, 1, 2), 3, False, "bias", "none"),
    ((1, 2, 1, 1, 2), 3, True, "global", "full"),
    ((1, 1, 1, 1, 4), 2, False, "last_step", "minimal"),
  ],
)
def test_any_split_trains_as_the_whole_batch(axes, k, streamed, balance, remat_policy):
  """What recomputes activations counts no token again."""
  keys = BALANCES[balance] | {"remat_policy": remat_policy}
  assert_same(stepped(trainer(axes, k if streamed else 0, **keys), k, parameters(balance)), balance)


def test_a_bias_moves_by_the_sign_of_what_is_missing():
  params, metrics = whole("bias")
  moved = (
    params["layers"]["mlp"]["router"]["bias"]
    - parameters("bias")["layers"]["mlp"]["router"]["bias"]
  )
  loads = np.stack([metrics.metrics[f"moe/load/{layer}"] for layer in range(LAYERS)])
  np.testing.assert_allclose(moved, 0.001 * np.sign(1 - loads), atol=1e-8)
  assert (np.sign(1 - loads) != 0).all()


def test_the_loads_are_those_of_tokens_that_count():
  _, metrics = whole("global")
  loads = np.stack([metrics.metrics[f"moe/load/{layer}"] for layer in range(LAYERS)])
  assert (counts_of(loads).sum(-1) == K * np.count_nonzero(uneven_rows(ROWS, T).weights)).all()
  np.testing.assert_allclose(loads.mean(-1), 1, rtol=1e-6)
  assert metrics.metrics["moe/max_load"] == pytest.approx(loads.max(-1))


def test_two_passes_minimize_the_loss_of_the_whole_step():
  """E/K · Σ_e (part of the step's tokens) · (mean share), with the shares' mean by the loss itself."""
  (after, metrics), (_, last) = whole("global"), whole("global, one step late")
  load = after["layers"]["mlp"]["router"]["load"]
  loads = np.stack([metrics.metrics[f"moe/load/{layer}"] for layer in range(LAYERS)])
  np.testing.assert_allclose(load, K / E * loads, rtol=1e-6)
  # The same tokens with the loads that were there before: another algorithm, another value.
  assert metrics.metrics[BALANCE] != pytest.approx(last.metrics[BALANCE], rel=1e-3)
  assert metrics.metrics["moe/load/0"] == pytest.approx(last.metrics["moe/load/0"])


# --- checkpoints and skipped steps ----------------------------------------------------------------

BOTH = {**BALANCES["bias"], **BALANCES["last_step"], "opt_type": "adamw"}
"""With a bias and a load in the state, and moments of all that is trained."""


def test_a_checkpoint_goes_to_any_number_of_devices_that_divide_experts(tmp_path):
  """Parameters, optimizer's state, biases and loads, bit for bit."""
  written = trainer((1, 2, 1, 1, 4), **BOTH)
  random = np.random.default_rng(0)
  saved = jax.tree.map(
    lambda x: jax.device_put(random.normal(size=x.shape).astype(x.dtype), x.sharding),
    written.abstract_saved,
  )
  kernel = saved["params"]["layers"]["mlp"]["experts"]["up"]["kernel"]
  assert {shard.data.shape[1] for shard in kernel.addressable_shards} == {1}
  keys = config(checkpoint_period=1).checkpoint
  with Checkpointer(tmp_path, keys, {}) as checkpointer:
    checkpointer.save(saved, Position(step=1, samples=ROWS), {})
  others = [trainer(axes, **BOTH) for axes in ((), (1, 1, 1, 1, 2), (2, 1, 2, 1, 2))]
  for other in (*others, pipelined("interleaved_1f1b", 2, 1, 2, **BOTH)):
    with Checkpointer(tmp_path, keys, {}) as checkpointer:
      found = checkpointer.restore(other.abstract_saved)
    assert found is not None
    again = other.to_save(other.from_saved(found.state))
    for (path, leaf), expected in zip(
      jax.tree.leaves_with_path(again), jax.tree.leaves(saved), strict=True
    ):
      assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes(), (other.mesh, path)


@pytest.mark.parametrize(("expert", "streamed"), [(2, False), (1, True)])
def test_a_skipped_step_moves_neither_bias_nor_load(expert, streamed):
  keys = {**BOTH, "precision": "float16", "initial_loss_scale": 64, "opt_type": "sgd"}
  keys |= {"ici_expert_parallelism": expert, "accumulation": "streamed" if streamed else "fused"}
  settings = config(**SIZES | keys, global_batch_to_train=ROWS, gradient_accumulation_steps=3)
  plan = plan_batches(settings.batch, settings.run, mesh_of(settings, expert))
  parts = build_trainer(settings, plan, jax.devices()[:expert])
  rows = uneven_rows(ROWS, T)
  weights = np.array(rows.weights)
  weights[-1, 0] = 1e6  # Its gradient is beyond float16.
  made = random_parameters(parts.model, seed=4)
  bad = stepped(parts, 3, made, rows._replace(weights=weights))  # pyright: ignore
  good = stepped(parts, 3, made)
  assert bad[1].scaling is not None
  assert good[1].scaling is not None
  assert [bool(each.scaling.is_skipped) for each in (bad[1], good[1])] == [True, False]  # pyright: ignore
  for name in ("bias", "load"):
    before, skipped, moved = (x["layers"]["mlp"]["router"][name] for x in (made, bad[0], good[0]))
    np.testing.assert_array_equal(skipped, before)
    assert (moved != before).all()


# --- pipelines ------------------------------------------------------------------------------------


def pipelined(schedule: str, stages: int, k: int, experts: int = 1, **keys: Any) -> Trainer:
  """Of steps of k microbatches, each in 4 through the stages."""
  devices = stages * experts
  keys = {"pipeline_schedule": schedule, "ici_pipeline_parallelism": stages, **keys}
  keys |= {"num_pipeline_microbatches": 4, "gradient_accumulation_steps": k}
  keys |= {"ici_expert_parallelism": experts, "num_simulated_devices": devices}
  settings = config(**SIZES | keys, per_device_batch_size=f"{ROWS // k}/{devices}")
  plan = plan_batches(settings.batch, settings.run, mesh_of(settings, devices))
  return build_trainer(settings, plan, jax.devices()[:devices])


@pytest.mark.parametrize(
  ("schedule", "k", "experts", "balance"),
  [
    ("gpipe", 3, 1, "bias"),
    ("1f1b", 1, 1, "last_step"),
    ("1f1b", 1, 2, "bias"),
    ("circular", 1, 1, "bias"),
    ("interleaved_1f1b", 1, 1, "bias"),
    ("interleaved_1f1b", 1, 1, "first layers without experts"),
    ("interleaved_1f1b", 3, 1, "global, of all parameters"),
  ],
)
def test_a_pipeline_trains_as_the_whole_batch(schedule, k, experts, balance):
  recomputed = {"remat_policy": "full"} if schedule == "gpipe" else {}
  parts = pipelined(schedule, 2, k, experts, **BALANCES[balance], **recomputed)
  assert_same(stepped(parts, k, parameters(balance)), balance)


@pytest.mark.parametrize(
  ("schedule", "keys", "said"),
  [
    (
      "gpipe",
      {"accumulation": "streamed"},
      "for example accumulation=fused, load_balance_loss_type",
    ),
    ("circular", {}, "for example pipeline_schedule=interleaved_1f1b, load_balance_loss_type"),
  ],
)
def test_where_a_pipeline_cannot_count_tokens_first_is_said(schedule, keys, said):
  with pytest.raises(UserError, match=said):
    pipelined(schedule, 2, 1, **BALANCES["global"], **keys)


def test_a_frozen_router_keeps_no_load_of_the_last_step():
  keys = {**BALANCES["last_step"], "lora_rank": 2}
  with pytest.raises(UserError, match="load_balance_loss_type=last_step: with these lora_rank"):
    pipelined("gpipe", 2, 1, **keys)


def test_the_loads_path_is_that_of_the_model():
  assert LOAD in trainer(**BALANCES["global"]).model.buffers
  assert trainer(**BALANCES["bias"]).model.buffers == {BIAS}
