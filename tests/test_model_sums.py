"""A model's own terms and statistics: the same training however a step is divided.

The model is the mixture of experts of docs/extending.md. Its balance loss is divided by rows, the cross
entropy by tokens, which are unevenly many: a mean of any part's means is another gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts import KEYS, experts
from initial_states import initial_state, random_parameters
from pipelined import poison
from support import SMALLEST, config, error, in_microbatches, mesh, program_text, uneven_rows

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.core.terms import Sum
from maxbatch.errors import UserError
from maxbatch.models import registry
from maxbatch.models.layers import Outputs
from maxbatch.models.registry import Parameters, build_model
from maxbatch.models.transformer import Transformer
from maxbatch.training import build
from maxbatch.training.build import build_trainer
from maxbatch.training.evaluation import eval_function, eval_shardings
from maxbatch.training.metrics import Metrics
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.state import Measures
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, LAYERS, RATE = 16, 24, 4, np.float32(1000)
"""Beside an update as large as that, rounding of the parameters themselves is nothing. A third of the rows
is padding, and is a whole microbatch of 3."""
SIZES = {**SMALLEST, "base_num_decoder_layers": LAYERS, "opt_type": "sgd"}
SIZES |= {"gradient_clipping_threshold": 0, **KEYS}
pytestmark = pytest.mark.usefixtures("experts")
__all__ = ["experts"]


def trainer(axes: tuple[int, int, int] = (1, 1, 1), dispatches: int = 0, **keys: object) -> Trainer:
  """Of fused steps, or of streamed ones in so many dispatches."""
  settings = config(**SIZES | keys)
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
  of_step = parts.microbatches(k, parts.denominators(pieces, parameters()))
  function = step_function(parts, pieces[0])
  for piece in pieces:
    state, metrics = function(state, piece, of_step, RATE)
  after, metrics = jax.device_get((parts.by_layer(state.params), metrics))
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


@pytest.mark.parametrize(
  ("axes", "k", "streamed"),
  [((2, 2, 2), 3, False), ((1, 1, 1), 3, True), ((2, 2, 2), 2, True)],
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
  text = program_text(parts._denominators.lower(piece, parameters()))
  assert "dot(" not in text
  assert "all-gather" not in text
  found = jax.device_get(parts.denominators([piece, piece], parameters()))
  assert found == {"loss": 2 * np.sum(fed.weights), "my_balance": 2 * ROWS * LAYERS}


def test_a_resumed_streamed_step_begins_with_the_sums_of_a_new_one():
  """A maximum, which a loss may hand out, begins at -inf."""
  settings = config(**SIZES)
  model = build_model(settings.model, T)
  optimizer = make_optimizer(settings.optimizer, model.axes(), 2)
  measures = Measures(Metrics(largest=("largest",)))
  key = jax.random.key(7)
  parts = Trainer(model, optimizer, mesh(), key, streamed=True, measures=measures)
  new = parts.init(0)
  jax.tree.map(np.testing.assert_array_equal, parts.from_saved(parts.to_save(new)).sums, new.sums)


# --- pipelines ------------------------------------------------------------------------------------


def pipelined(schedule: str, stages: int, k: int, **keys: Any) -> Trainer:
  """Of steps of k microbatches, each in 4 through the stages."""
  keys = {f"ici_{axis}_parallelism": keys.pop(axis, 1) for axis in ("data", "fsdp")} | keys
  keys |= {"pipeline_schedule": schedule, "ici_pipeline_parallelism": stages}
  keys |= {"num_pipeline_microbatches": 4, "gradient_accumulation_steps": k}
  count = stages * keys["ici_data_parallelism"] * keys["ici_fsdp_parallelism"]
  batch = {"per_device_batch_size": f"{ROWS // k}/{count}", "num_simulated_devices": count}
  settings = config(**SIZES | keys | batch)
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, count))
  return build_trainer(settings, plan, jax.devices()[:count])


REPEATED = {"num_pipeline_repeats": 2}


@pytest.mark.parametrize(
  ("schedule", "stages", "k", "keys"),
  [
    ("gpipe", 2, 3, {"data": 2}),
    ("gpipe", 4, 1, {"loss_scale": 8}),
    ("1f1b", 4, 3, {}),
    ("1f1b", 2, 1, {"fsdp": 2, "pipeline_saved_activations": "residuals"}),
    ("circular", 2, 1, REPEATED),
    ("interleaved_1f1b", 2, 3, REPEATED),
    ("1f1b", 2, 3, {"accumulation": "streamed"}),
  ],
)
def test_a_pipeline_trains_as_the_whole_batch(schedule, stages, k, keys):
  assert_same(stepped(pipelined(schedule, stages, k, **keys), k), whole())


def test_an_evaluation_in_a_pipeline_leaves_them_out():
  rows = uneven_rows(ROWS, T)
  found = []
  for parts in (trainer(), pipelined("gpipe", 2, 1)):
    placed = jax.device_put(rows, eval_shardings(rows, parts.mesh))
    params = initial_state(parts, parameters()).params
    found.append(jax.device_get(eval_function(parts, rows)(params, placed)))
  plain, other = found
  assert other.loss == pytest.approx(plain.loss, rel=1e-6)
  assert set(other.metrics) == set(plain.metrics) == set()


def test_what_idle_stages_hand_out_adds_nothing(monkeypatch):
  poison(monkeypatch)
  build._trainer.cache_clear()
  assert_same(stepped(pipelined("gpipe", 2, 1), 1), whole())


def test_what_is_not_of_the_layers_is_refused_in_a_pipeline(monkeypatch):
  import my_experts  # pyright: ignore[reportMissingImports]

  def with_another(self: Any, rows: Any, keys_B: Any) -> Outputs:
    found = Transformer.__call__(self, rows, keys_B)
    assert isinstance(found, Outputs)
    return found._replace(stats={**(found.stats or {}), "my_rows": Sum(jnp.zeros(()))})

  monkeypatch.setattr(my_experts.Mixture, "__call__", with_another, raising=False)
  registry._built.cache_clear()
  with pytest.raises(UserError, match="returns my_rows beside what its layers do"):
    stepped(pipelined("gpipe", 2, 1, base_mlp_dim=48), 1)
