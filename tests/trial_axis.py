"""A plan and a step on a mesh with an axis `trial`, beside the same without it; tests/test_trial_axis.py."""

import json

import jax
import numpy as np
from initial_states import initial_state, random_parameters
from support import SMALLEST, config, in_microbatches, uneven_rows

import maxbatch as mb
from maxbatch.core.topology import Topology
from maxbatch.hardware.sharding import LOGICAL_AXIS_RULES, make_mesh
from maxbatch.models.registry import build_model
from maxbatch.training.optimizer import make_optimizer
from maxbatch.training.step import Trainer, rows_shardings, step_function

T, ROWS, K = 16, 16, 2


def stepped(**sizes: int) -> dict[str, object]:
  """Returns what is known of a plan and of a step with so many devices along each axis."""
  settings = config(**SMALLEST, opt_type="sgd")
  model, layout = build_model(settings.model, T), Topology.of(**sizes)
  mesh = make_mesh(layout, jax.devices()[: layout.num_devices])
  optimizer = make_optimizer(settings.optimizer, model.axes(), 1)
  trainer = Trainer(model, optimizer, mesh, jax.random.key(0))
  rows = in_microbatches(uneven_rows(ROWS, T), K, K)
  rows = jax.device_put(rows, rows_shardings(rows, mesh))
  state = initial_state(trainer, random_parameters(model))
  kernel = state.params["layers"]["mlp"]["down"]["kernel"]
  held = kernel.addressable_data(0).size / kernel.size
  _, metrics = step_function(trainer, rows)(state, rows, np.int32(K), np.float32(0))
  plan = mb.plan(batch_size=ROWS, gradient_accumulation_steps=K, mesh=sizes)
  return {
    "mesh": plan.topology.shape,
    "per_device_batch_size": str(plan.per_device_batch_size),
    "held": held,
    "loss": float(metrics.loss),
    "grad_norm": float(metrics.grad_norm),
  }


def main() -> None:
  """Prints both as JSON."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 4)
  jax.config.update("jax_disable_most_optimizations", True)
  plain = stepped()
  LOGICAL_AXIS_RULES["mlp"] += ("trial",)
  print(json.dumps([plain, stepped(data=2, trial=2)]))
