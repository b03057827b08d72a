"""A stream that says it is a terminal, in place of the standard output."""

import io

import pytest


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
  stream = Terminal()
  monkeypatch.setattr("sys.stdout", stream)
  return stream
