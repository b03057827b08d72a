"""The optimizer against optax used by hand: averages, accumulation, decay, clipping, Muon."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxbatch.config.load import load_config
from maxbatch.core.train_step import NormState, StepOptimizer, mean_clipped, measure_norm
from maxbatch.errors import UserError
from maxbatch.hardware.sharding import LogicalAxes
from maxbatch.models.registry import Parameters
from maxbatch.training.optimizer import (
  OPTIMIZERS,
  make_optimizer,
)

_CONFIG = load_config(["config=base", "gradient_clipping_threshold=0"]).optimizer
RATE = 0.03

# Two stacked layers of width 6 with 3 heads of 2, and the parts outside the layers.
SHAPES: dict[tuple[str, ...], tuple[tuple[int, ...], LogicalAxes]] = {
  ("embedding",): ((7, 6), ("vocab", "embed")),
  ("final_norm", "scale"): ((6,), ("embed",)),
  ("head",): ((6, 7), ("embed", "vocab")),
  ("layers", "attention", "query", "kernel"): (
    (2, 6, 3, 2),
    ("layers", "embed", "heads", "head_dim"),
  ),
  ("layers", "attention", "query", "bias"): ((2, 3, 2), ("layers", "heads", "head_dim")),
  ("layers", "attention", "out", "kernel"): (
    (2, 3, 2, 6),
    ("layers", "heads", "head_dim", "embed"),
  ),
  ("layers", "mlp", "up", "kernel"): ((2, 6, 12), ("layers", "embed", "mlp")),
  ("layers", "mlp", "down", "kernel"): ((2, 12, 6), ("layers", "mlp", "embed")),
  ("layers", "norm", "scale"): ((2, 6), ("layers", "embed")),
}
AXES = {path: axes for path, (_, axes) in SHAPES.items()}


def tree(seed: int, dtype: str = "float32") -> Parameters:
  """Normally distributed values in the shapes of SHAPES."""
  random = np.random.default_rng(seed)
  result: Parameters = {}
  for path, (shape, _) in SHAPES.items():
    node = result
    for name in path[:-1]:
      node = node.setdefault(name, {})
    node[path[-1]] = random.normal(size=shape).astype(jnp.dtype(dtype))
  return result


def at(values: Parameters, path: tuple[str, ...]) -> np.ndarray:
  node: Any = values
  for name in path:
    node = node[name]
  return np.asarray(node)


PARAMS = tree(0)


@functools.cache
def optimizer(dispatches: int = 1, **keys: Any) -> StepOptimizer:
  return make_optimizer(dataclasses.replace(_CONFIG, **keys), AXES, dispatches)


def init(rule: StepOptimizer, params: Any = PARAMS) -> optax.MultiStepsState:
  return jax.jit(rule.init)(params)


@functools.cache
def dispatch(rule: StepOptimizer) -> jax.stages.Wrapped:
  """One dispatch of the training step, compiled once per rule."""

  def update(gradients: Any, state: Any, params: Any, weight: jax.Array) -> tuple[Any, Any]:
    updates, state = rule.update(gradients, state, params, weight, learning_rate=jnp.float32(RATE))
    return optax.apply_updates(params, updates), state

  return jax.jit(update)


def one_step(
  rule: StepOptimizer, sums: list[tuple[Any, float]], params: Any, state: Any
) -> tuple[Any, Any]:
  """One step of gradient sums, each with its own weight, as the training step hands them over."""
  total = 0.0
  for gradients, weight in sums:
    total += weight
    params, state = dispatch(rule)(gradients, state, params, np.float32(total))
  return params, state


def steps(rule: StepOptimizer, gradients: list[Any], params: Any = PARAMS) -> Any:
  """The parameters after one step of each gradient, of weight 1."""
  state = init(rule, params)
  for gradient in gradients:
    params, state = one_step(rule, [(gradient, 1.0)], params, state)
  return params


def grad_norm(state: optax.MultiStepsState) -> float:
  leaves = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, NormState))
  return next(float(leaf.grad_norm) for leaf in leaves if isinstance(leaf, NormState))


def scaled(values: Parameters, factor: float) -> Parameters:
  return jax.tree.map(lambda x: x * factor, values)


def assert_close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other
  )


def by_hand(rule: optax.GradientTransformation, gradients: list[Any]) -> Any:
  """The same with a rule of optax."""

  @jax.jit
  def step(gradient: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, state = rule.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  params, state = PARAMS, jax.jit(rule.init)(PARAMS)
  for gradient in gradients:
    params, state = step(gradient, state, params)
  return params


SUMS = {"w": jnp.array([6.0, 8.0])}


@pytest.mark.parametrize(
  ("clip_norm", "expected"), [(0.0, [3.0, 4.0]), (6.0, [3.0, 4.0]), (1.0, [0.6, 0.8])]
)
def test_sums_are_divided_by_their_weight_and_clipped(clip_norm, expected):
  rule = optax.chain(measure_norm(), mean_clipped(clip_norm))
  result: tuple[Any, Any] = rule.update(SUMS, rule.init(PARAMS), divisor=jnp.float32(2.0))
  np.testing.assert_allclose(result[0]["w"], expected, rtol=1e-6)
  assert float(result[1][0].grad_norm) == 5.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_sums_that_are_not_finite_stay_so(bad):
  rule = optax.chain(measure_norm(), mean_clipped(1.0))
  sums = {"w": jnp.array([6.0, bad])}
  result: tuple[Any, Any] = rule.update(sums, rule.init(PARAMS), divisor=jnp.float32(2.0))
  assert not np.isfinite(result[0]["w"][1])
  assert not np.isfinite(result[1][0].grad_norm)


def test_an_update_divides_and_clips_on_the_way_to_its_moments():
  sums, divisor = {"w": jnp.ones((256, 1024))}, jnp.float32(2.0)

  def bytes_of(*clipping: optax.GradientTransformationExtraArgs) -> float:
    rule = optax.chain(*clipping, optax.scale_by_adam())
    update = jax.jit(lambda sums, state, by: rule.update(sums, state, divisor=by))
    cost: Any = update.lower(sums, rule.init(sums), divisor).compile().cost_analysis()
    return cost["bytes accessed"]

  clip = optax.with_extra_args_support(optax.clip_by_global_norm(1.0))
  in_turn = bytes_of(measure_norm(), mean_clipped(), clip)
  assert bytes_of(measure_norm(), mean_clipped(1.0)) < in_turn - 2 * sums["w"].nbytes


def test_a_step_of_padding_only_has_gradient_zero():
  rule, nothing = optimizer(opt_type="sgd"), scaled(tree(1), 0.0)
  params, state = one_step(rule, [(nothing, 0.0)], PARAMS, init(rule))
  assert_close(params, PARAMS, 0.0)
  assert grad_norm(state) == 0.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_dispatches_of_uneven_sums_equal_one_whole_sum(name):
  weights = [10.0, 0.0, 1.0, 5.0]
  parts = [scaled(tree(seed), weight) for seed, weight in enumerate(weights, start=1)]
  whole = jax.tree.map(lambda *leaves: sum(leaves), *parts)
  split, single = optimizer(4, opt_type=name), optimizer(1, opt_type=name)
  left, right = PARAMS, PARAMS
  left_state, right_state = init(split), init(single)
  for _ in range(3):
    left, left_state = one_step(split, list(zip(parts, weights, strict=True)), left, left_state)
    right, right_state = one_step(single, [(whole, sum(weights))], right, right_state)
    assert_close(left, right)
    assert grad_norm(left_state) == pytest.approx(grad_norm(right_state), rel=1e-6)
  assert not np.allclose(at(left, ("embedding",)), at(PARAMS, ("embedding",)), atol=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_moves_before_the_last_dispatch(name):
  rule = optimizer(4, opt_type=name)
  params, state = dispatch(rule)(tree(1), init(rule), PARAMS, np.float32(1.0))
  assert_close(params, PARAMS, 0.0)
  assert_close(state.acc_grads, tree(1), 1e-6)


def test_adamw_is_that_of_optax_at_the_given_rate():
  keys: dict[str, Any] = {
    "adam_b1": 0.8,
    "adam_b2": 0.9,
    "adam_eps": 1e-6,
    "adam_weight_decay": 0.5,
  }
  rule, gradients = optimizer(**keys), [tree(1), tree(2)]
  mask = jax.tree_util.tree_map_with_path(
    lambda path, _: path[-1].key not in ("scale", "bias"), PARAMS
  )
  reference = optax.adamw(RATE, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.5, mask=mask)
  assert_close(steps(rule, gradients), by_hand(reference, gradients), 1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_that_of_optax_at_the_given_rate(momentum):
  rule, gradients = optimizer(opt_type="sgd", sgd_momentum=momentum), [tree(1), tree(2)]
  assert_close(steps(rule, gradients), by_hand(optax.sgd(RATE, momentum), gradients), 1e-6)


def test_adafactor_is_that_of_optax_at_the_given_rate():
  rule, gradients = optimizer(opt_type="adafactor"), [tree(1), tree(2)]
  assert_close(steps(rule, gradients), by_hand(optax.adafactor(RATE), gradients), 1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_shrinks_matrices_and_leaves_scales_and_biases(name):
  nothing = scaled(PARAMS, 0.0)
  after = steps(optimizer(opt_type=name, adam_weight_decay=0.5), [nothing])
  for path in SHAPES:
    kept = 1.0 if path[-1] in ("scale", "bias") else 1.0 - RATE * 0.5
    np.testing.assert_allclose(at(after, path), kept * at(PARAMS, path), rtol=1e-6)


def test_the_average_is_clipped_and_its_norm_recorded_before():
  gradient, weight = tree(1), 8.0
  norm = float(optax.tree.norm(gradient))
  rule = optimizer(opt_type="sgd", sgd_momentum=0.0, gradient_clipping_threshold=norm / 4)
  state = init(rule)
  params, state = one_step(rule, [(scaled(gradient, weight), weight)], PARAMS, state)
  assert_close(params, by_hand(optax.sgd(RATE), [scaled(gradient, 0.25)]), 1e-6)
  assert grad_norm(state) == pytest.approx(norm, rel=1e-6)


def test_a_gradient_below_the_threshold_is_left_alone():
  gradient = tree(1)
  norm = float(optax.tree.norm(gradient))
  clipped = optimizer(opt_type="sgd", gradient_clipping_threshold=norm * 1.01)
  assert_close(steps(clipped, [gradient]), steps(optimizer(opt_type="sgd"), [gradient]), 0.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sums_and_moments_are_float32_for_bfloat16_weights(name):
  rule, params = optimizer(2, opt_type=name), tree(0, "bfloat16")
  state = init(rule, params)
  params, state = one_step(rule, [(tree(1), 1.0), (tree(2), 1.0)], params, state)
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  kinds = {leaf.dtype for leaf in jax.tree.leaves(state)}
  assert kinds <= {jnp.dtype("float32"), jnp.dtype("int32"), jnp.dtype("bool")}
  assert {leaf.dtype for leaf in jax.tree.leaves(state.acc_grads)} == {jnp.dtype("float32")}


def orthogonalized(matrix: np.ndarray) -> np.ndarray:
  """Five Newton-Schulz iterations with the coefficients of Jordan et al. 2024, in float64."""
  x = matrix / np.linalg.norm(matrix)
  x = x.T if x.shape[0] > x.shape[1] else x
  for _ in range(5):
    gram = x @ x.T
    x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
  return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize(
  ("path", "shape"),
  [
    (("layers", "attention", "query", "kernel"), (6, 6)),
    (("layers", "attention", "out", "kernel"), (6, 6)),
    (("layers", "mlp", "up", "kernel"), (6, 12)),
    (("layers", "mlp", "down", "kernel"), (12, 6)),
  ],
)
def test_muon_orthogonalizes_each_layer_from_all_inputs_to_all_outputs(path, shape):
  gradient = tree(1)
  after = steps(optimizer(opt_type="muon", adam_weight_decay=0.0), [gradient])
  moved = (at(after, path) - at(PARAMS, path)) / -RATE
  for layer in range(2):
    matrix = at(gradient, path)[layer].astype(np.float64).reshape(shape)
    expected = orthogonalized(matrix) * 0.2 * np.sqrt(max(shape))
    np.testing.assert_allclose(moved[layer].reshape(shape), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
  ("stack", "axes"),
  [
    ((2,), ("layers", "embed", "mlp")),
    ((3,), ("expert", "mlp", "embed")),
    ((2, 3), ("layers", "expert", "embed", "mlp")),
    ((2, 3), ("layers", "expert", "embed", "heads", "head_dim")),
  ],
)
def test_muons_update_of_a_stack_is_the_updates_of_its_matrices(stack, axes):
  matrix = {"embed": 6, "mlp": 12, "heads": 2, "head_dim": 5}
  shape, path = tuple(matrix[axis] for axis in axes[len(stack) :]), ("kernel",)
  config = dataclasses.replace(_CONFIG, opt_type="muon")
  whole = make_optimizer(config, {path: axes}, 1)
  alone = make_optimizer(config, {path: axes[len(stack) :]}, 1)
  params, *gradients = (
    np.random.default_rng(seed).normal(size=(*stack, *shape)).astype(np.float32)
    for seed in range(3)
  )

  def trained(rule: StepOptimizer, *index: int) -> np.ndarray:
    each = [{"kernel": gradient[index]} for gradient in gradients]
    return steps(rule, each, {"kernel": params[index]})["kernel"]

  after = trained(whole)
  for index in np.ndindex(stack):
    np.testing.assert_allclose(after[index], trained(alone, *index), rtol=1e-5, atol=1e-6)


def test_muon_leaves_everything_else_to_adamw():
  gradients = [tree(1), tree(2)]
  results = [steps(optimizer(opt_type=name), gradients) for name in ("muon", "adamw")]
  for path in SHAPES:
    same = np.allclose(at(results[0], path), at(results[1], path), atol=1e-6)
    assert same == (path[-1] != "kernel")


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_the_moments_lie_under_the_paths_of_their_parameters(name):
  rule = optimizer(opt_type=name)
  results: set[tuple[str, ...]] = set()
  for path, leaf in jax.tree_util.tree_leaves_with_path(init(rule)):
    names = tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
    if leaf.size > 3:
      assert leaf.shape == SHAPES[names][0]
      results.add(names)
  assert results == SHAPES.keys()


def test_updates_under_a_512th_of_a_bfloat16_weight_are_rounded_away():
  weights = jax.random.normal(jax.random.key(0), (10_000,)).astype(jnp.bfloat16)

  def share_moved(fraction: float) -> float:
    moved = optax.apply_updates(weights, weights.astype(jnp.float32) * fraction)
    return float(jnp.mean(moved != weights))

  assert share_moved(0.99 / 512) == share_moved(-0.99 / 512) == 0
  assert 0 < share_moved(1.1 / 512) < 1
  assert share_moved(1.01 / 256) == share_moved(-1.01 / 256) == 1


def test_an_unknown_optimizer_is_refused_with_the_nearest_name():
  with pytest.raises(UserError) as caught:
    optimizer(opt_type="adam")
  assert str(caught.value) == (
    "opt_type=adam: there is no such opt_type. Did you mean adamw? "
    "Known: adamw, sgd, adafactor, muon."
  )
