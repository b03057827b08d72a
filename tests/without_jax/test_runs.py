"""The list of runs: a line each in 80 columns, color on a terminal alone, and how to go on."""

import io
import json

import pytest
from written_runs import HOSTILE, write_run

from maxbatch import runs
from maxbatch.run_folder.history import glance_at


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


@pytest.fixture
def folder(tmp_path):
  write_run(tmp_path / "finished", 40)
  write_run(tmp_path / "a_run_with_a_name_longer_than_the_column" / "branch", 40)
  stopped = write_run(tmp_path / "stopped", 40, text=HOSTILE)
  lines = (stopped / "events.jsonl").read_text().splitlines()[:7]
  (stopped / "events.jsonl").write_text("\n".join(lines))
  (tmp_path / "new").mkdir()
  (tmp_path / "new" / "config.yml").write_text("steps: 3")
  (tmp_path / "no_run").mkdir()
  (tmp_path / "only_compiled").mkdir()
  (tmp_path / "only_compiled" / "compile_report.json").write_text('[{"devices": 8}]')
  return tmp_path


def test_a_line_for_each_run_and_how_to_go_on(folder, capsys):
  assert runs.main([str(folder)]) == 0
  table, _, rest = capsys.readouterr().out.partition("\n\n")
  assert table.splitlines() == [
    "run                    state               step    loss    eval   batch tokens/s",
    "…han_the_column/branch finished           40/40   2.249   2.174      32    8.19k",
    "finished               finished           40/40   2.249   2.174      32    8.19k",
    "new                    unknown                –       –       –       –        –",
    "only_compiled          compiled               –       –       –       –        –",
    "stopped                stopped            40/40   2.249   2.174      32    8.19k",
  ]
  assert max(map(len, table.splitlines())) <= 80
  first, command = rest.splitlines()
  assert first == "stopped stopped: after step 20, and saved"
  assert command.startswith("  python -m maxbatch.train config=base 'prompt=</script>")
  assert "\x1b" not in table + rest


@pytest.mark.parametrize("no_color", ["", "1"])
def test_color_is_for_terminals_and_can_be_refused(folder, monkeypatch, no_color):
  screen = Terminal()
  monkeypatch.setenv("NO_COLOR", no_color)
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.setattr("sys.stdout", screen)
  assert runs.main([str(folder / "finished")]) == 0
  shown = screen.getvalue()
  assert ("\x1b[32m finished" in shown) == (not no_color)
  assert shown.count("\x1b") == (0 if no_color else 4)


def test_a_folder_without_runs_is_named(tmp_path, capsys):
  assert runs.main([str(tmp_path)]) == 2
  assert f"{tmp_path}: no run found" in capsys.readouterr().err


def test_of_a_long_run_only_the_end_is_read(tmp_path):
  run = write_run(tmp_path / "long", 40)
  with (run / "metrics.jsonl").open("a") as file:
    for step in range(41, 5000):
      file.write(
        json.dumps({"step": step, "samples": 0, "tokens": 0, "loss": 1.0, "x" * 20: 0}) + "\n"
      )
  result = glance_at(run)
  assert result.metrics.last["step"] == 4999
  assert result.metrics.num_records < 3000
  assert not result.missing
