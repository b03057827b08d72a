"""The noise scale in a pipeline: the squares of replicas, or of dispatches, are those of the plain step."""

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
MODEL |= {"gns_from_microbatches": "true", "gradient_accumulation_steps": K}


def trainer(axes: dict[str, int], **keys: Any) -> Trainer:
  devices = int(np.prod(list(axes.values())))
  sizes = {"num_simulated_devices": devices, "per_device_batch_size": f"{ROWS // K}/{devices}"}
  shape = {f"ici_{axis}_parallelism": axes.get(axis, 1) for axis in ("data", "fsdp", "pipeline")}
  settings = config(**MODEL | sizes | shape | keys)
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, devices))
  return build_trainer(settings, plan, jax.devices()[:devices])


def stepped(parts: Trainer) -> StepMetrics:
  fed = in_microbatches(uneven_rows(ROWS, T), K, K)
  pieces = [fed]
  if parts.streamed:
    pieces = [jax.tree.map(lambda x, at=at: x[at : at + 1], fed) for at in range(K)]
  function, parameters = step_function(parts, pieces[0]), random_parameters(parts.model, seed=4)
  state, metrics = initial_state(parts, parameters), None
  for piece in pieces:
    placed = jax.device_put(piece, rows_shardings(piece, parts.mesh))
    state, metrics = function(state, placed, parts.microbatches(K), np.float32(0))
  return jax.device_get(metrics)


def noise_of(metrics: StepMetrics) -> NoiseSums:
  assert metrics.noise is not None
  assert metrics.noise.squares is not None
  return metrics.noise


PIPELINE = {"pipeline_schedule": "1f1b", "num_pipeline_microbatches": 2}
STREAMED = {"accumulation": "streamed"}


@pytest.mark.parametrize(
  ("axes", "keys"),
  [({"data": 2}, {}), ({"data": 2, "fsdp": 2}, {}), ({}, STREAMED)],
)
def test_squares_of_replicas_and_dispatches_are_those_of_the_plain_step(axes, keys):
  plain = stepped(trainer(axes | {"fsdp": 1}, **keys))
  piped = stepped(trainer(axes | {"pipeline": 2}, **PIPELINE | keys))
  expected, found = noise_of(plain), noise_of(piped)
  assert found.squares is not None
  assert expected.squares is not None
  assert found.rows == expected.rows > 0
  assert found.row_tokens_squared == expected.row_tokens_squared
  assert found.squares.of_replicas == pytest.approx(expected.squares.of_replicas, rel=1e-5)
  assert found.squares.replica_divisors == expected.squares.replica_divisors
  # Where a step is one dispatch, a replica is all that is compared.
  assert found.squares.of_microbatches == found.squares.of_replicas
  assert found.squares.divisors == found.squares.replica_divisors
  measured = moments_by_group((), piped, every_layer=False)[FROM_MICROBATCHES]
  assert measured is not None
  assert np.isfinite(measured.noise)


def test_squares_of_routers_and_experts_are_those_of_the_plain_step():
  """With two repeats a stage has layers that are no neighbours, in an order of their own."""
  keys = {"num_experts": 4, "base_moe_mlp_dim": 8, "base_num_decoder_layers": 4, **STREAMED}
  interleaved = {**PIPELINE, "pipeline_schedule": "interleaved_1f1b", "num_pipeline_repeats": 2}
  expected = noise_of(stepped(trainer({"data": 2}, **keys))).of_experts
  piped = stepped(trainer({"data": 2, "pipeline": 2}, **interleaved | keys))
  found = noise_of(piped).of_experts
  assert expected is not None
  assert found is not None
  for of_group, of_plain in zip(found, expected, strict=True):
    np.testing.assert_allclose(of_group, of_plain, rtol=1e-4)
  assert "expert/3/2" in moments_by_group((), piped, every_layer=False)
