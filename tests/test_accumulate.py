"""The batch split any way: the same loss and the same gradient, at the cost of one reduction."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import (
  collectives,
  config,
  error,
  in_microbatches,
  memory,
  mesh,
  model_config,
  program_text,
  relative_errors,
  uneven_rows,
)

from maxbatch.data.rows import Rows
from maxbatch.models import stacks
from maxbatch.models.registry import Model, build_model
from maxbatch.precision.formats import BFLOAT16
from maxbatch.precision.policy import Policy
from maxbatch.training import partial_sums
from maxbatch.training.accumulate import model_accumulate
from maxbatch.training.loss import loss_sum
from maxbatch.training.objective import LOSS, TEXT
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import StateParts, Sums, abstract_state, shardings
from maxbatch.training.step import rows_shardings

T = 16
DROPOUT_KEY = jax.random.key(7)
CAPACITY = 8
ROWS = 64

MESHES = [
  *[(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8)],
  *[(2, 4, 1), (4, 1, 2), (1, 2, 4), (2, 2, 2)],
]
"""Devices along data, fsdp and tensor: each axis alone, each pair, and all three. A device has one
row of a microbatch, two or more; all attention heads, whole groups of them, a part of a group, or a
part of a head."""


def in_words(axes: tuple[int, int, int]) -> str:
  return "x".join(map(str, axes))


@functools.cache
def initial(model: Model):
  """Parameters to begin with."""
  return jax.device_get(jax.jit(model.init)(jax.random.key(0)))


def summing(model: Model, axes: tuple[int, int, int]):
  """The training code's sums over microbatches as one function, and its parameters' shapes, on a mesh."""
  devices = mesh(*axes)
  optimizer = make_optimizer(config().optimizer, model.axes(), 1)
  abstract = abstract_state(StateParts(model, optimizer), devices).params

  def sums(params, rows, num_microbatches):
    zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
    with jax.sharding.use_abstract_mesh(devices.abstract_mesh):
      keys = TEXT.keys(model, DROPOUT_KEY, rows)
      result = model_accumulate(model, devices)(params, rows, num_microbatches, keys, zeros=zeros)
      loss = result.terms[LOSS]
      return result.gradients, Sums(*partial_sums.joined((loss.numerator, loss.denominator)), {})

  return jax.jit(sums), abstract


summing_once = functools.cache(summing)


@functools.cache
def placed(model: Model, axes: tuple[int, int, int]):
  """The initial parameters on a mesh."""
  return jax.device_put(initial(model), shardings(summing_once(model, axes)[1]))


def feed(rows: Rows, k: int, axes: tuple[int, int, int], capacity: int) -> Rows:
  """The rows in k microbatches, laid out as in training."""
  fed = in_microbatches(rows, k, capacity)
  return jax.device_put(fed, rows_shardings(fed, mesh(*axes)))


def run_sums(model: Model, rows: Rows, k: int, axes: tuple[int, int, int], capacity: int):
  """Summed gradients and losses of `rows` in k microbatches on a mesh."""
  function, _ = summing_once(model, axes)
  fed = feed(rows, k, axes, capacity)
  return jax.device_get(function(placed(model, axes), fed, np.int32(k)))


def lowered_sums(model: Model, rows: Rows, k: int, axes: tuple[int, int, int], capacity: int):
  """That program."""
  function, params = summing_once(model, axes)
  return function.lower(params, feed(rows, k, axes, capacity), np.int32(k))


@pytest.fixture(scope="module")
def model() -> Model:
  return build_model(model_config(dropout_rate=0.1), T)


@pytest.fixture(scope="module")
def whole(model):
  """The batch in one piece on one device."""
  return run_sums(model, uneven_rows(ROWS, T), 1, (1, 1, 1), 1)


def test_one_piece_is_the_plain_gradient_of_the_loss(model, whole):
  rows = uneven_rows(ROWS, T)
  gradient = jax.jit(jax.value_and_grad(lambda p: loss_sum(model, p, rows, DROPOUT_KEY)))
  loss, grads = gradient(initial(model))
  assert error(whole[0], grads) < 1e-6
  assert whole[1].loss == pytest.approx(float(loss), rel=1e-6)
  assert whole[1].weight == np.sum(rows.weights)


def assert_same_sums(split, whole):
  assert error(split[0], whole[0]) < 1e-6
  assert max(relative_errors(split[0], whole[0]).values()) < 2e-6
  assert split[1].loss == pytest.approx(float(whole[1].loss), rel=1e-6)
  assert split[1].weight == whole[1].weight


@pytest.mark.parametrize("axes", MESHES, ids=in_words)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_k_microbatches_give_the_sums_of_their_rows(model, axes, k):
  """On each mesh one program for all numbers of microbatches, as in training."""
  rows = uneven_rows(ROWS, T)
  first = rows._replace(weights=np.where(np.arange(ROWS)[:, None] < 8 * k, rows.weights, 0))
  split = jax.tree.map(lambda x: x[: 8 * k], rows)
  assert_same_sums(
    run_sums(model, split, k, axes, CAPACITY), run_sums(model, first, 1, (1, 1, 1), 1)
  )


def test_a_split_in_two_gives_the_same_sums(model, whole):
  assert_same_sums(run_sums(model, uneven_rows(ROWS, T), 2, (2, 2, 2), CAPACITY), whole)


def packed_rows(count: int) -> Rows:
  """As `uneven_rows`, each with two documents that meet at another place."""
  place_1T, cuts_B1 = np.arange(T)[None], np.random.default_rng(1).integers(1, T, (count, 1))
  second_BT = place_1T >= cuts_B1
  return uneven_rows(count, T)._replace(
    segment_ids=(1 + second_BT).astype(np.int32),
    positions=(place_1T - second_BT * cuts_B1).astype(np.int32),
  )


@pytest.fixture(scope="module")
def whole_packed(model):
  """The packed batch in one piece on one device."""
  return run_sums(model, packed_rows(ROWS), 1, (1, 1, 1), 1)


def test_packed_rows_in_one_piece_are_their_documents(model, whole, whole_packed):
  rows = packed_rows(ROWS)
  gradient = jax.jit(jax.grad(lambda p: loss_sum(model, p, rows, DROPOUT_KEY)))
  grads = gradient(initial(model))
  assert error(whole_packed[0], grads) < 1e-6
  assert error(whole_packed[0], whole[0]) > 0.01


@pytest.mark.parametrize(
  ("axes", "k"),
  [((1, 1, 1), 8), ((1, 8, 1), 1), ((2, 2, 2), 4)],
)
def test_any_split_of_packed_rows_gives_the_same_sums(model, whole_packed, axes, k):
  assert_same_sums(run_sums(model, packed_rows(ROWS), k, axes, CAPACITY), whole_packed)


@pytest.mark.usefixtures("optimized")
def test_programs_as_a_run_compiles_them_give_the_same_sums(model, whole_packed):
  axes = (2, 2, 2)
  # A function of its own: jax keeps what it compiled of one that other tests have run.
  function, _ = summing(model, axes)
  fed = feed(packed_rows(ROWS), 4, axes, CAPACITY)
  optimized = jax.device_get(function(placed(model, axes), fed, np.int32(4)))
  assert_same_sums(optimized, whole_packed)


def test_the_rows_hold_a_microbatch_of_padding_only():
  weights = in_microbatches(uneven_rows(ROWS, T), 8, CAPACITY).weights
  assert 0 in weights.sum((1, 2))


def test_accumulation_512_stays_exact(model):
  rows = uneven_rows(512, T)
  grads, sums = run_sums(model, rows, 512, (1, 1, 1), 512)
  parts = [jax.tree.map(lambda x, at=at: x[at : at + ROWS], rows) for at in range(0, 512, ROWS)]
  results = [run_sums(model, part, 1, (1, 1, 1), 1) for part in parts]
  in_float64 = [jax.tree.map(np.float64, one) for one, _ in results]
  assert error(grads, jax.tree.map(lambda *leaves: sum(leaves), *in_float64)) < 1e-5
  assert sums.loss == pytest.approx(sum(float(one.loss) for _, one in results), rel=1e-5)


def test_bfloat16_parameters_accumulate_in_float32():
  policy = Policy(parameters=BFLOAT16, compute=BFLOAT16)
  model = build_model(model_config(), T, policy=policy)
  function, params = summing(model, (1, 1, 1))
  fed = feed(uneven_rows(ROWS, T), 8, (1, 1, 1), CAPACITY)
  grads, _ = jax.eval_shape(function, params, fed, np.int32(8))
  assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype(np.float32)}


def test_sums_do_not_depend_on_what_lies_beyond_the_trips(model):
  axes = (1, 1, 1)
  function, _ = summing_once(model, axes)
  fed = feed(uneven_rows(ROWS, T), 8, axes, CAPACITY)

  def with_weights_beyond(value: float):
    weights = np.array(fed.weights)
    weights[4:] = value
    rows = fed._replace(weights=jax.device_put(weights, fed.weights.sharding))
    return jax.device_get(function(placed(model, axes), rows, np.int32(4)))

  jax.tree.map(np.testing.assert_array_equal, with_weights_beyond(np.nan), with_weights_beyond(0.0))


# What the compiled program does between devices.


def test_replicas_talk_once_per_step(model):
  lowered = lowered_sums(model, uneven_rows(ROWS, T), 8, (8, 1, 1), CAPACITY)
  result = collectives(program_text(lowered))
  assert result["loop"] == []
  assert set(result["once"]) == {"all-reduce"}


def test_rows_are_never_moved_between_devices(model):
  for axes in [(8, 1, 1), (2, 2, 2), (1, 8, 1)]:
    lowered = lowered_sums(model, uneven_rows(ROWS, T), 8, axes, CAPACITY)
    text = program_text(lowered)
    result = collectives(text)
    assert "all-to-all" not in result["loop"] + result["once"]
    assert not re.search(r"= s32\[[^=]*(all-gather|collective-permute)", text)


def test_memory_is_flat_in_the_number_of_microbatches(model):
  temporary = {}
  for k in (2, 64):
    lowered = lowered_sums(model, uneven_rows(8 * k, T), k, (2, 1, 1), k)
    temporary[k] = memory(lowered).temp_size_in_bytes
  assert temporary[64] == pytest.approx(temporary[2], rel=0.05)


def test_fsdp_keeps_no_gathered_parameters_for_the_backward_pass(monkeypatch):
  keys = {"base_num_decoder_layers": 6, "base_mlp_dim": 512}
  gathers, temporary = [], []
  for policy in (stacks.remat_policy, lambda config: None):
    monkeypatch.setattr(stacks, "remat_policy", policy)
    summing_once.cache_clear()
    deep = build_model(model_config(**keys), T)
    lowered = lowered_sums(deep, uneven_rows(8, T), 1, (1, 8, 1), 1)
    gathers.append(collectives(program_text(lowered))["loop"].count("all-gather"))
    temporary.append(memory(lowered).temp_size_in_bytes)
  assert gathers[0] > gathers[1]
  assert temporary[0] < temporary[1] - 6 * 3 * 32 * 512 * 4 / 2
