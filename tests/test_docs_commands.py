"""Every command of README.md and docs/ is run: in this process, and small.

Commands that plan run as they stand. Those that train are validated, which loads the data, traces the
step and asks for memory and disk as the run would, with a smaller model where none is named. What
reads a run reads one that was trained for it. Blocks that show what is printed are run by
test_docs.py. The rest is in ELSEWHERE.
"""

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
from support import SMALLEST
from test_docs import BLOCK, PAGES
from test_docs_site import ROOT, SHOWN

from maxbatch import train

ELSEWHERE = {
  r"train +config=advice.yml": "it is advised for devices that are not here: test_advise.py",
  r"=my_\w+:|\[my_\w+:": "test_extending.py has their files, and trains with them",
  r"configs/examples/": "test_second_job.py makes their data, and trains on them",
  r"s3://": "there is no such bucket: test_object_store.py has a server of its own",
  r"somebodys|runs/made|runs/tuned": "test_fine_tuning_transformers.py has such models and adapters",
  r"my_folder|my_chat_model": "test_fine_tuning.py and test_chat.py have models and conversations",
  r"runs/qwen|Qwen/": "it is on the hub: test_conversion.py has small models of such families",
  r"input_analyzer ": "it measures for a minute: test_input_analyzer.py has shorter ones",
  r"critical_batch ": "it trains four runs: test_critical_batch.py",
  r"advise +runs/": "8 steps are too few to say anything: test_run_advice.py has runs with more",
  r"remat_policy=explore": "a quarter of an hour of compiling: test_grid_search.py has other grids",
  r"checkpoint=runs/short": "scripts/longer_context.py trains it, and test_conversion.py converts a run",
  r"load_parameters_path=llama2": "14 GB of weights: test_fine_tuning.py has small ones",
}
SMALL = [f"{key}={value}" for key, value in SMALLEST.items()]
NAMED = ("model_name=", "configs/post_train/")
"""What has a size of its own."""
VALIDATE = ["compile_only=false", "validate_only=true", "base_output_directory=new"]
RUN = ["steps=8", "per_device_batch_size=1", "generate_length=0"]
IN_BLOCKS = {
  (Path(page).name, command, shlex.join(shlex.split(words.partition(" | grep ")[0])))
  for page in PAGES
  for command, words, _ in BLOCK.findall((ROOT / "docs" / page).read_text())
}


def elsewhere(module: str, words: str) -> str:
  """Why a command is not run here, and which test runs it; empty if it is."""
  given = f"{module} {words}"
  return next((why for marks, why in ELSEWHERE.items() if re.search(marks, given)), "")


FIRST = {(module, words): page for page, module, words in reversed(SHOWN)}
"""A command that several pages have is run once."""
HERE = [
  (page, module, shlex.split(words))
  for (module, words), page in reversed(FIRST.items())
  if not elsewhere(module, words)
  and (page, module, shlex.join(shlex.split(words))) not in IN_BLOCKS
]


def runnable(module: str, words: list[str]) -> list[str]:
  """The command's arguments, smaller."""
  if module in ("train", "train_rl") and "--help" not in words:
    own = [] if any(one.startswith("config=") for one in words) else ["config=base"]
    size = [] if any(name in one for one in words for name in NAMED) else SMALL
    rollouts = ["num_simulated_devices=8"] if module == "train_rl" else []
    return [*own, *words, *size, *rollouts, *VALIDATE]
  if module == "sample":
    return [re.sub(r"max_new_tokens=.*", "max_new_tokens=4", word) for word in words]
  return words


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A checkout in which some runs were trained, with what the commands read."""
  place = tmp_path_factory.mktemp("checkout")
  (place / "configs").symlink_to(ROOT / "configs")
  (place / "prompts.txt").write_text("def a\nclass b\n")
  for name in ("texts", "code", "web", "math"):
    (place / name).mkdir()
    (place / name / "a.txt").write_text("".join(f"{name}: line {n}\n" for n in range(2000)))
  runs = f"base_output_directory={place / 'runs'}"
  assert train.main(["config=base", *SMALL, *RUN, runs]) == 0
  for name in ("a", "b", "lr-1", "lr-2", "format"):
    shutil.copytree(place / "runs" / "first_run", place / "runs" / name)
  return place


@pytest.mark.parametrize(("page", "module", "words"), HERE, ids=lambda one: str(one)[:70])
def test_a_command_of_a_page_runs(page, module, words, place, monkeypatch, capsys):
  monkeypatch.chdir(place)
  code = importlib.import_module(f"maxbatch.{module}").main(runnable(module, words))
  assert code == 0, capsys.readouterr().err


def test_what_runs_elsewhere_is_there():
  for marks, why in ELSEWHERE.items():
    assert any(re.search(marks, f"{module} {words}") for _, module, words in SHOWN), marks
    assert all((ROOT / "tests" / name).is_file() for name in re.findall(r"test_\w+\.py", why))
