"""Terms and statistics that a pipeline's layers hand out: summed over ticks, stages and replicas.

R rows of a microbatch, T tokens.

A term enters the backward of the stage that forms it, with its weight in the step's objective. That
takes the denominators of the whole step, which are summed over its rows before the first tick.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.core.accumulate import term_weights
from maxbatch.core.terms import Ratio, Stats, Terms, joined, over_replicas, zeros_of
from maxbatch.data.rows import Rows
from maxbatch.errors import UserError
from maxbatch.models.layers import Outputs
from maxbatch.models.registry import Model
from maxbatch.pipeline_parallel.sizes import Pipeline
from maxbatch.pipeline_parallel.timetable_arrays import TimetableArrays
from maxbatch.training.model_parts import FlatParams, ModelParts
from maxbatch.training.objective import LOSS, zero_model_sums


class StageSums(NamedTuple):
  """What a stage's layers hand out, summed over ticks; empty in an evaluation."""

  terms: Terms
  stats: Stats

  def add(self, new: "StageSums", is_active: jax.Array) -> "StageSums":
    """Returns the sums with those of a forward; what an idle stage computes, NaN too, adds nothing."""
    masked = jax.tree.map(lambda x, zero: jnp.where(is_active, x, zero), new, zeros_of(new))
    return joined(self, masked)


NO_SUMS = StageSums({}, {})


def zero_stage_sums(model: Model) -> StageSums:
  """Returns the sums before the first tick."""
  return StageSums(*zero_model_sums(model))


def stage_sums(model: Model, outputs: Outputs) -> StageSums:
  """Returns what layers hand out.

  Raises:
    UserError: the rest of the model returns something too, and a pipeline never calls the whole of it.
  """
  sums = StageSums(outputs.terms or {}, outputs.stats or {})
  whole, layers = ({*terms, *stats} for terms, stats in (model.own_sums, sums))
  if other := sorted(whole ^ layers):
    raise UserError(
      f"decoder_block={model.config.decoder_block} returns {', '.join(other)} beside what its layers do, "
      "and in a pipeline only layers can; for example pipeline_schedule=none, with "
      "ici_fsdp_parallelism instead of ici_pipeline_parallelism"
    )
  return sums


def term_gradients(
  model: Model, denominators: Mapping[str, jax.Array], scale: jax.Array | None
) -> dict[str, jax.Array]:
  """Returns the gradient of the step's objective by each of the model's numerators, float32 scalars.

  Args:
    denominators: of the whole step, that of the loss included.
    scale: by which gradients are multiplied; None: by nothing.
  """
  own, zero = dict(zero_stage_sums(model).terms), jnp.zeros((), jnp.float32)
  weights = term_weights(OrderedDict({LOSS: Ratio(zero, zero)} | own), denominators)
  return {name: weights[name] * (1.0 if scale is None else scale) for name in own}


def step_denominators(
  parts: ModelParts,
  pipeline: Pipeline,
  stage_index: jax.Array,
  params: tuple[FlatParams, FlatParams],
  microbatch: Callable[[jax.Array], Rows],
  ticks: TimetableArrays,
) -> dict[str, jax.Array]:
  """Returns the denominators of a step's terms, summed over its microbatches, stages and replicas.

  They do not depend on the parameters, so the compiler drops the model from this loop.

  Args:
    params: of this stage's layers, (repeats, layers, …), and all others.
    microbatch: a function from the number of a microbatch to its rows.
    ticks: the step's timetable.
  """
  layers, rest = params

  def of_microbatch(number: jax.Array) -> dict[str, jax.Array]:
    rows = microbatch(number)
    x_RTD = parts.embed(layers, rest, rows)
    weight = jnp.where(stage_index == 0, rows.weights.sum(), 0.0)
    total = {LOSS: weight}
    for repeat in range(pipeline.repeats):
      chunk = {path: leaf[repeat] for path, leaf in layers.items()}
      first = (repeat * pipeline.stages + stage_index) * pipeline.layers
      terms = parts.apply_layers(chunk, rest, x_RTD, rows, first).terms or {}
      for name, term in terms.items():
        total[name] = total.get(name, 0.0) + term.denominator
    return total

  def add(number: jax.Array, total: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return joined(total, of_microbatch(number))

  count = ticks.stages.forward.is_active.sum() // pipeline.repeats
  zeros = zeros_of(jax.eval_shape(of_microbatch, jnp.int32(0)))
  return over_replicas(jax.lax.fori_loop(0, count, add, zeros), ("data", "stage"))
