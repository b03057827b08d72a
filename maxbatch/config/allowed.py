"""The values that keys may have, beside their Python types: the types that the sections are made of."""

import dataclasses
import re
from fractions import Fraction
from typing import Annotated, Literal


@dataclasses.dataclass(frozen=True)
class Range:
  """The closed interval a number must lie in; `also` names one value allowed outside it."""

  low: float | None = None
  high: float | None = None
  also: float | None = None
  offers_also: bool = True
  """Whether a message may offer `also`, which some keys need another key for."""
  limit: float | None = None
  """What a machine can hold: said only to who exceeds it."""
  off: str = ""
  """The word that is meant by 0 and less, if there is one."""

  def holds(self, value: float | Fraction) -> bool:
    """Returns whether `value` is allowed."""
    if self.also is not None and value == self.also:
      return True
    if self.exceeded_by(value):
      return False
    return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

  def exceeded_by(self, value: float | Fraction) -> bool:
    """Returns whether `value` is more than a machine can hold."""
    return self.limit is not None and value > self.limit

  def __str__(self) -> str:
    low = "" if self.low is None else f"at least {_digits(self.low)}"
    high = "" if self.high is None else f"at most {_digits(self.high)}"
    text = " and ".join(part for part in (low, high) if part)
    return text if self.also is None else f"{text}, or {_digits(self.also)}"


def _digits(edge: float) -> str:
  """Returns a whole number in full, else as short as it goes."""
  return str(edge) if isinstance(edge, int) else f"{edge:g}"


@dataclasses.dataclass(frozen=True)
class FileName:
  """A text that names a file or folder, or files by a glob: no longer than file systems take."""

  words: str = "a name that a file system can hold"

  def holds(self, value: str) -> bool:
    """Returns whether `value` is such a name."""
    encoded = value.encode(errors="replace")
    return len(encoded) <= 4000 and all(len(part) <= 255 for part in encoded.split(b"/"))

  def nearest(self, value: str) -> str:
    """Returns the beginning of `value`."""
    return "/".join(part[:40] for part in value[:80].split("/"))


@dataclasses.dataclass(frozen=True)
class RelativePath(FileName):
  """A text that names a folder inside another one: no step upwards, and no control character."""

  words: str = "the name of a folder inside another one, without .. and control characters"

  def holds(self, value: str) -> bool:
    """Returns whether `value` is such a name."""
    parts = value.split("/")
    short = all(len(part.encode(errors="replace")) <= 200 for part in parts) and len(parts) <= 8
    return short and value.isprintable() and not {"", ".", ".."} & set(parts)

  def nearest(self, value: str) -> str:
    """Returns what is left of `value` without what does not work in it."""
    printable = "".join(char if char.isprintable() else "_" for char in value)
    parts = [part[:40] for part in printable.split("/") if part not in ("", ".", "..")]
    return "/".join(parts[:8]) or "my_run"


@dataclasses.dataclass(frozen=True)
class Address(FileName):
  """A text that names a port of a host, or nothing."""

  words: str = "HOST:PORT"
  longest: int = 253
  """Characters of a host's name."""

  def holds(self, value: str) -> bool:
    """Returns whether `value` is such an address."""
    host, _, port = value.rpartition(":")
    numbered = port.isdecimal() and len(port) <= 5 and 0 < int(port) < 2**16
    return not value or (self._is_host(host) and numbered)

  def nearest(self, value: str) -> str:
    """Returns `value` with a port."""
    host = value.partition(":")[0]
    return f"{host if self._is_host(host) else 'localhost'}:1234"

  def _is_host(self, text: str) -> bool:
    name = re.fullmatch(r"[\w.-]+|\[[\da-f:.]+\]", text, re.ASCII | re.IGNORECASE)
    return name is not None and len(text) <= self.longest


@dataclasses.dataclass(frozen=True)
class Registered:
  """A text that names something registered, or `module:attribute` of the user's (registry.py)."""


@dataclasses.dataclass(frozen=True)
class Example:
  """A value that works, for messages, where none can be made of what is wrong."""

  text: str


# A size, a count or an index on a device is an int32.
INT32 = 2**31 - 1
# JSON and floats count exactly so far: samples and tokens of whole runs.
EXACT = 2**53
# No machine has more, and a plan lists the hosts one by one.
DEVICES = 2**20
# More does not fit in a float32.
FLOAT32 = 3e38

Name = Annotated[str, Registered()]
Path = Annotated[str, FileName()]
Positive = Annotated[int, Range(low=1, limit=INT32)]
NonNegative = Annotated[int, Range(low=0, limit=INT32)]
PositiveOrUnset = Annotated[int, Range(low=1, limit=INT32, also=-1)]
Budget = Annotated[int, Range(low=1, limit=EXACT, also=-1, offers_also=False)]
CountOrUnset = Annotated[int, Range(low=1, limit=EXACT, also=-1)]
CountOrZeroOrUnset = Annotated[int, Range(low=0, limit=EXACT, also=-1)]
Exact = Annotated[Fraction, Range(low=0, limit=INT32)]
ExactOrUnset = Annotated[Fraction, Range(low=0, limit=INT32, also=-1)]
Weight = Annotated[Fraction, Range(low=0, limit=EXACT)]
DevicesOrUnset = Annotated[int, Range(low=1, limit=DEVICES, also=-1)]
DevicesOrNone = Annotated[int, Range(low=0, limit=DEVICES)]
Hosts = Annotated[int, Range(low=1, limit=DEVICES)]
Seconds = Annotated[int, Range(low=1, limit=1_000_000)]
Seed = Annotated[int, Range(low=0, high=2**32 - 1)]
"""jax takes the last 32 bits of a seed: beyond them another seed would give the same numbers."""
Probability = Annotated[float, Range(low=0, high=1)]
NucleusProbability = Annotated[float, Range(low=0.001, high=1)]
NonNegativeFloat = Annotated[float, Range(low=0, limit=FLOAT32)]
FloatFormat = Literal["float32", "bfloat16", "float16", "cbfloat16"]
Scale = Annotated[float, Range(low=2.0**-24, high=2.0**40)]
LossScale = Annotated[float, Range(low=2.0**-24, high=2.0**40, off="none")]
"""A scale of losses: powers of two are exact."""
