"""What a pipeline's step holds and computes, by the compiler's account, on four simulated devices.

R samples of a microbatch, T tokens, D width, V vocabulary, in float32.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend import core
from pipelined import QUICKLY
from support import config

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.data.registry import build_dataset
from maxbatch.models.registry import build_model
from maxbatch.pipeline_parallel.layout import pipeline_of
from maxbatch.pipeline_parallel.timetable_arrays import buffer_capacity
from maxbatch.training.build import build_trainer, step_rows, traced_step
from maxbatch.training.residual_bytes import residual_bytes

STAGES, R, T, D, V = 4, 4, 128, 64, 8192
KEYS = {
  "num_simulated_devices": STAGES,
  "ici_pipeline_parallelism": STAGES,
  "num_pipeline_microbatches": STAGES,
  "per_device_batch_size": R,
  "max_target_length": T,
  "base_emb_dim": D,
  "base_num_decoder_layers": 2 * STAGES,
  "num_vocab_tiling": 1,
  "vocab_size": V,
  "opt_type": "sgd",
  "dataset_type": "synthetic",
}


@functools.cache
def traced(
  schedule: str, repeats: int, passes: int, stash: str = "input"
) -> tuple[jax.stages.Traced, int]:
  """A step of STAGES × passes microbatches, and the predicted bytes of one device's slots."""
  keys = {
    "pipeline_schedule": schedule,
    "num_pipeline_repeats": repeats,
    "pipeline_saved_activations": stash,
  }
  settings = config(**KEYS, **keys, gradient_accumulation_steps=passes)
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, STAGES))
  trainer = build_trainer(settings, plan, jax.devices()[:STAGES])
  assert trainer.pipeline is not None
  assert trainer.pipeline.rows == R
  source = build_dataset(settings.data, T).train
  rows = step_rows(plan, trainer, source, plan.micro_batch_to_train)
  capacity = buffer_capacity(trainer.pipeline)
  slots = sum(vars(capacity).values()) * R * T * D * 4
  if stash == "residuals":
    slots += capacity.inputs * residual_bytes(settings, plan, trainer.pipeline)
  return traced_step(trainer, rows), slots


@functools.cache
def compiled(
  schedule: str, repeats: int, passes: int, stash: str = "input"
) -> tuple[jax.stages.Compiled, int]:
  """The same compiled."""
  step, slots = traced(schedule, repeats, passes, stash)
  return step.lower().compile(compiler_options=QUICKLY), slots


def equations(jaxpr: core.Jaxpr, scope: str = "") -> Iterator[Any]:
  """Every equation, with those inside of it, of a scope of names."""
  for equation in jaxpr.eqns:
    is_there = scope in str(equation.source_info.name_stack)
    if is_there:
      yield equation
    for value in equation.params.values():
      for each in value if isinstance(value, tuple) else (value,):
        inner = each.jaxpr if isinstance(each, core.ClosedJaxpr) else each
        if isinstance(inner, core.Jaxpr):
          yield from equations(inner, "" if is_there else scope)


def temporary_bytes(
  schedule: str, repeats: int, passes: int, stash: str = "input"
) -> tuple[int, int]:
  """Of one device, and of its slots as predicted."""
  program, slots = compiled(schedule, repeats, passes, stash)
  result = program.memory_analysis()
  assert result is not None
  return result.temp_size_in_bytes, slots


def test_one_forward_one_backward_holds_no_more_for_more_microbatches():
  """Neither inputs nor residuals, both of which are kept here."""
  few, many = (temporary_bytes("1f1b", 1, passes, "residuals")[0] for passes in (2, 8))
  assert many == pytest.approx(few, rel=0.02)


def test_after_all_forwards_memory_grows_as_predicted():
  (few, slots), (many, more_slots) = (temporary_bytes("gpipe", 1, passes) for passes in (2, 8))
  assert many > 1.3 * few
  assert many - few == pytest.approx(more_slots - slots, rel=0.02)


def test_residuals_take_what_is_predicted():
  (few, slots), (many, more_slots) = (
    temporary_bytes("circular", 2, passes, "residuals") for passes in (2, 4)
  )
  assert more_slots - slots > 20 * (2 * STAGES) * R * T * D * 4  # not inputs alone
  assert many - few == pytest.approx(more_slots - slots, rel=0.02)


def test_with_residuals_the_layers_are_computed_once():
  flops = []
  for stash in ("input", "residuals"):
    analysis = compiled("1f1b", 1, 2, stash)[0].cost_analysis()
    assert analysis is not None
    flops.append(analysis["flops"])
  again, once = flops
  # The forward of a layer, of which the scan over layers counts one; a loop's body counts once too.
  heads, kv_heads, width, mlp = 4, 2, 8, 64
  matrices = D * width * 2 * (heads + kv_heads) + 3 * D * mlp
  forward = 2 * R * T * matrices + 2 * 2 * R * heads * T * T * width
  assert again - once == pytest.approx(forward, rel=0.1)


def test_a_backward_adds_each_layers_gradients_as_they_are_formed():
  """It never holds those of all layers of a stage beside their sums."""
  backward = list(equations(traced("1f1b", 1, 2)[0].jaxpr.jaxpr, "tick_backward"))
  loops = [one for one in backward if one.primitive.name == "scan"]
  # What a scan stacks has a dimension more than what its body returns.
  pairs = [zip(one.outvars, one.params["jaxpr"].jaxpr.outvars, strict=True) for one in loops]
  stacked = {
    whole.aval.shape for one in pairs for whole, part in one if whole.aval.shape != part.aval.shape
  }
  matrices = jax.tree.leaves(build_model(config(**KEYS).model, T).shapes()["layers"])
  # Activations of both layers, which the backward recomputes.
  assert (2, R, T, D) in stacked
  assert not stacked & {(2, *one.shape[1:]) for one in matrices}
  assert not [one for one in backward if one.primitive.name == "scatter-add"]


def test_no_stage_holds_the_logits_of_a_whole_microbatch():
  # A quarter of them, and their gradient; all else, some tables of the vocabulary too, is smaller.
  assert temporary_bytes("1f1b", 1, 2)[0] < R * T * V * 4


def predicted(**keys: object) -> int:
  """Bytes of one microbatch's residuals on one of 16 devices that are not here."""
  settings = config(
    **KEYS, pipeline_schedule="1f1b", pipeline_saved_activations="residuals", **keys
  )
  layout = topology(settings.mesh, 16)
  plan = plan_batches(settings.batch, settings.run, layout)
  return residual_bytes(settings, plan, pipeline_of(settings, layout, plan))


DIVIDED = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}


def test_fsdp_and_tensor_divide_residuals():
  # A layer's input, and with minimal the products too: of queries, keys, values, the output of
  # attention, and two of the feed-forward layer. With tensor 2, a microbatch has twice the rows.
  layers, rows = 2, 2 * R * T * 4
  full = layers * rows * D
  assert predicted(**DIVIDED, remat_policy="full") == full
  products = layers * rows * (D + (4 + 2 + 2) * 8 // 2 + 2 * 64 // 2)
  assert predicted(**DIVIDED, remat_policy="minimal") == full + products


def test_what_a_kernel_keeps_is_divided_as_without_it():
  # One head on each device: there the kernel's arrays have no dim that tensor could divide.
  keys = DIVIDED | {"base_num_query_heads": 2, "remat_policy": "none"}
  kernel = predicted(**keys, compile_topology="v5e-16", attention="flash")
  assert kernel == predicted(**keys, attention="dot_product")
