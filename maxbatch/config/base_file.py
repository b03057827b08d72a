"""configs/base.yml, as scripts/write_base_config.py writes it from the declarations of the keys."""

import dataclasses
import json
from collections.abc import Iterator
from fractions import Fraction

from maxbatch.config.declare import declared, helps
from maxbatch.config.schema import sections
from maxbatch.config.value import plain

_WIDTH = 99
_OPENING = """\
# Every key of a run with its default, what it is and why you would change it.
# Override on the command line as key=value, or in your own file with `base_config: base`.
# Written by scripts/write_base_config.py from maxbatch/config/keys/.
"""


@dataclasses.dataclass(frozen=True)
class Documented:
  """A key as base.yml and --help explain it."""

  key: str
  default: str
  """As it is written in YAML."""
  type: object
  help: str
  heading: str


def documented_keys() -> list[Documented]:
  """Returns every key that maxbatch declares, in the order of base.yml."""
  results: list[Documented] = []
  for section in sections().values():
    results += documented(section, section.heading)
  return results


def documented(cls: type, heading: str) -> Iterator[Documented]:
  """Yields the keys that a dataclass declares."""
  for key, one in declared(cls).items():
    yield Documented(key, _written(one.default), one.type, helps(cls).get(key, ""), heading)


def base_file() -> str:
  """Returns the text of base.yml."""
  text, heading = _OPENING, ""
  for one in documented_keys():
    if one.heading != heading:
      heading = one.heading
      text += f"\n# --- {heading} ".ljust(_WIDTH + 1, "-") + "\n"
    text += f"# {one.help}\n{one.key}: {one.default}\n"
  return text


def _written(value: object) -> str:
  """Returns a default in YAML of one line, which YAML 1.1 reads as of the same type."""
  if isinstance(value, tuple):
    return f"[{', '.join(map(_written, value))}]"
  if isinstance(value, str | bool):
    return json.dumps(value, ensure_ascii=False)
  if isinstance(value, float) and value != -1:
    digits, exponent = f"{value:e}".split("e")
    is_short = 0 < abs(value) < 0.01 and float(digits).is_integer()
    return f"{float(digits)}e{int(exponent)}" if is_short else repr(value)
  return str(plain(value)) if isinstance(value, Fraction) else f"{value:.0f}"
