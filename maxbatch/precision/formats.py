"""Floating-point formats as data: how many bits they have, and what they can hold."""

import dataclasses
from collections.abc import Mapping

from maxbatch.config.schema import PrecisionConfig


@dataclasses.dataclass(frozen=True)
class Format:
  """A binary floating-point format with a sign, laid out as IEEE 754 does it.

  The largest exponent means infinity or NaN, and there are subnormal numbers (gradual underflow).
  """

  name: str
  exponent_bits: int
  mantissa_bits: int
  """Those stored; one more is implied."""
  carrier: str
  """The numpy dtype of arrays that hold its values: its own, or a wider one where it is emulated."""
  bytes: int
  """Bytes of one element of such an array."""

  @property
  def is_emulated(self) -> bool:
    """Whether arrays of it have the dtype of another format."""
    return self.carrier != self.name

  @property
  def bits(self) -> int:
    """Bits of one number."""
    return 1 + self.exponent_bits + self.mantissa_bits

  @property
  def largest_exponent(self) -> int:
    """The exponent of the largest power of two that is finite; the exponents' bias too."""
    return 2 ** (self.exponent_bits - 1) - 1

  @property
  def smallest_exponent(self) -> int:
    """The exponent of the smallest normal number."""
    return 1 - self.largest_exponent

  @property
  def largest(self) -> float:
    """The largest finite number."""
    return (2 - 2.0**-self.mantissa_bits) * 2.0**self.largest_exponent

  @property
  def smallest_normal(self) -> float:
    """The smallest positive number with all of its significant bits."""
    return 2.0**self.smallest_exponent

  @property
  def smallest(self) -> float:
    """The smallest positive number; half of it, and less, is rounded to zero."""
    return 2.0 ** (self.smallest_exponent - self.mantissa_bits)


FLOAT32 = Format("float32", 8, 23, "float32", 4)
BFLOAT16 = Format("bfloat16", 8, 7, "bfloat16", 2)
FLOAT16 = Format("float16", 5, 10, "float16", 2)
CBFLOAT16 = Format("cbfloat16", 6, 9, "float32", 4)
"""Cerebras's: a wider range than float16's, by a bit taken from the mantissa. No chip that jax knows
has it: float32 arrays hold its values."""

FORMATS: Mapping[str, Format] = {
  each.name: each for each in (FLOAT32, BFLOAT16, FLOAT16, CBFLOAT16)
}


def compute_format(config: PrecisionConfig) -> Format:
  """Returns the format of weights in use and activations."""
  return FORMATS[config.precision if config.dtype == "auto" else config.dtype]
