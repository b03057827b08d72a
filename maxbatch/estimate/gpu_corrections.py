"""What XLA's compiler leaves out or gets wrong of a GPU: memory, and times of operations.

Memory is left out because only the libraries know it on the device. What CUDA, NCCL and the libraries hold for themselves lies outside of the share that jax takes
(`PREALLOCATED`), so it is in the capacity and not here.

Errors of its times, as the versions of jax 0.10.2 and 0.12 write them: with
xla_gpu_collect_cost_model_stats an instruction carries times by several models, of which "sol" has
measured tables of matrix products and collectives for Hopper and Blackwell. tests/test_gpu_compiler.py
has each error, so that a repaired compiler is noticed:

- Products of types outside of the table are too slow by the cube of the bytes of a result's element: 64
  times for bfloat16 summed in float32, 8 times for float16.
- A custom fusion without a product (a slice that a kernel or copy takes by its address) has a placeholder.
- cuDNN's attention, copies and some collectives have none; a kernel that does next to nothing takes a
  nanosecond.
"""

from collections.abc import Iterator, Mapping

from maxbatch.estimate.flops import products
from maxbatch.estimate.hlo import Computation, HloModule, Instruction

_CUBLAS = 32 * 2**20
"""What cuBLAS wants on Hopper and later, by its documentation; the compiler counts 4 MiB, and none for the
products that it gives to Triton before a device has tried both."""
_FRAGMENTS = 0.01
"""Assumed: gaps between arrays of the state and temporaries of the step, which the allocator places."""


def left_out(program: HloModule, peak: int) -> Mapping[str, int]:
  """Returns bytes by what they are for.

  Args:
    peak: as the compiler says.
  """
  return {
    "workspace of attention": max(_attention(program), default=0),
    "workspace of cuBLAS": _CUBLAS,
    "fragmentation": int(_FRAGMENTS * peak),
  }


def _attention(program: HloModule) -> Iterator[int]:
  """Yields what cuDNN's backward kernels keep: the queries' gradient in float32, and a sum for each row of
  the logits."""
  for body in program.computations.values():
    for one in body:
      work = products(program, body, one) if "__cudnn$fmha" in one.target else None
      queries = body.operand(one, 0)
      if work is not None and work.backward and queries is not None:
        elements = queries.shapes[0].elements
        yield 4 * elements + 4 * elements // work.width


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
