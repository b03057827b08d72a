"""Frozen parameters and adapters in the step: what there is of them, and that it trains the rest."""

import functools
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from initial_states import initial_state, random_parameters
from support import config, in_microbatches, mesh, relative_errors, uneven_rows

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.compile.program import state_bytes
from maxbatch.compile.traced_flops import model_flops_per_token
from maxbatch.errors import UserError
from maxbatch.models import lora
from maxbatch.models.registry import Model, build_model, joined, parameter_counts
from maxbatch.pipeline_parallel.schedule import BufferLimits, TimetableShape, timetable
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import timetable_arrays
from maxbatch.precision.policy import policy_of
from maxbatch.training.build import build_trainer, lost_updates
from maxbatch.training.loss import loss_parts, loss_sum
from maxbatch.training.model_parts import to_layer_order, to_stage_order
from maxbatch.training.objective import LOSS
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.pipelined_step import pipelined_accumulate
from maxbatch.training.state import StateParts, abstract_state, to_save
from maxbatch.training.step import Trainer, rows_shardings, step_function

T, ROWS, CAPACITY, RATE, STEPS = 16, 32, 4, 1e-2, 3
KEY = jax.random.key(7)

ATTENTION: dict[str, Any] = {"trainable": '["layers/attention/*", "final_norm/*"]'}
ADAPTERS: dict[str, Any] = {"lora_rank": 2, "lora_targets": "[query,out,down]", "lora_alpha": 3}
DROPOUT: dict[str, Any] = {"dropout_rate": 0.1}
MIXED: dict[str, Any] = {"lora_rank": 2, "trainable": '["*/bias", "head"]', "mlp_bias": "true"}


def trainer(axes: tuple[int, int, int] = (1, 1, 1), dispatches: int = 0, **keys: Any) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  settings = config(**keys)
  model = build_model(settings.model, T, settings.noise.gns, settings.optimizer.trainable)
  optimizer = make_optimizer(settings.optimizer, model.axes(), dispatches or 1)
  return Trainer(model, optimizer, mesh(*axes), KEY, streamed=dispatches > 0)


def model_of(length: int = T, **keys: Any) -> Model:
  settings = config(**keys)
  trainable, policy = settings.optimizer.trainable, policy_of(settings.precision)
  return build_model(settings.model, length, settings.noise.gns, trainable, policy)


def loud(parameters: Any) -> Any:
  """With adapters that are not zero."""
  leaves, structure = jax.tree.flatten(parameters)
  random = np.random.default_rng(0)
  return jax.tree.unflatten(
    structure, [x + 0.1 * random.normal(size=x.shape).astype(x.dtype) for x in leaves]
  )


def begun(model: Model) -> Any:
  """Parameters to begin with, adapters that are not zero among them."""
  return jax.device_put(random_parameters(model))


def paths(tree: Any) -> set[tuple[str, ...]]:
  """Of the parameters that are in some tree, wherever."""
  result = jax.tree_util.tree_leaves_with_path(tree)
  named = ([e.key for e in path if isinstance(e, jax.tree_util.DictKey)] for path, _ in result)
  return {tuple(each) for each in named if each}


# --- what there is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("keys", "opt_type"),
  [(ATTENTION, "adamw"), (ADAPTERS, "adafactor"), (MIXED, "muon"), (ADAPTERS, "adamw")],
  ids=("attention", "adafactor", "muon", "adapters"),
)
def test_of_a_frozen_parameter_there_is_nothing_but_itself(keys, opt_type):
  parts = trainer((2, 2, 2), opt_type=opt_type, **keys)
  state = parts.abstract
  assert paths(state.frozen) == parts.model.frozen
  assert paths(state.params) | paths(state.frozen) == set(parts.model.axes())
  assert not paths((state.params, state.opt_state)) & parts.model.frozen
  if opt_type == "adamw":
    held = state_bytes(state)
    assert held.accumulators == held.parameters
    assert held.optimizer_state == 2 * held.parameters + 5 * 4
    assert held.total == sum(
      int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize
      for x in jax.tree.leaves((state.params, state.opt_state, state.frozen))
    )
  assert paths(to_save(state)["params"]) == set(parts.model.axes())
  assert not paths(to_save(state, keeps_frozen=False)) & parts.model.frozen


def test_no_gradient_of_a_frozen_matrix_is_formed():
  """As traced: not even one that the compiler would drop."""
  rows = in_microbatches(uneven_rows(ROWS, T), 2, CAPACITY)

  def products(**keys: Any) -> set[str]:
    parts = trainer(num_vocab_tiling=4, **keys)
    text = step_function(parts, rows).lower(parts.abstract, rows, np.int32(1), np.float32(0))
    return set(re.findall(r"dot_general.*-> tensor<([\dx]+)xf32>", text.as_text()))

  head, gate = "32x264", "32x64"
  assert {head, gate} <= products()
  assert not {head, gate} & products(**ADAPTERS)
  only_head = products(trainable="[head]")
  assert head in only_head
  assert gate not in only_head


def test_the_patterns_of_all_parameters_make_the_same_program():
  rows = in_microbatches(uneven_rows(ROWS, T), 2, CAPACITY)
  texts = set()
  every: dict[str, Any] = {"trainable": '["*"]'}
  for keys in (dict[str, Any](), every):
    parts = trainer((2, 2, 1), **keys)
    assert parts.abstract.frozen == {}
    function = step_function(parts, rows)
    texts.add(function.lower(parts.abstract, rows, np.int32(1), np.float32(0)).as_text())
  assert len(texts) == 1


def test_a_pattern_without_a_match_is_refused_with_the_nearest():
  cases: tuple[tuple[dict[str, Any], str], ...] = (
    ({"trainable": "[layer/atention/*]"}, "nearest: layers/attention/*"),
    ({"trainable": "[embeding]"}, "for example trainable=['embedding']"),
    ({"lora_rank": 2, "lora_targets": "[querry]"}, "Did you mean query? It has down, gate, key,"),
    (
      {"lora_rank": 2, "gns": "norm"},
      "gns=norm measures the gradients of the normalization layers",
    ),
  )
  for keys, said in cases:
    with pytest.raises(UserError) as caught:
      model_of(**keys)
    assert said in str(caught.value)


def test_muon_without_a_matrix_that_trains_is_refused():
  for keys in ({"lora_rank": 2}, {"trainable": "[embedding]"}):
    with pytest.raises(
      UserError, match=r"opt_type=muon orthogonalizes .* for example opt_type=adamw"
    ):
      built(opt_type="muon", **keys)
  built(opt_type="muon", lora_rank=2, trainable='["layers/attention/out/kernel"]')


def built(**keys: Any) -> Trainer:
  settings = config(batch_size=8, **keys)
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, 8))
  return build_trainer(settings, plan, jax.devices())


def test_counts_and_work_know_what_trains():
  plain, adapted = model_of(), model_of(lora_rank=2)
  assert parameter_counts(plain) == "35,488 parameters"
  assert parameter_counts(adapted) == "35,936 parameters, of which 448 train"
  assert model_flops_per_token(adapted, T) < 0.7 * model_flops_per_token(plain, T)
  # Adapters are float32 whatever they stand beside, so nothing of them is lost.
  assert lost_updates(model_of(lora_rank=2, weight_dtype="bfloat16")) == []
  assert lost_updates(model_of(weight_dtype="bfloat16", **ATTENTION))


# --- what it computes ----------------------------------------------------------------------------


@functools.cache
def by_hand(**keys: Any) -> tuple[Any, list[float]]:
  """The parameters after STEPS of a loop of optax, and each step's loss, on one device."""
  parts = trainer(**keys)
  begun = initial_state(parts, random_parameters(parts.model))
  settings, frozen = config(**keys).optimizer, begun.frozen
  rule = optax.chain(
    optax.clip_by_global_norm(settings.gradient_clipping_threshold),
    optax.sgd(RATE, momentum=settings.sgd_momentum),
  )
  params, losses = begun.params, []
  state = rule.init(params)

  @jax.jit
  def step(params, state, rows):
    def mean(params):
      total = loss_sum(parts.model, joined(params, frozen), rows, KEY)
      return total / rows.weights.sum()

    loss, gradients = jax.value_and_grad(mean)(params)
    updates, state = rule.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss

  for seed in range(STEPS):
    params, state, loss = step(params, state, uneven_rows(ROWS, T, seed))
    losses.append(float(loss))
  return jax.device_get((params, frozen)), losses


@pytest.mark.parametrize(
  ("keys", "axes", "k", "streams"),
  [
    (ATTENTION, (2, 2, 2), 4, False),
    (ADAPTERS | DROPOUT, (2, 2, 2), 4, False),
    (ADAPTERS | DROPOUT, (1, 1, 1), 4, True),
  ],
  ids=lambda value: str(value)[:24],
)
def test_trained_in_any_split_equals_a_loop_of_optax(keys, axes, k, streams):
  keys = {"opt_type": "sgd"} | keys
  (params, frozen), losses = by_hand(**keys)
  parts = trainer(axes, k if streams else 0, **keys)
  state = initial_state(parts, random_parameters(parts.model))
  begun = jax.device_get(state.params)
  function, result, metrics = None, [], None
  for seed in range(STEPS):
    fed = in_microbatches(uneven_rows(ROWS, T, seed), k, k if streams else CAPACITY)
    pieces = (
      [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)] if streams else [fed]
    )
    for piece in pieces:
      placed = jax.device_put(piece, rows_shardings(piece, parts.mesh))
      function = function or step_function(parts, piece)
      state, metrics = function(state, placed, parts.microbatches(k), np.float32(RATE))
    assert metrics is not None
    result.append(float(metrics.loss))
  np.testing.assert_allclose(result, losses, rtol=1e-6)
  moved = jax.tree.map(np.subtract, params, begun)
  for a, b, change in zip(*map(jax.tree.leaves, (state.params, params, moved)), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 + 1e-5 * np.abs(change).max())
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), frozen)


def test_adapters_change_nothing_before_they_are_trained_and_can_be_merged():
  rows, plain = uneven_rows(4, T), model_of()
  settings: dict[str, Any] = ADAPTERS | {"lora_targets": "[query,key,value,out,gate,up,down]"}
  scanned, unrolled = (model_of(scan_layers=each, **settings) for each in ("true", "false"))

  def loss_of(model, parameters):
    return float(jax.jit(lambda p: loss_sum(model, p, rows, None))(parameters))

  fresh, without = jax.jit(scanned.init)(KEY), jax.jit(plain.init)(KEY)
  merged = lora.merged(fresh, scanned.config)
  jax.tree.map(np.testing.assert_array_equal, merged, without)
  before = loss_of(plain, without)
  assert loss_of(scanned, fresh) == before
  tuned = loud(fresh)
  after = loss_of(scanned, tuned)
  assert after != pytest.approx(before, rel=1e-3)
  assert after == pytest.approx(loss_of(plain, lora.merged(tuned, scanned.config)), rel=1e-6)
  assert after == pytest.approx(loss_of(unrolled, tuned), rel=1e-6)
  adapters = {path for path in flatten_dict(tuned) if path[-1] in ("lora_a", "lora_b")}
  assert adapters == paths(scanned.split(tuned)[0])


@pytest.mark.parametrize(
  "keys",
  [MIXED, {"trainable": '["*/scale", "layers/mlp/up/*", "embedding"]'}],
  ids=("mixed", "norms"),
)
def test_the_noise_scale_measures_what_trains_alone(keys):
  model = model_of(gns="all", normalization="layernorm", **keys)
  rows = uneven_rows(6, T)
  params, frozen = model.split(begun(model))

  def loss(params, probes, rows):
    return loss_parts(model, joined(params, frozen), rows, None, probes).loss.sum()

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(None, 0))
  def of_each(params, row):
    one = jax.tree.map(lambda x: x[None], row)
    return jax.grad(lambda p: loss_sum(model, joined(p, frozen), one, None))(params)

  squares = jax.jit(jax.grad(loss, argnums=1))(params, model.probes(6, 1), rows)
  gradients = flatten_dict(of_each(params, rows))
  probed = model.probed()
  assert {path for each in probed for path in each.parameters} == set(gradients)
  for each, result in zip(probed, jax.tree.leaves(squares), strict=True):
    expected = sum(
      np.square(np.asarray(gradients[path], np.float64).reshape(6, each.num_layers or 1, -1)).sum(
        -1
      )
      for path in each.parameters
    )
    np.testing.assert_allclose(
      np.asarray(result).reshape(each.num_layers or 1, 6).T, expected, rtol=2e-4, atol=1e-7
    )


def test_a_pipeline_forms_gradients_of_what_trains_alone():
  stages, repeats, layers, cuts, rows = 2, 2, 1, 2, 2
  keys = {
    "base_num_decoder_layers": stages * repeats * layers,
    "trainable": "[embedding]",
  } | ADAPTERS
  model = model_of(9, **keys)
  pipeline = Pipeline("", stages, repeats, layers, cuts, 1, 1, 1, rows, (cuts,), 1, "residuals")
  limits = BufferLimits(repeats * cuts, cuts)
  ticks = timetable_arrays(
    timetable("circular", TimetableShape(stages, cuts, repeats, 1)), limits, 16
  )
  devices = mesh(fsdp=2, stage=stages)
  whole = begun(model)
  fed = in_microbatches(uneven_rows(8, 9), 1, 1)
  optimizer = make_optimizer(config().optimizer, model.axes(), 1)
  places = jax.tree.map(
    lambda x: x.sharding, abstract_state(StateParts(model, optimizer), devices).parameters
  )

  @jax.jit
  def gradients(params, rows, ticks):
    zeros = optax.tree.zeros_like(model.split(params)[0])
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
      params, frozen = model.split(params)
      accumulate = pipelined_accumulate(model, pipeline, devices, frozen, KEY, capacity=limits)
      return accumulate(params, rows, ticks, zeros=zeros)

  staged = jax.device_put(to_stage_order(model, pipeline, whole), places)
  result = gradients(staged, jax.device_put(fed, rows_shardings(fed, devices)), ticks)
  found = jax.device_get(to_layer_order(model, pipeline, result.gradients))
  params, frozen = model.split(whole)
  loss, expected = jax.jit(
    jax.value_and_grad(lambda p: loss_sum(model, joined(p, frozen), uneven_rows(8, 9), KEY))
  )(params)
  summed = float(result.terms[LOSS].numerator.sum())
  assert summed == pytest.approx(float(loss), rel=1e-5)
  assert max(relative_errors(found, expected).values()) < 1e-5
