"""The verdict over losses made by hand: which branch is critical, what is said, what is drawn."""

import dataclasses
import json
import math
import statistics
from fractions import Fraction

import numpy as np
import pytest

from maxbatch.experiments.branching import Branch, Branching
from maxbatch.experiments.losses import Measured, block_means, critical, half_width, judge
from maxbatch.experiments.plot import critical_batch_charts, title
from maxbatch.experiments.report import CriticalBatchReport, Origin
from maxbatch.plots.chart import Band, Line
from maxbatch.plots.interactive import DASHES, SYMBOLS

WINDOW, BLOCKS = 10, 40
EVEN = tuple(0.001 * (-1) ** n for n in range(BLOCKS))
"""Noise whose mean over the window is 0."""


def measured(factor: int, loss: float, noise: float = 1.0) -> Measured:
  """A branch of factor × 32 samples that ends at `loss`; without blocks at infinity."""
  branch = Branch(Fraction(factor), 32 * factor, 512 * factor, 320 // factor, 8 // factor)
  blocks = tuple(loss + noise * wave * factor for wave in EVEN) if math.isfinite(loss) else ()
  return Measured(branch, 0.01 * factor**0.5, blocks, None, 60.0)


def report(
  losses: dict[int, float], *, tolerance: float = 0.01, noise: float = 1.0
) -> CriticalBatchReport:
  ordered = [measured(factor, loss, noise) for factor, loss in losses.items()]
  branching = Branching(
    tuple(one.branch for one in ordered), 32, Fraction(4), 163_840, 4096, BLOCKS, WINDOW
  )
  origin = Origin("runs/mine/checkpoints/200", 200, 6400, 102_400, 0.01)
  return CriticalBatchReport(
    origin, branching, "sqrt", tolerance, tuple(judge(ordered, WINDOW, tolerance))
  )


def verdict(losses: dict[int, float]) -> int:
  result = report(losses)
  return int(result.critical.measured.branch.factor)


@pytest.mark.parametrize(
  ("losses", "expected"),
  [
    ({1: 3.0, 2: 3.0, 4: 3.0}, 4),
    ({1: 3.0, 2: 3.009, 4: 3.011}, 2),
    ({1: 3.0, 2: 3.02, 4: 3.03}, 1),
    # Held to the best smaller branch, not to factor 1: 2 is better than 1, and 4 not than 2.
    ({1: 3.0, 2: 2.98, 4: 2.995}, 2),
    # Small losses that add up: 4 is within the tolerance of 2, but not of 1.
    ({1: 3.0, 2: 3.008, 4: 3.016}, 2),
    # The largest that is within, even where one below it is not.
    ({1: 3.0, 2: 3.02, 4: 3.0}, 4),
    ({1: 3.0, 2: math.inf, 4: math.inf}, 1),
  ],
)
def test_the_critical_branch_is_the_largest_within_the_tolerance_of_all_smaller_ones(
  losses, expected
):
  assert verdict(losses) == expected
  by_definition = [k for k in losses if all(losses[k] <= losses[j] + 0.01 for j in losses if j < k)]
  assert expected == max(by_definition)


def test_exactly_the_tolerance_is_within():
  ordered = [measured(1, 3.0, 0), measured(2, 3.25, 0)]
  assert [one.within for one in judge(ordered, WINDOW, 0.25)] == [True, True]


def test_only_the_window_counts():
  early = dataclasses.replace(measured(2, 3.0), blocks=(9.0,) * (BLOCKS - WINDOW) + (3.0,) * WINDOW)
  _, one = judge([measured(1, 3.0, 0), early], WINDOW, 0.01)
  assert (one.loss, one.difference, one.within) == (3.0, 0.0, True)
  _, one = judge([measured(1, 3.0, 0), early], WINDOW + 1, 0.01)
  assert not one.within


def test_blocks_are_means_of_consecutive_steps():
  assert block_means([1, 2, 3, 4, 5, 6], 2) == (1.5, 3.5, 5.5)


def test_noise_that_branches_share_does_not_count():
  waves = np.random.default_rng(0).normal(size=BLOCKS)
  shared = [
    dataclasses.replace(measured(k, 0), blocks=tuple(3 + 0.001 * k + waves)) for k in (1, 2)
  ]
  _, one = judge(shared, WINDOW, 0.01)
  assert one.difference == pytest.approx(0.001)
  assert one.half_width < 1e-9
  assert one.clear


def test_the_interval_covers_the_mean_of_independent_blocks():
  random = np.random.default_rng(1)
  widths = []
  covered = 0
  for _ in range(2000):
    values = random.normal(size=WINDOW)
    widths.append(half_width(list(values)))
    covered += abs(statistics.fmean(values)) <= widths[-1]
  assert 0.94 < covered / 2000 < 0.985
  assert 0.7 < statistics.median(widths) < 1.1  # 2.26 / √10 = 0.72 without the correlation


def test_the_interval_grows_where_neighbours_resemble_each_other():
  random = np.random.default_rng(2)
  covered = 0
  for _ in range(500):
    values = [random.normal()]
    for _ in range(39):
      values.append(0.7 * values[-1] + random.normal() * math.sqrt(1 - 0.49))
    covered += abs(statistics.fmean(values)) <= half_width(values)
  assert covered / 500 > 0.85  # 0.57 if the blocks were taken for independent


def test_all_within():
  result = report({1: 3.0, 2: 2.999, 4: 3.001})
  assert result.sentences() == [
    "The critical batch is at least 128 samples (2,048 tokens): the largest tried, it ends within "
    "0.01 of x2, the best smaller one."
  ]
  assert (result.at_least, result.below) == (128, None)


def test_between_two():
  result = report({1: 3.0, 2: 3.001, 4: 3.05})
  assert result.sentences() == [
    "The critical batch is between 64 samples (1,024 tokens) and 128 samples (2,048 tokens), which "
    "ends 0.05 nats per token above x1."
  ]
  assert (result.at_least, result.below) == (64, 128)


def test_below_the_smallest_but_one():
  result = report({1: 3.0, 2: math.inf})
  assert result.sentences() == [
    "The critical batch is below 64 samples (1,024 tokens), which diverges. Whether 32 is below "
    "it, only smaller factors can show."
  ]
  assert (result.at_least, result.below) == (None, 64)


def test_losses_that_do_not_rise_steadily_are_pointed_at():
  assert report({1: 3.0, 2: 3.05, 4: 3.0}).sentences()[1:] == [
    "Yet x2 (which ends 0.05 nats per token above x1) is beyond the tolerance: the losses do not "
    "rise with the batch. Look at the plot."
  ]


def test_noise_larger_than_the_tolerance_is_said():
  sentence = report({1: 3.0, 2: 3.0}, noise=30).sentences()[1]
  assert sentence.startswith(
    "Insufficient: the noise of the smoothed losses is larger than tolerance=0.01 (x2 +0.0000 ± "
  )
  assert "With branch_tokens=655360, which continues these branches" in sentence


def test_a_difference_next_to_the_tolerance_is_not_certain():
  result = report({1: 3.0, 2: 3.0095, 4: 3.0098, 8: 3.2})
  assert result.sentences()[1].startswith(
    "Not certain: the noise leaves open on which side of tolerance=0.01 it is (x4 +0.0098 ± 0.0"
  )


def test_doubt_about_a_smaller_branch_does_not_matter():
  assert report({1: 3.0, 2: 3.0099, 4: 2.9}).sentences()[1:] == []


TABLE = """\
  factor  batch  tokens/step  learning rate  steps      loss     above best smaller  eval loss  seconds
       1     32          512           0.01    320    3.0000                      –          –     60.0
       2     64        1,024         0.0141    160    3.0080  +0.0080 ± 0.0008 (x1)          –     60.0   within
       4    128        2,048           0.02     80    3.0096  +0.0096 ± 0.0023 (x1)          –     60.0  within?
       8    256        4,096         0.0283     40  diverged                      –          –     60.0   beyond

"""


def test_the_table():
  printed = str(report({1: 3.0, 2: 3.008, 4: 3.0096, 8: math.inf}))
  assert printed.startswith(TABLE), printed


def test_json_has_no_infinity():
  result = report({1: 3.0, 2: math.inf}).as_dict()
  read = json.loads(json.dumps(result, allow_nan=False))
  assert read["branches"][1]["loss"] is None
  assert read["branches"][1]["diverged"] is True
  assert (read["critical_batch_at_least"], read["critical_batch_below"]) == (None, 64)
  assert read["branches"][0]["loss"] == pytest.approx(3.0)


def drawn(losses: dict[int, float]) -> tuple[dict[str, Line], dict[str, Line], Band]:
  """The lines that are named in each picture, and the area that is marked."""
  above, below = ([*chart.panels[0].marks] for chart in critical_batch_charts(report(losses)))
  curves, spots = ({m.label: m for m in marks if isinstance(m, Line)} for marks in (above, below))
  [result] = [mark for mark in below if isinstance(mark, Band)]
  return curves, spots, result


@pytest.mark.parametrize(
  ("losses", "expected"),
  [
    ({1: 3.0, 2: 3.001, 4: 3.05}, "between 64 and 128 samples"),
    ({1: 3.0, 2: 3.0, 4: 3.0}, "at least 128 samples"),
    ({1: 3.0, 2: math.inf, 4: math.inf}, "below 64 samples"),
  ],
)
def test_the_plot_draws_every_branch(losses, expected):
  assert title(report(losses)) == f"Critical batch of mine after step 200: {expected}"
  curves, spots, result = drawn(losses)
  for factor, loss in losses.items():
    name = f"x{factor} ({32 * factor})"
    assert (name in curves) == (f"x{factor}" in spots) == math.isfinite(loss)
    assert (f"x{factor}: diverged" in spots) == math.isinf(loss)
    if math.isfinite(loss):
      assert len(curves[name].y) == BLOCKS - WINDOW + 1
      assert spots[f"x{factor}"].y == [pytest.approx(loss)]
      assert result.low[0] < loss < result.high[0]
  assert curves["judged from here"].x[0][0] == (BLOCKS - WINDOW) * 4096
  assert "best smaller branch + tolerance" in spots


def test_no_two_branches_look_the_same_without_color():
  curves, spots, _ = drawn({1: 3.0, 2: 3.0, 4: 3.01, 8: 3.02})
  ways = [(curves[f"x{n} ({32 * n})"].dash, spots[f"x{n}"].color) for n in (1, 2, 4, 8)]
  assert ways == [(0, 0), (1, 1), (2, 2), (3, 3)]
  assert len(set(DASHES)) >= 4
  assert len(set(SYMBOLS)) >= 4


@pytest.mark.parametrize(
  ("losses", "left", "right"),
  [
    ({1: 3.0, 2: 3.001, 4: 3.05}, 1, 2),
    ({1: 3.0, 2: 3.0, 4: 3.0}, 2, None),
    ({1: 3.0, 2: 3.5, 4: 3.6}, None, 1),
  ],
)
def test_the_plot_marks_where_the_critical_batch_is(losses, left, right):
  batches = [32 * factor for factor in losses]
  low, high = drawn(losses)[2].x[0]
  assert low == batches[left] if left is not None else low < batches[0]
  assert high == batches[right] if right is not None else high > batches[-1]


def test_the_critical_place_is_the_first_alone_when_nothing_else_is_within():
  assert critical(judge([measured(1, 3.0), measured(2, 4.0)], WINDOW, 0.01)) == 0


def descending(factor: int, critical: float) -> Measured:
  """A branch whose loss falls with the samples that count, which are fewer in larger steps."""
  one = measured(factor, 3.0)
  samples = 256 * (np.arange(BLOCKS) + 0.5) / (1 + one.branch.batch / critical)
  losses = 2.2 - 0.3 * np.log1p(samples / 6400) + np.array(EVEN)
  return dataclasses.replace(one, blocks=tuple(losses.tolist()))


def test_branches_tell_the_batch_that_takes_twice_the_data():
  flat = report({1: 3.0, 2: 3.0, 4: 3.0, 8: 3.0})
  judged = judge([descending(factor, 100) for factor in (1, 2, 4, 8)], WINDOW, 0.01)
  result = dataclasses.replace(flat, judged=tuple(judged))
  assert result.tradeoff is not None
  assert result.tradeoff.critical_batch.value == pytest.approx(100, rel=0.1)
  assert f"a batch of {result.tradeoff.critical_batch.value:.0f} samples (95% " in str(result)
  assert result.as_dict()["tradeoff"]["critical_batch"]["low"] < 100
  # Losses that do not fall, and too few branches, tell nothing.
  assert flat.tradeoff is None
  assert flat.as_dict()["tradeoff"] is None
  assert dataclasses.replace(flat, judged=tuple(judged[:2])).tradeoff is None
