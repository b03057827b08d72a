"""The compiled step: two ways to feed it, one result; donated, sharded, compiled once."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from initial_states import initial_state, random_parameters
from support import config, in_microbatches, memory, mesh, relative_errors, uneven_rows

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.data.rows import Rows
from maxbatch.models.registry import build_model
from maxbatch.training.evaluation import eval_function
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures, TrainState
from maxbatch.training.step import Trainer, rows_shardings, step_function

T, ROWS, CAPACITY = 16, 32, 16


@functools.cache
def trainer(axes=(1, 1, 1), dispatches: int = 0, **keys: object) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  streamed = dispatches > 0
  settings = config(**{"dropout_rate": 0.1} | keys)
  model = build_model(settings.model, T, settings.noise.gns)
  optimizer = make_optimizer(settings.optimizer, model.axes(), dispatches or 1)
  measures = Measures(microbatch_squares=settings.noise.gns_from_microbatches)
  parts = model, optimizer, mesh(*axes), jax.random.key(7)
  return Trainer(*parts, streamed=streamed, measures=measures)


def fresh(parts: Trainer) -> TrainState:
  """A state to begin with: steps delete what they are given."""
  return initial_state(parts, random_parameters(parts.model))


@functools.cache
def fused_program(parts: Trainer, k: int):
  """The program of fused steps of ROWS rows in k microbatches."""
  return step_function(parts, in_microbatches(uneven_rows(ROWS, T), k, CAPACITY))


def fused(parts: Trainer, steps: list[tuple[Rows, int]]):
  """The state after steps of (rows, number of microbatches), and each step's metrics."""
  fed = [in_microbatches(rows, k, CAPACITY) for rows, k in steps]
  function = fused_program(parts, steps[0][1])
  state, metrics = fresh(parts), []
  for rows, (_, k) in zip(fed, steps, strict=True):
    placed = jax.device_put(rows, rows_shardings(rows, parts.mesh))
    state, values = function(state, placed, np.int32(k), np.float32(1e-2))
    metrics.append(values)
  return jax.device_get((state, metrics))


def streamed(parts: Trainer, steps: list[tuple[Rows, int]]):
  """The same, a dispatch per microbatch."""
  function = None
  state, metrics = fresh(parts), []
  for rows, k in steps:
    fed, values = in_microbatches(rows, k, k), None
    for index in range(k):
      micro = jax.tree.map(lambda x, at=index: x[at : at + 1], fed)
      function = function or step_function(parts, micro)
      placed = jax.device_put(micro, rows_shardings(micro, parts.mesh))
      state, values = function(state, placed, None, np.float32(1e-2))
    metrics.append(values)
  return jax.device_get((state, metrics))


def placed_rows(parts: Trainer) -> Rows:
  """Rows in 8 microbatches."""
  fed = in_microbatches(uneven_rows(ROWS, T), 8, CAPACITY)
  return jax.device_put(fed, rows_shardings(fed, parts.mesh))


@functools.cache
def lowered_step(parts: Trainer) -> jax.stages.Lowered:
  """The program of fused steps of `placed_rows`."""
  arguments = parts.abstract, placed_rows(parts), np.int32(1), np.float32(0.0)
  return fused_program(parts, 8).lower(*arguments)


@pytest.mark.usefixtures("optimized")
def test_streamed_equals_fused_in_programs_as_a_run_compiles_them():
  keys: dict[str, object] = {"opt_type": "sgd", "dropout_rate": 0.0}
  axes, steps = (2, 2, 1), [(uneven_rows(ROWS, T), 4)]
  one, _ = fused(trainer(axes, **keys), steps)
  other, _ = streamed(trainer(axes, 4, **keys), steps)
  assert max(relative_errors(other.params, one.params).values()) < 1e-6


@pytest.mark.parametrize(("axes", "k"), [((1, 1, 1), 1), ((2, 2, 2), 4)])
def test_streamed_equals_fused(axes, k):
  # SGD: Adam's first steps are the signs of the gradient, which turn rounding into differences.
  keys: dict[str, object] = {"opt_type": "sgd", "gns": "norm"}
  if k > 1:
    keys |= {"gns": "all", "gns_from_microbatches": True, "dropout_rate": 0.0}
  steps = [(uneven_rows(ROWS, T, seed), k) for seed in (0, 1)]
  one, one_metrics = fused(trainer(axes, **keys), steps)
  other, other_metrics = streamed(trainer(axes, k, **keys), steps)
  assert max(relative_errors(other.params, one.params).values()) < 1e-6
  for a, b in zip(other_metrics, one_metrics, strict=True):
    assert a.noise.rows == b.noise.rows > 0
    if b.noise.squares is not None:
      # Of a replica's microbatches together in one dispatch: these are not the same dispatches.
      squares = (each.noise.squares._replace(of_replicas=0, replica_divisors=0) for each in (a, b))
      a, b = (
        each._replace(noise=each.noise._replace(squares=own))
        for each, own in zip((a, b), squares, strict=True)
      )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), a, b)


def test_the_step_of_padding_only_changes_nothing_but_decay():
  rows = uneven_rows(ROWS, T)._replace(weights=np.zeros((ROWS, T), np.float32))
  parts = trainer(opt_type="sgd")
  state, metrics = fused(parts, [(rows, 2)])
  assert metrics[0][:3] == (0.0, 0.0, 0.0)
  jax.tree.map(np.testing.assert_array_equal, state.params, jax.device_get(fresh(parts).params))


def test_another_accumulation_compiles_nothing_new():
  parts = trainer((2, 1, 1), dropout_rate=0.0)
  placed = placed_rows(parts)
  compiled = lowered_step(parts).compile()
  losses = set()
  for num_microbatches in (1, 2, 8):
    _, metrics = compiled(fresh(parts), placed, np.int32(num_microbatches), np.float32(0.0))
    losses.add(float(metrics.loss))
  assert len(losses) == 3


def test_runs_with_up_to_16_microbatches_share_a_program():
  capacities = set()
  for accumulation in (1, 3, 16):
    settings = config(gradient_accumulation_steps=accumulation)
    plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, 8))
    capacities.add(plan.microbatch_capacity)
  assert len(capacities) == 1


def test_the_state_is_donated():
  parts = trainer((2, 1, 1), dropout_rate=0.0)
  state, lowered = fresh(parts), lowered_step(parts)
  held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
  # All but three scalars that are zero between steps.
  assert memory(lowered).alias_size_in_bytes >= held - 12
  lowered.compile()(state, placed_rows(parts), np.int32(2), np.float32(0.1))
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("axes", [(1, 8, 1), (8, 1, 1), (4, 2, 1)])
@pytest.mark.parametrize("opt_type", ["adamw", "adafactor", "muon"])
def test_the_state_is_divided_from_birth(opt_type, axes):
  parts = trainer(axes, opt_type=opt_type)
  state = dataclasses.replace(parts, over_data=axes[0] > 1).abstract

  def share(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape))

  vectors = 0 if axes[1] == 8 else 1  # Replicas keep all of what is one for each layer.
  matrices = [leaf for leaf in jax.tree.leaves(state.params) if leaf.ndim > 1 + vectors]
  assert matrices
  assert all(share(leaf) * 8 == leaf.size for leaf in matrices)
  moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1]
  assert moments
  assert all(share(leaf) < leaf.size for leaf in moments if leaf.ndim > 1 + vectors)


def test_a_state_begins_alike_on_any_mesh():
  one, divided = (trainer(axes, opt_type="sgd").init(seed=0) for axes in ((1, 1, 1), (2, 2, 2)))
  for ours, theirs in zip(*map(jax.tree.leaves, (one.params, divided.params)), strict=True):
    # The tails of a normal distribution differ in their last bits between machine codes.
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    assert np.ptp(ours) > 0 or (np.asarray(ours) == 1).all()


def test_no_device_ever_holds_the_whole_state():
  parts = trainer((1, 8, 1), base_emb_dim=64, base_mlp_dim=256)
  wanted = parts.abstract
  whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(wanted.params))
  places = jax.tree.map(lambda leaf: leaf.sharding, wanted.params)
  create = jax.jit(parts.model.init, out_shardings=places)
  used = memory(create.lower(jax.random.key(0)))
  assert used.output_size_in_bytes + used.temp_size_in_bytes < whole / 2


def test_a_stage_axis_divides_the_layers():
  plain = trainer(opt_type="sgd")
  staged = dataclasses.replace(plain, mesh=mesh(data=2, stage=2))
  kernel = fresh(staged).params["layers"]["mlp"]["up"]["kernel"]
  assert kernel.addressable_data(0).shape[0] * 2 == kernel.shape[0]
  steps = [(uneven_rows(ROWS, T), 2)]
  expected, _ = fused(plain, steps)
  result, _ = fused(staged, steps)
  assert max(relative_errors(result.params, expected.params).values()) < 1e-6


def test_an_optimizer_divided_over_data_trains_as_one_device():
  plain = trainer(opt_type="sgd")
  divided = dataclasses.replace(plain, mesh=mesh(data=4), over_data=True)
  kernel = fresh(divided).params["layers"]["mlp"]["up"]["kernel"]
  assert kernel.addressable_data(0).size * 4 == kernel.size
  steps = [(uneven_rows(ROWS, T), 2)]
  expected, (one,) = fused(plain, steps)
  result, (other,) = fused(divided, steps)
  assert max(relative_errors(result.params, expected.params).values()) < 1e-6
  np.testing.assert_allclose(other.grad_norm, one.grad_norm, rtol=1e-6)


def test_evaluation_has_no_dropout_and_no_z_loss():
  rows = uneven_rows(ROWS, T)
  results = []
  for z_loss in (0.0, 0.1):
    parts = trainer((2, 1, 1), z_loss_multiplier=z_loss)
    function = eval_function(parts, rows)
    results.append(float(function(fresh(parts).params, rows).loss))
  assert results[0] == results[1]


def test_an_evaluation_on_cpus_has_one_body_for_all_layers():
  """Also where scan_layers=false compiles each layer of the step on its own."""
  rows = uneven_rows(ROWS, T)

  def text(scan_layers: bool) -> str:
    parts = trainer(scan_layers=scan_layers)
    return eval_function(parts, rows).trace(parts.abstract.parameters, rows).lower().as_text()

  assert text(scan_layers=False) == text(scan_layers=True)
