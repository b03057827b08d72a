"""Seconds from costs: every rule of the estimate, on numbers that can be checked by hand."""

import math
import pathlib

import pytest

from maxbatch.estimate.chips import Chip
from maxbatch.estimate.costs import Collective, OperationCost, program_costs
from maxbatch.estimate.flops import Products
from maxbatch.estimate.hlo import ReplicaGroups, parse
from maxbatch.estimate.step_time import StepEstimate, estimate

TPU_STEP = (pathlib.Path(__file__).parents[1] / "data" / "tpu_step.hlo").read_text()

# 1000 cycles, 100 FLOPs, 10 bytes of memory, 4 of links and 1 of the network in a second.
CHIP = Chip(
  generation="test",
  device_kind="test",
  peak_flops=100.0,
  hbm_bytes=0,
  usable_bytes=0,
  hbm_bandwidth=10.0,
  ici_bandwidth=4.0,
  ici_links=2,
  dcn_bandwidth=1.0,
  clock=1000.0,
  matrix_unit=128,
)


def cost(
  flops: int = 0,
  bytes: int = 0,
  cycles: int | None = None,
  *,
  name: str = "op",
  count: int = 1,
  inside: bool = True,
  loop: str = "body",
  scope: str = "mlp",
  kind: str = "",
  size: int = 0,
  groups: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),),
  overlapped: bool = False,
  products: Products | None = None,
) -> OperationCost:
  return OperationCost(
    name=name,
    opcode="fusion",
    op_name="",
    scope=scope,
    loop=loop,
    in_microbatch_loop=inside,
    count=count,
    products=products or Products(flops, flops),
    bytes=bytes,
    cycles=cycles,
    collective=Collective(kind, size, ReplicaGroups(groups)) if kind else None,
    overlapped=overlapped,
  )


def estimated(*costs: OperationCost, expected: float = 100.0) -> StepEstimate:
  return estimate(costs, CHIP, expected)


def test_the_compilers_cycles_come_first():
  assert estimated(cost(900, 900, cycles=500, count=3)).microbatch_seconds == pytest.approx(1.5)


def test_the_roofline_is_the_longer_of_products_and_bytes():
  assert estimated(cost(200, 10)).microbatch_seconds == pytest.approx(2.0)
  assert estimated(cost(200, 30)).microbatch_seconds == pytest.approx(3.0)


def test_narrow_heads_are_charged_the_whole_matrix_unit():
  """And the blocks that are computed, not the half that counts."""
  assert estimated(cost(products=Products(100, 150, width=64))).microbatch_seconds == pytest.approx(
    3.0
  )
  assert estimated(
    cost(products=Products(100, 150, width=128))
  ).microbatch_seconds == pytest.approx(1.5)
  assert estimated(
    cost(products=Products(100, 150, width=192))
  ).microbatch_seconds == pytest.approx(2.0)


def test_a_step_is_the_rest_and_as_many_passes_as_it_has():
  result = estimated(cost(cycles=2000), cost(cycles=500, inside=False, loop="main"))
  assert (result.microbatch_seconds, result.rest_seconds) == pytest.approx((2.0, 0.5))
  assert result.step_seconds(1) == pytest.approx(2.5)
  assert result.step_seconds(7) == pytest.approx(14.5)


@pytest.mark.parametrize(
  ("kind", "seconds"),
  [
    ("all-gather", 16 * 3 / 4 / 4),
    ("reduce-scatter", 16 * 3 / 4 / 4),
    ("all-reduce", 2 * 16 * 3 / 4 / 4),
    ("collective-permute", 16 / 2),
  ],
)
def test_collectives_on_the_links(kind: str, seconds: float):
  result = estimated(cost(kind=kind, size=16))
  assert result.microbatch_parts.interconnect == pytest.approx(seconds)
  assert result.collectives[0].seconds == pytest.approx(seconds)


def test_collectives_between_slices():
  gather = cost(kind="all-gather", size=16)
  assert estimate([gather], CHIP, 0, devices_per_slice=4).microbatch_seconds == pytest.approx(3.0)
  result = estimate([gather], CHIP, 0, devices_per_slice=2)
  assert result.microbatch_seconds == pytest.approx(12.0)
  assert result.collectives[0].crosses_slices


def test_one_device_alone_exchanges_nothing():
  assert estimated(cost(kind="all-reduce", size=16, groups=((0,), (1,)))).microbatch_seconds == 0.0


def test_synchronous_collectives_stop_the_operations():
  result = estimated(cost(cycles=5000), cost(kind="all-gather", size=16))
  assert result.microbatch_seconds == pytest.approx(8.0)


def test_asynchronous_collectives_run_beside_the_operations():
  """3 s of links behind 5 s of work cost nothing; behind 1 s they cost 2 s."""
  gather = cost(kind="all-gather", size=16, overlapped=True, scope="norm")
  hidden = estimated(cost(cycles=5000), gather)
  assert hidden.microbatch_seconds == pytest.approx(5.0)
  late = estimated(cost(cycles=1000), gather)
  assert late.microbatch_seconds == pytest.approx(3.0)
  assert late.microbatch_parts.interconnect == pytest.approx(2.0)
  assert late.by_scope(1) == pytest.approx({"norm": 2.0, "mlp": 1.0})


def test_only_operations_of_the_same_loop_body_hide_a_collective():
  gather = cost(kind="all-gather", size=16, overlapped=True)
  assert estimated(cost(cycles=5000, loop="other"), gather).microbatch_seconds == pytest.approx(8.0)


def test_copies_run_beside_until_memory_is_full():
  """5 s of copies, 1 s of other bytes: behind 2 s of work 4 s are left."""
  copy = cost(bytes=50, overlapped=True, scope="other")
  work = cost(bytes=10, cycles=2000)
  result = estimated(work, copy)
  assert result.microbatch_seconds == pytest.approx(6.0)
  assert result.microbatch_parts.memory == pytest.approx(4.0)
  assert estimated(cost(bytes=10, cycles=9000), copy).microbatch_seconds == pytest.approx(9.0)


@pytest.mark.parametrize(
  ("costs", "limit"),
  [
    ([cost(500, 10)], "compute"),
    ([cost(200, 30)], "memory bandwidth"),
    ([cost(300, 20)], "compute"),
    # The compiler's time is mostly neither: the vector unit is at work.
    ([cost(0, 10, cycles=9000)], "compute"),
    ([cost(0, 60, cycles=9000)], "memory bandwidth"),
    ([cost(cycles=1000), cost(kind="all-gather", size=16)], "interconnect"),
    (
      [cost(cycles=9, inside=False), cost(kind="all-gather", size=16, inside=False)],
      "interconnect",
    ),
  ],
)
def test_what_limits(costs: list[OperationCost], limit: str):
  assert estimated(*costs).limited_by == limit


def test_coverage_is_of_what_was_expected():
  costs = [cost(30, cycles=1), cost(20, count=2), cost(20, inside=False)]
  result = estimate(costs, CHIP, expected_microbatch_flops=80, expected_rest_flops=20)
  assert result.coverage == pytest.approx(0.9)
  assert result.compiler_share == pytest.approx(30 / 90)
  assert (result.microbatch_flops, result.rest_flops) == (70, 20)


def test_coverage_without_expectations():
  result = estimate([cost(cycles=5)], CHIP, 0.0)
  assert math.isnan(result.coverage)
  assert math.isnan(result.compiler_share)


def test_scopes_add_up():
  result = estimated(
    cost(cycles=2000, scope="mlp", count=2),
    cost(cycles=1000, scope="attention"),
    cost(kind="all-gather", size=16, scope="attention"),
    cost(cycles=500, scope="optimizer", inside=False),
    cost(cycles=9000, scope="norm", inside=False),
  )
  assert result.by_scope(2) == {"norm": 9.0, "mlp": 8.0, "attention": 8.0, "optimizer": 0.5}
  assert sum(result.by_scope(3).values()) == pytest.approx(result.step_seconds(3))
  assert next(iter(result.by_scope(1))) == "norm"
  assert next(iter(result.by_scope(9))) != "norm"


def test_the_largest_and_those_without_an_estimate():
  result = estimated(
    cost(cycles=100, name="short"),
    cost(cycles=400, name="long", count=10),
    cost(200, name="kernel"),
    cost(kind="all-gather", size=16, name="gather"),
    cost(kind="all-gather", size=16, name="hidden", overlapped=True),
  )
  assert [(one.name, one.how) for one in result.largest] == [
    ("long", "compiler"),
    ("gather", "roofline"),
    ("kernel", "roofline"),
    ("short", "compiler"),
  ]
  assert result.largest[0].seconds == pytest.approx(4.0)
  assert [(one.name, one.seconds) for one in result.unestimated] == [("kernel", 2.0)]


def test_alike_collectives_are_listed_together():
  result = estimated(
    cost(kind="all-reduce", size=1, inside=False),
    cost(kind="all-gather", size=16, count=3),
    cost(kind="all-gather", size=4),
    cost(kind="all-gather", size=4, overlapped=True),
  ).collectives
  assert [(x.kind, x.in_microbatch_loop, x.overlapped, x.count, x.bytes) for x in result] == [
    ("all-gather", True, False, 4, 52),
    ("all-gather", True, True, 1, 4),
    ("all-reduce", False, False, 1, 1),
  ]
  assert result[0].seconds == pytest.approx(52 * 3 / 4 / 4)


def test_a_whole_program():
  """The fixture: 3 layers in the loop over microbatches, an optimizer after it."""
  expected = 3 * (4_194_304 + 262_144)
  result = estimate(program_costs(parse(TPU_STEP)), CHIP, expected)
  assert result.coverage == pytest.approx(1.0)
  assert result.compiler_share == pytest.approx(4_194_304 / (4_194_304 + 262_144))
  assert result.rest_seconds == pytest.approx(4.5)
  assert result.by_scope(1)["optimizer"] == pytest.approx(4.5)
  assert result.unestimated[0].name == "splash_mha_fwd_residuals.1"
  assert {one.kind for one in result.collectives} == {"all-gather", "all-reduce", "reduce-scatter"}
