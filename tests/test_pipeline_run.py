"""A timetable that runs gives the loss and the gradients of the plain step."""

import jax
import numpy as np
import pytest
from pipelined import CUTS, PASSES, Case, make_rows, pipelined, plain

ALL = CUTS * PASSES
ONCE, ROUNDS = ("gpipe", "1f1b"), ("circular", "interleaved_1f1b")
PARALLEL = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
"""Devices along data, fsdp and tensor."""

CASES = [
  *((Case(axes=axes), ONCE + ROUNDS, (CUTS, ALL)) for axes in PARALLEL),
  *((Case(repeats=2, axes=axes), ROUNDS, (CUTS, ALL)) for axes in PARALLEL),
  (Case(repeats=3, axes=(2, 2, 1)), ROUNDS, (CUTS, ALL)),
  (Case(repeats=2, hop=2), ROUNDS, (CUTS, ALL)),
  # Fewer microbatches than stages, segments, tied and learned embeddings.
  (Case(stages=4, length=8, gpt2=True), ONCE, (1, 2, 3, ALL)),
]


def error(found, expected) -> float:
  """‖difference‖ / ‖expected‖ of the whole gradient, computed in float64."""
  flat = [
    np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])
    for tree in (found, expected)
  ]
  return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1]))


@pytest.mark.parametrize(
  ("case", "schedule", "microbatches"),
  [
    pytest.param(
      case,
      name,
      count,
      id=f"{name}-{count}-of-{case.stages}x{case.repeats}-{'x'.join(map(str, case.axes))}",
    )
    for case, names, counts in CASES
    for name in names
    for count in counts
  ],
)
def test_any_timetable_gives_the_gradients_of_the_plain_step(case, schedule, microbatches):
  gradients, sums = pipelined(case, schedule, microbatches)
  loss, expected = plain(case.gpt2, case.length, microbatches)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
  assert error(gradients, expected) < 2e-6
  assert sums.loss == pytest.approx(float(loss), rel=1e-6)
  assert sums.weight == np.sum(make_rows(case, microbatches).weights)


def test_the_rows_hold_a_microbatch_of_padding_only():
  weights = np.asarray(make_rows(Case(), ALL).weights)
  assert 0 in weights.reshape(ALL, -1).sum(1)
