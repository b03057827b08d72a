"""Errors of XLA's own times of operations on GPUs, as its versions of jax 0.10.2 and 0.12 write them.

With xla_gpu_collect_cost_model_stats an instruction carries times by several models, of which "sol" has
measured tables of matrix products and collectives for Hopper and Blackwell. tests/test_gpu_compiler.py has
each error, so that a repaired compiler is noticed:

- Products of types outside of the table are too slow by the cube of the bytes of a result's element: 64
  times for bfloat16 summed in float32, 8 times for float16.
- A custom fusion without a product (a slice that a kernel or copy takes by its address) has a placeholder.
- cuDNN's attention, copies and some collectives have none; a kernel that does next to nothing takes a
  nanosecond.
"""

from collections.abc import Iterator

from maxbatch.estimate.hlo import Computation, HloModule, Instruction

_IN_TABLE = {("bf16", "bf16"), ("f32", "f32"), ("f8e4m3fn", "bf16"), ("f8e5m2", "bf16")}
"""Types of left operand and result of which products have a measured time."""
_CUSTOM_FUSION = '"kind":"__custom_fusion"'


def is_placeholder(one: Instruction) -> bool:
  """Returns whether the time that an instruction carries means nothing."""
  return _CUSTOM_FUSION in one.attributes


def overcharge(program: HloModule, within: Computation, one: Instruction) -> int:
  """Returns how many times too long the compiler's time of a product is; 1: it is right."""
  pairs = [
    (left.shapes[0].dtype, dot.shapes[0])
    for body, dot in _dots(program, within, one)
    if (left := body.operand(dot, 0)) is not None
  ]
  outside = [result for dtype, result in pairs if (dtype, result.dtype) not in _IN_TABLE]
  return max(((result.bytes // result.elements) ** 3 for result in outside), default=1)


def _dots(
  program: HloModule, within: Computation, one: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
  """Yields the products of an instruction, in what it calls too."""
  if one.opcode == "dot" or "__cublas$" in one.target:
    yield within, one
  for body in program.called_by(one):
    for inner in body:
      yield from _dots(program, body, inner)
