"""What a run may have besides, where devices share rows: the same as without that axis."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from initial_states import initial_state, random_parameters
from support import SMALLEST, config, error, in_microbatches, mesh
from test_context_steps import RATE, ROWS, T, rows_of

from maxbatch.models import probes
from maxbatch.models.registry import Parameters, build_model
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.training.evaluation import eval_function, eval_shardings
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

CUTS = 2
"""Of a microbatch, for the stages."""
SIZES = {**SMALLEST, "max_target_length": T, "opt_type": "sgd", "gradient_clipping_threshold": 0}
SIZES |= {"base_num_query_heads": 4, "base_num_decoder_layers": 2, "num_vocab_tiling": 2}
MODELS = {
  "all": {"gns": "all", "attention_sink": "true", "use_qk_norm": "true", "lora_rank": 2},
  "all, tied": {"gns": "all", "logits_via_embedding": "true", "normalization": "layernorm"}
  | {"position_embedding": "learned", "mlp_bias": "true", "attention_qkv_bias": "true"},
  "norm": {"gns": "norm"},
  "staged": {"sliding_window_size": 7, "layer_types": "[sliding_attention,full_attention]"}
  | {"dropout_rate": 0.25, "base_num_kv_heads": 1, "gns_from_microbatches": "true"},
  "bias": {"routed_bias": "true", "routed_score_func": "sigmoid", "router_z_loss_weight": 0.1},
  "global": {"load_balance_loss_type": "global", "mlp_bias": "true", "shared_experts": 1},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 8}
EXPERTS |= {"load_balance_loss_weight": 0.5}
"""With a balance loss, of each row or of the step, that matters beside the cross entropy."""
for experts in ("bias", "global"):
  MODELS[experts] |= EXPERTS


def trainer(
  name: str, sizes: dict[str, int], dispatches: int = 0, pipeline: Pipeline | None = None
) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  settings = config(**SIZES | MODELS[name])
  model = build_model(settings.model, T, settings.noise.gns, trainable=("*",))
  optimizer = make_optimizer(settings.optimizer, model.axes(), dispatches or 1)
  parts = model, optimizer, mesh(**sizes), jax.random.key(7), dispatches > 0, pipeline
  return Trainer(*parts)


@functools.cache
def parameters(name: str) -> Parameters:
  return random_parameters(trainer(name, {}).model, seed=4)


def stepped(parts: Trainer, name: str, k: int) -> tuple[Parameters, StepMetrics]:
  """The parameters after a step of k microbatches, and what it reports."""
  fed = in_microbatches(rows_of("rope"), k, k)
  pieces = [fed]
  if parts.streamed:
    pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)]
  pieces = [jax.device_put(piece, rows_shardings(piece, parts.mesh)) for piece in pieces]
  state, reported = initial_state(parts, parameters(name)), None
  of_step = parts.microbatches(k, parts.denominators(pieces, state.parameters))
  function = step_function(parts, pieces[0])
  for piece in pieces:
    state, reported = function(state, piece, of_step, RATE)
  return jax.device_get((parts.by_layer(state.params), reported))


@functools.cache
def whole(name: str) -> tuple[Parameters, StepMetrics]:
  """Of one device and one microbatch."""
  return stepped(trainer(name, {}), name, 1)


def assert_same(found: tuple[Parameters, StepMetrics], name: str) -> None:
  (params, reported), (expected_params, expected) = found, whole(name)
  before = trainer(name, {}).model.split(parameters(name))[0]
  updates, of_whole = (jax.tree.map(np.subtract, x, before) for x in (params, expected_params))
  assert error(updates, of_whole) < 1e-6
  assert reported.loss == pytest.approx(expected.loss, rel=1e-6)
  assert reported.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
  assert reported.weight == expected.weight
  assert set(reported.metrics) == set(expected.metrics)
  for metric, value in reported.metrics.items():
    assert np.ravel(value) == pytest.approx(np.ravel(expected.metrics[metric]), rel=1e-6), metric


def assert_near(found: Any, expected: Any) -> None:
  """Of squared norms, some of which are of small differences."""

  def near(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())

  jax.tree.map(near, found, expected)


@pytest.mark.parametrize(
  ("name", "sizes", "k", "is_ghost"),
  [
    ("all", {"context": 2, "fsdp": 2, "tensor": 2}, 2, False),
    ("all", {"context": 5}, 1, True),
    ("all, tied", {"context": 4, "data": 2}, 3, False),
    ("norm", {"context": 4, "tensor": 2}, 1, False),
  ],
)
def test_the_noise_scale_is_that_of_whole_rows(name, sizes, k, is_ghost, monkeypatch):
  """By either way to a matrix's squares: of so short rows none would be the product's."""
  _, expected = whole(name)
  monkeypatch.setattr(probes, "is_ghost", lambda *_: is_ghost)
  found = stepped(trainer(name, sizes), name, k)
  assert_same(found, name)
  noise = found[1].noise
  assert noise is not None
  assert expected.noise is not None
  assert noise.rows == expected.noise.rows
  assert_near(noise.row_tokens_squared, expected.noise.row_tokens_squared)
  assert_near(noise.of_rows, expected.noise.of_rows)
  assert_near(found[1].of_step, expected.of_step)


@pytest.mark.parametrize(
  ("name", "sizes", "k", "dispatches"),
  [
    ("bias", {"context": 2, "expert": 2, "data": 2}, 3, 0),
    ("global", {"context": 2, "expert": 2, "tensor": 2}, 2, 2),
    ("global", {"context": 4, "fsdp": 2}, 3, 0),
  ],
)
def test_experts_balance_whole_rows_and_steps(name, sizes, k, dispatches):
  found = stepped(trainer(name, sizes, dispatches), name, k)
  assert_same(found, name)
  counted = [metric for metric in found[1].metrics if metric.startswith("moe/load/")]
  assert counted
  for metric in counted:
    loads_E, expected_E = (each[1].metrics[metric] for each in (found, whole(name)))
    # What is counted is the same and not only close.
    np.testing.assert_array_equal(tokens_of(loads_E, found), tokens_of(expected_E, found))


def tokens_of(load_E: Any, found: tuple[Parameters, StepMetrics]) -> np.ndarray:
  """What loads were divided from, of experts two of which a token is sent to."""
  counts_E = np.asarray(load_E) * found[1].weight * 2 / len(load_E)
  np.testing.assert_allclose(counts_E, counts_E.round(), atol=1e-3)
  return counts_E.round()


@pytest.mark.parametrize(
  ("name", "sizes", "k", "stash"),
  [
    ("staged", {"context": 2, "fsdp": 2, "stage": 2}, 3, "residuals"),
    ("staged", {"context": 4, "stage": 2}, 2, "input"),
    ("bias", {"context": 2, "expert": 2, "stage": 2}, 2, "input"),
  ],
)
def test_stages_run_the_layers_of_rows_that_devices_share(name, sizes, k, stash):
  rows = ROWS // k // CUTS // sizes.get("fsdp", 1) // sizes.get("expert", 1)
  pipeline = Pipeline("1f1b", 2, 1, 1, CUTS, k, k, 1, rows, (CUTS,), 1, stash)
  parts = trainer(name, sizes, pipeline=pipeline)
  assert_same(stepped(parts, name, k), name)
  if stash == "residuals":
    assert evaluated(parts, name) == pytest.approx(evaluated(trainer(name, {}), name), rel=1e-6)


def evaluated(parts: Trainer, name: str) -> tuple[float, float]:
  """The loss and the weight of all rows."""
  rows = jax.device_put(rows_of("rope"), eval_shardings(rows_of("rope"), parts.mesh))
  found = eval_function(parts, rows)(initial_state(parts, parameters(name)).parameters, rows)
  return float(found.loss), float(found.weight)
