"""HLO text as a program: shapes, calls, estimates, groups."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from maxbatch.estimate.hlo import ArrayShape, HloModule, Instruction, parse, parse_groups

TPU_STEP = (pathlib.Path(__file__).parent / "data" / "tpu_step.hlo").read_text()


@pytest.fixture(scope="module")
def program() -> HloModule:
  return parse(TPU_STEP)


def instruction(program: HloModule, name: str) -> Instruction:
  return next(c.instructions[name] for c in program.computations.values() if name in c.instructions)


def module(line: str) -> str:
  return f"HloModule m, num_partitions=8\n\nENTRY %main () -> f32[] {{\n  ROOT {line}\n}}\n"


def test_computations_and_the_entry(program: HloModule):
  assert program.entry == "main.1"
  assert program.num_devices == 4
  assert program.computations["layers_body"].root == "tuple.2"
  assert program.computations["add.1"].parameters()[1].name == "y.1"
  assert len(program.computations) == 12


def test_an_instruction(program: HloModule):
  weights = instruction(program, "weights.1")
  assert weights.opcode == "fusion"
  assert weights.shapes == (ArrayShape("bf16", (32, 256), space=1),)
  assert weights.bytes == 32 * 256 * 2
  assert weights.operands == ("stack.1", "layer.1")
  assert weights.computations == ("slice_of_layer",)
  assert weights.op_name == "jit(step)/while/body/jvp()/while/body/dynamic_slice"
  assert weights.cycles == 1500


def test_results_in_a_tuple_with_comments_between(program: HloModule):
  fusion = instruction(program, "fusion.1")
  assert [shape.dims for shape in fusion.shapes] == [(4, 16, 256), (128, 256)]
  assert fusion.operands == ("shard.1", "whole.1", "hidden.1", "whole.1")


def test_a_loop_names_condition_and_body(program: HloModule):
  loop = instruction(program, "while.1")
  assert loop.called == {"condition": ("layers_condition",), "body": ("layers_body",)}
  assert loop.known_trip_count is None
  assert instruction(program, "sum.2").index == 5


def test_a_kernel_whose_metadata_spans_lines(program: HloModule):
  """And whose body is text with parentheses that never close."""
  kernel = instruction(program, "splash_mha_fwd_residuals.1")
  assert kernel.target == "tpu_custom_call"
  assert kernel.op_name.endswith("splash_mha_fwd_residuals/pallas_call")
  assert kernel.cost_estimate == {}


def test_every_name_is_known(program: HloModule):
  for computation in program.computations.values():
    for one in computation:
      assert set(one.operands) <= computation.instructions.keys()
      assert set(one.computations) <= program.computations.keys()


def test_a_kernel_that_states_its_cost():
  line = (
    '%k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config='
    '{"custom_call_config":{"cost_estimate":{"flops":"1000","bytes_accessed":"64"}}}'
  )
  kernel = instruction(parse(module(line)), "k")
  assert kernel.cost_estimate == {"flops": 1000, "bytes_accessed": 64}


def test_branches_and_known_trips():
  line = (
    "%w = s32[] while(%t), condition=%c, body=%b, "
    'backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0"}}'
  )
  assert instruction(parse(module(line)), "w").known_trip_count == 12
  line = "%c = f32[] conditional(%i, %x, %y), branch_computations={%one, %two.2}"
  assert instruction(parse(module(line)), "c").computations == ("one", "two.2")


def test_elements_of_a_tuple_that_operands_name():
  """%pair#1 is element 1 of %pair, %pair#1#0 an element of that; so writes jax 0.12."""
  text = """HloModule m

ENTRY %main (pair: (s32[], ((f32[8,128], pred[]), s32[4]), bf16[2])) -> f32[8,128] {
  %pair = (s32[]{:T(128)}, ((f32[8,128]{1,0:T(8,128)S(1)}, pred[]), /*index=1*/s32[4]{0}), /*index=2*/bf16[2]) parameter(0)
  %sum = f32[8,128]{1,0} add(%pair#1#0#0, %pair#1#0#0), metadata={op_name="a#1"}
  ROOT %t = (f32[8,128]{1,0}, s32[], bf16[2]) tuple(%sum, %pair#0, %pair#2)
}
"""
  main = parse(text).computations["main"]
  assert main.instructions["sum"].operands == ("pair#1#0#0",) * 2
  assert main.instructions["t"].operands == ("sum", "pair#0", "pair#2")
  element = main.instructions["pair#1#0#0"]
  assert (element.opcode, element.operands, element.index) == (
    "get-tuple-element",
    ("pair#1#0",),
    0,
  )
  assert element.shapes == (ArrayShape("f32", (8, 128), space=1),)
  assert main.instructions["pair#2"].shapes == (ArrayShape("bf16", (2,)),)
  assert main.root == "t"
  with pytest.raises(ValueError, match="there is no element 3 of %pair"):
    parse(text.replace("%pair#2", "%pair#3"))


@pytest.mark.parametrize(
  ("dtype", "dims", "expected"),
  [
    ("f32", "2,3", 24),
    ("bf16", "", 2),
    ("pred", "5", 5),
    ("s4", "7", 4),
    ("f8e4m3fn", "3", 3),
    ("c64", "2", 16),
    ("token", "", 0),
    ("s32", "<=6", 24),
  ],
)
def test_bytes_of_a_shape(dtype: str, dims: str, expected: int):
  assert instruction(parse(module(f"%x = {dtype}[{dims}] iota()")), "x").bytes == expected


@pytest.mark.parametrize(
  ("attributes", "expected"),
  [
    ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
    ("replica_groups={}, to_apply=%add", (tuple(range(8)),)),
    ("to_apply=%add", (tuple(range(8)),)),
    ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("replica_groups=mesh['x'=8] {'x'}", (tuple(range(8)),)),
    ("replica_groups=mesh['x'=2,'y'=4] {'x'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
    ("replica_groups=mesh['x'=2,'y'=4] {'y'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ("replica_groups=mesh['x'=8] {'x':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    (
      "replica_groups=mesh['x'=4,'y'=1,'z'=2], device_ids=([2,4]T(1,0)) {'x'}",
      ((0, 1, 2, 3), (4, 5, 6, 7)),
    ),
    ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
  ],
)
def test_groups(attributes: str, expected: tuple[tuple[int, ...], ...]):
  assert sorted(parse_groups(f", channel_id=1, {attributes}, x=1", 8).groups) == sorted(expected)


def test_whether_groups_cross_slices():
  within = parse_groups("replica_groups=[2,4]<=[8]", 8)
  across = parse_groups("replica_groups=[4,2]<=[2,4]T(1,0)", 8)
  assert (within.size, across.size) == (4, 2)
  assert not within.crosses(devices_per_slice=4)
  assert across.crosses(devices_per_slice=4)
  assert within.crosses(devices_per_slice=2)


def test_text_that_is_no_program():
  with pytest.raises(ValueError, match="no ENTRY computation"):
    parse("HloModule empty\n")


def test_what_this_machine_compiles():
  @jax.jit
  def product(x, y):
    return jnp.tanh(x @ y)

  x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
  y = jax.ShapeDtypeStruct((16, 4), jnp.float32)
  program = parse(product.lower(x, y).compile().as_text() or "")
  entry = program.computations[program.entry]
  assert entry.instructions[entry.root].shapes[0].dims == (8, 4)
  assert program.num_devices == 1
