"""docs/extending.md is run as it stands: its files written, its tests and its trainings run."""

import dataclasses
import functools
import importlib
import inspect
import pathlib
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from first_devices import use_first_devices
from support import SMALLEST

from maxbatch import train
from maxbatch.config.declare import Name
from maxbatch.config.schema import fields
from maxbatch.run_folder.metrics import read_metrics
from maxbatch.tuning import coupling

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "extending.md"
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n)*)", PAGE.read_text(), re.MULTILINE))
BLOCK = re.compile(r"```(\w+)\n((?:.*\n)*?)```")
TABLE_ROW = re.compile(r"\| ([\w -]+) \| `(\w+)` \| `(\w+)` in `maxbatch/([\w/]+)\.py` \|")
SMALL = SMALLEST | {
  "steps": 4,
  "per_device_batch_size": 1,
  "eval_samples": 2,
  "eval_interval": -1,
}


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """The reader's folder, in which modules are found and the command is started."""
  (tmp_path / "text.txt").write_text("".join(f"line {n} of the text\n" for n in range(300)))
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.chdir(tmp_path)
  use_first_devices(monkeypatch, 1)
  return tmp_path


def write_files(folder: pathlib.Path, section: str) -> list[str]:
  """Writes the section's Python files, each named in its first line."""
  blocks = [text for language, text in BLOCK.findall(SECTIONS[section]) if language == "python"]
  names = [text.splitlines()[0].removeprefix("# ") for text in blocks]
  for name, text in zip(names, blocks, strict=True):
    (folder / name).write_text(text)
  return names


def commands(section: str) -> list[list[str]]:
  blocks = [text for language, text in BLOCK.findall(SECTIONS[section]) if language == "bash"]
  return [shlex.split(line) for block in blocks for line in block.splitlines()]


def run_tests(file: str, folder: pathlib.Path) -> int:
  """Calls the tests of a file in this process, and counts them."""
  functions = vars(importlib.import_module(file.removesuffix(".py"))).items()
  tests = [function for name, function in functions if name.startswith("test_")]
  for number, test in enumerate(tests):
    takes_folder = "tmp_path" in inspect.signature(test).parameters
    test(*[folder / f"test_{number}"] if takes_folder else [])
  return len(tests)


def calls_of(plugin: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """Returns the list to which each call of a `module:attribute`, or of a function in it, is added."""
  module_name, name = plugin.split(":")
  module, calls = importlib.import_module(module_name), list[str]()

  def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: object, **named: object) -> Any:
      calls.append(plugin)
      return function(*args, **named)

    return call

  found = getattr(module, name)
  if isinstance(found, type):
    monkeypatch.setattr(found, "__init__", counted(found.__init__))
  elif callable(found):
    monkeypatch.setattr(module, name, counted(found))
  else:
    functions = {field: value for field, value in vars(found).items() if callable(value)}
    own = {field: counted(function) for field, function in functions.items()}
    monkeypatch.setattr(module, name, dataclasses.replace(found, **own))
  return calls


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_works_as_it_is_written(section, folder, capfd, monkeypatch):
  module, test = write_files(folder, section)
  pytest_command, train_command = commands(section)
  assert pytest_command == ["python", "-m", "pytest", test]
  assert run_tests(test, folder) == 1
  assert train_command[:3] == ["maxbatch", "train", "config=base"]
  given = train_command[3:]
  (plugin,) = re.findall(rf"{module.removesuffix('.py')}:\w+", " ".join(given))
  chosen = {argument.partition("=")[0] for argument in given}
  lengths = {"generate_length": 2 if "tokenizer" in section else 0}
  small = [f"{key}={value}" for key, value in (SMALL | lengths).items() if key not in chosen]
  if "batch_size" in chosen:
    small.remove("per_device_batch_size=1")
  paths = [f"base_output_directory={folder}", "dataset_path=text.txt", "dataset_cache_directory=."]
  calls = calls_of(plugin, monkeypatch)
  code = train.main(["config=base", *small, *paths, *given])
  assert code == 0, capfd.readouterr()
  assert calls, f"the run does not use {plugin}"
  last = read_metrics(folder / "first_run")[-1]
  assert last["step"] == 4
  if "a loss of the model's own" in section:
    assert last["my_balance"] > 0
    assert last["my_tokens_of_expert/0"] + last["my_tokens_of_expert/1"] > 0


def run_of_experts(folder: pathlib.Path, *given: str) -> int:
  (section,) = [title for title in SECTIONS if "a loss of the model's own" in title]
  write_files(folder, section)
  keys = SMALLEST | {"base_num_decoder_layers": 2, "per_device_batch_size": 1}
  keys |= {"generate_length": 0, "eval_fraction": 0}
  small = [f"{key}={value}" for key, value in keys.items()]
  paths = [f"base_output_directory={folder}", "dataset_path=text.txt", "dataset_cache_directory=."]
  return train.main(["config=base", *small, *paths, "decoder_block=my_experts:Mixture", *given])


WAYS = {
  "fused": "per_device_batch_size=2",
  "streamed": "per_device_batch_size=2 accumulation=streamed",
  "pipelined": "ici_pipeline_parallelism=2 pipeline_schedule=1f1b",
}


def test_a_model_s_terms_are_reported_the_same_however_a_step_is_divided(
  folder, capfd, monkeypatch
):
  found = {}
  # The same model: it is looked at once.
  monkeypatch.setattr(coupling, "coupling", functools.cache(coupling.coupling))
  for name, keys in WAYS.items():
    use_first_devices(monkeypatch, 2 if name == "pipelined" else 1)
    given = "gradient_accumulation_steps=3", "packing=false", "steps=2", f"run_name={name}"
    given = *given, "enable_checkpointing=false"
    assert run_of_experts(folder, *given, *keys.split()) == 0, capfd.readouterr()
    found[name] = [record for record in read_metrics(folder / name) if "loss" in record]
  (_, fused), *others = found.pop("fused"), *found.values()
  for _, other in others:
    assert set(other) == set(fused)
    for name in ("loss", "grad_norm", "my_balance", "my_router_entropy", "my_tokens_of_expert/0"):
      assert other[name] == pytest.approx(fused[name], rel=1e-5), name


def test_the_table_names_every_section_s_registry():
  rows = TABLE_ROW.findall(PAGE.read_text())
  without = "keys of its own", "a loss of the model's own"
  own = [text for title, text in SECTIONS.items() if not any(each in title for each in without)]
  for (_, key, registry, path), section in zip(rows, own, strict=True):
    known = vars(importlib.import_module(f"maxbatch.{path.replace('/', '.')}"))[registry]
    assert fields()[key][1].type in (str, Name, tuple[Name, ...])
    assert len(known) > 0
    assert f"{key}=my_" in section.replace("[", "")
