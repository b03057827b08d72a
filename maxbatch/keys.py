"""maxbatch keys WORD …: the configuration keys that a word leads to."""

import dataclasses
import itertools
import sys
from collections.abc import Sequence

from maxbatch.command_line.arguments import Arguments, Command, key_lines
from maxbatch.command_line.run import run_command
from maxbatch.command_line.signals import leave
from maxbatch.config.find import did_you_mean
from maxbatch.config.schema import Documented, documented_keys
from maxbatch.errors import UserError


@dataclasses.dataclass(frozen=True)
class KeysArguments:
  """There are only the words."""


COMMAND = Command(
  "keys",
  """\
Prints the configuration keys whose names, headings or meanings have every WORD, with type, default
and meaning.
""",
  KeysArguments,
  usage="WORD [WORD ...]",
  takes_keys=False,
)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit code."""
  return run_command(COMMAND, arguments, _print_found)


def found(words: Sequence[str]) -> list[Documented]:
  """Returns the keys that have every word, in whatever case, those first that have all in the name."""
  lowered = [word.lower() for word in words]

  def has(text: str) -> bool:
    return all(word in text.lower() for word in lowered)

  keys = [one for one in documented_keys() if has(f"{one.key} {one.heading} {one.help}")]
  return sorted(keys, key=lambda one: not has(one.key))


def _print_found(arguments: Arguments[KeysArguments]) -> None:
  words, known = arguments.configuration, [one.key for one in documented_keys()]
  if not words:
    raise UserError("no word is given; for example maxbatch keys accumulation")
  keys = found(words)
  if not keys:
    raise UserError(
      f"no key has {' and '.join(map(repr, words))} in its name or meaning."
      f"{did_you_mean('_'.join(words), known)} For example maxbatch keys accumulation"
    )
  for heading, entries in itertools.groupby(keys, key=lambda one: one.heading):
    print("\n".join([heading.capitalize(), *itertools.chain(*map(key_lines, entries)), ""]))
  print(f"{len(keys)} of {len(known)} keys")


if __name__ == "__main__":
  leave(main(sys.argv[1:]))
