"""Metrics that a run lists: however the batch is split, the plain values of one device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from initial_states import initial_state, random_parameters
from noise_runs import training
from pipeline_sweep import MODEL, Run, batch, configuration, prepared, without_pipeline
from support import config, in_microbatches, mesh, uneven_rows

from maxbatch.errors import UserError
from maxbatch.models.layers import hidden_of
from maxbatch.models.registry import Parameters, build_model
from maxbatch.training import metrics
from maxbatch.training.evaluation import eval_function
from maxbatch.training.loss import loss_sum
from maxbatch.training.metrics import METRICS, TokenMetric, Tokens, chosen_metrics
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures
from maxbatch.training.step import Trainer, rows_shardings, step_function

T, ROWS, RATE = 16, 32, np.float32(0.1)
KEY = jax.random.key(7)


def _even(tokens: Tokens) -> jax.Array:
  return (tokens.targets_BC % 2 == 0).astype(jnp.float32)


EVEN = TokenMetric(lambda tokens: _even(tokens) * tokens.loss_BC, per=_even)
"""The loss of tokens with an even number: a sum divided by another."""


@pytest.fixture(autouse=True)
def _one_more_metric(monkeypatch):
  monkeypatch.setattr(metrics, "METRICS", {**METRICS, "even_loss": EVEN})


def trainer(axes: tuple[int, int, int], dispatches: int = 0, **keys: object) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  settings = config(opt_type="sgd", gradient_clipping_threshold=0, num_vocab_tiling=2, **keys)
  model = build_model(settings.model, T, settings.noise.gns)
  optimizer = make_optimizer(settings.optimizer, model.axes(), dispatches or 1)
  measures = Measures(chosen_metrics(metrics.METRICS))
  parts = model, optimizer, mesh(*axes), KEY
  return Trainer(*parts, streamed=dispatches > 0, measures=measures)


@functools.cache
def parameters() -> Parameters:
  """Those that every step here begins with, on the host; some of their guesses are right."""
  return random_parameters(trainer((1, 1, 1)).model, seed=4)


def step(axes: tuple[int, int, int], k: int, *, streamed: bool = False, **keys: object):
  """What one step of k microbatches reports."""
  parts = trainer(axes, k if streamed else 0, **keys)
  fed = in_microbatches(uneven_rows(ROWS, T), k, k)
  fed = jax.device_put(fed, rows_shardings(fed, parts.mesh))
  state = initial_state(parts, parameters())
  if not streamed:
    return step_function(parts, fed)(state, fed, np.int32(k), RATE)[1].metrics
  result, pieces = {}, [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)]
  function = step_function(parts, pieces[0])
  for piece in pieces:
    state, reported = function(state, piece, None, RATE)
    result = reported.metrics
  return result


@functools.cache
def plain(*, evaluation: bool = False) -> dict[str, float]:
  """By the formulas, from all logits at once."""
  parts, rows = trainer((1, 1, 1)), uneven_rows(ROWS, T)
  params = parameters()

  @jax.jit
  def logits(params):
    bound = parts.model.bind(params)
    return hidden_of(bound(rows, None)) @ bound.output_matrix()

  logits_BTV = np.asarray(logits(params), np.float64)
  log_z_BT = np.log(np.exp(logits_BTV).sum(-1))
  targets_BT, weights_BT = np.asarray(rows.targets), np.asarray(rows.weights, np.float64)
  logit_BT = np.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
  hit_BT, even_BT = logits_BTV.argmax(-1) == targets_BT, targets_BT % 2 == 0
  of_tokens = {
    "accuracy": np.average(hit_BT, weights=weights_BT),
    "log_z": np.average(log_z_BT, weights=weights_BT),
    "even_loss": np.average(log_z_BT - logit_BT, weights=weights_BT * even_BT),
  }
  if evaluation:
    return of_tokens
  gradients = jax.jit(jax.grad(lambda p: loss_sum(parts.model, p, rows, KEY)))(params)
  updates = jax.tree.map(lambda g: -RATE * np.float64(g) / weights_BT.sum(), gradients)
  after = jax.tree.map(np.add, params, updates)
  return of_tokens | {"update_norm": norm(updates), "param_norm": norm(after)}


def norm(tree: Parameters) -> float:
  return float(np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree))))


def assert_equal(result, expected) -> None:
  assert set(result) == set(expected)
  for name, value in expected.items():
    np.testing.assert_allclose(result[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
  ("axes", "k", "streamed"),
  [
    ((1, 1, 1), 1, False),
    ((2, 2, 2), 4, False),
    ((2, 2, 2), 4, True),
  ],
)
def test_any_split_reports_the_plain_values(axes, k, streamed):
  assert plain()["accuracy"] > 0
  assert_equal(step(axes, k, streamed=streamed), plain())


def test_measuring_the_noise_scale_leaves_them_as_they_are():
  assert_equal(step((1, 2, 1), 2, gns="all"), plain())


@pytest.mark.parametrize("axes", [(1, 1, 1), (2, 2, 2)])
def test_evaluation_has_the_means_over_tokens(axes):
  parts, rows = trainer(axes), uneven_rows(ROWS, T)
  sums = eval_function(parts, rows)(initial_state(parts, parameters()).params, rows)
  assert_equal(metrics.token_values(sums.metrics, sums.weight), plain(evaluation=True))


@functools.cache
def pipelined(schedule: str) -> Run:
  """Two stages on two replicas, two microbatches a step."""
  keys = {
    "num_simulated_devices": 4,
    "ici_pipeline_parallelism": 2,
    "pipeline_schedule": schedule,
    "num_pipeline_microbatches": 2,
    "base_num_decoder_layers": 4,
    "num_layers_per_pipeline_stage": 2 if schedule in ("gpipe", "1f1b") else 1,
    "per_device_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "metrics": "[accuracy, log_z, even_loss, param_norm, update_norm]",
  }
  return prepared(configuration(MODEL | keys))


@functools.cache
def on_one_device() -> dict[str, Any]:
  """What such a step reports without its pipeline."""
  return without_pipeline(pipelined("1f1b")).metrics


@pytest.mark.parametrize("schedule", ["1f1b", "circular"])
def test_a_pipeline_reports_the_same(schedule):
  run = pipelined(schedule)
  assert_equal(run.step(run.trainer).metrics, on_one_device())


def test_evaluation_in_a_pipeline_is_the_same():
  run = pipelined("1f1b")
  rows, result = batch(run.config, run.plan.eval_batch), []
  for parts in (run.trainer, dataclasses.replace(run.trainer, pipeline=None, mesh=mesh())):
    sums = eval_function(parts, rows)(run.placed(parts).params, rows)
    result.append(metrics.token_values(sums.metrics, sums.weight))
  assert_equal(*result)


def test_tokens_without_weight_may_be_anything():
  rows = uneven_rows(ROWS, T)
  values = jnp.asarray(np.where(rows.weights == 0, np.float32(np.nan), np.float32(2.0)))
  tokens = Tokens(values, values, values, values, jnp.asarray(rows.weights), jnp.zeros((ROWS, T)))
  sums = metrics.token_sums(chosen_metrics(["log_z"]), tokens)
  assert metrics.token_values(sums, rows.weights.sum())["log_z"] == 2.0


def test_a_run_records_them_by_name(tmp_path):
  with training(tmp_path) as train:
    records = train(
      "listed", batch_size=16, total_samples=32, gns="off", metrics="[accuracy, param_norm]"
    )
  first, *_, last = records.records
  assert "accuracy" not in first
  assert {"accuracy", "param_norm", "eval/accuracy"} <= set(last)
  assert "eval/accuracy" in first
  assert "eval/param_norm" not in last


def test_an_unknown_name_is_refused_with_the_nearest():
  with pytest.raises(UserError, match=r"metrics=acuracy: there is no such metric. Did you mean"):
    chosen_metrics(["acuracy"])
