"""Rows whose tokens are divided over devices: the same training however many share a row."""

import functools

import jax
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
from maxbatch.models.registry import Parameters, build_model
from maxbatch.training import metrics
from maxbatch.training.evaluation import EvalMetrics, eval_function, eval_shardings
from maxbatch.training.metrics import METRICS, chosen_metrics
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, RATE = 20, 24, np.float32(1000)
"""A third of the rows is padding. Beside such an update rounding of the parameters is nothing."""
SIZES = {**SMALLEST, "max_target_length": T, "opt_type": "sgd", "gradient_clipping_threshold": 0}
SIZES |= {"base_num_query_heads": 4, "num_vocab_tiling": 2, "z_loss_multiplier": 0.01}
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


def rows_of(name: str) -> Rows:
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


def trainer(name: str, sizes: dict[str, int], dispatches: int = 0) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  settings = config(**SIZES | MODELS[name])
  model = build_model(settings.model, T, trainable=("*",))
  optimizer = make_optimizer(settings.optimizer, model.axes(), dispatches or 1)
  measures = Measures(chosen_metrics(metrics.METRICS), settings.noise.gns_from_microbatches)
  parts = model, optimizer, mesh(**sizes), jax.random.key(7)
  return Trainer(*parts, streamed=dispatches > 0, measures=measures)


@functools.cache
def parameters(name: str) -> Parameters:
  return random_parameters(trainer(name, {}).model, seed=4)


def stepped(parts: Trainer, name: str, k: int) -> tuple[Parameters, StepMetrics]:
  """The parameters after a step of k microbatches, and what it reports."""
  fed = in_microbatches(rows_of(name), k, k)
  pieces = [fed]
  if parts.streamed:
    pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)]
  pieces = [jax.device_put(piece, rows_shardings(piece, parts.mesh)) for piece in pieces]
  state, reported = initial_state(parts, parameters(name)), None
  function, of_step = step_function(parts, pieces[0]), parts.microbatches(k)
  for piece in pieces:
    state, reported = function(state, piece, of_step, RATE)
  return jax.device_get((state.params, reported))


@functools.cache
def whole(name: str, k: int = 1) -> tuple[Parameters, StepMetrics]:
  """Of one device."""
  return stepped(trainer(name, {}), name, k)


@pytest.mark.parametrize(
  ("name", "sizes", "k", "streamed"),
  [
    ("rope", {"context": 2}, 1, False),
    ("rope", {"context": 2, "fsdp": 2, "tensor": 2}, 3, False),
    ("rope", {"context": 4, "data": 2}, 3, True),
    ("learned", {"context": 4, "tensor": 2}, 2, False),
    ("learned", {"context": 2, "data": 2, "fsdp": 2}, 2, False),
    ("latent", {"context": 4, "fsdp": 2}, 1, False),
  ],
)
def test_devices_that_share_rows_train_as_one_does(name, sizes, k, streamed):
  params, found = stepped(trainer(name, sizes, k if streamed else 0), name, k)
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


def messages(sizes: dict[str, int]) -> dict[str, int]:
  """Those of a microbatch, by kind; of one layer's gathered weights there are as many everywhere."""
  parts, rows = trainer("rope", sizes), in_microbatches(rows_of("rope"), 3, 3)
  lowered = step_function(parts, rows).lower(parts.abstract, rows, np.int32(3), RATE)
  kinds = collectives(program_text(lowered))["loop"]
  return {kind: kinds.count(kind) for kind in set(kinds) - {"all-reduce"}}


def test_a_layer_sends_keys_and_values_forward_and_their_gradients_back():
  """Beside that what it sends is the weights, as with fsdp: nothing of the stream."""
  with_context, with_fsdp = messages({"context": 2, "fsdp": 2}), messages({"fsdp": 4})
  more = {kind: count - with_fsdp.get(kind, 0) for kind, count in with_context.items()}
  assert set(with_context) == {"all-gather", "reduce-scatter"}
  assert more == {"all-gather": 2, "reduce-scatter": 2}
