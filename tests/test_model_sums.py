"""A model's own terms and statistics: the same training however a step is divided.

The model is the mixture of experts of docs/extending.md. Its balance loss is divided by rows, the cross
entropy by tokens, which are unevenly many: a mean of any part's means is another gradient.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from initial_states import initial_state, random_parameters
from experts import KEYS, experts
from support import config, in_microbatches, mesh, program_text, uneven_rows

from maxbatch.models.registry import Parameters, build_model
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, RATE = 16, 32, np.float32(1000)
"""Beside an update as large as that, rounding of the parameters themselves is nothing."""
pytestmark = pytest.mark.usefixtures("experts")
__all__ = ["experts"]


def trainer(axes: tuple[int, int, int] = (1, 1, 1), dispatches: int = 0, **keys: object) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  settings = config(opt_type="sgd", gradient_clipping_threshold=0, **KEYS | keys)
  model = build_model(settings.model, T)
  optimizer = make_optimizer(settings.optimizer, model.axes(), dispatches or 1)
  parts = model, optimizer, mesh(*axes), jax.random.key(7)
  return Trainer(*parts, streamed=dispatches > 0)


@functools.cache
def parameters() -> Parameters:
  return random_parameters(trainer().model, seed=4)


def stepped(parts: Trainer, k: int) -> tuple[Parameters, StepMetrics]:
  """What a step of k microbatches adds to the parameters, and what it reports."""
  fed = in_microbatches(uneven_rows(ROWS, T), k, k)
  pieces = [fed]
  if parts.streamed:
    pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(k)]
  pieces = [jax.device_put(piece, rows_shardings(piece, parts.mesh)) for piece in pieces]
  state, metrics = initial_state(parts, parameters()), None
  of_step = parts.microbatches(k, parts.denominators(pieces))
  function = step_function(parts, pieces[0])
  for piece in pieces:
    state, metrics = function(state, piece, of_step, RATE)
  after, metrics = jax.device_get((state.params, metrics))
  return jax.tree.map(np.subtract, after, parameters()), metrics


@functools.cache
def whole() -> tuple[Parameters, StepMetrics]:
  return stepped(trainer(), 1)


def assert_same(found: tuple[Parameters, StepMetrics], expected: Any) -> None:
  (updates, metrics), (whole_updates, whole_metrics) = found, expected
  assert error(updates, whole_updates) < 1e-6
  assert set(metrics.metrics) == {"my_balance", "my_router_entropy", "my_tokens_of_expert"}
  np.testing.assert_array_equal(
    metrics.metrics["my_tokens_of_expert"], whole_metrics.metrics["my_tokens_of_expert"]
  )
  for name in ("my_balance", "my_router_entropy"):
    assert metrics.metrics[name] == pytest.approx(whole_metrics.metrics[name], rel=1e-6)
  assert metrics.loss == pytest.approx(whole_metrics.loss, rel=1e-6)
  assert metrics.grad_norm == pytest.approx(whole_metrics.grad_norm, rel=1e-6)


def error(found: Parameters, expected: Parameters) -> float:
  """‖difference‖ / ‖expected‖ of the whole tree."""
  each = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  squares = [(np.sum((a - b) ** 2, dtype=float), np.sum(b**2, dtype=float)) for a, b in each]
  off, norm = np.sum(squares, axis=0)
  return float(np.sqrt(off / norm))


@pytest.mark.parametrize(
  ("axes", "k", "streamed"),
  [((2, 2, 2), 4, False), ((1, 1, 1), 4, True), ((2, 2, 2), 2, True)],
)
def test_any_split_trains_as_the_whole_batch(axes, k, streamed):
  assert_same(stepped(trainer(axes, k if streamed else 0), k), whole())


def test_the_terms_matter():
  without, _ = stepped(trainer(my_balance_weight=0), 1)
  assert error(without, whole()[0]) > 0.01


def test_denominators_are_found_without_the_model():
  parts = trainer((1, 2, 1), 2)
  fed = in_microbatches(uneven_rows(ROWS, T), 2, 2)
  piece = jax.device_put(fed, rows_shardings(fed, parts.mesh))
  text = program_text(parts._denominators.lower(piece))
  assert "dot(" not in text
  assert "all-gather" not in text
  found = jax.device_get(parts.denominators([piece, piece]))
  tokens, layers = np.sum(fed.weights), 2
  assert found == {"loss": 2 * tokens, "my_balance": 2 * ROWS * layers}
