"""maxbatch COMMAND: one name for all commands, and the keys that a word leads to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_layers import COMMANDS as FILES

from maxbatch import __main__ as console
from maxbatch import keys

ROOT = Path(__file__).resolve().parents[2]


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
  code = console.main(arguments)
  out, err = capsys.readouterr()
  return code, out, err


def test_help_has_a_line_for_every_command(capsys):
  assert {*console.COMMANDS, "__main__"} == {*FILES}
  for asked in ("--help", "-h", "help"):
    code, out, _ = ran(capsys, asked)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(console.COMMANDS)
    assert all(len(line) <= 100 for line in lines)
  assert ran(capsys)[0] == 2


def test_a_typo_names_the_nearest_command(capsys):
  code, out, err = ran(capsys, "trian", "config=base")
  assert (code, out) == (2, "")
  assert err.startswith("error: there is no command 'trian'. Did you mean train? Commands: train, ")


def test_a_key_before_the_command_is_said_to_be_one(capsys):
  assert ran(capsys, "config=base")[2] == (
    "error: config=base is a key, and a command comes first; for example maxbatch train config=base\n"
  )


@pytest.mark.parametrize(
  ("given", "becomes"),
  [
    (["runs", "a b", "c"], ["maxbatch.runs", "a b", "c"]),
    (["help", "runs"], ["maxbatch.runs", "--help"]),
    (["help", "train", "batch"], ["maxbatch.train", "--help", "batch"]),
  ],
)
def test_a_command_becomes_its_module(given, becomes, monkeypatch):
  seen = list[list[str]]()
  monkeypatch.setattr(os, "execv", lambda path, words: seen.append([path, *words]))
  console.main(given)
  assert seen == [[sys.executable, sys.executable, "-m", *becomes]]


def test_help_starts_without_jax_and_numpy():
  program = """
import sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "flax", "optax", "numpy", "grain", "bokeh")))
from maxbatch.__main__ import main
main(["--help"])
"""
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
  )
  assert (done.returncode, done.stderr) == (0, "")
  assert "critical_batch" in done.stdout


def test_a_word_finds_keys_by_name_heading_and_meaning(capsys):
  assert keys.main(["ACCUMULATION"]) == 0
  out = capsys.readouterr().out
  assert "  gradient_accumulation_steps=" in out
  number = len(keys.found(["accumulation"]))
  assert out.splitlines()[-1] == f"{number} of {len(keys.documented_keys())} keys"
  # Some have it in their meaning alone.
  assert any("replica" not in one.key + one.heading for one in keys.found(["replica"]))
  assert {one.key for one in keys.found(["batch", "schedule"])} < {
    one.key for one in keys.found(["batch"])
  }


def test_a_word_that_no_key_has_names_the_nearest(capsys):
  assert keys.main(["learnin_rate"]) == 2
  assert "Did you mean learning_rate?" in capsys.readouterr().err
  assert keys.main([]) == 2
  assert "for example maxbatch keys accumulation" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("line", "offered"),
  [
    ("maxbatch critical", {"critical_batch"}),
    ("maxbatch train gns_d", {"gns_dry_run="}),
    ("maxbatch train config=base gns=", {"off", "norm", "all"}),
    ("maxbatch train packing=f", {"false"}),
  ],
)
def test_a_shell_completes_commands_keys_and_values(line, offered, tmp_path):
  pytest.importorskip("argcomplete")
  shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
  shell |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "offered"), "_ARGCOMPLETE_IFS": "\n"}
  shell |= {"_ARGCOMPLETE_COMP_WORDBREAKS": " =:"}
  command = [sys.executable, "-m", "maxbatch"]
  subprocess.run(command, env=os.environ | shell, cwd=ROOT, capture_output=True, check=False)
  assert set((tmp_path / "offered").read_text().split("\n")) == offered
