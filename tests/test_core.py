"""The core with a model that is not ours: any split of a batch has the sums of the whole batch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support import collectives, program_text

from maxbatch.core.accumulate import accumulate, divisor, objective, sum_denominators
from maxbatch.core.terms import Max, Ratio, Sum, Terms
from maxbatch.core.train_step import init_state, mean_gradient, step_optimizer, train_step

N, D = 48, 6


def mesh(**sizes: int) -> Mesh:
  shape = tuple(sizes.values())
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape))


def parameters() -> dict[str, np.ndarray]:
  random = np.random.default_rng(0)
  return {
    "w": random.normal(size=(D, D)).astype(np.float32),
    "v": random.normal(size=D).astype(np.float32),
  }


def batch() -> dict[str, np.ndarray]:
  """Rows of different weights, some of them padding."""
  random = np.random.default_rng(1)
  weight = random.integers(0, 5, N).astype(np.float32)
  weight[10:16] = 0
  return {
    "x": random.normal(size=(N, D)).astype(np.float32),
    "y": random.normal(size=N).astype(np.float32),
    "weight": weight,
    "id": np.arange(N, dtype=np.int32),
  }


def loss(params: Any, rows: Any, keys_B: Any) -> tuple[Terms, dict[str, Any]]:
  """Two terms with denominators of their own, dropout, and one statistic of each kind."""
  hidden = jnp.tanh(rows["x"] @ params["w"])
  if keys_B is not None:
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (D,)))(keys_B)
    hidden = jnp.where(keep, hidden / 0.8, 0.0)
  error = (hidden @ params["v"] - rows["y"]) ** 2
  counts = (rows["weight"] > 0).astype(jnp.float32)
  terms = {
    "square": Ratio((rows["weight"] * error).sum(), rows["weight"].sum()),
    "size": Ratio((counts * (hidden**2).sum(-1)).sum(), counts.sum(), coefficient=0.1),
  }
  stats = {
    "error": Ratio((rows["weight"] * error).sum(), rows["weight"].sum()),
    "rows": Sum((rows["weight"] > 0).sum(dtype=jnp.int32)),
    "hidden": Sum((counts[:, None] * hidden).sum(0)),
    "largest": Max(jnp.where(rows["weight"] > 0, error, -jnp.inf).max()),
  }
  return terms, stats


def in_microbatches(rows: Any, k: int, capacity: int) -> Any:
  def cut(x: np.ndarray) -> np.ndarray:
    x = x.reshape(k, -1, *x.shape[1:])
    return np.concatenate([x, np.ones((capacity - k, *x.shape[1:]), x.dtype)])

  return jax.tree.map(cut, rows)


def keys_of(ids: np.ndarray) -> jax.Array:
  fold = functools.partial(jax.random.fold_in, jax.random.key(3))
  return jax.vmap(jax.vmap(fold))(ids) if ids.ndim == 2 else jax.vmap(fold)(ids)


@functools.cache
def whole() -> tuple[Any, Any, Any]:
  """Objective and gradient of all rows in one piece, by plain jax."""
  rows = batch()

  def value(params: Any) -> Any:
    terms, stats = loss(params, rows, keys_of(rows["id"]))
    return objective(terms), stats

  (total, stats), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(parameters())
  return jax.device_get((total, gradient, stats))


def assert_close(one: Any, other: Any, tolerance: float = 1e-6) -> None:
  def close(a: Any, b: Any) -> None:
    assert np.linalg.norm(np.subtract(a, b)) <= tolerance * np.linalg.norm(b)

  jax.tree.map(close, one, other)


SPLITS = [({}, 1), ({}, 4), ({"data": 8}, 3), ({"data": 2, "fsdp": 4}, 2), ({"fsdp": 8}, 6)]


def assert_split_is_whole(axes: dict[str, int], k: int) -> None:
  devices = mesh(**axes) if axes else None
  function = jax.jit(accumulate(loss, devices))
  rows = in_microbatches(batch(), k, 8 if k > 1 else 1)
  if devices is not None:
    over = NamedSharding(devices, PartitionSpec(None, tuple(axes)))
    rows = jax.device_put(rows, over)
  sums = jax.device_get(function(parameters(), rows, np.int32(k), keys_of(rows["id"])))
  total, gradient, stats = whole()
  assert objective(sums.terms) == pytest.approx(float(total), rel=1e-6)
  assert_close(jax.tree.map(lambda g: g / divisor(sums.terms), sums.gradients), gradient)
  assert sums.stats["rows"].total == stats["rows"].total
  assert sums.stats["rows"].total.dtype == np.int32
  for name in ("error", "hidden", "largest"):
    np.testing.assert_allclose(sums.stats[name].value(), stats[name].value(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(("axes", "k"), SPLITS)
def test_any_split_has_the_gradient_and_statistics_of_the_whole_batch(axes, k):
  assert_split_is_whole(axes, k)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(("axes", "k"), [({"data": 2, "fsdp": 4}, 2), ({}, 4)])
def test_programs_as_a_run_compiles_them_have_it_too(axes, k):
  assert_split_is_whole(axes, k)


def test_terms_of_one_denominator_run_the_loss_once_for_each_microbatch():
  """A second loop, over denominators, is there only where they differ."""

  def one_term(params: Any, rows: Any, keys_B: Any) -> Any:
    terms, _ = loss(params, rows, keys_B)
    return {"square": terms["square"]}, {}

  rows = in_microbatches(batch(), 4, 8)
  arguments = parameters(), rows, np.int32(4)
  loops = [
    jax.jit(accumulate(each)).lower(*arguments).as_text().count("stablehlo.while")
    for each in (one_term, loss)
  ]
  assert loops == [1, 2]


def test_a_loss_is_traced_once():
  """For the shapes of its terms and for the loop."""
  traced = []

  def one_term(params: Any, rows: Any, keys_B: Any) -> Any:
    traced.append(rows)
    return {"square": loss(params, rows, keys_B)[0]["square"]}, {}

  devices = mesh(data=2)
  over = NamedSharding(devices, PartitionSpec(None, "data"))
  rows = jax.device_put(in_microbatches(batch(), 3, 8), over)
  jax.jit(accumulate(one_term, devices)).trace(parameters(), rows, np.int32(3))
  assert len(traced) == 1


def test_replicas_talk_once():
  def one_term(params: Any, rows: Any, keys_B: Any) -> Any:
    terms, stats = loss(params, rows, keys_B)
    return {"square": terms["square"]}, {"error": stats["error"]}

  devices = mesh(data=8)
  rows = jax.device_put(
    in_microbatches(batch(), 3, 8), NamedSharding(devices, PartitionSpec(None, "data"))
  )
  lowered = jax.jit(accumulate(one_term, devices)).lower(parameters(), rows, np.int32(3))
  result = collectives(program_text(lowered))
  assert result["loop"] == []
  assert set(result["once"]) == {"all-reduce"}


@pytest.mark.parametrize("axes", [{}, {"data": 2}])
def test_squares_are_those_of_the_microbatches_and_replicas(axes):
  def one_term(params: Any, rows: Any, keys_B: Any) -> Any:
    return {"square": loss(params, rows, keys_B)[0]["square"]}, {}

  def norm(gradients: Any) -> jax.Array:
    return sum((jnp.square(g).sum() for g in jax.tree.leaves(gradients)), jnp.zeros(()))

  k, replicas = 4, axes.get("data", 1)
  devices = mesh(**axes) if axes else None
  rows = in_microbatches(batch(), k, 8)
  result = jax.jit(accumulate(one_term, devices, squared_norm=norm))(parameters(), rows, k)

  def square(params: Any, part: Any) -> Any:
    terms, _ = one_term(params, part, None)
    return terms["square"].numerator, terms["square"].denominator

  gradient = jax.jit(jax.grad(square, has_aux=True))
  of_replicas = []
  for replica in range(replicas):
    own = jax.tree.map(lambda x, at=replica: np.split(x, replicas, axis=1)[at], rows)
    parts = [jax.tree.map(lambda x, m=m: x[m], own) for m in range(k)]
    of_replicas.append([jax.device_get(gradient(parameters(), part)) for part in parts])
  each = [one for replica in of_replicas for one in replica]
  assert result.squares is not None
  assert result.squares.of_microbatches == pytest.approx(
    sum(float(norm(g)) for g, _ in each), rel=1e-5
  )
  assert result.squares.divisors == sum(float(d) ** 2 for _, d in each)
  together = [jax.tree.map(lambda *g: sum(g), *(g for g, _ in one)) for one in of_replicas]
  assert result.squares.of_replicas == pytest.approx(
    sum(float(norm(g)) for g in together), rel=1e-5
  )


def test_streamed_steps_equal_fused_ones():
  rows, k = batch(), 4
  fed = in_microbatches(rows, k, 8)
  keys = keys_of(fed["id"])
  steps = {}
  for streamed in (False, True):
    optimizer = step_optimizer(optax.adam(0.1), clip_norm=0.5, dispatches=k if streamed else 1)
    function = jax.jit(train_step(accumulate(loss), optimizer, streamed=streamed))
    shapes = jax.tree.map(lambda x: x[0], fed)
    state = init_state(parameters(), optimizer, *((loss, shapes) if streamed else ()))
    terms, _ = loss(parameters(), rows, None)
    of_step = {name: term.denominator for name, term in terms.items()}
    result = None
    for _ in range(3):
      if not streamed:
        state, result = function(state, fed, np.int32(k), keys)
        continue
      for at in range(k):
        micro = jax.tree.map(lambda x, at=at: x[at : at + 1], fed)
        state, result = function(state, micro, np.int32(1), keys[at : at + 1], of_step)
        assert bool(result.is_last) == (at == k - 1)
    assert result is not None
    # Divided, and not yet clipped.
    np.testing.assert_allclose(optax.tree.norm(mean_gradient(result)), result.grad_norm, rtol=1e-6)
    steps[streamed] = jax.device_get((state.params, result.loss, result.grad_norm))
  assert_close(steps[True], steps[False], 2e-6)
  assert steps[False][2] > 0.5


def test_a_streamed_step_is_told_its_denominators():
  fed, k = in_microbatches(batch(), 4, 4), 4
  pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)]
  function = jax.jit(sum_denominators(loss))
  of_each = [function(parameters(), piece, np.int32(1)) for piece in pieces]
  of_step = jax.tree.map(lambda *x: sum(x), *of_each)
  assert of_step == function(parameters(), fed, np.int32(k))
  assert of_step == {"square": batch()["weight"].sum(), "size": (batch()["weight"] > 0).sum()}
  optimizer = step_optimizer(optax.sgd(0.1), dispatches=k)
  step = jax.jit(train_step(accumulate(loss), optimizer, streamed=True))
  state = init_state(parameters(), optimizer, loss, jax.tree.map(lambda x: x[0], fed))
  with pytest.raises(ValueError, match="that of square, size is missing"):
    step(state, pieces[0], np.int32(1))


def test_a_step_of_padding_alone_changes_nothing():
  rows = batch()
  rows["weight"] = np.zeros_like(rows["weight"])
  optimizer = step_optimizer(optax.sgd(0.1))
  function = jax.jit(train_step(accumulate(loss), optimizer))
  state, result = function(
    init_state(parameters(), optimizer), in_microbatches(rows, 2, 4), np.int32(2)
  )
  jax.tree.map(np.testing.assert_array_equal, state.params, parameters())
  assert result.loss == 0.0
  assert optax.tree.norm(mean_gradient(result)) == 0
