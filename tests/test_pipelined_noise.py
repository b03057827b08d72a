"""The noise scale in a pipeline: squares are those of a plain step of as many microbatches as it has."""

from typing import Any

import jax
import numpy as np
import pytest
from initial_states import initial_state, random_parameters
from support import SMALLEST, config, in_microbatches, uneven_rows

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.training.build import build_trainer
from maxbatch.training.noise_run import FROM_MICROBATCHES, moments_by_group
from maxbatch.training.step import NoiseSums, StepMetrics, Trainer, rows_shardings, step_function

T, ROWS, K = 16, 24, 3
MODEL = {**SMALLEST, "base_num_decoder_layers": 2, "opt_type": "sgd"}
MODEL |= {"gns_from_microbatches": "true"}
OF_ROWS = {"gns_from_microbatches": "false", "gns": "all"}


def trainer(axes: dict[str, int], cuts: int = 1, **keys: Any) -> Trainer:
  """The parts of a step of K · `cuts` microbatches."""
  devices, steps = int(np.prod(list(axes.values()))), K * cuts
  sizes = {"num_simulated_devices": devices, "gradient_accumulation_steps": str(steps)}
  sizes |= {"per_device_batch_size": f"{ROWS // steps}/{devices}"}
  shape = {f"ici_{axis}_parallelism": axes.get(axis, 1) for axis in ("data", "fsdp", "pipeline")}
  settings = config(**MODEL | sizes | shape | keys)
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, devices))
  return build_trainer(settings, plan, jax.devices()[:devices])


def stepped(parts: Trainer, cuts: int = 1, groups: int = 1) -> StepMetrics:
  """Steps; with cuts, on the microbatches into which a pipeline cuts those of a step without, each of rows of
  all groups of devices."""
  steps = K * cuts

  def cut(x: np.ndarray) -> np.ndarray:
    split = x.reshape(K, groups, cuts, -1, *x.shape[1:])
    return split.swapaxes(1, 2).reshape(x.shape)

  fed = in_microbatches(jax.tree.map(cut, uneven_rows(ROWS, T)), steps, steps)
  pieces = [fed]
  if parts.streamed:
    pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(steps)]
  function, parameters = step_function(parts, pieces[0]), random_parameters(parts.model, seed=4)
  state, metrics = initial_state(parts, parameters), None
  for piece in pieces:
    placed = jax.device_put(piece, rows_shardings(piece, parts.mesh))
    state, metrics = function(state, placed, parts.microbatches(steps), np.float32(0))
  return jax.device_get(metrics)


def noise_of(metrics: StepMetrics) -> NoiseSums:
  assert metrics.noise is not None
  assert metrics.noise.squares is not None
  return metrics.noise


CUTS = 2
PIPELINE = {"pipeline_schedule": "1f1b", "num_pipeline_microbatches": CUTS}
STREAMED = {"accumulation": "streamed"}
TIED = {"logits_via_embedding": "true", "scale_embedding": "true"}
REPEATS = {"pipeline_schedule": "interleaved_1f1b", "num_pipeline_repeats": 2}


@pytest.mark.parametrize(
  ("axes", "keys", "schedule"),
  [
    ({}, TIED, {}),
    ({"fsdp": 2}, TIED, {"pipeline_schedule": "gpipe"}),
    ({"data": 2}, STREAMED, {}),
    ({"data": 2}, {**TIED, "base_num_decoder_layers": 4, "dropout_rate": 0.1}, REPEATS),
  ],
)
def test_squares_are_those_of_a_plain_step_of_as_many_microbatches(axes, keys, schedule):
  data, groups = axes.get("data", 1), axes.get("data", 1) * axes.get("fsdp", 1)
  plain = stepped(trainer({"data": data}, CUTS, **keys), CUTS, groups)
  piped = stepped(trainer(axes | {"pipeline": 2}, **PIPELINE | keys | schedule))
  expected, found = noise_of(plain), noise_of(piped)
  assert found.squares is not None
  assert expected.squares is not None
  assert found.rows == expected.rows > 0
  assert found.row_tokens_squared == expected.row_tokens_squared
  assert found.squares.of_microbatches == pytest.approx(expected.squares.of_microbatches, rel=1e-5)
  assert found.squares.divisors == expected.squares.divisors
  if "accumulation" not in keys:  # Streamed, replicas are parts of a dispatch.
    assert found.squares.of_replicas == pytest.approx(expected.squares.of_replicas, rel=1e-5)
    assert found.squares.replica_divisors == expected.squares.replica_divisors
  measured = moments_by_group((), piped, every_layer=False)[FROM_MICROBATCHES]
  assert measured is not None
  assert np.isfinite(measured.noise)


def test_squares_of_routers_and_experts_are_those_of_the_plain_step():
  """With two repeats a stage has layers that are no neighbours, in an order of their own."""
  keys = {"num_experts": 4, "base_moe_mlp_dim": 8, "base_num_decoder_layers": 4, **STREAMED}
  expected = noise_of(stepped(trainer({"data": 2}, CUTS, **keys), CUTS, 2)).of_experts
  piped = stepped(trainer({"data": 2, "pipeline": 2}, **PIPELINE | REPEATS | keys))
  found = noise_of(piped).of_experts
  assert expected is not None
  assert found is not None
  for of_group, of_plain in zip(found, expected, strict=True):
    np.testing.assert_allclose(of_group, of_plain, rtol=1e-4)
  assert "expert/3/2" in moments_by_group((), piped, every_layer=False)


@pytest.mark.parametrize(
  ("axes", "keys", "schedule"),
  [
    # A row of each group of devices, which stages cannot share.
    ({"fsdp": 2}, TIED, {"num_pipeline_microbatches": 4}),
    (
      {"data": 2},
      {"base_num_decoder_layers": 4, "position_embedding": "learned", "dropout_rate": 0.1},
      {**REPEATS, "pipeline_saved_activations": "residuals"},
    ),
  ],
)
def test_squares_of_rows_are_those_of_the_plain_step(axes, keys, schedule):
  plain = stepped(trainer({}, **OF_ROWS | keys))
  parts = trainer(axes | {"pipeline": 2}, **OF_ROWS | PIPELINE | keys | schedule)
  piped = stepped(parts)
  assert piped.noise is not None
  assert plain.noise is not None
  assert piped.noise.rows == plain.noise.rows > 0
  assert piped.noise.squares is None
  pairs = (piped.noise.of_rows, plain.noise.of_rows), (piped.of_step, plain.of_step)
  for found, expected in pairs:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=2e-5)
  measured = moments_by_group(parts.model.probed(), piped, every_layer=True)
  assert {"total", "norm", "embedding", "layer/1"} <= set(measured)
