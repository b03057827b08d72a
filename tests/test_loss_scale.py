"""The loss scale: how it changes, what is refused, and what a step makes of it and of an overflow."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import SMALLEST, configured, in_microbatches, relative_errors, uneven_rows

from maxbatch.batch.from_config import plan_batches, topology
from maxbatch.data.rows import Rows
from maxbatch.errors import TrainingDivergedError, UserError
from maxbatch.precision.loss_scale import LossScale, LossScaling, scaling_of
from maxbatch.training.build import build_trainer, streams
from maxbatch.training.loss_scaling import ScalingMetrics, check_skips
from maxbatch.training.state import TrainState
from maxbatch.training.step import StepMetrics, Trainer, rows_shardings, step_function

SCALING = LossScaling(64.0, True, 2.0, 256.0, 3, 4.0, 0.5, 5)
ROWS, K = 32, 4


def test_a_dynamic_scale_shrinks_when_a_step_is_skipped_and_grows_after_a_window_of_good_ones():
  state, result = SCALING.begin(), []
  for is_finite in map(bool, map(int, "0111111101100000000")):
    state = SCALING.after(state, jnp.bool_(is_finite))
    result.append((float(state.scale), int(state.skipped_steps), int(state.skipped_in_a_row)))
  scales, skipped, in_a_row = zip(*result, strict=True)
  shrinking = [64, 32, 16, 8, 4, 2, 2, 2]
  assert scales == (32, 32, 32, 128, 128, 128, 256, 256, 128, 128, 128, *shrinking)
  assert skipped == (*[1] * 8, *[2] * 3, *range(3, 11))
  assert in_a_row == (1, *[0] * 7, 1, 0, 0, *range(1, 9))


def test_a_fixed_scale_stays_and_counts():
  fixed = dataclasses.replace(SCALING, is_dynamic=False)
  state = functools.reduce(fixed.after, map(jnp.bool_, [0, 1, 1, 1, 1, 0, 0]), fixed.begin())
  assert fixed.note(state) == {
    "scale": 64.0,
    "good_steps": 0,
    "skipped_steps": 3,
    "skipped_in_a_row": 2,
  }


@pytest.mark.parametrize(
  ("scaling", "scale"),
  [
    (SCALING, 8.0),
    (dataclasses.replace(SCALING, minimum=16.0), 16.0),
    (dataclasses.replace(SCALING, is_dynamic=False), 64.0),
  ],
)
def test_a_resume_takes_up_the_scale_that_the_keys_allow(scaling, scale):
  noted = {"scale": 8.0, "good_steps": 2, "skipped_steps": 3, "skipped_in_a_row": 0}
  assert scaling.note(scaling.begin(noted)) == noted | {"scale": scale}


def keys(*given: str) -> LossScaling | None:
  return scaling_of(configured(*given).precision)


def test_float16_alone_is_scaled_unless_keys_say_otherwise():
  assert [keys(f"precision={name}") for name in ("float32", "bfloat16", "cbfloat16")] == [None] * 3
  dynamic = keys("precision=float16")
  assert dynamic is not None
  assert dynamic == keys("dtype=float16") == keys("grad_dtype=float16") != keys()
  assert dynamic == keys("loss_scale=dynamic")
  assert keys("precision=float16", "loss_scale=none") is None
  assert keys("precision=float16", "dtype=bfloat16") is None
  fixed = keys("loss_scale=0.25")
  assert fixed is not None
  assert (fixed.initial, fixed.is_dynamic) == (0.25, False)


@pytest.mark.parametrize(
  ("given", "said"),
  [
    ("loss_scale=0", ", or auto, or none, or dynamic. A value that works: loss_scale=none"),
    ("loss_scale=-8", "A value that works: loss_scale=none"),
    ("loss_scale=1e-12", "nearest value that works: loss_scale=5.96"),
    ("profiler=nsys", 'must be one of xplane, "". A value that works: profiler=xplane'),
    ("loss_scale=dynamics", "loss_scale=dynamic"),
    ("loss_scale_growth_factor=1", "nearest value that works: loss_scale_growth_factor=1.0625"),
    ("loss_scale_backoff_factor=1", "nearest value that works: loss_scale_backoff_factor=0.9375"),
    ("precision=fp16", "must be one of float32, bfloat16, float16, cbfloat16"),
    ("weight_dtype=float16", "must be one of float32, bfloat16"),
    (
      "loss_scale=dynamic initial_loss_scale=1 min_loss_scale=2",
      "for example initial_loss_scale=2",
    ),
    ("loss_scale=dynamic max_loss_scale=8", "for example initial_loss_scale=8"),
  ],
)
def test_what_cannot_work_is_refused_with_what_does(given, said):
  with pytest.raises(UserError, match=said):
    keys(*given.split())


@pytest.mark.parametrize(
  ("loss", "said"),
  [
    (2.0, r"last 5 steps were skipped.*loss_scale=2; the gradients"),
    (np.inf, "loss itself is inf"),
  ],
)
def test_a_run_that_skips_step_after_step_stops(loss, said):
  counts = (np.float32(2), np.bool_(True), np.int32(9))
  check_skips(SCALING, ScalingMetrics(*counts, np.int32(4)), 20, loss, lambda: "")  # pyright: ignore
  with pytest.raises(TrainingDivergedError, match=said):
    check_skips(SCALING, ScalingMetrics(*counts, np.int32(5)), 20, loss, lambda: "")  # pyright: ignore


SPLITS: dict[str, tuple[str, ...]] = {
  "fsdp and tensor": (
    *("gns=all", "gns_from_microbatches=true", "metrics=[update_norm]", "z_loss_multiplier=0.01"),
    "ici_data_parallelism=2",
    "ici_fsdp_parallelism=2",
    "ici_tensor_parallelism=2",
  ),
  "streamed": ("ici_data_parallelism=2", "accumulation=streamed"),
  "shared rows": (
    "ici_data_parallelism=1",
    "ici_context_parallelism=2",
    "context_parallel_strategy=ring",
  ),
  "pipeline": (
    "ici_data_parallelism=1",
    "ici_pipeline_parallelism=2",
    "pipeline_schedule=1f1b",
    "num_pipeline_microbatches=2",
    "base_num_decoder_layers=2",
  ),
}
DEVICES = {"fsdp and tensor": 8, "streamed": 2, "shared rows": 2, "pipeline": 2}


@functools.cache
def program(split: str, *more: str) -> tuple[Trainer, Any]:
  """A trainer, and its step for microbatches of ROWS / K rows."""
  given = [*(f"{key}={value}" for key, value in SMALLEST.items()), *SPLITS[split], *more]
  given += [f"global_batch_to_train={ROWS}", f"gradient_accumulation_steps={K}"]
  config = configured(*given)
  layout = topology(config.mesh, DEVICES[split])
  plan = plan_batches(config.batch, config.run, layout)
  trainer = build_trainer(config, plan, jax.devices()[: DEVICES[split]])
  fed = in_microbatches(uneven_rows(ROWS, 16), K, K)
  streamed = streams(config)
  fed = jax.tree.map(lambda x: x[:1], fed) if streamed else fed
  return trainer, step_function(trainer, fed)


def steps(
  split: str, *more: str, batches: list[Rows], state: TrainState | None = None
) -> tuple[TrainState, list[StepMetrics]]:
  """The state after steps on these rows, and what each reported."""
  trainer, function = program(split, *more)
  results: list[StepMetrics] = []
  now = state or trainer.init(0)
  for rows in batches:
    fed, metrics, rate = in_microbatches(rows, K, K), None, np.float32(1e-2)
    if split == "streamed":
      for at in range(K):
        one = jax.tree.map(lambda x, at=at: x[at : at + 1], fed)
        one = jax.device_put(one, rows_shardings(one, trainer.mesh))
        now, metrics = function(now, one, None, rate)
    else:
      fed = jax.device_put(fed, rows_shardings(fed, trainer.mesh))
      now, metrics = function(now, fed, trainer.microbatches(K), rate)
    results.append(jax.device_get(metrics))
  return now, results


def overflowing(rows: Rows) -> Rows:
  """One token of the last microbatch, and so of one device that has it, counts so often that its gradient is beyond float16."""
  weights = np.array(rows.weights)
  weights[-1, 3] = 1e6
  return rows._replace(weights=weights)  # pyright: ignore[reportArgumentType]


GOOD = [uneven_rows(ROWS, 16, seed) for seed in range(3)]
FLOAT16 = ("precision=float16", "opt_type=sgd", "initial_loss_scale=64", "loss_scale_window=2")


@pytest.mark.parametrize("split", SPLITS)
def test_one_bad_microbatch_skips_the_step_whole(split):
  bad = overflowing(GOOD[1])
  state, first = steps(split, *FLOAT16, batches=GOOD[:1])
  before = jax.device_get((state.params, state.opt_state.inner_opt_state))
  state, second = steps(split, *FLOAT16, batches=[bad], state=state)
  after = jax.device_get((state.params, state.opt_state.inner_opt_state))
  jax.tree.map(np.testing.assert_array_equal, before, after)
  assert not any(np.any(x) for x in jax.tree.leaves(jax.device_get(state.opt_state.acc_grads)))
  assert np.asarray(state.opt_state.gradient_step) == 2
  # Then it goes on as if there had been no such step, but for the scale.
  state, third = steps(split, *FLOAT16, batches=[GOOD[2], GOOD[0]], state=state)
  told = [metrics.scaling for metrics in (*first, *second, *third)]
  assert [float(each.loss_scale) for each in told if each] == [64, 64, 32, 32]
  assert [bool(each.is_skipped) for each in told if each] == [False, True, False, False]
  assert [int(each.skipped_steps) for each in told if each] == [0, 1, 1, 1]
  scale = trainer_scale(state)
  assert scale == {"scale": 64.0, "good_steps": 0, "skipped_steps": 1, "skipped_in_a_row": 0}
  without, _ = steps(split, *FLOAT16, batches=[GOOD[0], GOOD[2], GOOD[0]])
  errors = relative_errors(jax.device_get(state.params), jax.device_get(without.params))
  assert max(errors.values()) < 0.02


def trainer_scale(state: TrainState) -> dict[str, float]:
  assert isinstance(state.loss_scale, LossScale)
  return LossScaling.note(state.loss_scale)


def test_the_scale_is_divided_out_of_all_that_a_step_reports():
  """In one program, to the rounding of numbers near float16's smallest."""
  states, reports = [], []
  for scale in (64.0, 1024.0):
    state = program("fsdp and tensor", *FLOAT16)[0].init(0)
    assert state.loss_scale is not None
    given = jax.device_put(np.float32(scale), state.loss_scale.scale.sharding)
    state = state._replace(loss_scale=state.loss_scale._replace(scale=given))
    state, (result,) = steps("fsdp and tensor", *FLOAT16, batches=GOOD[:1], state=state)
    assert result.noise is not None
    assert result.noise.squares is not None
    assert result.noise.squares.of_microbatches > 0
    states.append(jax.device_get(state.params))
    reports.append(result._replace(scaling=None))
  begun = jax.device_get(program("fsdp and tensor", *FLOAT16)[0].init(0).params)
  moved = [jax.tree.map(np.subtract, after, begun) for after in states]
  assert max(relative_errors(*moved).values()) < 0.01
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0.01, atol=1e-6), *reports)


def test_a_resume_at_any_step_goes_on_bit_for_bit():
  batches = [GOOD[0], overflowing(GOOD[1]), overflowing(GOOD[2]), GOOD[1], GOOD[2]]
  whole, _ = steps("streamed", *FLOAT16, batches=batches)
  expected, scale = jax.device_get(whole.params), trainer_scale(whole)
  trainer, _ = program("streamed", *FLOAT16)
  state = trainer.init(0)
  for at in range(len(batches)):
    saved, noted = jax.device_get(trainer.to_save(state)), trainer_scale(state)
    resumed, _ = steps(
      "streamed",
      *FLOAT16,
      batches=batches[at:],
      state=trainer.from_saved(jax.device_put(saved), noted),
    )
    assert trainer_scale(resumed) == scale
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.params), expected)
    state, _ = steps("streamed", *FLOAT16, batches=batches[at : at + 1], state=state)
  assert scale["skipped_steps"] == 2
