"""Costs of a program: how often, how many FLOPs and bytes, which collectives."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxbatch.estimate.costs import OperationCost, program_costs
from maxbatch.estimate.flops import Products, products
from maxbatch.estimate.hlo import parse
from maxbatch.estimate.traffic import traffic

TPU_STEP = (pathlib.Path(__file__).parent / "data" / "tpu_step.hlo").read_text()


def costs_of(text: str = TPU_STEP) -> dict[str, OperationCost]:
  return {cost.name: cost for cost in program_costs(parse(text))}


def entry(*lines: str) -> str:
  body = "\n".join(f"  {line}" for line in lines)
  return f"HloModule m, num_partitions=8\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


def flops_of(*lines: str) -> Products:
  """Of the last line."""
  program = parse(entry(*lines))
  main = program.computations["main"]
  return products(program, main, list(main)[-1])


def convolution_flops(left: str, right: str, result: str, attributes: str) -> int:
  return flops_of(
    f"%l = bf16[{left}]{{0}} parameter(0)",
    f"%r = bf16[{right}]{{0}} parameter(1)",
    f"%c = bf16[{result}]{{0}} convolution(%l, %r), {attributes}",
  ).flops


def with_elements_in_operands(text: str) -> str:
  """As the compiler of jax 0.12 writes it: %x#3 for the element 3 of %x, without a line of its own."""
  element = re.compile(
    r"^  %([\w.\-]+) = \S.* get-tuple-element\(%([\w.\-]+)\), index=(\d+).*\n", re.M
  )
  for name, source, index in element.findall(text):
    text = re.sub(rf"%{re.escape(name)}(?=[,)])", f"%{source}#{index}", text)
  return element.sub("", text)


def test_elements_in_operands_are_counted_as_those_of_their_own():
  """Loops are read by what their conditions and bodies take out of tuples, in operands or not."""
  text = with_elements_in_operands(TPU_STEP)
  assert "get-tuple-element" not in text
  assert costs_of(text) == costs_of()


def test_loops_multiply_and_the_loop_over_microbatches_does_not():
  """Its bound is an argument; that of the layers, 3, comes from outside of both loops."""
  costs = costs_of()
  assert (costs["fusion.1"].count, costs["fusion.1"].in_microbatch_loop) == (3, True)
  assert (costs["copy-start.1"].count, costs["copy-start.1"].in_microbatch_loop) == (1, True)
  assert (costs["fusion.2"].count, costs["fusion.2"].in_microbatch_loop) == (1, False)
  assert costs["fusion.1"].loop == "layers_body"
  assert costs["fusion.2"].loop == "main.1"


def test_only_what_works_is_listed():
  assert set(costs_of()) == {
    *("next.1", "next.2", "copy.1", "weights.1", "async-collective-start", "fusion.1"),
    *("all-reduce.1", "splash_mha_fwd_residuals.1", "copy-start.1", "all-reduce-scatter.1"),
    "fusion.2",
  }


def test_cycles_and_products_of_fusions():
  costs = costs_of()
  assert costs["fusion.1"].flops == 2 * 4 * 16 * 128 * 256
  assert costs["fusion.1"].cycles == 30000
  assert costs["splash_mha_fwd_residuals.1"].cycles is None


def test_cycles_that_only_the_parts_of_a_fusion_have():
  wrapped = TPU_STEP.replace(', backend_config={"window_config":{"estimated_cycles":"30000"}}', "")
  assert costs_of(wrapped)["fusion.1"].cycles is None
  inner = 'op_name="jit(step)/while/body/jvp()/while/body/mlp/dot_general" stack_frame_id=3}'
  estimated = wrapped.replace(inner, inner + ', backend_config={"estimated_cycles":"777"}')
  assert costs_of(estimated)["fusion.1"].cycles == 777
  # An estimate of something else than the product is none.
  bitcast = "bitcast(%param.5)"
  other = wrapped.replace(bitcast, bitcast + ', backend_config={"estimated_cycles":"777"}')
  assert costs_of(other)["fusion.1"].cycles is None


def test_scopes():
  """Own ones, those of the ops inside a fusion, those of transposed ones; and kernels by name."""
  scopes = {name: cost.scope for name, cost in costs_of().items()}
  assert scopes["fusion.1"] == "mlp"
  assert scopes["all-reduce.1"] == "norm"
  assert scopes["all-reduce-scatter.1"] == "head"
  assert scopes["fusion.2"] == "optimizer"
  assert scopes["splash_mha_fwd_residuals.1"] == "attention"
  assert scopes["weights.1"] == "other"


def test_what_has_no_scope_has_that_of_the_loop_around():
  plain = loop("compare(%j, %five), direction=LT")
  assert costs_of(plain)["next"].scope == "other"
  within = plain.replace("body=%body", 'body=%body, metadata={op_name="jit(step)/mlp/while"}')
  assert costs_of(within)["next"].scope == "mlp"


def test_the_innermost_scope_counts():
  line = '%x = f32[8]{0} sqrt(%y), metadata={op_name="jit(step)/transpose(jvp(mlp))/norm/mul"}'
  assert costs_of(entry("%y = f32[8]{0} parameter(0)", line))["x"].scope == "norm"


def test_collectives():
  costs = costs_of()
  results = {
    name: (cost.collective.kind, cost.collective.bytes, cost.collective.group_size, cost.overlapped)
    for name, cost in costs.items()
    if cost.collective
  }
  assert results == {
    "async-collective-start": ("all-gather", 4 * 32 * 256 * 2, 4, True),
    "all-reduce.1": ("all-reduce", 4 * 16 * 128 * 2, 4, False),
    "all-reduce-scatter.1": ("reduce-scatter", 128 * 256 * 4, 4, False),
  }


def test_collectives_that_are_started_and_awaited():
  costs = costs_of(
    entry(
      "%p = f32[16]{0} parameter(0)",
      "%s = (f32[16]{0}, f32[64]{0}) all-gather-start(%p), replica_groups=[2,4]<=[8]",
      "ROOT %d = f32[64]{0} all-gather-done(%s)",
    )
  )
  assert list(costs) == ["s"]
  collective = costs["s"].collective
  assert costs["s"].overlapped
  assert collective is not None
  assert (collective.kind, collective.bytes, collective.group_size) == ("all-gather", 256, 4)


def test_what_slices_exchange_through_their_hosts():
  costs = costs_of(
    entry(
      "%p = f32[6,8]{1,0} parameter(0)",
      "%token = token[] after-all()",
      "%s = (f32[6,8]{1,0}, u32[], token[]) send(%p, %token), is_host_transfer=true, "
      'frontend_attributes={_xla_megascale_target="{1,3:4}x{0:15}",'
      '_xla_megascale_transfer_type="ALL_REDUCE"}',
      "%d = token[] send-done(%s), is_host_transfer=true",
      "%r = (f32[6,8]{1,0}, u32[], token[]) recv(%token), is_host_transfer=true",
      "ROOT %e = (f32[6,8]{1,0}, token[]) recv-done(%r), is_host_transfer=true",
    )
  )
  assert list(costs) == ["s"]
  collective = costs["s"].collective
  assert collective is not None
  assert (collective.kind, collective.bytes, collective.group_size) == ("all-reduce", 192, 3)
  assert collective.crosses(None)
  assert costs["s"].overlapped
  assert costs["s"].bytes == 192


def test_what_a_device_sends_to_another():
  costs = costs_of(
    entry(
      "%p = f32[6,8]{1,0} parameter(0)",
      "%token = token[] after-all()",
      "%s = (f32[6,8]{1,0}, u32[], token[]) send(%p, %token), source_target_pairs={{0,1},{1,0}}",
    )
  )
  collective = costs["s"].collective
  assert collective is not None
  assert (collective.kind, collective.crosses(None)) == ("collective-permute", False)
  assert collective.crosses(devices_per_slice=1)


def test_bytes_in_main_memory():
  """Of the slice, not the stack; nothing for what is in vector memory, or gathered beside."""
  costs = costs_of()
  assert costs["weights.1"].bytes == 32 * 256 * 2 + 4
  assert costs["fusion.1"].bytes == 4 * 16 * 128 * 2
  assert costs["copy-start.1"].bytes == 128 * 256 * 4
  assert costs["fusion.2"].bytes == 2 * 128 * 256 * 4


def test_what_is_gathered_beside_a_fusion_is_not_its_traffic():
  """Shard and gathered array in main memory: only the product's operands and result count."""
  everywhere = costs_of(TPU_STEP.replace("S(1)", ""))["fusion.1"]
  assert everywhere.bytes == 2 * (4 * 16 * 128 + 128 * 256 + 4 * 16 * 256)


def test_calls_that_only_tell_the_compiler_something():
  line = '%b = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"'
  assert costs_of(entry(line)) == {}


UPDATE = """HloModule m

%f (a: f32[9,8], b: f32[1,8], i: s32[]) -> f32[9,8] {
  %a = f32[9,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %double = f32[1,8]{1,0} add(%b, %b)
  ROOT %u = f32[9,8]{1,0} dynamic-update-slice(%a, %double, %i, %i)
}

ENTRY %main (a.1: f32[9,8], b.1: f32[1,8], i.1: s32[]) -> f32[9,8] {
  %a.1 = f32[9,8]{1,0} parameter(0)
  %b.1 = f32[1,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %slice.1 = f32[1,8]{1,0} dynamic-slice(%a.1, %i.1, %i.1), dynamic_slice_sizes={1,8}
  ROOT %fusion.1 = f32[9,8]{1,0} fusion(%a.1, %b.1, %i.1), kind=kLoop, calls=%f
}
"""


def test_an_update_in_place_moves_only_its_part():
  costs = costs_of(UPDATE)
  assert costs["fusion.1"].bytes == 32 + 32 + 4
  assert costs["slice.1"].bytes == 32 + 32 + 4 + 4


def test_slices_copied_between_memories():
  line = (
    "%s = ((f32[9,8]{1,0:T(8,128)}), f32[1,8]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%p), "
    "slice={[0:1], [0:8]}"
  )
  program = parse(entry("%p = f32[9,8]{1,0:T(8,128)} parameter(0)", line))
  main = program.computations["main"]
  assert traffic(program, main, main.instructions["s"]) == 32


def test_an_asynchronous_operation_costs_what_it_wraps():
  text = """HloModule m

%wrapped (p: f32[9,8]) -> f32[1,8] {
  %p = f32[9,8]{1,0:T(8,128)} parameter(0)
  ROOT %slice = f32[1,8]{1,0:T(8,128)S(1)} slice(%p), slice={[0:1], [0:8]}
}

ENTRY %main (a: f32[9,8]) -> f32[1,8] {
  %a = f32[9,8]{1,0:T(8,128)} parameter(0)
  %s = ((f32[9,8]{1,0:T(8,128)}), f32[1,8]{1,0:T(8,128)S(1)}, s32[]) async-start(%a), calls=%wrapped
  %u = ((f32[9,8]{1,0:T(8,128)}), f32[1,8]{1,0:T(8,128)S(1)}, s32[]) async-update(%s)
  ROOT %d = f32[1,8]{1,0:T(8,128)S(1)} async-done(%u)
}
"""
  costs = costs_of(text)
  assert list(costs) == ["s"]
  assert costs["s"].bytes == 32
  assert costs["s"].overlapped


def test_dots():
  left = "%l = f32[5,6,7]{2,1,0} parameter(0)"
  right = "%r = f32[5,7,3]{2,1,0} parameter(1)"
  dot = (
    "%d = f32[5,6,3]{2,1,0} dot(%l, %r), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
    "rhs_batch_dims={0}, rhs_contracting_dims={1}"
  )
  assert flops_of(left, right, dot).flops == 2 * 5 * 6 * 7 * 3


@pytest.mark.parametrize(
  ("call", "config"),
  [
    ("__onednn$matmul", ""),
    ("__cublas$gemm", '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}'),
  ],
)
def test_products_by_a_library(call: str, config: str):
  shape = "7,6" if config else "6,7"
  line = (
    f'%g = (f32[6,3]{{1,0}}, s8[64]{{0}}) custom-call(%l, %r), custom_call_target="{call}", '
    f"backend_config={config}"
  )
  left, right = f"%l = f32[{shape}]{{1,0}} parameter(0)", "%r = f32[7,3]{1,0} parameter(1)"
  assert flops_of(left, right, line).flops == 2 * 6 * 7 * 3


@pytest.mark.parametrize(
  ("left", "right", "result", "attributes", "multiplications"),
  [
    ("4,16,768", "768,32,1", "4,16,32", "window={size=1}, dim_labels=0bf_io0->0bf", 64 * 768 * 32),
    ("16,768", "768,32", "16,32", "dim_labels=bf_io->bf", 16 * 768 * 32),
    # A projection to 12 heads of 64, where the heads are places of a window over padding.
    (
      *("4,16,768,1", "12,64,768,1", "4,16,12,64"),
      "window={size=1x12 pad=0_0x11_11 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f",
      64 * 768 * 12 * 64,
    ),
    # Back from the heads: they are summed over.
    (
      *("4,16,12,64", "12,64,768,1", "4,16,768,1"),
      "window={size=1x12}, dim_labels=0b1f_1io0->0bf1",
      64 * 768 * 12 * 64,
    ),
    # A gradient of weights, over 4 rows of 16 tokens.
    (
      *("4,16,32", "4,16,768", "32,768,1"),
      "window={size=4}, dim_labels=0fb_0io->bf0",
      64 * 32 * 768,
    ),
    # A batch of 8 products as a strided window over holes: no place of it meets another's data.
    (
      *("5,3,8", "7,3,8", "5,7,8"),
      "window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=bf0_oi0->bf0",
      8 * 5 * 3 * 7,
    ),
    # A true convolution: 3 wide, padded by one place: the two ends miss one product each.
    (
      *("2,10,3", "3,3,5", "2,10,5"),
      "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
      2 * 3 * 5 * 28,
    ),
  ],
)
def test_convolutions(left: str, right: str, result: str, attributes: str, multiplications: int):
  assert convolution_flops(left, right, result, attributes) == 2 * multiplications


def splash(name: str, grid: str, shards: int = 1) -> Products:
  """Of rows of 1024 tokens, of which a device has the queries of a part."""
  own = 1024 // shards
  return flops_of(
    f"%g = s8[{grid}]{{2,1,0}} parameter(0)",
    f"%q = bf16[4,12,{own},64]{{3,2,1,0}} parameter(1)",
    "%k = bf16[4,3,1024,64]{3,2,1,0} parameter(2)",
    f"%{name}.1 = bf16[4,12,{own},64]{{3,2,1,0}} custom-call(%g, %g, %q, %k, %k), "
    'custom_call_target="tpu_custom_call"',
  )


@pytest.mark.parametrize(
  ("name", "count"),
  [
    ("splash_mha_fwd_segmented_residuals", 2),
    ("splash_mha_dq_no_residuals", 3),
    ("splash_mha_dkv_segmented_no_residuals", 4),
  ],
)
def test_causal_attention_is_half(name: str, count: int):
  """Of 1024 tokens in 4 blocks, 10 of 16 blocks are visited."""
  pairs = 1024 * 1024
  product = 2 * 4 * 12 * 64
  result = splash(name, "1,4,4")
  assert result == Products(count * product * pairs // 2, count * product * pairs * 10 // 16, 64)


def test_a_devices_part_of_a_row_is_half_of_its_pairs_too():
  """Of 1024 tokens in 8 blocks two devices visit 18 blocks each, of 32."""
  product = 2 * 2 * 4 * 12 * 64
  result = splash("splash_mha_fwd_segmented_residuals", "1,4,8", shards=2)
  assert result == Products(product * 512 * 1024 // 2, product * 512 * 1024 * 18 // 32, 64)
  in_window = splash("splash_mha_fwd_segmented_residuals", "1,4,3", shards=2)
  assert in_window.flops == product * 512 * 3 * 128


def test_a_fused_backward_kernel_gives_the_gradient_of_queries_in_parts():
  result = flops_of(
    "%g = s8[1,2,2]{2,1,0} parameter(0)",
    "%q = bf16[4,12,1024,64]{3,2,1,0} parameter(1)",
    "%splash_mha_dkv_no_residuals.1 = (f32[512,64]{1,0}, bf16[4,2,12,1024,64]{4,3,2,1,0}, "
    "bf16[4,12,1024,64]{3,2,1,0}, bf16[4,12,1024,64]{3,2,1,0}) custom-call(%g, %g, %q, %q, %q), "
    'custom_call_target="tpu_custom_call"',
  )
  pairs = 5 * 2 * 4 * 12 * 64 * 1024 * 1024
  assert result == Products(pairs // 2, pairs * 3 // 4, 64)


def test_attention_in_a_window_visits_a_narrower_grid():
  product = 2 * 4 * 12 * 64
  for grid in ("1,8,2", "1,2,8"):
    result = splash("splash_mha_fwd_residuals", grid)
    assert result == Products(2 * product * 1024 * 256, 2 * product * 1024 * 256, 64)


def test_a_kernel_with_a_stated_cost():
  line = (
    '%k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
    'backend_config={"cost_estimate":{"flops":"1000"}}'
  )
  assert flops_of("%x = f32[8]{0} parameter(0)", line).flops == 1000


def test_an_unknown_kernel_has_only_its_bytes():
  line = '%k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"'
  cost = costs_of(entry("%x = f32[8]{0} parameter(0)", line))["k"]
  assert (cost.flops, cost.bytes, cost.cycles) == (0, 64, None)


def loop(condition: str, start: str = "0", step: str = "1") -> str:
  return f"""HloModule m

%added (e: s32[], f: s32[]) -> s32[] {{
  %e = s32[] parameter(0)
  %f = s32[] parameter(1)
  ROOT %g = s32[] add(%f, %e)
}}

%body (c: (s32[], s32[])) -> (s32[], s32[]) {{
  %c = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[]) tuple(%next, %n)
}}

%inner (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}}

%test (d: (s32[], s32[])) -> pred[] {{
  %d = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%d), index=0
  %m = s32[] get-tuple-element(%d), index=1
  %five = s32[] constant(5)
  ROOT %r = pred[] {condition}
}}

ENTRY %main (trips: s32[]) -> (s32[], s32[]) {{
  %trips = s32[] parameter(0)
  %start = s32[] constant({start})
  %seven = s32[] constant(7)
  %init = (s32[], s32[]) tuple(%start, %seven)
  ROOT %w = (s32[], s32[]) while(%init), condition=%test, body=%body
}}
"""


@pytest.mark.parametrize(
  ("text", "trips"),
  [
    (loop("compare(%j, %five), direction=LT"), 5),
    (loop("compare(%j, %five), direction=LE"), 6),
    (loop("compare(%five, %j), direction=GT"), 5),
    (loop("compare(%j, %five), direction=LT", start="2"), 3),
    # A loop that was unrolled counts by twos.
    (loop("compare(%j, %five), direction=LT", step="2"), 3),
    (loop("compare(%j, %five), direction=LT").replace("add(%i, %one)", "add(%one, %i)"), 5),
    (loop("compare(%j, %m), direction=LT"), 7),
    (loop("compare(%j, %five), direction=NE"), 5),
    (loop("compare(%five, %j), direction=NE"), 5),
    (loop("compare(%j, %five), direction=LT", start="9"), 0),
    # Downwards; of unsigned numbers 2^32 - 1 is added.
    (loop("compare(%j, %five), direction=GT", start="9", step="-1"), 4),
    (loop("compare(%j, %five), direction=GE", start="9", step="-1"), 5),
    (loop("compare(%five, %j), direction=LT", start="9", step="-1"), 4),
    (loop("compare(%j, %five), direction=GT", start="10", step="-2"), 3),
    (loop("compare(%j, %five), direction=NE", start="9", step="-1"), 4),
    (loop("compare(%j, %five), direction=GT", start="9").replace("add(", "subtract("), 4),
    (loop("compare(%j, %five), direction=GT", "9", "4294967295").replace("s32", "u32"), 4),
    (loop("compare(%j, %five), direction=GT", start="3", step="-1"), 0),
    # What is added may be in a fusion, or be added in two steps.
    (
      loop("compare(%j, %five), direction=LT", step="2").replace(
        "add(%i, %one)", "fusion(%one, %i), kind=kLoop, calls=%added"
      ),
      3,
    ),
    (
      loop("compare(%j, %five), direction=LT").replace(
        "%next = s32[] add(%i, %one)",
        "%half = s32[] add(%i, %one)\n  %next = s32[] add(%one, %half)",
      ),
      3,
    ),
    (loop("fusion(%j, %five), kind=kLoop, calls=%inner"), 5),
    (loop("fusion(%j, %m), kind=kLoop, calls=%inner"), 7),
  ],
)
def test_trips(text: str, trips: int):
  cost = costs_of(text)["next"]
  assert (cost.count, cost.in_microbatch_loop, cost.unread_loops) == (trips, False, ())


@pytest.mark.parametrize(
  "text",
  [
    loop("compare(%j, %m), direction=LT").replace("%seven)", "%trips)"),
    # The bound changes from trip to trip.
    loop("compare(%j, %m), direction=LT").replace("tuple(%next, %n)", "tuple(%next, %next)"),
  ],
)
def test_trips_that_are_data(text: str):
  cost = costs_of(text)["next"]
  assert (cost.count, cost.in_microbatch_loop) == (1, True)


@pytest.mark.parametrize(
  "text",
  [
    # It ends by overflow alone, or never; it doubles; the condition is no comparison.
    loop("compare(%j, %five), direction=GT", start="9"),
    loop("compare(%j, %five), direction=LT", step="-1"),
    loop("compare(%j, %five), direction=LT", step="0"),
    loop("compare(%j, %five), direction=NE", step="2"),
    loop("compare(%j, %five), direction=LT").replace("add(", "multiply("),
    loop("and(%j, %five)"),
  ],
)
def test_loops_that_cannot_be_read_are_named_and_no_loop_over_microbatches(text: str):
  cost = costs_of(text.replace("body=%body", 'body=%body, metadata={op_name="jit(step)/while"}'))[
    "next"
  ]
  assert (cost.count, cost.in_microbatch_loop) == (1, False)
  assert cost.unread_loops == ("jit(step)/while",)


def test_of_a_conditional_the_larger_branch_counts():
  text = """HloModule m

%small (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %neg = f32[8,8]{1,0} negate(%a)
}

%large (b: f32[8,8]) -> f32[8,8] {
  %b = f32[8,8]{1,0} parameter(0)
  ROOT %mul = f32[8,8]{1,0} dot(%b, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: pred[], x: f32[8,8]) -> f32[8,8] {
  %p = pred[] parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  ROOT %c = f32[8,8]{1,0} conditional(%p, %x, %x), true_computation=%small, false_computation=%large
}
"""
  assert list(costs_of(text)) == ["mul"]
  # Without products, that which moves more.
  copies = "ROOT %mul = f32[8,8]{1,0} add(%b, %b)"
  text = (
    re.sub(r"ROOT %mul.*", copies, text)
    .replace("ROOT %neg", "ROOT %a2")
    .replace("negate(%a)", "bitcast(%a)")
  )
  assert list(costs_of(text)) == ["mul"]


def test_what_is_conditional_names_the_innermost_condition():
  text = """HloModule m

%none (a: f32[8]) -> f32[8] {
  ROOT %a = f32[8]{0} parameter(0)
}

%inner (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %deep = f32[8]{0} negate(%b)
}

%inner2 (d: f32[8]) -> f32[8] {
  %d = f32[8]{0} parameter(0)
  ROOT %deepest = f32[8]{0} negate(%d)
}

%outer (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  %p.2 = pred[] constant(true)
  %within = f32[8]{0} negate(%c)
  %unnamed = f32[8]{0} conditional(%p.2, %c, %c), true_computation=%inner, false_computation=%none
  ROOT %both = f32[8]{0} conditional(%p.2, %c, %c), true_computation=%inner2, false_computation=%none, metadata={op_name="step/out/cond/in/cond"}
}

ENTRY %main (p: pred[], x: f32[8]) -> f32[8] {
  %p = pred[] parameter(0)
  %x = f32[8]{0} parameter(1)
  %before = f32[8]{0} negate(%x)
  ROOT %r = f32[8]{0} conditional(%p, %x, %x), true_computation=%outer, false_computation=%none, metadata={op_name="step/out/cond"}
}
"""
  assert {name: cost.condition for name, cost in costs_of(text).items()} == {
    "before": "",
    "within": "step/out/cond",
    "deep": "step/out/cond",
    "deepest": "step/out/cond/in/cond",
  }


def test_what_this_machine_compiles():
  """The gradient of 3 layers in a loop whose trips are data, and one sum over devices after it."""
  mesh = Mesh(np.array(jax.devices()), ("data",))
  rows, whole = PartitionSpec("data"), PartitionSpec()

  def loss(weights, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0].sum()

  def local(weights, x, trips):
    def add(_, total):
      return total + jax.grad(loss)(weights, x * total.sum())

    return jax.lax.psum(jax.lax.fori_loop(0, trips, add, jnp.ones_like(weights)), "data")

  step = jax.shard_map(
    local, mesh=mesh, in_specs=(whole, rows, whole), out_specs=whole, check_vma=False
  )
  shapes = [(3, 32, 32), jnp.float32, whole], [(64, 32), jnp.float32, rows], [(), jnp.int32, whole]
  arguments = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    for shape, dtype, spec in shapes
  ]
  costs = program_costs(parse(jax.jit(step).lower(*arguments).compile().as_text() or ""))
  # Each layer multiplies once forward and twice backward: by its input and by its weights.
  product = 2 * (64 // 8) * 32 * 32
  assert sum(c.flops * c.count for c in costs if c.in_microbatch_loop) == 3 * 3 * product
  assert sum(c.flops * c.count for c in costs) == 3 * 3 * product
  results = [(c.in_microbatch_loop, c.collective.group_size) for c in costs if c.collective]
  assert results == [(False, 8)]
