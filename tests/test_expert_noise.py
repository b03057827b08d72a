"""The noise scale of routers and of each expert: from the gradients of a step's microbatches."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from initial_states import initial_state, random_parameters
from support import SMALLEST, config, in_microbatches, mesh, uneven_rows

from maxbatch.data.rows import Rows
from maxbatch.models.registry import Parameters, build_model
from maxbatch.training.loss import loss_sum
from maxbatch.training.noise_run import FROM_MICROBATCHES, moments_by_group
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, MICROBATCHES, LAYERS, E = 16, 12, 3, 2, 4
SIZES = {**SMALLEST, "base_num_decoder_layers": LAYERS, "opt_type": "sgd", "num_experts": E}
SIZES |= {"base_moe_mlp_dim": 8, "shared_experts": 1, "router_logit_bias": "true"}


@functools.cache
def trainer(axes: tuple[int, ...] = (), streamed: bool = False) -> Trainer:
  settings = config(**SIZES)
  model = build_model(settings.model, T, trainable=("*",))
  optimizer = make_optimizer(settings.optimizer, model.axes(), MICROBATCHES if streamed else 1)
  measures = Measures(microbatch_squares=True)
  parts = model, optimizer, mesh(*axes), jax.random.key(7)
  return Trainer(*parts, streamed=streamed, measures=measures)


PARAMETERS = random_parameters(trainer().model, seed=4)


@functools.cache
def program(axes: tuple[int, ...], streamed: bool) -> Any:
  piece = in_microbatches(uneven_rows(ROWS, T), MICROBATCHES, MICROBATCHES)
  if streamed:
    piece = jax.tree.map(lambda x: x[:1], piece)
  return step_function(trainer(axes, streamed), piece)


def measured(rows: Rows, axes: tuple[int, ...] = (), streamed: bool = False) -> StepMetrics:
  """What a step that moves nothing measures."""
  parts, fed = trainer(axes, streamed), in_microbatches(rows, MICROBATCHES, MICROBATCHES)
  count = MICROBATCHES if streamed else 1
  pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(count)]
  state, metrics = initial_state(parts, PARAMETERS), None
  for piece in pieces if streamed else [fed]:
    piece = jax.device_put(piece, rows_shardings(piece, parts.mesh))
    microbatches = parts.microbatches(MICROBATCHES)
    state, metrics = program(axes, streamed)(state, piece, microbatches, np.float32(0))
  return jax.device_get(metrics)


@functools.cache
def gradient() -> Any:
  model = trainer().model
  return jax.jit(jax.grad(lambda params, rows: loss_sum(model, params, rows, jax.random.key(7))))


def by_group(tree: Parameters) -> dict[str, np.ndarray]:
  """The gradient of each group as a vector."""
  groups: dict[str, list[np.ndarray]] = {"router": [], "experts": [], FROM_MICROBATCHES: []}
  for path, leaf in flatten_dict(tree).items():
    leaf = np.asarray(leaf, np.float64)
    groups[FROM_MICROBATCHES].append(leaf.ravel())
    if path[1:3] == ("mlp", "router"):
      groups["router"].append(leaf.ravel())
    if path[1:3] == ("mlp", "experts"):
      groups["experts"].append(leaf.ravel())
      for layer, expert in np.ndindex(LAYERS, E):
        groups.setdefault(f"expert/{layer}/{expert}", []).append(leaf[layer, expert].ravel())
  return {name: np.concatenate(parts) for name, parts in groups.items()}


@pytest.mark.parametrize(
  ("axes", "streamed"), [((), False), ((), True), ((1, 1, 2, 1, 2), False), ((1, 2), True)]
)
def test_squares_are_those_of_each_microbatch_and_of_the_step(axes, streamed):
  rows = uneven_rows(ROWS, T)
  fed = in_microbatches(rows, MICROBATCHES, MICROBATCHES)
  pieces = [jax.tree.map(lambda x, at=at: x[at], fed) for at in range(MICROBATCHES)]
  each = [by_group(gradient()(PARAMETERS, piece)) for piece in pieces]
  found = measured(rows, axes, streamed)
  assert found.noise is not None
  assert found.noise.of_experts is not None
  router, experts_2LE = found.noise.of_experts
  result = {"router": router, "experts": experts_2LE.sum((1, 2))}
  result |= {f"expert/{at[0]}/{at[1]}": experts_2LE[:, *at] for at in np.ndindex(LAYERS, E)}
  for name, (small, big) in result.items():
    assert small == pytest.approx(sum((part[name] ** 2).sum() for part in each), rel=1e-5), name
    whole_N = np.stack([part[name] for part in each]).sum(0)
    assert big == pytest.approx((whole_N**2).sum(), rel=1e-5), name
  whole = sum((part[FROM_MICROBATCHES] ** 2).sum() for part in each)
  assert found.noise.squares is not None
  assert found.noise.squares.of_microbatches == pytest.approx(whole, rel=1e-5)


def test_the_estimates_are_right_on_average():
  """Beside the gradients of single rows, of which the rows of each step are drawn."""
  random, steps, few = np.random.default_rng(0), 60, 6
  pool = jax.tree.map(lambda x: np.asarray(x)[:few], uneven_rows(ROWS, T))
  pool = pool._replace(weights=np.ones_like(pool.weights))
  singles = [
    by_group(gradient()(PARAMETERS, jax.tree.map(lambda x, at=at: x[at : at + 1], pool)))
    for at in range(few)
  ]
  estimates: dict[str, list[tuple[float, float]]] = {}
  for _ in range(steps):
    drawn = random.integers(few, size=ROWS)
    rows = jax.tree.map(lambda x: x[drawn], pool)  # noqa: B023
    rows = rows._replace(sample_ids=np.arange(ROWS, dtype=np.int32))
    for name, moments in moments_by_group((), measured(rows), every_layer=False).items():
      assert moments is not None
      estimates.setdefault(name, []).append((moments.signal, moments.noise))
  assert set(estimates) == set(singles[0])
  for name, values in estimates.items():
    rows_BN = np.stack([single[name] for single in singles]) / T
    mean_N = rows_BN.mean(0)
    expected = (mean_N**2).sum(), ((rows_BN - mean_N) ** 2).sum(1).mean()
    error = np.std(values, axis=0) / np.sqrt(steps)
    assert (np.abs(np.mean(values, axis=0) - expected) < 4 * error).all(), name
