"""Memory of a GPU that XLA's compiler leaves out, because only the libraries know it on the device.

What CUDA, NCCL and the libraries hold for themselves lies outside of the share that jax takes
(`PREALLOCATED`), so it is in the capacity and not here.
"""

from collections.abc import Iterator, Mapping

from maxbatch.estimate.flops import products
from maxbatch.estimate.hlo import HloModule

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
