"""XLA's times of a step for 16 absent H100s, recorded: what is read of them, corrected and added.

tests/data/gpu_step.hlo.gz: a GPT-2 of two layers, width 128, rows of 128 tokens, data 2 × fsdp 8,
compiled by jax 0.10.2, without what no estimate reads.
"""

import dataclasses
import gzip
import math
import pathlib

import pytest

from maxbatch.core.topology import Topology
from maxbatch.estimate.chips import (
  CHIPS,
  GPUS,
  calibrated,
  chip_for,
  is_network_published,
  on_network,
)
from maxbatch.estimate.costs import Collective, OperationCost, program_costs
from maxbatch.estimate.flops import Products, attention_pairs
from maxbatch.estimate.gpu_corrections import left_out, overcharge
from maxbatch.estimate.hlo import HloModule, ReplicaGroups, parse
from maxbatch.estimate.step_time import connected, estimate, link_seconds, seconds_of

FILE = pathlib.Path(__file__).parent.parent / "data" / "gpu_step.hlo.gz"
H100 = GPUS["h100"]


@pytest.fixture(scope="module")
def step() -> HloModule:
  return parse(gzip.decompress(FILE.read_bytes()).decode())


@pytest.fixture(scope="module")
def costs(step: HloModule) -> list[OperationCost]:
  return list(program_costs(step))


def test_products_of_all_layers_are_found(costs: list[OperationCost]):
  """Of a token: 6 for every weight of a product, and attention's causal half."""
  layers, width, hidden, vocabulary, length, tokens = 2, 128, 512, 2048, 128, 2 * 128
  weights = layers * (4 * width**2 + 2 * width * hidden) + width * vocabulary
  attention = layers * 7 * width * length  # 2 products forward, 5 backward, of half the pairs
  expected = tokens * (6 * weights + attention)
  assert sum(cost.flops * cost.count for cost in costs) == pytest.approx(expected, rel=0.02)


def test_nearly_all_products_have_the_compilers_time(costs: list[OperationCost]):
  result = estimate(costs, H100, 1.0, 1.0, 8)
  assert result.compiler_share > 0.9
  assert {one.scope for one in result.unestimated if "attention" in one.name} == {"attention"}


def test_attention_takes_its_published_rate(costs: list[OperationCost]):
  kernels = [cost for cost in costs if cost.products.width]
  assert {cost.products.width for cost in kernels} == {64}
  assert {cost.products.backward for cost in kernels} == {False, True}
  one = max(kernels, key=lambda cost: cost.flops)
  large = dataclasses.replace(one, products=Products(10**12, 10**12, 64, True), count=1, bytes=0)
  assert seconds_of([large], H100) == pytest.approx(
    1e12 / H100.peak_flops / H100.attention["backward"]["64"]
  )
  assert seconds_of([large], GPUS["a100"]) > seconds_of([large], H100)


def test_pairs_of_causal_attention():
  assert attention_pairs(4096, 4096, 0) == 4096**2 / 2
  assert attention_pairs(4096, 4096, 4096) == 4096**2 / 2
  assert attention_pairs(4096, 4096, 1024) == 1024 * 4096 - 1024**2 / 2


def test_collectives_have_the_compilers_time_within_a_host(costs: list[OperationCost]):
  """Those that are wrapped in an asynchronous computation, too."""
  inside = [cost for cost in costs if cost.collective and not cost.collective.crosses(8)]
  assert {cost.collective.kind for cost in inside if cost.collective} >= {
    "all-gather",
    "reduce-scatter",
    "all-reduce",
  }
  wrapped = [cost for cost in inside if cost.opcode == "async-start"]
  assert wrapped
  for cost in inside:
    assert cost.collective is not None
    assert cost.collective.cycles is not None
    seconds = link_seconds(cost.collective, H100, 8)
    assert seconds == cost.collective.cycles * 1e-6 > 0
    assert cost.overlapped


DOT = """HloModule step

ENTRY %main {{
  %a = {left}[4096,4096]{{1,0}} parameter(0)
  %b = {left}[4096,4096]{{1,0}} parameter(1)
  ROOT %c = {result}[4096,4096]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, backend_config={{"reification_cost":[{{"exec_time_us":9.5,"name":""}},{{"end_to_end_cycles":0,"exec_time_us":{us},"compute_time_us":0,"name":"sol"}}]}}
}}
"""


@pytest.mark.parametrize(
  ("left", "result", "factor"),
  [
    ("bf16", "bf16", 1),
    ("f32", "f32", 1),
    ("bf16", "f32", 64),
    ("f16", "f16", 8),
    ("f16", "f32", 64),
    ("f8e4m3fn", "bf16", 1),
    ("f8e4m3fn", "f32", 64),
  ],
)
def test_products_of_types_outside_of_the_table_are_divided(left: str, result: str, factor: int):
  program = parse(DOT.format(left=left, result=result, us=176.16 * factor))
  body = program.computations[program.entry]
  assert overcharge(program, body, body.instructions["c"]) == factor
  assert seconds_of(program_costs(program), H100) == pytest.approx(176.16e-6 / H100.sustained)


@pytest.mark.parametrize("factor", [0.7, 1.2])
def test_a_measured_gpu_takes_as_much_longer(costs: list[OperationCost], factor: float):
  other = calibrated(H100, factor)
  times = [estimate(costs, chip, 1.0, 1.0, 8).step_seconds(1) for chip in (H100, other)]
  assert times[1] == pytest.approx(factor * times[0])
  program = parse(DOT.format(left="bf16", result="f32", us=176.16 * 64))
  assert seconds_of(program_costs(program), other) == pytest.approx(
    factor * 176.16e-6 / H100.sustained
  )


def test_a_repaired_compiler_is_not_divided():
  """What would be faster than the peak was right."""
  program = parse(DOT.format(left="bf16", result="f32", us=190))
  assert seconds_of(program_costs(program), H100) == pytest.approx(190e-6 / H100.sustained)


def test_products_in_float8_take_what_twice_the_peak_allows():
  """The compiler's times are beyond it: 0.79 of that is what bfloat16 reaches of its own."""
  program = parse(DOT.format(left="f8e4m3fn", result="bf16", us=50))
  least = 2 * 4096**3 / (2 * 0.79 * H100.peak_flops)
  assert seconds_of(program_costs(program), H100) == pytest.approx(least / H100.sustained)


def test_placeholders_of_custom_fusions_are_not_read(step: HloModule, costs: list[OperationCost]):
  bodies = step.computations.values()
  custom = {one.name for body in bodies for one in body if "__custom_fusion" in one.attributes}
  written = [one for body in bodies for one in body if one.name in custom and one.cycles]
  assert written
  assert [cost.cycles for cost in costs if cost.name in custom] == [None] * len(custom)


def test_no_operation_takes_less_than_a_launch(costs: list[OperationCost]):
  busy = [cost for cost in costs if not cost.collective and not cost.overlapped]
  assert all(seconds_of([cost], H100) >= cost.count * H100.launch for cost in busy)


GIB = 2.0**30


def between(groups: list[tuple[int, ...]], kind: str) -> float:
  return link_seconds(Collective(kind, int(GIB), ReplicaGroups(tuple(groups)), cycles=5.0), H100, 8)


def test_between_hosts_the_ports_of_a_group_add_up():
  port = 50e9 * H100.network_share
  whole = [tuple(range(16))]
  assert between(whole, "all-gather") == pytest.approx(GIB / 2 / (8 * port))
  assert between(whole, "all-reduce") == pytest.approx(2 * GIB / 2 / (8 * port))
  # One GPU of each host, as gradients between replicas.
  alone = [(gpu, gpu + 8) for gpu in range(8)]
  assert between(alone, "all-gather") == pytest.approx(GIB / 2 / port)
  assert between([(0, 8)], "collective-permute") == pytest.approx(GIB / port)


def test_which_devices_the_fast_links_connect():
  assert connected(Topology.of(data=8), H100) is None
  assert connected(Topology.of(data=64), H100) == 8
  assert connected(Topology.of(data=64), GPUS["gb200"]) is None
  assert connected(Topology.of(data=144), GPUS["gb200"]) == 72
  assert connected(Topology.of(data=64), CHIPS["v5e"]) is None


def test_what_the_compiler_leaves_out_of_memory(step: HloModule):
  queries = 2 * 2 * 128 * 64
  assert left_out(step, 10**9) == {
    "workspace of attention": 4 * queries + 4 * queries // 64,
    "workspace of cuBLAS": 32 * 2**20,
    "fragmentation": 10**7,
  }
  assert math.isclose(sum(left_out(step, 0).values()), 33_687_552, rel_tol=0.01)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_another_network_between_hosts_is_all_that_changes(factor: float):
  """Of 100 Gb/s instead of the published 400; steps that were measured had the published one."""
  known = calibrated(H100, factor)
  slower = on_network(known, 100)
  assert dataclasses.replace(slower, dcn_bandwidth=known.dcn_bandwidth) == known
  assert on_network(known, 0) is known
  assert chip_for(H100.device_kind, 100) == on_network(H100, 100)
  alone, inside = ReplicaGroups(((0, 8),)), ReplicaGroups((tuple(range(8)),))
  times = [
    [
      link_seconds(Collective("all-gather", 10**9, groups, cycles=5.0), chip, 8)
      for chip in (known, slower)
    ]
    for groups in (alone, inside)
  ]
  assert times[0][1] == pytest.approx(4 * times[0][0])
  assert times[1][1] == times[1][0]
  assert is_network_published(known)
  assert not is_network_published(slower)
