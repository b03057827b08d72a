"""A choice survives in a file under all it depends on, whole or not at all."""

import json
import os
import pathlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest

from maxbatch.tuning.remembered import RememberedChoice

KEY: dict[str, Any] = {
  "model": {"base_emb_dim": 128, "remat_policy": "full"},
  "sizes": [Fraction(1, 2), 1],
  "mesh": {"data": 8, "fsdp": 1},
  "device_memory_gb": 0.5,
  "versions": {"jax": "0.10.2", "libtpu": None},
}
CHOICE = {"micro_batch_size": "1/2", "why": "largest that fits"}
PROBES = [{"per_device": "1/2", "peak_bytes": 5}]


def memory(folder: pathlib.Path, depends_on: Mapping[str, Any] = KEY) -> RememberedChoice:
  return RememberedChoice(folder, "micro_batch_size", "auto", depends_on)


def remember(folder: pathlib.Path) -> pathlib.Path:
  memory(folder).write(CHOICE, PROBES)
  return memory(folder).file


def agreed(folder: pathlib.Path, *, retune: bool = False) -> tuple[dict[str, Any] | None, str]:
  """The choice, where 1/2 and 1 are allowed, and what is said."""
  said: list[str] = []
  result = memory(folder).agreed(("1/2", "1"), retune=retune, say=said.append)
  return result, "\n".join(said)


def test_a_choice_is_recalled_with_its_probes_beside_it(tmp_path):
  folder = tmp_path / "new" / "folder"
  assert memory(folder).recall() == (None, None)
  file = remember(folder)
  assert memory(folder).recall() == (CHOICE, None)
  assert json.loads(file.read_text())["probes"] == PROBES
  assert list(folder.iterdir()) == [file]


def test_people_can_read_it(tmp_path):
  text = remember(tmp_path).read_text()
  assert '    "base_emb_dim": 128' in text
  content = json.loads(text)
  assert list(content) == ["depends_on", "choice", "probes", "when"]
  assert content["when"].endswith("+00:00")


def changed() -> dict[str, dict[str, Any]]:
  """The key with one thing changed, by what it is."""
  keys = {name: {**KEY, name: "another"} for name in KEY}
  keys["inside"] = {**KEY, "model": {**KEY["model"], "remat_policy": "none"}}
  keys["one more"] = {**KEY, "dtype": "bfloat16"}
  keys["one less"] = {name: KEY[name] for name in KEY if name != "mesh"}
  keys["order of sizes"] = {**KEY, "sizes": [1, Fraction(1, 2)]}
  return keys


@pytest.mark.parametrize("name", changed())
def test_any_change_invalidates(tmp_path, name):
  remember(tmp_path)
  assert memory(tmp_path, changed()[name]).recall() == (None, None)
  assert memory(tmp_path).recall()[0] is not None


def test_the_order_of_keys_is_no_change(tmp_path):
  remember(tmp_path)
  assert memory(tmp_path, dict(reversed(KEY.items()))).recall()[0] is not None


def test_forgotten_is_gone(tmp_path):
  file = remember(tmp_path)
  assert agreed(tmp_path) == (CHOICE, "")
  assert agreed(tmp_path, retune=True) == (None, "")
  assert not file.exists()
  assert agreed(tmp_path, retune=True) == agreed(tmp_path) == (None, "")


@pytest.mark.parametrize("value", ["7", None, ["1"]])
def test_a_value_that_the_key_cannot_take_is_damaged(tmp_path, value):
  memory(tmp_path).write({"micro_batch_size": value}, [])
  damaged = f"micro_batch_size auto: {memory(tmp_path).file} has a damaged choice; measured again"
  assert agreed(tmp_path) == (None, damaged)


@pytest.mark.parametrize("value", [True, 1.0, {"1": 1}, [1], "1"])
def test_a_choice_of_another_type_is_damaged(tmp_path, value):
  memory(tmp_path).write({"micro_batch_size": value}, [])
  said: list[str] = []
  assert memory(tmp_path).agreed((1, 2), retune=False, say=said.append) is None
  assert "has a damaged choice" in said[0]


def test_a_pipe_in_place_of_the_file_is_said(tmp_path):
  file = memory(tmp_path).file
  os.mkfifo(file)
  assert memory(tmp_path).recall() == (None, f"{file} cannot be read: it is a pipe")
  remember(tmp_path)
  assert memory(tmp_path).recall()[0] is not None


def test_a_newer_choice_replaces_the_older(tmp_path):
  remember(tmp_path)
  memory(tmp_path).write({"micro_batch_size": "1"}, [])
  assert memory(tmp_path).recall() == ({"micro_batch_size": "1"}, None)


GOOD = {"depends_on": {}, "choice": {}, "probes": [], "when": ""}
DAMAGES = {
  '{"depends_on": {': "is no JSON",
  "": "is no JSON",
  "\udcff": "is no JSON",
  "[" * 100_000: "is no JSON",
  "[]": "is not a remembered choice",
  "{}": "lacks depends_on, choice, probes, when",
  json.dumps(GOOD | {"choice": 3}): "has a damaged choice",
  json.dumps(GOOD | {"probes": {}}): "has a damaged probes",
  json.dumps(GOOD): "depends on something else",
}


@pytest.mark.parametrize("content", DAMAGES)
def test_a_damaged_file_is_ignored_and_said(tmp_path, content):
  file = remember(tmp_path)
  file.write_bytes(content.encode(errors="surrogateescape"))
  assert memory(tmp_path).recall() == (None, f"{file} {DAMAGES[content]}")
  remember(tmp_path)
  assert memory(tmp_path).recall()[0] is not None


def test_what_cannot_be_read_is_said(tmp_path):
  file = memory(tmp_path).file
  file.mkdir()
  assert memory(tmp_path).recall() == (None, f"{file} cannot be read: Is a directory")


def test_a_write_that_breaks_off_leaves_the_file_before(tmp_path, monkeypatch):
  remember(tmp_path)

  def stop(*_: object) -> None:
    raise OSError("stopped before the rename")

  monkeypatch.setattr(os, "replace", stop)
  with pytest.raises(OSError, match="stopped"):
    memory(tmp_path).write({"micro_batch_size": "9"}, [])
  assert memory(tmp_path).recall() == (CHOICE, None)
