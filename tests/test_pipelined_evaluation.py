"""Evaluation through the stages: the plain sums, for any number of rows, on no stage too much.

R rows of a microbatch, T tokens, D width, V vocabulary, in float32.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipelined import QUICKLY
from support import GPT2, SMALLEST, config, uneven_rows

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.data.rows import Rows
from maxbatch.pipeline_parallel.schedule import ModelChunk, TimetableShape, forward_only_timetable
from maxbatch.pipeline_parallel.sizes import Pipeline, eval_microbatches
from maxbatch.training.build import build_trainer
from maxbatch.training.evaluation import eval_function
from maxbatch.training.loss import loss_sum
from maxbatch.training.model_parts import stage_order
from maxbatch.training.state import shardings
from maxbatch.training.step import Trainer

MOST = 32
MODEL = SMALLEST | {
  "base_num_decoder_layers": 12,
  "dropout_rate": 0.1,
  "z_loss_multiplier": 0.1,
  "opt_type": "sgd",
}
SEGMENTS = GPT2 | {"base_num_kv_heads": 2}
TWO = {"ici_pipeline_parallelism": 2, "per_device_batch_size": 4}
DELAYED = {"pipeline_delay_activation_forwarding": "true"}


def trainer(**keys: object) -> Trainer:
  settings = config(**keys)
  count = settings.mesh.num_simulated_devices
  plan = plan_batches(settings.batch, settings.run, topology(settings.mesh, count))
  return build_trainer(settings, plan, jax.devices()[:count])


def compiled(parts: Trainer, rows: Rows) -> Any:
  lowered = eval_function(parts, rows).lower(parts.abstract.params, rows)
  return lowered.compile(compiler_options=QUICKLY)


def make_rows(count: int, packed: bool) -> Rows:
  """The first of uneven rows; packed, each two segments long."""
  rows = uneven_rows(MOST, 16)
  if packed:
    place = np.arange(16, dtype=np.int32)[None] + 0 * rows.inputs
    rows = rows._replace(segment_ids=1 + (place >= 3).astype(np.int32), positions=place % 3)
  return jax.tree.map(lambda x: x[:count], rows)


@functools.cache
def plain(packed: bool) -> Any:
  """Parameters, and the loss of MOST rows as a function, of the model on one device."""
  keys = MODEL | (SEGMENTS if packed else {}) | {"num_simulated_devices": 1}
  parts = trainer(**keys)
  loss = jax.jit(lambda params, rows: loss_sum(parts.model, params, rows, None))
  return jax.device_get(parts.init(0).params), loss


def expected(rows: Rows, packed: bool) -> float:
  """Rows beyond the batch weigh nothing."""
  params, loss = plain(packed)
  missing = MOST - len(rows.inputs)
  filled = jax.tree.map(lambda x: np.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))), rows)
  return float(loss(params, filled))


def in_place(parts: Trainer, params: Any) -> Any:
  """Parameters from the host as a run of this trainer has them."""
  assert parts.pipeline is not None
  order = stage_order(parts.pipeline)
  staged = params | {"layers": jax.tree.map(lambda x: x[order], params["layers"])}
  return jax.device_put(staged, shardings(parts.abstract.params))


@pytest.mark.parametrize(
  ("keys", "counts", "packed"),
  [
    # As many rows as in training, and one; then 5 and 11 in a group, which do not divide; then 3,
    # fewer than the stages.
    ({**TWO, "pipeline_schedule": "circular", "num_pipeline_repeats": 3}, (8, 1), False),
    (
      {**TWO, **DELAYED, "pipeline_schedule": "interleaved_1f1b", "num_pipeline_repeats": 3,
       "ici_fsdp_parallelism": 2, "ici_data_parallelism": 2},
      (20,), False,
    ),
    (
      {**TWO, **DELAYED, "pipeline_schedule": "gpipe", "ici_tensor_parallelism": 2}, (11,), False
    ),
    (
      {**TWO, "pipeline_schedule": "1f1b", "ici_pipeline_parallelism": 4,
       "ici_data_parallelism": 2},
      (6,), True,
    ),
  ],
)  # fmt: skip
def test_sums_are_those_of_the_plain_evaluation(keys, counts, packed):
  axes = [value for key, value in keys.items() if key.startswith("ici")]
  sizes = {"ici_data_parallelism": 1, "num_simulated_devices": int(np.prod(axes))}
  parts = trainer(**MODEL | (SEGMENTS if packed else {}) | sizes | keys)
  params = in_place(parts, plain(packed)[0])
  for count in counts:
    rows = make_rows(count, packed)
    program = compiled(parts, rows)
    placed = jax.device_put(rows, program.input_shardings[0][1])
    result = jax.device_get(program(params, placed))
    assert result.loss == pytest.approx(expected(rows, packed), rel=1e-6)
    assert result.weight == np.sum(rows.weights)


# --- what a stage holds ---------------------------------------------------------------------------

STAGES, R, T, D, V = 4, 4, 128, 64, 8192
WIDE = {
  "num_simulated_devices": STAGES,
  "ici_pipeline_parallelism": STAGES,
  "per_device_batch_size": R,
  "max_target_length": T,
  "base_emb_dim": D,
  "num_vocab_tiling": 1,
  "vocab_size": V,
  "opt_type": "sgd",
  "pipeline_schedule": "circular",
  "num_layers_per_pipeline_stage": 2,
}


def wide(repeats: int) -> tuple[Trainer, Any]:
  """Trainer and program of a model with two layers per stage and repeat."""
  parts = trainer(**WIDE, base_num_decoder_layers=2 * STAGES * repeats)
  assert parts.pipeline is not None
  assert (parts.pipeline.repeats, parts.pipeline.rows) == (repeats, R)
  return parts, compiled(parts, uneven_rows(R * STAGES, T))


def test_no_stage_gathers_layers_or_holds_the_logits_of_a_microbatch():
  (_, few), (parts, many) = wide(2), wide(6)
  assert "all-gather" not in many.as_text()
  assert "collective-permute" in many.as_text()
  held = [program.memory_analysis().temp_size_in_bytes for program in (few, many)]
  layers = jax.tree.leaves(parts.abstract.params["layers"])
  assert held[1] - held[0] < sum(leaf.size * 4 for leaf in layers) / (12 * STAGES)
  assert held[1] < R * T * V * 4


# --- how the batch is cut -------------------------------------------------------------------------


def pipeline(stages: int, rows: int, repeats: int = 1, forwarding_delay: int = 1) -> Pipeline:
  return Pipeline("", stages, repeats, 1, stages, 1, 1, 1, rows, (stages,), forwarding_delay)


@given(st.integers(2, 5), st.integers(1, 9), st.integers(1, 2), st.integers(1, 200))
def test_microbatches_hold_all_rows_and_are_no_larger_than_in_training(
  stages, each, forwarding_delay, rows
):
  count, size = eval_microbatches(pipeline(stages, each, forwarding_delay=forwarding_delay), rows)
  assert (count - 1) * size < rows <= count * size
  assert size <= each
  # Enough to keep the stages busy, if there are enough rows.
  assert size == 1 or 2 * count > forwarding_delay * stages


@pytest.mark.parametrize(
  ("rows", "expected"),
  [
    (16, (4, 4)),
    (32, (8, 4)),
    (17, (5, 4)),  # 5 × 4 = 20: 3 rows of padding
    (25, (7, 4)),
    (21, (6, 4)),
    (9, (3, 3)),  # not 4 of 3, one of which would be empty
    (3, (3, 1)),
    (1, (1, 1)),
  ],
)
def test_cuts(rows, expected):
  assert eval_microbatches(pipeline(4, 4), rows) == expected


@given(st.integers(2, 4), st.integers(1, 13), st.integers(1, 3), st.integers(1, 2))
def test_every_input_is_used_in_the_tick_in_which_it_arrives(
  stages, microbatches, repeats, forwarding_delay
):
  shape = TimetableShape(stages, microbatches, repeats, forwarding_delay)
  table = forward_only_timetable(shape)
  done = {(place, entry.microbatch): tick for tick, place, entry in table.forwards()}
  works = {(place, number) for place in shape.model_chunks() for number in range(microbatches)}
  assert set(done) == works
  assert len(list(table.forwards())) == len(works)
  for (place, number), tick in done.items():
    above = shape.previous_chunk(place)
    assert above is None or done[above, number] + forwarding_delay == tick
  assert done[ModelChunk(0, 0), 0] == 0
  assert len(table.ticks) == max(done.values()) + 1
  whole = microbatches % (forwarding_delay * stages) == 0 or repeats == 1
  assert not whole or len(table.ticks) == shape.forwards_per_stage + shape.warmup_ticks
