"""The scripts make the environment once, from versions that are pinned.

A stand-in for Python records how the scripts call it, so that no network is needed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from maxbatch.compile.report_time import TESTED_VERSIONS

ROOT = Path(__file__).resolve().parent.parent

STAND_IN = """#!/bin/bash
[[ "$*" != *accelerators.py ]] || exec "$REAL" "$@"
echo "$*" >> "$CALLS"
echo "${0##*/} $*" >> "${CALLS%/*}/names"
case "$*" in
  "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *"pip install"*) [[ ! -e "$CALLS.offline" ]] || { echo "ERROR: no such host"; exit 1; } ;;
esac
"""


WORKERS = "-n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0"
QUICK = [
  f"-m pytest -p quick_tier {WORKERS} tests/without_jax",
  f"-m pytest -p quick_tier {WORKERS} --ignore=tests/without_jax tests",
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
  """A checkout in a folder with a space in its name, beside a stand-in for Python 3.14."""
  root = tmp_path / "a checkout"
  shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
  for name in ("pyproject.toml", "constraints.txt"):
    shutil.copy(ROOT / name, root / name)
  finds = "maxbatch/hardware/accelerators.py"
  (root / finds).parent.mkdir(parents=True)
  shutil.copy(ROOT / finds, root / finds)
  (root / "maxbatch" / "train.py").touch()
  program(tmp_path / "bin" / "python3.14", STAND_IN)
  program(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
  return root


def program(path: Path, text: str) -> None:
  """Writes a program that takes the place of another."""
  path.parent.mkdir(exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


def call(checkout: Path, script: str, *arguments: str, path: str | None = None, **environment: str):
  """Runs a script from another folder; returns the process and the calls of Python it made."""
  calls = checkout.parent / "calls"
  calls.write_text("")
  path = f"{checkout.parent / 'bin'}:{os.environ['PATH']}" if path is None else path
  process = subprocess.run(
    ["/bin/bash", str(checkout / "scripts" / script), *arguments],
    capture_output=True,
    text=True,
    cwd=checkout.parent,
    env={"PATH": path, "CALLS": str(calls), "REAL": sys.executable, **environment},
  )
  lines = calls.read_text().splitlines()
  return process, [line for line in lines if not line.startswith(("-c", "--version"))]


INSTALL = "-m pip install --disable-pip-version-check --quiet -c constraints.txt -e"


def test_first_call_installs_and_second_starts_at_once(checkout: Path):
  process, calls = call(checkout, "test.sh", "-k", "a b")
  assert process.returncode == 0, process.stderr
  tests = [f"{each} -k a b" for each in QUICK]
  assert calls == ["-m venv --clear .venv", f"{INSTALL} .[test]", *tests]
  assert "1 to 5 minutes, once" in process.stderr
  process, calls = call(checkout, "test.sh")
  assert calls == QUICK
  assert process.stderr == ""


def test_all_tests_run_without_the_plugin_of_the_quick_tier(checkout: Path):
  _, calls = call(checkout, "test.sh", "--all", "-x")
  everything = [each.replace(" -p quick_tier", "") + " -x" for each in QUICK]
  assert calls[1:] == [f"{INSTALL} .[test-all]", *everything]
  # What all tests need the quick ones find there.
  assert call(checkout, "test.sh")[1] == QUICK


def test_tests_that_are_named_run_whole(checkout: Path):
  _, calls = call(checkout, "test.sh", "scripts/test.sh::test_x", "-x")
  assert calls[2:] == [f"-m pytest {WORKERS} scripts/test.sh::test_x -x"]


def test_all_that_continuous_integration_runs_is_everything():
  assert (ROOT / ".ci" / "run").read_text().splitlines()[-1].endswith('scripts/test.sh" --all "$@"')


def test_train_shares_the_environment_of_the_tests(checkout: Path):
  call(checkout, "test.sh")
  _, calls = call(checkout, "train.sh", "steps=3")
  assert calls == ["-m maxbatch.train config=configs/base.yml steps=3"]


def test_tests_add_what_training_did_not_need(checkout: Path):
  call(checkout, "train.sh")
  _, calls = call(checkout, "test.sh")
  assert f"{INSTALL} .[test]" in calls
  assert "-m venv --clear .venv" not in calls


def test_the_newest_packages_have_an_environment_of_their_own(checkout: Path):
  call(checkout, "test.sh")
  process, calls = call(checkout, "test.sh", MAXBATCH_NEWEST="1")
  assert process.returncode == 0, process.stderr
  newest = INSTALL.replace("-c constraints.txt", "--upgrade --upgrade-strategy eager")
  assert calls == ["-m venv --clear .venv-newest", f"{newest} .[test]", *QUICK]
  assert call(checkout, "test.sh", MAXBATCH_NEWEST="1")[1] == QUICK
  assert call(checkout, "test.sh")[1] == QUICK


def gpu(checkout: Path, *drivers: str) -> None:
  """Puts GPUs into the machine, as nvidia-smi lists them."""
  lines = "".join(f"NVIDIA H200, {driver}\\n" for driver in drivers)
  asked = '[ "$*" = "--query-gpu=name,driver_version --format=csv,noheader" ]'
  program(checkout.parent / "bin" / "nvidia-smi", f"#!/bin/sh\n{asked} && printf '{lines}'\n")


@pytest.mark.parametrize(
  ("driver", "extra"), [("580.65.06", ".[gpu]"), ("570.86.15", ".[gpu12]"), ("470.256.02", ".")]
)
def test_training_beside_a_gpu_installs_what_its_driver_takes(checkout: Path, driver, extra):
  gpu(checkout, driver, driver)
  process, calls = call(checkout, "train.sh")
  assert process.returncode == 0, process.stderr
  assert f"This machine has 2 × NVIDIA H200, driver {driver}: " in process.stderr
  assert f"{INSTALL} {extra}" in calls
  assert ("update the driver" in process.stderr) == (extra == ".")
  process, calls = call(checkout, "train.sh")
  assert (process.stderr, len(calls)) == ("", 1)


def test_a_gpu_changes_nothing_for_tests_and_for_who_wants_the_cpu(checkout: Path):
  gpu(checkout, "580.65.06")
  _, calls = call(checkout, "test.sh")
  assert f"{INSTALL} .[test]" in calls
  assert len(call(checkout, "train.sh", JAX_PLATFORMS="cpu")[1]) == 1
  assert f"{INSTALL} .[gpu]" in call(checkout, "train.sh")[1]
  # Both are there now.
  assert call(checkout, "test.sh")[1] == QUICK
  assert len(call(checkout, "train.sh")[1]) == 1


def test_own_config_replaces_the_default(checkout: Path):
  _, calls = call(checkout, "train.sh", "steps=3", "config=mine.yml")
  assert calls[-1] == "-m maxbatch.train steps=3 config=mine.yml"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(checkout: Path, name: str):
  call(checkout, "train.sh")
  with (checkout / name).open("a") as file:
    file.write("# changed\n")
  _, calls = call(checkout, "train.sh")
  assert f"{INSTALL} ." in calls


def test_failed_installation_says_so_and_is_repaired(checkout: Path):
  offline = checkout.parent / "calls.offline"
  offline.touch()
  process, calls = call(checkout, "train.sh")
  assert process.returncode != 0
  assert "ERROR: no such host" in process.stderr
  assert "Is there a network?" in process.stderr
  assert not any("maxbatch.train" in line for line in calls)
  offline.unlink()
  process, calls = call(checkout, "train.sh")
  assert process.returncode == 0
  assert calls[-2:] == [f"{INSTALL} .", "-m maxbatch.train config=configs/base.yml"]


def test_failed_upgrade_is_repaired_even_when_the_change_is_undone(checkout: Path):
  call(checkout, "train.sh")
  pins = (checkout / "constraints.txt").read_text()
  (checkout / "constraints.txt").write_text(pins + "# newer\n")
  (checkout.parent / "calls.offline").touch()
  assert call(checkout, "train.sh")[0].returncode != 0
  (checkout.parent / "calls.offline").unlink()
  (checkout / "constraints.txt").write_text(pins)
  assert f"{INSTALL} ." in call(checkout, "train.sh")[1]


def test_moved_checkout_is_installed_again(checkout: Path):
  call(checkout, "train.sh")
  moved = checkout.rename(checkout.parent / "moved")
  assert f"{INSTALL} ." in call(moved, "train.sh")[1]


def test_half_made_environment_is_made_anew(checkout: Path):
  broken = checkout / ".venv" / "bin" / "python"
  broken.parent.mkdir(parents=True)
  broken.write_text("#!/bin/bash\nexit 1\n")
  broken.chmod(0o755)
  process, calls = call(checkout, "train.sh")
  assert process.returncode == 0, process.stderr
  assert calls[0] == "-m venv --clear .venv"


def test_a_python_that_is_named_makes_the_environment(checkout: Path):
  program(checkout.parent / "bin" / "mine", STAND_IN)
  process, _ = call(checkout, "train.sh", MAXBATCH_PYTHON="mine")
  assert process.returncode == 0, process.stderr
  assert "mine --version" in (checkout.parent / "names").read_text()


def test_without_a_new_enough_python_the_message_names_the_version(checkout: Path):
  tools = checkout.parent / "tools"
  tools.mkdir()
  for name in ("dirname", "cat", "cksum", "grep"):
    (tools / name).symlink_to(str(shutil.which(name)))
  old = tools / "python3"
  old.write_text("#!/bin/bash\nexit 1\n")
  old.chmod(0o755)
  process, _ = call(checkout, "train.sh", path=str(tools))
  assert process.returncode != 0
  assert "maxbatch needs Python 3.11 or newer" in process.stderr


def test_every_python_that_is_named_is_tested():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  named = [one.rpartition(" ")[2] for one in project["classifiers"] if ":: 3." in one]
  jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
  assert jobs["quick"]["strategy"]["matrix"]["python"] == named


@pytest.mark.parametrize("name", ["tests", "nightly"])
def test_workflows_run_what_is_there(name):
  """Actions are pinned to a version; scripts, extras and pinned files exist."""
  workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
  extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
  # YAML 1.1 reads the key `on` as true.
  assert {"name", True, "permissions", "jobs"} <= workflow.keys()
  for job in workflow["jobs"].values():
    assert job["runs-on"] == "ubuntu-latest"
    assert job["steps"][0]["uses"].startswith("actions/checkout@v")
    for step in job["steps"]:
      assert ("uses" in step) != ("run" in step)
      assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/none@v1"))
      commands = step.get("run", "")
      assert set(re.findall(r"\.\[(\w+)\]", commands)) <= extras.keys()
      assert all((ROOT / file).is_file() for file in re.findall(r"-c (\S+)", commands))
      for file in re.findall(r"(?:^|\s)((?:scripts|\.ci)/\S+)", commands):
        assert os.access(ROOT / file, os.X_OK)
  named = re.findall(r"matrix\.(\w+)", json.dumps(workflow))
  matrices = [job.get("strategy", {}).get("matrix", {}) for job in workflow["jobs"].values()]
  known = {key for one in matrices for key in one} | {
    key for one in matrices for row in one.get("include", []) for key in row
  }
  assert set(named) <= known


def test_every_installed_package_is_pinned():
  lines = (ROOT / "constraints.txt").read_text().splitlines()
  pins = [line for line in lines if not line.startswith("#")]
  assert pins
  assert all("==" in line and "/" not in line for line in pins)
  names = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  required = project["dependencies"] + with_extras(project["optional-dependencies"], "dev")
  bare = {Requirement(line).name.lower().replace("_", "-") for line in required}
  assert bare <= names


def test_lower_bounds_are_the_versions_that_the_tests_pass_with():
  """Older ones may work, but nobody has tried."""
  pins = (ROOT / "constraints.txt").read_text().splitlines()
  tested = {
    name.lower().replace("_", "-"): version
    for name, _, version in (line.partition("==") for line in pins)
  }
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  required = [*project["dependencies"], *project["optional-dependencies"]["tpu"]]
  for one in map(Requirement, required):
    assert str(one.specifier) == f">={tested[one.name.lower().replace('_', '-')]}", one


def test_the_versions_that_estimates_name_are_the_pinned_ones():
  pins = (ROOT / "constraints.txt").read_text().splitlines()
  for package, version in TESTED_VERSIONS[0].items():
    assert f"{package}=={version}" in pins


def with_extras(extras: dict[str, list[str]], name: str) -> list[str]:
  """What an extra requires, and the extras of our own that it names."""
  results = [Requirement(line) for line in extras[name]]
  inner = [extra for one in results if one.name == "maxbatch" for extra in sorted(one.extras)]
  named = [str(one) for one in results if one.name != "maxbatch"]
  return [*named, *(line for extra in inner for line in with_extras(extras, extra))]


def test_the_tests_bring_the_tpu_compiler_where_there_is_one():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  extras = project["optional-dependencies"]
  (compiler,) = extras["tpu"]
  for name in ("test-all", "dev"):
    assert str(Requirement(compiler)) in with_extras(extras, name)
  marker = Requirement(compiler).marker
  assert marker is not None
  linux, mac = {"sys_platform": "linux"}, {"sys_platform": "darwin"}
  assert marker.evaluate({**linux, "platform_machine": "x86_64"})
  assert not marker.evaluate({**linux, "platform_machine": "aarch64"})
  assert not marker.evaluate({**mac, "platform_machine": "arm64"})


def test_the_quick_tests_install_nothing_large():
  extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
  names = {Requirement(each).name for each in with_extras(extras, "test")}
  assert not names & {"torch", "transformers", "peft", "libtpu", "playwright", "datasets", "wandb"}
