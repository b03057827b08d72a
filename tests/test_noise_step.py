"""What a step reports for the noise scale: the same however it is split, and at no message's cost."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from initial_states import initial_state
from support import collectives, config, in_microbatches, mesh, uneven_rows

from maxbatch.models.registry import Parameters, build_model
from maxbatch.training.loss import loss_sum
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, CAPACITY, PART = 16, 32, 8, 4
KEY = jax.random.key(7)
SPLITS = [((2, 1, 1), 2), ((1, 4, 1), 1), ((2, 2, 2), 4)]
"""Devices along data, fsdp and tensor, and microbatches."""


@functools.cache
def prepared(axes: tuple[int, int, int], gns: str = "off", from_microbatches: bool = False):
  """The trainer of a step that measures this."""
  keys = {"gns": gns, "gns_from_microbatches": from_microbatches}
  settings = config(opt_type="sgd", **keys)
  model = build_model(settings.model, T, settings.noise.gns)
  optimizer = make_optimizer(settings.optimizer, model.axes(), 1)
  measures = Measures(microbatch_squares=settings.noise.gns_from_microbatches)
  return Trainer(model, optimizer, mesh(*axes), KEY, measures=measures)


@functools.cache
def parameters() -> Parameters:
  """Those that every step here begins with, on the host."""
  return jax.device_get(jax.jit(prepared((1, 1, 1)).model.init)(jax.random.key(0)))


@functools.cache
def gradients_of_parts() -> list[Parameters]:
  """Of the summed loss of each PART rows, on the host, by the plain gradient on one device."""
  model = prepared((1, 1, 1)).model
  of_rows = jax.jit(jax.grad(lambda p, rows: loss_sum(model, p, rows, KEY)))
  parts = in_microbatches(uneven_rows(ROWS, T), ROWS // PART, ROWS // PART)
  pieces = [jax.tree.map(lambda x, at=at: x[at], parts) for at in range(ROWS // PART)]
  return [jax.device_get(of_rows(parameters(), piece)) for piece in pieces]


def squared_norm(gradients: Sequence[Parameters]) -> float:
  """Of the sum of gradients, in float64."""
  sums = jax.tree.map(lambda *leaves: np.sum(leaves, axis=0, dtype=np.float64), *gradients)
  return sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(sums))


@functools.cache
def compiled(axes: tuple[int, int, int], k: int, *measured: Any):
  """The step's program and its rows."""
  trainer = prepared(axes, *measured)
  rows = in_microbatches(uneven_rows(ROWS, T), k, CAPACITY)
  rows = jax.device_put(rows, rows_shardings(rows, trainer.mesh))
  function = step_function(trainer, rows)
  return function.lower(trainer.abstract, rows, np.int32(k), np.float32(0.0)).compile(), rows


def metrics(axes: tuple[int, int, int], k: int, *measured: Any) -> StepMetrics:
  """What one step reports."""
  program, rows = compiled(axes, k, *measured)
  state = initial_state(prepared(axes, *measured), parameters())
  return jax.device_get(program(state, rows, np.int32(k), np.float32(0.0))[1])


@pytest.fixture(scope="module")
def whole() -> StepMetrics:
  """The batch in one piece on one device."""
  return metrics((1, 1, 1), 1, "all")


@pytest.mark.parametrize(("axes", "k"), SPLITS)
def test_any_split_measures_the_same(whole, axes, k):
  split = metrics(axes, k, "all")
  assert split.noise
  assert whole.noise
  assert split.noise.rows == whole.noise.rows == (uneven_rows(ROWS, T).weights.sum(1) > 0).sum()

  def assert_near(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())

  jax.tree.map(assert_near, split.noise.of_rows, whole.noise.of_rows)
  jax.tree.map(assert_near, split.of_step, whole.of_step)


def test_squares_of_the_step_are_those_of_its_gradient(whole):
  total = sum(float(leaf.sum()) for leaf in jax.tree.leaves(whole.of_step))
  assert total == pytest.approx(squared_norm(gradients_of_parts()), rel=1e-5)
  assert total == pytest.approx(float(whole.grad_norm * whole.weight) ** 2, rel=1e-5)


@pytest.mark.parametrize(("axes", "replicas"), [((1, 2, 2), 1), ((2, 2, 2), 2)])
def test_gradients_of_microbatches(axes, replicas):
  ours = metrics(axes, 4, "off", True)
  num_parts = ROWS // (4 * replicas) // PART
  parts = gradients_of_parts()
  micro = [parts[at : at + num_parts] for at in range(0, len(parts), num_parts)]
  assert len(micro) == 4 * replicas
  assert ours.noise is not None
  assert ours.noise.squares is not None
  total = sum(map(squared_norm, micro))
  assert float(ours.noise.squares.of_microbatches) == pytest.approx(total, rel=1e-5)
  assert not ours.noise.of_rows


def test_nothing_is_reported_unless_asked():
  result = metrics((2, 1, 1), 2, "off")
  assert (result.metrics, result.noise, result.of_step) == ({}, None, None)


def messages(axes: tuple[int, int, int], gns: str) -> dict[str, Counter[str]]:
  """Messages between devices by kind, inside and outside the loop over microbatches."""
  text = compiled(axes, dict(SPLITS)[axes], gns)[0].as_text()
  assert text
  result = collectives(text)
  return {where: Counter(names) for where, names in result.items()}


@pytest.mark.parametrize(
  ("gns", "axes"),
  [("norm", (1, 4, 1)), ("norm", (2, 2, 2)), ("all", (2, 1, 1))],
)
def test_measuring_sends_no_message_more(gns, axes):
  without, measuring = messages(axes, "off"), messages(axes, gns)
  for where in ("loop", "once"):
    assert measuring[where].total() <= without[where].total()


def test_measuring_every_layer_divides_gradients_over_fsdp_one_by_one():
  """XLA's CPU compiler merges reductions to everyone, but not those to shares: half the bytes."""
  without, measuring = messages((1, 4, 1), "off"), messages((1, 4, 1), "all")
  assert measuring["once"] == without["once"]
  matrices, tables = 7, 2
  assert measuring["loop"]["reduce-scatter"] == matrices + tables
  assert measuring["loop"]["all-reduce"] <= without["loop"]["all-reduce"]
  assert measuring["loop"]["all-gather"] <= without["loop"]["all-gather"]
