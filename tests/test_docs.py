"""The documentation shows what the commands print."""

import re
import shlex
from pathlib import Path

import pytest

from maxbatch.plan import main

PAGE = Path(__file__).resolve().parent.parent / "docs" / "batch_size.md"
SHOWN = re.findall(
  r"```console\n\$ python -m maxbatch\.plan (.*)\n((?:.*\n)*?)```", PAGE.read_text()
)


def selected(text: str, grep: str) -> str:
  """What `grep` leaves of `text`: with -A n, from the first line found on at most n more."""
  words = shlex.split(grep)
  lines, pattern = text.splitlines(keepends=True), words[-1]
  if "-A" not in words:
    return "".join(line for line in lines if re.search(pattern, line))
  first = next(n for n, line in enumerate(lines) if re.search(pattern, line))
  return "".join(lines[first : first + int(words[words.index("-A") + 1]) + 1])


@pytest.mark.parametrize("command", [command for command, _ in SHOWN])
def test_a_command_prints_what_the_page_shows(command, capsys):
  arguments, _, grep = command.partition(" | grep ")
  main(shlex.split(arguments))
  printed = capsys.readouterr()
  text = printed.out + printed.err
  assert (selected(text, grep) if grep else text) == dict(SHOWN)[command]


def test_every_block_of_the_page_is_run():
  assert len(SHOWN) == PAGE.read_text().count("```console") > 10
