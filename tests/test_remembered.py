"""A choice survives in a file under all it depends on, whole or not at all."""

import json
import os
from fractions import Fraction
from typing import Any

import pytest

from maxbatch.tuning.remembered import file_of, forget, recall, remember

KEY: dict[str, Any] = {
  "model": {"base_emb_dim": 128, "remat_policy": "full"},
  "sizes": [Fraction(1, 2), 1],
  "mesh": {"data": 8, "fsdp": 1},
  "device_memory_gb": 0.5,
  "versions": {"jax": "0.10.2", "libtpu": None},
}
CHOICE = {"micro_batch_size": "1/2", "why": "largest that fits"}
PROBES = [{"per_device": "1/2", "peak_bytes": 5}]


def test_a_choice_is_recalled_with_its_probes(tmp_path):
  folder = tmp_path / "new" / "folder"
  assert recall(folder, KEY) == (None, None)
  file = remember(folder, KEY, CHOICE, PROBES)
  assert file == file_of(folder, KEY)
  found, problem = recall(folder, KEY)
  assert problem is None
  assert found is not None
  assert (found.choice, found.probes) == (CHOICE, PROBES)
  assert list(folder.iterdir()) == [file]


def test_people_can_read_it(tmp_path):
  text = remember(tmp_path, KEY, CHOICE, PROBES).read_text()
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
  remember(tmp_path, KEY, CHOICE, PROBES)
  assert recall(tmp_path, changed()[name]) == (None, None)
  assert not forget(tmp_path, changed()[name])
  assert recall(tmp_path, KEY)[0] is not None


def test_the_order_of_keys_is_no_change(tmp_path):
  remember(tmp_path, KEY, CHOICE, PROBES)
  assert recall(tmp_path, dict(reversed(KEY.items())))[0] is not None


def test_forgotten_is_gone(tmp_path):
  remember(tmp_path, KEY, CHOICE, PROBES)
  assert forget(tmp_path, KEY)
  assert recall(tmp_path, KEY) == (None, None)
  assert not forget(tmp_path, KEY)


def test_a_newer_choice_replaces_the_older(tmp_path):
  remember(tmp_path, KEY, CHOICE, PROBES)
  remember(tmp_path, KEY, {"micro_batch_size": "1"}, [])
  found, _ = recall(tmp_path, KEY)
  assert found is not None
  assert found.choice == {"micro_batch_size": "1"}


GOOD = {"depends_on": {}, "choice": {}, "probes": [], "when": ""}
DAMAGES = {
  '{"depends_on": {': "is no JSON",
  "": "is no JSON",
  "\udcff": "is no JSON",
  "[]": "is not a remembered choice",
  "{}": "lacks depends_on, choice, probes, when",
  json.dumps(GOOD | {"choice": 3}): "has a damaged choice",
  json.dumps(GOOD | {"probes": {}}): "has a damaged probes",
  json.dumps(GOOD): "depends on something else",
}


@pytest.mark.parametrize("content", DAMAGES)
def test_a_damaged_file_is_ignored_and_said(tmp_path, content):
  file = remember(tmp_path, KEY, CHOICE, PROBES)
  file.write_bytes(content.encode(errors="surrogateescape"))
  assert recall(tmp_path, KEY) == (None, f"{file} {DAMAGES[content]}")
  remember(tmp_path, KEY, CHOICE, PROBES)
  assert recall(tmp_path, KEY)[0] is not None


def test_what_cannot_be_read_is_said(tmp_path):
  file_of(tmp_path, KEY).mkdir()
  found, problem = recall(tmp_path, KEY)
  assert found is None
  assert problem == f"{file_of(tmp_path, KEY)} cannot be read: Is a directory"


def test_a_write_that_breaks_off_leaves_the_file_before(tmp_path, monkeypatch):
  remember(tmp_path, KEY, CHOICE, PROBES)

  def stop(*_: object) -> None:
    raise OSError("stopped before the rename")

  monkeypatch.setattr(os, "replace", stop)
  with pytest.raises(OSError, match="stopped"):
    remember(tmp_path, KEY, {"micro_batch_size": "9"}, [])
  found, problem = recall(tmp_path, KEY)
  assert problem is None
  assert found is not None
  assert found.choice == CHOICE
