"""Options and keys by the names that they had before: they work, and are said to be old."""

import pytest

from maxbatch import train, train_rl
from maxbatch.command_line.arguments import parse, say_old_name


@pytest.fixture(autouse=True)
def _nothing_said_yet():
  say_old_name.cache_clear()


@pytest.mark.parametrize("command", [train.COMMAND, train_rl.COMMAND])
def test_an_option_by_its_old_name(command, capsys):
  assert parse(command, ["config=base", "--forget"]).own.retune
  assert capsys.readouterr().err == (
    "note: --forget is called --retune now; the old name still works\n"
  )
  assert parse(command, ["config=base", "--retune"]).own.retune
  assert not capsys.readouterr().err
