"""The first and last screens of the commands, in 80 columns; in color only where a person looks."""

import re

import pytest
from support import SMALLEST
from terminals import Terminal, on_terminal

from maxbatch import train, train_rl
from maxbatch.command_line.screen import for_screen
from maxbatch.plan import main as plan

COLUMNS = 80
ESCAPE = re.compile(r"\x1b\[\d*m")
SMALL = [f"{key}={value}" for key, value in SMALLEST.items()]
COMMANDS = {
  "plan": (plan, ["config=base"]),
  "plan of rollouts": (plan, ["config=configs/post_train/rl.yml"]),
  "validate": (train.main, ["config=base", "validate_only=true"]),
  "validate rollouts": (
    train_rl.main,
    ["config=configs/post_train/rl.yml", "validate_only=true", "num_simulated_devices=8"],
  ),
  "compile": (train.main, ["config=base", "compile_only=true", *SMALL]),
  "train": (train.main, ["config=base", *SMALL, "steps=2", "generate_length=4"]),
}


def on_screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
  """A terminal in the place of standard output."""
  terminal = on_terminal(monkeypatch)
  monkeypatch.setenv("COLUMNS", str(COLUMNS))
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.delenv("NO_COLOR", raising=False)
  return terminal


def lines_of(text: str) -> list[str]:
  """What stays on the screen, without colors."""
  return [ESCAPE.sub("", line.rpartition("\r")[2]) for line in text.split("\n")]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_person_sees_fits_the_screen(name, tmp_path, monkeypatch):
  terminal = on_screen(monkeypatch)
  main, arguments = COMMANDS[name]
  if main is not plan:
    arguments = [*arguments, f"base_output_directory={tmp_path}"]
  assert main(arguments) == 0
  text = terminal.getvalue()
  # A path is never broken.
  long = [line for line in lines_of(text) if len(line) > COLUMNS and str(tmp_path) not in line]
  assert not long
  assert "\x1b[1m" in text or "\x1b[32m" in text
  assert "\x1b" not in ESCAPE.sub("", text)


@pytest.mark.parametrize("name", ["plan", "validate"])
def test_where_nobody_looks_lines_are_whole_and_plain(name, tmp_path, capsys):
  main, arguments = COMMANDS[name]
  main([*arguments, f"base_output_directory={tmp_path}"])
  assert "\x1b" not in capsys.readouterr().out


def test_a_long_line_goes_on_below_its_second_column(monkeypatch):
  on_screen(monkeypatch)
  text = "Data    " + "words " * 20 + "/a/path\nHeading\n  below\nA sentence."
  assert lines_of(for_screen(text)) == [
    "Data    " + " ".join(["words"] * 12),
    "        " + " ".join(["words"] * 8) + " /a/path",
    "Heading",
    "  below",
    "A sentence.",
  ]
  assert for_screen(text).startswith("\x1b[1mData\x1b[0m")
  assert "\x1b[1mHeading\x1b[0m\n" in for_screen(text)
  monkeypatch.setenv("NO_COLOR", "1")
  assert "\x1b" not in for_screen(text)
