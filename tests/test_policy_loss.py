"""Completions through the streamed step: the same update as their plain sums, however they are split."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grpo_metrics import metric_values
from initial_states import initial_state, random_parameters
from pipelined import CUTS, PASSES, Case
from support import mesh, relative_errors
from test_grpo import ALLOWED_V, B, T, completions_of

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.config.load import load_config
from maxbatch.config.schema import Config
from maxbatch.core.terms import joined
from maxbatch.data.rows import Routes
from maxbatch.models.experts import FLIPS
from maxbatch.models.registry import build_model
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.rl.completions import Completions
from maxbatch.rl.grpo import Objective, grpo_sums
from maxbatch.rl.log_probs import token_log_probs
from maxbatch.rl.policy_loss import PolicyLoss
from maxbatch.sampling.choice import num_words, packed
from maxbatch.training.build import build_trainer
from maxbatch.training.loss import TokenShare
from maxbatch.training.metrics import NO_METRICS
from maxbatch.training.model_parts import to_layer_order, to_stage_order
from maxbatch.training.objective import LOSS as LOSS_NAME
from maxbatch.training.partial_sums import AT_ONCE, joined_sums
from maxbatch.training.pipelined_step import pipelined_accumulate
from maxbatch.training.state import Measures, TrainState
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

GOAL = Objective("dapo", 0.05, 0.2, 0.28, 2.0, T - 5)
KEYS = f"""vocab_size=264 base_emb_dim=16 base_num_decoder_layers=1 base_num_query_heads=2
  base_num_kv_heads=2 head_dim=8 base_mlp_dim=32 max_target_length={T} accumulation=streamed
  opt_type=sgd sgd_momentum=0 gradient_clipping_threshold=0 learning_rate=1 warmup_steps=0
  lr_schedule_type=constant steps=1"""
V = 264
LOSS_ALLOWED = np.resize(ALLOWED_V, V)
LOSS = PolicyLoss(GOAL, LOSS_ALLOWED.tobytes(), 0.7, has_proximal=True, kept_words=num_words(V))


WITHOUT_KL = dataclasses.replace(LOSS, objective=dataclasses.replace(GOAL, beta=0.0))
"""Runs the model on no microbatch without a gradient, if nothing else comes of it."""
EXPERTS = "num_experts=4", "base_moe_mlp_dim=8", "routed_bias=true"


def cut_completions() -> Completions:
  """Completions of which each token was chosen from some, and the others cannot be learned."""
  completions = completions_of()
  kept_BTV = np.random.default_rng(6).random((*completions.rows.targets.shape, V)) < 0.4
  np.put_along_axis(kept_BTV, np.asarray(completions.rows.targets)[..., None], True, -1)
  bits = packed(jnp.asarray(kept_BTV.reshape(-1, V)))
  return completions._replace(kept_BTW=np.asarray(bits).reshape(*kept_BTV.shape[:2], -1))


def routed_completions() -> Completions:
  """Completions whose tokens were sent to two of four experts at random."""
  completions = cut_completions()
  each = np.tile(np.arange(4, dtype=np.int16), (*completions.rows.targets.shape, 1, 1))
  experts: Any = np.random.default_rng(8).permuted(each, axis=-1)[..., :2]
  return completions._replace(rows=completions.rows._replace(routes=Routes(experts, True)))


def config_of(micro: int, *keys: str) -> Config:
  counts = f"global_batch_to_train={B} gradient_accumulation_steps={B // micro}"
  return load_config(["config=base", *KEYS.split(), *counts.split(), *keys])


@functools.cache
def step(
  micro: int, num_devices: int, *keys: str, loss: PolicyLoss = LOSS, learned: int = B
) -> tuple[Trainer, TrainState, StepMetrics]:
  """One step on the same completions, of which so many have an advantage."""
  config = config_of(micro, *keys)
  layout = topology(config.mesh, num_devices)
  plan = plan_batches(config.batch, config.run, layout)
  trainer = build_trainer(config, plan, jax.devices()[:num_devices], loss=loss)
  state = initial_state(trainer, random_parameters(trainer.model))
  completions = routed_completions() if any(loss.routes_LK) else cut_completions()
  advantages_B = np.where(np.arange(B) < learned, completions.advantages_B, 0)
  completions = completions._replace(advantages_B=advantages_B.astype(np.float32))  # pyright: ignore
  cut = [
    jax.tree.map(lambda x: np.asarray(x)[None, at : at + micro], completions)  # noqa: B023
    for at in range(0, B, micro)
  ]
  function = step_function(trainer, cut[0])
  metrics = None
  for each in cut:
    fed = jax.device_put(each, rows_shardings(each, trainer.mesh))
    state, metrics = function(state, fed, None, np.float32(1))
  assert metrics is not None
  return trainer, state, metrics


def test_a_step_on_completions_is_one_of_their_plain_sums():
  trainer, state, metrics = step(B, 1)
  params, completions = random_parameters(trainer.model), cut_completions()

  def loss(params):
    options = LOSS_ALLOWED, LOSS.temperature, completions.kept_BTW
    result = token_log_probs(trainer.model, params, completions.rows, *options)
    sums = grpo_sums(result, completions, GOAL)
    return sums.loss, sums

  gradients, sums = jax.jit(jax.grad(loss, has_aux=True))(params)
  expected = jax.tree.map(lambda p, g: p - g / sums.weight, params, gradients)
  assert max(relative_errors(state.parameters, expected).values()) < 1e-6
  assert float(metrics.loss) == pytest.approx(float(sums.loss / sums.weight), rel=1e-6)
  for name, value in metric_values(sums).items():
    assert float(metrics.metrics[name]) == pytest.approx(float(value), rel=1e-5), name


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_loss_does_not_depend_on_how_its_tokens_are_shared(loss_type):
  """Three stages have five of 12 tokens each, of which the last ones are filled up."""
  loss = dataclasses.replace(LOSS, objective=dataclasses.replace(GOAL, loss_type=loss_type))
  model, completions = build_model(config_of(B).model, T), cut_completions()
  random = np.random.default_rng(9)
  hidden_BTD = random.normal(size=(B, T, 16)).astype(np.float32)
  matrix_DV = 0.1 * random.normal(size=(16, V)).astype(np.float32)

  def summed(given, shares: int):
    terms, all_stats = jnp.zeros(2), []
    for index in range(shares):

      def cut(x_BT, at=index):
        ends = [(0, 0), (0, -T % shares)] + [(0, 0)] * (x_BT.ndim - 2)
        return jnp.split(jnp.pad(x_BT, ends), shares, 1)[at]

      options = {"cut": cut, "counts_rows": jnp.bool_(index == 0)} if shares > 1 else {}
      share = TokenShare(model, cut(given[0]), given[1], **options, form=AT_ONCE)
      term, stats = loss.of_share(share, completions, NO_METRICS)
      terms += jnp.stack([term.numerator, term.denominator])
      all_stats.append(stats)
    return terms[0], (terms, functools.reduce(joined, all_stats))

  of_shares = jax.jit(jax.grad(summed, has_aux=True), static_argnums=1)
  whole, shared = (of_shares((hidden_BTD, matrix_DV), shares) for shares in (1, 3))
  assert max(relative_errors(dict(enumerate(shared[0])), dict(enumerate(whole[0]))).values()) < 1e-6
  assert all(np.abs(leaf).max() > 0 for leaf in whole[0])
  for one, other in zip(*(jax.tree.leaves(each[1]) for each in (shared, whole)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6)


SCHEDULES = {1: ("gpipe", "1f1b"), 2: ("circular", "interleaved_1f1b")}


@pytest.mark.parametrize("repeats", SCHEDULES)
def test_the_loss_of_a_pipeline_s_stages_is_that_of_whole_completions(repeats):
  """One program runs both timetables, on two replicas, of which microbatches have a row each. The model is
  run if one reward differs, and not if none does."""
  of_pipeline = LOSS if repeats == 1 else WITHOUT_KL
  case, layers = Case(repeats=repeats, axes=(2, 1, 1)), 4
  model = build_model(config_of(B, f"base_num_decoder_layers={layers}").model, T)
  params, completions = random_parameters(model), cut_completions()
  whole = functools.partial(of_pipeline, model, metrics=NO_METRICS, keys_B=None, probes={})

  @functools.partial(jax.grad, has_aux=True)
  def loss(params, completions):
    terms, stats = whole(parameters=params, microbatch=completions)
    return terms[LOSS_NAME].numerator.sum(), (terms, stats)

  loss = jax.jit(loss)
  expected = loss(params, completions)
  sizes = layers // 2 // repeats, CUTS, PASSES, PASSES, 1, 1
  pipeline = Pipeline("", 2, repeats, *sizes, (CUTS,), 1)
  devices = mesh(2, stage=2)
  measures = Measures(LOSS.metrics(NO_METRICS))
  accumulate = pipelined_accumulate(
    model, pipeline, devices, measures=measures, capacity=case.capacity, loss=of_pipeline
  )

  @jax.jit
  def pipelined(params, batch, ticks):
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
      result = accumulate(params, batch, ticks)
      (terms, stats), _ = joined_sums((result.terms, result.stats), jnp.zeros((1, 1)))
      return result.gradients, (terms, stats)

  batch = jax.tree.map(lambda x: np.reshape(x, (PASSES, -1, *x.shape[1:])), completions)
  staged = jax.device_get(to_stage_order(model, pipeline, jax.device_put(params)))
  for schedule in SCHEDULES[repeats]:
    gradients, sums = pipelined(staged, batch, case.ticks(schedule, CUTS * PASSES))
    gradients = to_layer_order(model, pipeline, gradients)
    assert max(relative_errors(gradients, expected[0]).values()) < 1e-6
    for one, other in zip(*(jax.tree.leaves(each) for each in (sums, expected[1])), strict=True):
      np.testing.assert_allclose(one, np.sum(other), rtol=2e-6)
  if of_pipeline is WITHOUT_KL:
    alike = completions._replace(advantages_B=np.zeros(B, np.float32))
    in_parts = jax.tree.map(lambda x: np.reshape(x, (PASSES, -1, *x.shape[1:])), alike)
    # Whatever is computed from these parameters is no number.
    broken = jax.tree.map(lambda x: np.full_like(x, np.nan), staged)
    gradients, sums = pipelined(broken, in_parts, case.ticks(SCHEDULES[repeats][0], CUTS * PASSES))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(jax.device_get(gradients)))
    for one, other in zip(*map(jax.tree.leaves, (sums, loss(params, alike)[1])), strict=True):
      np.testing.assert_allclose(one, np.sum(other), rtol=2e-6)


@pytest.mark.parametrize(
  ("micro", "num_devices", "keys"),
  [
    (4, 1, ()),
    (16, 8, ("ici_fsdp_parallelism=4",)),
    (
      8,
      8,
      ("ici_fsdp_parallelism=4", "ici_context_parallelism=2", "context_parallel_strategy=ring"),
    ),
  ],
)
def test_a_step_does_not_depend_on_how_its_completions_are_split(micro, num_devices, keys):
  _, whole, expected = step(B, 1)
  _, state, metrics = step(micro, num_devices, *keys)
  assert (
    max(relative_errors(jax.device_get(state.params), jax.device_get(whole.params)).values()) < 1e-6
  )
  for name, value in expected.metrics.items():
    assert float(metrics.metrics[name]) == pytest.approx(float(value), rel=1e-5), name


def test_experts_count_completions_from_which_nothing_is_learned():
  """Else their biases would depend on which groups share a microbatch."""
  each = [
    step(B, 1, *EXPERTS, loss=WITHOUT_KL, learned=4),
    step(4, 2, *EXPERTS, "ici_expert_parallelism=2", loss=WITHOUT_KL, learned=4),
  ]
  (whole, expected), (split, found) = ((state.parameters, metrics) for _, state, metrics in each)
  assert np.ptp(whole["layers"]["mlp"]["router"]["bias"]) > 0
  for name in ("bias", "kernel"):
    one, other = (np.asarray(x["layers"]["mlp"]["router"][name]) for x in (split, whole))
    np.testing.assert_allclose(one, other, rtol=0, atol=0 if name == "bias" else 1e-6)
  for name, value in expected.metrics.items():
    np.testing.assert_allclose(found.metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_step_of_replayed_routes_does_not_depend_on_the_split_and_counts_what_they_say():
  replayed = dataclasses.replace(LOSS, routes_LK=(1, 2), replays=True)
  (whole, expected), (split, found) = (
    (jax.device_get(state.parameters), jax.device_get(metrics))
    for _, state, metrics in (
      step(B, 1, *EXPERTS, loss=replayed),
      step(4, 2, *EXPERTS, "ici_expert_parallelism=2", loss=replayed),
    )
  )
  assert max(relative_errors(split, whole).values()) < 1e-6
  for name, value in expected.metrics.items():
    np.testing.assert_allclose(found.metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
  assert 0.5 < expected.metrics[FLIPS] < 1
  rows = routed_completions().rows
  assert rows.routes is not None
  sent = np.asarray(rows.routes.experts)[np.asarray(rows.weights) > 0]
  counted = np.bincount(sent.ravel(), minlength=4)
  np.testing.assert_allclose(expected.metrics["moe/load/0"], counted / counted.mean(), rtol=1e-6)


@pytest.mark.parametrize(
  ("keys", "off"),
  [(("precision=float16", "initial_loss_scale=256"), 0.02), (("precision=cbfloat16",), 0.02)],
)
def test_a_step_in_another_format_or_with_a_loss_scale_is_near(keys, off):
  trainer, whole, expected = step(B, 1)
  _, state, metrics = step(B, 1, *keys)
  assert float(metrics.loss) == pytest.approx(float(expected.loss), rel=0.02, abs=0.01)
  begun = random_parameters(trainer.model)
  moved = [jax.tree.map(np.subtract, jax.device_get(s.parameters), begun) for s in (state, whole)]
  assert (
    relative_errors(
      *({"all": np.concatenate([x.ravel() for x in jax.tree.leaves(m)])} for m in moved)
    )["['all']"]
    < off
  )
  assert (metrics.scaling is None) == ("precision=cbfloat16" in keys)


def test_sums_and_largest_gap_begin_anew_with_each_step():
  _, state, _ = step(B, 1)
  assert {float(leaf) for leaf in jax.tree.leaves(state.sums)} == {0.0, -np.inf}


def test_the_step_is_compiled_for_what_it_is_fed():
  rows = completions_of().rows
  fed = LOSS.batch_shapes(rows)
  given = jax.tree.map(lambda x: (x.shape, x.dtype), cut_completions())
  assert jax.tree.map(lambda x: (x.shape, x.dtype), fed) == given
  goal = dataclasses.replace(GOAL, beta=0.0)
  plain = dataclasses.replace(LOSS, objective=goal, has_proximal=False, kept_words=0)
  fewer = plain.batch_shapes(rows)
  assert isinstance(fewer, Completions)
  assert fewer.proximal_BT is None
  assert fewer.reference_BT is None
  assert fewer.kept_BTW is None
