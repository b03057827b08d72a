"""Options and keys by the names that they had before: they work, and are said to be old."""

import pytest

from maxbatch import train, train_rl
from maxbatch.checkpoints.record import changed_settings
from maxbatch.command_line.arguments import parse
from maxbatch.config import schema
from maxbatch.config.find import config_path
from maxbatch.config.load import load_config, say_old_name
from maxbatch.errors import UserError


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


OLD = {"pipeline_stash": "pipeline_saved_activations", "gns_dwell_tokens": "gns_hold_tokens"}


def test_a_key_by_its_old_name_on_the_command_line(capsys):
  config = load_config(["config=base", "pipeline_stash=residuals", "gns_dwell_tokens=7"])
  assert (config.pipeline.pipeline_saved_activations, config.noise.gns_hold_tokens) == (
    "residuals",
    7,
  )
  assert capsys.readouterr().err == "".join(
    f"note: {old} is called {new} now; the old name still works\n" for old, new in OLD.items()
  )
  assert schema.old_names() == OLD


def test_a_key_by_its_old_name_in_a_file(tmp_path, capsys):
  (tmp_path / "my.yml").write_text("base_config: base\ngns_dwell_tokens: 7\n")
  (tmp_path / "next.yml").write_text("base_config: my.yml\ngns_hold_tokens: 8\n")
  assert load_config([f"config={tmp_path / 'my.yml'}"]).noise.gns_hold_tokens == 7
  assert load_config([f"config={tmp_path / 'next.yml'}"]).noise.gns_hold_tokens == 8
  # A run's config.yml of an older version gives every key.
  whole = config_path("base").read_text()
  (tmp_path / "config.yml").write_text(whole.replace("gns_hold_tokens", "gns_dwell_tokens"))
  assert load_config([f"config={tmp_path / 'config.yml'}"]).noise.gns_hold_tokens == -1
  assert capsys.readouterr().err.count("note: gns_dwell_tokens is called") == 1


def test_both_names_in_one_file_are_refused(tmp_path):
  file = tmp_path / "my.yml"
  file.write_text("base_config: base\ngns_dwell_tokens: 7\ngns_hold_tokens: 8\n")
  with pytest.raises(UserError) as caught:
    load_config([f"config={file}"])
  assert str(caught.value) == (
    f"{file}:2: gns_dwell_tokens is the old name of gns_hold_tokens, which {file}:3 gives too; keep "
    "gns_hold_tokens"
  )


def test_a_checkpoint_s_keys_are_compared_by_their_names_now():
  record = {"settings": {"gns_dwell_tokens": 7, "pipeline_stash": "input"}}
  assert changed_settings(
    record, {"gns_hold_tokens": 8, "pipeline_saved_activations": "input"}
  ) == {"gns_hold_tokens": "gns_hold_tokens: 7 → 8"}
