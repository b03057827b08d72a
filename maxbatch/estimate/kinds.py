"""What an operation of a compiled program does: products, data moved, or something computed."""

from collections.abc import Iterator
from typing import Literal

from maxbatch.estimate.hlo import HloModule, Instruction

Kind = Literal["products", "kernels", "relayouts", "slices", "copies", "elementwise"]
"""products: matrix products, with what is fused with them. kernels: custom calls, such as attention's.
relayouts: transposes and copies into another layout, with casts. slices: parts taken out of arrays or
written into them. copies: asynchronous ones between memories. elementwise: the rest, reductions too."""

_PRODUCTS = ("dot", "convolution")
_ASYNCHRONOUS = ("copy-start", "slice-start", "async-start", "dynamic-slice-start")
_RELAYOUTS = ("copy", "transpose", "reshape")
_SLICES = (
  "dynamic-slice",
  "dynamic-update-slice",
  "slice",
  "concatenate",
  "pad",
  "gather",
  "scatter",
)
_NEUTRAL = (
  "parameter",
  "constant",
  "bitcast",
  "tuple",
  "get-tuple-element",
  "convert",
  "broadcast",
  "fusion",
  "call",
)


def kind_of(program: HloModule, one: Instruction) -> Kind:
  """The kind of an instruction, by all that it calls."""
  inside = list(_inside(program, one))
  opcodes = {each.opcode for each in inside if each.opcode not in _NEUTRAL}
  if opcodes & set(_PRODUCTS):
    return "products"
  if one.opcode in _ASYNCHRONOUS:
    return "copies"
  if one.opcode == "custom-call":
    return "kernels"
  # Numbers that say where a slice lies are no work.
  arrays = [each for each in inside if any(shape.elements > 1 for shape in each.shapes)]
  moved = {each.opcode for each in arrays} - set(_NEUTRAL)
  if moved and moved <= set(_RELAYOUTS):
    return "relayouts"
  if moved and moved <= {*_RELAYOUTS, *_SLICES}:
    return "slices"
  return "elementwise"


def _inside(program: HloModule, one: Instruction) -> Iterator[Instruction]:
  """The instruction, and all in the computations it calls."""
  yield one
  if one.opcode in ("fusion", "async-start", "call-start", "custom-call", "call"):
    for body in program.called_by(one):
      for each in body:
        yield from _inside(program, each)
