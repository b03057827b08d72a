"""Names of registered things: found, or refused the same way everywhere."""

import dataclasses
from pathlib import Path

import pytest

from maxbatch.config.load import load_config
from maxbatch.config.registry import registered
from maxbatch.errors import UserError
from maxbatch.models.registry import build_model


def test_a_registered_name_is_found():
  assert registered("opt_type", "sgd", {"adamw": 1, "sgd": 2}) == 2


def test_a_name_that_resembles_nothing_gets_the_list():
  with pytest.raises(UserError) as caught:
    registered("opt_type", "zzz", {"adamw": 1, "sgd": 2})
  assert str(caught.value) == "opt_type=zzz: there is no such opt_type. Known: adamw, sgd."


def test_an_unknown_model_is_refused_with_the_nearest_name():
  model = load_config(["config=base"]).model
  with pytest.raises(UserError) as caught:
    build_model(dataclasses.replace(model, decoder_block="Transfomer"), 16)
  assert str(caught.value) == (
    "decoder_block=Transfomer: there is no such decoder_block. Did you mean transformer? "
    "Known: transformer."
  )


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """A folder of the user's, in which Python looks for modules."""
  monkeypatch.syspath_prepend(tmp_path)
  return tmp_path


def test_a_module_of_the_user_s_own_is_imported(own):
  (own / "own_rule.py").write_text("def build():\n  return 3\n")
  assert registered("opt_type", "own_rule:build", {"sgd": lambda: 1})() == 3


def test_a_module_may_lie_in_a_package(own):
  (own / "own_package").mkdir()
  (own / "own_package" / "rule.py").write_text("build = 4\n")
  assert registered("opt_type", "own_package.rule:build", {"sgd": 1}) == 4


MISTAKES = {
  "own_absent:build": "there is no module own_absent in the working directory or in PYTHONPATH; "
  "start the command in the folder of the file, or set PYTHONPATH to that folder",
  "own_values.part:build": "there is no module own_values.part in the working directory or in "
  "PYTHONPATH; start the command in the folder of the file, or set PYTHONPATH to that folder",
  "own_values:biuld": "own_values has no biuld. Did you mean build? Write "
  "opt_type=own_values:NAME with the name of something defined there.",
  "own_values:": "own_values has no name after the colon. Write opt_type=own_values:NAME with the "
  "name of something defined there.",
  "own_imports:build": "importing own_imports failed: No module named 'own_missing'; install what "
  "it imports, or correct the import",
  "own_names:build": "importing own_names failed: cannot import name 'biuld' from 'own_values' ",
  "./own_values.py:build": "'./own_values.py' is not the name of a module; write it as in an import "
  "statement, for example my_folder.my_file:build",
}


@pytest.mark.parametrize("value", MISTAKES)
def test_what_cannot_be_imported_is_named(own, value):
  (own / "own_values.py").write_text("build = 1\n")
  (own / "own_imports.py").write_text("import own_missing\n")
  (own / "own_names.py").write_text("from own_values import biuld\n")
  with pytest.raises(UserError) as caught:
    registered("opt_type", value, {"sgd": 1})
  assert str(caught.value).startswith(f"opt_type={value}: {MISTAKES[value]}")


def test_a_mistake_inside_the_module_keeps_its_own_traceback(own):
  (own / "own_broken.py").write_text("build = int('x')\n")
  with pytest.raises(ValueError, match="invalid literal"):
    registered("opt_type", "own_broken:build", {"sgd": 1})
