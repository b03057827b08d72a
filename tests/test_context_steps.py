"""Rows whose tokens are divided over devices: the same training however many share a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from initial_states import initial_state, random_parameters
from support import (
  SMALLEST,
  collectives,
  config,
  error,
  in_microbatches,
  mesh,
  program_text,
  uneven_rows,
)

from maxbatch.data.rows import Rows
from maxbatch.models import context_attention
from maxbatch.models.registry import Parameters, build_model
from maxbatch.rl.log_probs import token_log_probs
from maxbatch.training import metrics
from maxbatch.training.evaluation import EvalMetrics, eval_function, eval_shardings
from maxbatch.training.metrics import METRICS, chosen_metrics
from maxbatch.training.model_parts import ModelParts
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, RATE = 20, 24, np.float32(1000)
"""A third of the rows is padding. Beside such an update rounding of the parameters is nothing."""
SIZES = {**SMALLEST, "max_target_length": T, "opt_type": "sgd", "gradient_clipping_threshold": 0}
SIZES |= {"base_num_query_heads": 4, "num_vocab_tiling": 2, "z_loss_multiplier": 0.01}
Keys = tuple[tuple[str, object], ...]
STRATEGY, BALANCE = "context_parallel_strategy", "context_parallel_load_balance"
MODELS = {
  "rope": {"base_num_kv_heads": 1, "base_num_decoder_layers": 2, "attn_logits_soft_cap": 5}
  | {"sliding_window_size": 7, "layer_types": "[sliding_attention,full_attention]"}
  | {"attention_sink": "true", "use_qk_norm": "true", "final_logits_soft_cap": 5},
  "learned": {"position_embedding": "learned", "mlp_activation": "gelu", "mlp_bias": "true"}
  | {"attention_qkv_bias": "true", "logits_via_embedding": "true", "normalization": "layernorm"}
  | {"dropout_rate": 0.25, "gns_from_microbatches": "true", "remat_policy": "full"},
  "latent": {"attention_type": "mla", "base_num_kv_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8}
  | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "lora_rank": 2},
}
"""With windows and documents that begin and end within a device's tokens, and go on over several."""


def rows_of(name: str, T: int = T) -> Rows:
  """Packed documents, of which the first ends after 3 tokens in one row, 4 in the next, …; or whole rows."""
  rows, place_1T = uneven_rows(ROWS, T), np.arange(T)[None]
  if name == "latent":
    return rows
  ends_B1 = 3 + np.arange(ROWS)[:, None] % (T - 3)
  second_BT = place_1T >= ends_B1
  positions_BT = np.where(second_BT, place_1T - ends_B1, place_1T)
  return rows._replace(
    segment_ids=(1 + second_BT).astype(np.int32), positions=positions_BT.astype(np.int32)
  )


def trainer(
  name: str,
  sizes: dict[str, int],
  dispatches: int = 0,
  keys: Keys = (),
  T: int = T,
) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  # The mesh is made here: these say only that its keys are read.
  shared = {"ici_context_parallelism": sizes.get("context", 1)} if keys else {}
  settings = config(**SIZES | MODELS[name] | {"max_target_length": T} | shared | dict(keys))
  model = build_model(settings.model, T, trainable=("*",))
  optimizer = make_optimizer(settings.optimizer, model.axes(), dispatches or 1)
  measures = Measures(chosen_metrics(metrics.METRICS), settings.noise.gns_from_microbatches)
  parts = model, optimizer, mesh(**sizes), jax.random.key(7)
  return Trainer(*parts, streamed=dispatches > 0, measures=measures)


@functools.cache
def parameters(name: str, T: int = T) -> Parameters:
  return random_parameters(trainer(name, {}, T=T).model, seed=4)


def stepped(parts: Trainer, name: str, k: int) -> tuple[Parameters, StepMetrics]:
  """The parameters after a step of k microbatches, and what it reports."""
  T = parts.model.max_target_length
  fed = in_microbatches(rows_of(name, T), k, k)
  pieces = [fed]
  if parts.streamed:
    pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)]
  pieces = [jax.device_put(piece, rows_shardings(piece, parts.mesh)) for piece in pieces]
  state, reported = initial_state(parts, parameters(name, T)), None
  function, of_step = step_function(parts, pieces[0]), parts.microbatches(k)
  for piece in pieces:
    state, reported = function(state, piece, of_step, RATE)
  return jax.device_get((state.params, reported))


@functools.cache
def whole(name: str, k: int = 1, T: int = T) -> tuple[Parameters, StepMetrics]:
  """Of one device."""
  return stepped(trainer(name, {}, T=T), name, k)


@pytest.mark.parametrize(
  ("name", "sizes", "k", "streamed", "strategy"),
  [
    ("rope", {"context": 2}, 1, False, "all_gather"),
    ("rope", {"context": 2, "fsdp": 2, "tensor": 2}, 3, False, "ring"),
    ("rope", {"context": 4, "data": 2}, 3, True, "ulysses"),
    ("learned", {"context": 4, "tensor": 2}, 2, False, "all_gather"),
    ("learned", {"context": 2, "data": 2, "fsdp": 2}, 2, False, "ring"),
    ("latent", {"context": 4, "fsdp": 2}, 1, False, "auto"),
  ],
)
def test_devices_that_share_rows_train_as_one_does(name, sizes, k, streamed, strategy):
  """Two have the first and the last tokens each (zigzag); four of 20 cannot, and have neighbours."""
  keys = ((STRATEGY, strategy),)
  params, found = stepped(trainer(name, sizes, k if streamed else 0, keys), name, k)
  # The noise scale of microbatches is that of the same microbatches.
  expected_params, expected = whole(name, k if name == "learned" else 1)
  before = trainer(name, {}).model.split(parameters(name))[0]
  updates, of_whole = (jax.tree.map(np.subtract, x, before) for x in (params, expected_params))
  assert error(updates, of_whole) < 1e-6
  assert found.loss == pytest.approx(expected.loss, rel=1e-6)
  assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
  assert found.weight == expected.weight
  assert set(found.metrics) == set(expected.metrics) >= set(METRICS) - {"largest"}
  for metric, value in found.metrics.items():
    assert value == pytest.approx(expected.metrics[metric], rel=2e-6), metric
  if name == "learned" and "data" not in sizes:
    noise, of_whole = found.noise, expected.noise
    assert noise is not None
    assert of_whole is not None
    assert noise.squares is not None
    assert of_whole.squares is not None
    for value, wanted in zip(noise.squares, of_whole.squares, strict=True):
      assert value == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize(
  ("name", "strategy", "balance", "block"),
  [
    ("rope", "ring", True, 1024),
    ("rope", "all_gather", False, 2),
    ("learned", "ring", True, 2),
    ("latent", "all_gather", True, 1024),
  ],
)
def test_eight_devices_that_share_rows_train_as_one_does(
  name, strategy, balance, block, monkeypatch
):
  """By blocks of two tokens, too, of which none sees all keys."""
  monkeypatch.setattr(context_attention, "BLOCK", block)
  monkeypatch.setattr(context_attention, "SMALLEST", 1)
  keys = (STRATEGY, strategy), (BALANCE, balance)
  params, found = stepped(trainer(name, {"context": 8}, keys=keys, T=32), name, 1)
  expected_params, expected = whole(name, T=32)
  before = trainer(name, {}, T=32).model.split(parameters(name, 32))[0]
  updates, of_whole = (jax.tree.map(np.subtract, x, before) for x in (params, expected_params))
  assert error(updates, of_whole) < 1e-6
  assert found.loss == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_all_devices_have_as_many_products_in_zigzag_order(ways):
  """Of 4·ways² products of half a device's tokens with half of another's."""
  counts = {}
  for balance in (True, False):
    keys = {"ici_context_parallelism": ways, BALANCE: balance, STRATEGY: "ring"}
    with jax.sharding.use_abstract_mesh(mesh(context=ways).abstract_mesh):
      order_T = context_attention.token_order(config(**SIZES | keys).model, 64)
    places = jnp.asarray(np.arange(64) if order_T is None else order_T).reshape(ways, 2, -1)
    first, halves = jnp.zeros(1), places.reshape(2 * ways, -1)
    counts[balance] = [
      sum(bool(context_attention.is_seen(first, own, keys)) for own in each for keys in halves)
      for each in places
    ]
  assert counts[True] == [2 * ways + 1] * ways
  assert counts[False] == [4 * device + 3 for device in range(ways)]


@pytest.mark.parametrize(("balance", "moved"), [(True, 1), (False, 0)])
def test_stages_and_completions_have_that_order_too(balance, moved, monkeypatch):
  parts = trainer("rope", {"context": 2}, keys=((STRATEGY, "ring"), (BALANCE, balance)))
  orders, in_order = [], Rows.in_order
  monkeypatch.setattr(
    Rows,
    "in_order",
    lambda rows, order_T: orders.append(order_T.tolist()) or in_order(rows, order_T),
  )
  zigzag_T = [*range(5), *range(15, 20), *range(5, 15)]
  rows, model = rows_of("rope"), parts.model
  steps = jax.tree.map(lambda x: jnp.asarray(x)[None], rows)
  with jax.set_mesh(parts.mesh):
    moved_rows = jax.jit(ModelParts(model, None).in_order)(steps)
    allowed_V = np.ones(model.config.vocab_size, bool)
    jax.eval_shape(lambda params: token_log_probs(model, params, rows, allowed_V), model.shapes())
  wanted = rows.inputs[:, zigzag_T if moved else slice(T)]
  np.testing.assert_array_equal(moved_rows.inputs[0], wanted)
  assert orders == [zigzag_T] * 2 * moved


@functools.cache
def evaluated(context: int) -> EvalMetrics:
  parts, rows = trainer("rope", {"context": context}), rows_of("rope")
  rows = jax.device_put(rows, eval_shardings(rows, parts.mesh))
  state = initial_state(parts, parameters("rope"))
  return jax.device_get(eval_function(parts, rows)(state.parameters, rows))


def test_an_evaluation_is_that_of_whole_rows():
  found, expected = evaluated(4), evaluated(1)
  assert found.loss == pytest.approx(expected.loss, rel=1e-6)
  assert found.weight == expected.weight


def messages(sizes: dict[str, int], strategy: str = "") -> dict[str, int]:
  """Those of a microbatch, by kind; of one layer's gathered weights there are as many everywhere."""
  keys = ((STRATEGY, strategy),) if strategy else ()
  parts, rows = trainer("rope", sizes, keys=keys), in_microbatches(rows_of("rope"), 3, 3)
  lowered = step_function(parts, rows).lower(parts.abstract, rows, np.int32(3), RATE)
  kinds = collectives(program_text(lowered))["loop"]
  return {kind: kinds.count(kind) for kind in set(kinds) - {"all-reduce"}}


@pytest.mark.parametrize(
  ("strategy", "expected"),
  [
    # Keys and values forward and again backward, and their gradients.
    ("all_gather", {"all-gather": 4 + 5, "reduce-scatter": 2}),
    # Of keys and values one there, one in the backward pass; their gradients in it, and at its end.
    ("ring", {"collective-permute": 8, "all-gather": 5}),
    # The gradient of a sink's logits comes from the devices that had its heads. Where documents begin is
    # found by comparing each token with the one before, and all devices need it.
    ("ulysses", {"all-to-all": 8, "all-gather": 1 + 2, "collective-permute": 2}),
  ],
)
def test_a_layer_sends_what_its_strategy_says(strategy, expected):
  """Beside that it sends weights, as with fsdp, and nothing of the stream; and of a microbatch's rows, once,
  the numbers of tokens that other devices have read: five arrays for zigzag order."""
  with_context = messages({"context": 2, "fsdp": 2}, strategy)
  with_fsdp = messages({"fsdp": 4})
  more = {kind: count - with_fsdp.get(kind, 0) for kind, count in with_context.items()}
  assert {kind: count for kind, count in more.items() if count} == expected
