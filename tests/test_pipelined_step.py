"""A timetable that runs gives the loss and the gradients of the plain step."""

import collections
import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from pipelined import (
  CUTS,
  KEY,
  PASSES,
  Case,
  fed_rows,
  in_order_of_stages,
  make_rows,
  pipelined,
  plain,
  poison,
  program,
)
from support import error

from maxbatch.pipeline_parallel.sizes import predicted_bubble
from maxbatch.training import tick
from maxbatch.training.loss import loss_sum

ALL = CUTS * PASSES
ROUNDING = 1e-5
"""Of float32 through 12 layers. The plain gradient in 8 parts, or with other machine code, differs
by 1e-6 to 4e-6 from the same in one piece: which, depends on the processor's instructions."""
ONCE, ROUNDS = ("gpipe", "1f1b"), ("circular", "interleaved_1f1b")

CASES = [
  # Each axis alone (data, fsdp, tensor), and two.
  (Case(axes=(1, 2, 1)), ONCE + ROUNDS, (CUTS, ALL)),
  (Case(repeats=2, axes=(2, 1, 1), dropout_rate=0.0), ROUNDS, (CUTS, ALL)),
  (Case(repeats=2, axes=(1, 1, 2), forwarding_delay=2, dropout_rate=0.0), ROUNDS, (CUTS, ALL)),
  (Case(repeats=3, axes=(2, 2, 1)), ROUNDS, (CUTS, ALL)),
  # Fewer microbatches than stages, segments, tied and learned embeddings.
  (Case(stages=4, length=8, gpt2=True, dropout_rate=0.0), ONCE, (1, 2, 3, ALL)),
]
FULL, MINIMAL = (("remat_policy", "full"),), (("remat_policy", "minimal"),)
UNROLLED = ("scan_layers", "false")
KEEPING = [
  (Case(stash="residuals", repeats=2, axes=(1, 2, 2)), ROUNDS, (CUTS, ALL)),
  (
    Case(stash="residuals", repeats=3, forwarding_delay=2, axes=(1, 2, 1), keys=MINIMAL),
    ROUNDS,
    (ALL,),
  ),
  (Case(stash="residuals", stages=4, length=8, gpt2=True, keys=(*FULL, UNROLLED)), ONCE, (2, ALL)),
]
"""Every remat_policy: the first has what the configuration says, none."""


@pytest.mark.parametrize(
  ("case", "schedule", "microbatches"),
  [
    pytest.param(
      case,
      name,
      count,
      id="-".join([name, str(count), f"of-{case.stages}x{case.repeats}", *map(str, case.axes)])
      + ("" if case.stash == "input" else f"-{case.stash}"),
    )
    for case, names, counts in CASES + KEEPING
    for name in names
    for count in counts
  ],
)
def test_any_timetable_gives_the_gradients_of_the_plain_step(case, schedule, microbatches):
  gradients, sums = pipelined(case, schedule, microbatches)
  loss, expected = plain(case, microbatches)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
  assert error(gradients, expected) < ROUNDING
  assert sums.loss == pytest.approx(float(loss), rel=1e-6)
  assert sums.weight == np.sum(make_rows(case, microbatches).weights)


def test_layers_that_differ_are_known_by_their_number_in_any_stage():
  """With the options of Gemma and OLMo, heads divided over devices."""
  keys = {"layer_types": "[sliding_attention, sliding_attention, full_attention]"} | {
    "sliding_window_size": 3,
    "local_rope_max_timescale": 10,
    "normalization": "zero_centered_rmsnorm",
    "use_post_attn_norm": "true",
    "use_post_ffw_norm": "true",
    "use_qk_norm": "true",
    "qk_norm_across_heads": "true",
    "attn_logits_soft_cap": 0.5,
    "final_logits_soft_cap": 2,
  }
  case = Case(repeats=2, axes=(1, 1, 2), dropout_rate=0.0, keys=tuple(keys.items()))
  compiled, places = program(case)
  params = jax.device_get(jax.jit(case.model.init)(jax.random.key(0)))
  rows = make_rows(case, ALL)
  given = jax.device_put(in_order_of_stages(case, params), places)
  result, sums = compiled(given, fed_rows(case, ALL), case.ticks("interleaved_1f1b", ALL))
  loss = jax.jit(jax.value_and_grad(lambda p, rows: loss_sum(case.model, p, rows, KEY)))
  expected = jax.device_get(loss(params, rows))
  # Small sums that are normalized again carry their rounding further.
  assert error(in_order_of_stages(case, jax.device_get(result), back=True), expected[1]) < 6e-6
  assert sums.loss == pytest.approx(float(expected[0]), rel=1e-6)


def test_in_bfloat16_residuals_are_what_would_be_computed_again():
  keys = ("dtype", "bfloat16"), ("remat_policy", "minimal")
  ways = [Case(stash=stash, keys=keys, dropout_rate=0.0) for stash in ("input", "residuals")]
  again, kept = (pipelined(case, "1f1b", ALL)[0] for case in ways)
  assert error(kept, again) < 1e-3
  # Rounding to bfloat16 itself is far more.
  assert error(kept, plain(ways[0], ALL)[1]) > 3e-3


def test_the_rows_hold_a_microbatch_of_padding_only():
  weights = np.asarray(make_rows(Case(), ALL).weights)
  assert 0 in weights.reshape(ALL, -1).sum(1)


# --- idle stages ----------------------------------------------------------------------------------


@pytest.fixture
def fresh_programs():
  """Programs traced in a test are not for the next."""
  program.cache_clear()
  yield
  program.cache_clear()


@pytest.mark.usefixtures("fresh_programs", "optimized")
def test_a_timetable_as_a_run_compiles_it_gives_them_too(monkeypatch):
  monkeypatch.setattr("pipelined.QUICKLY", {})
  case = Case(repeats=2, axes=(2, 1, 1), dropout_rate=0.0)
  gradients, _ = pipelined(case, "interleaved_1f1b", ALL)
  assert error(gradients, plain(case, ALL)[1]) < ROUNDING


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.parametrize("stash", ["input", "residuals"])
def test_what_idle_stages_compute_changes_nothing(monkeypatch, stash):
  poison(monkeypatch)
  case = Case(repeats=2, stash=stash, dropout_rate=0.0)
  for name in ROUNDS:
    gradients, sums = pipelined(case, name, CUTS)
    loss, expected = plain(case, CUTS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert error(gradients, expected) < ROUNDING
    assert sums.loss == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.usefixtures("fresh_programs")
def test_that_would_be_seen_without_the_masks(monkeypatch):
  poison(monkeypatch)
  monkeypatch.setattr(tick, "mask", lambda condition, value: value)
  gradients, _ = pipelined(Case(repeats=2, dropout_rate=0.0), "circular", CUTS)
  # One mask keeps the layers' gradients, another the embedding's.
  assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients["layers"]))
  assert not np.isfinite(gradients["embedding"]).all()


@pytest.mark.usefixtures("fresh_programs")
def test_the_bubble_of_a_run_is_the_predicted_one(monkeypatch):
  counted = collections.Counter()

  def count(kind: str, on: jax.Array) -> jax.Array:
    jax.debug.callback(lambda on: counted.update([(kind, bool(on))]), on)
    return on

  for kind in ("_forward", "_backward"):
    plain_part: Callable[..., Any] = getattr(tick.PipelineStage, kind)

    def part(self, entry, *rest, kind=kind, plain_part=plain_part):
      # A callback can only be where every axis is taken over.
      axes, whole = {"fsdp", "tensor"}, PartitionSpec()
      noted: Any = functools.partial(count, kind)
      jax.shard_map(noted, in_specs=whole, out_specs=whole, axis_names=axes, check_vma=False)(
        entry.is_active
      )
      return plain_part(self, entry, *rest)

    monkeypatch.setattr(tick.PipelineStage, kind, part)
  case = Case(stages=4, repeats=3, dropout_rate=0.0)
  for name in ROUNDS:
    counted.clear()
    pipelined(case, name, ALL)
    jax.effects_barrier()
    for kind in ("_forward", "_backward"):
      used, idle = counted[kind, True], counted[kind, False]
      assert used == case.stages * case.repeats * ALL
      assert Fraction(idle, used + idle) == predicted_bubble(case.pipeline.shape)
