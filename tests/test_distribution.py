"""A wheel and an sdist: each has the whole package, and a wheel alone trains, by one command.

Installed into an empty environment, whose other packages are those of the tests.
"""

import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS, QUICKLY, REPOSITORY, environment, small_run

from maxbatch.run_folder.metrics import read_metrics


def run(*command: str | Path, cwd: Path, **changes: str) -> str:
  """Runs a command without our sources on its path; returns what it printed."""
  environ = {**environment(**changes), "XLA_FLAGS": QUICKLY}
  del environ["PYTHONPATH"]
  done = subprocess.run(
    [str(word) for word in command],
    cwd=cwd,
    env=environ,
    capture_output=True,
    text=True,
    timeout=PATIENCE_SECONDS,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
  run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into, cwd=source)
  (built,) = into.iterdir()
  return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The sdist, unpacked."""
  folder = tmp_path_factory.mktemp("sdist")
  with tarfile.open(build("sdist", REPOSITORY, folder / "dist")) as archive:
    archive.extractall(folder, filter="data")
  (unpacked,) = folder.glob("maxbatch-*")
  return unpacked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
  return build("wheel", REPOSITORY, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The programs of an environment in which the wheel is installed, and nothing else of ours."""
  place = tmp_path_factory.mktemp("empty") / "environment"
  run(sys.executable, "-m", "venv", "--without-pip", place, cwd=place.parent)
  # A line adds the folder alone: what its own .pth files add, as our checkout, stays out.
  (packages,) = place.glob("lib/python*/site-packages")
  (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
  pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--quiet"]
  run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel, cwd=place.parent)
  return place / "bin"


def files(folder: Path) -> dict[str, bytes]:
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in folder.rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
  }


def contents(wheel: Path) -> dict[str, bytes]:
  with zipfile.ZipFile(wheel) as archive:
    return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_a_wheel_has_every_file_of_the_package_and_the_configurations(wheel):
  ours = {f"maxbatch/{name}": text for name, text in files(REPOSITORY / "maxbatch").items()}
  ours |= {f"maxbatch/configs/{name}": text for name, text in files(REPOSITORY / "configs").items()}
  assert contents(wheel) == ours
  assert "maxbatch/py.typed" in ours
  with zipfile.ZipFile(wheel) as archive:
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_an_sdist_makes_the_same_wheel(sdist, wheel, tmp_path):
  assert contents(build("wheel", sdist, tmp_path / "dist")) == contents(wheel)
  assert (sdist / "scripts" / "train.sh").is_file()


def test_the_wheel_alone_runs_the_first_job(installed, tmp_path):
  keys = small_run(tmp_path / "runs", tmp_path / "text.txt", tmp_path / "cache")
  out = run(installed / "maxbatch", "train", *keys, "steps=2", cwd=tmp_path)
  assert "Batch plan" in out
  assert [one["step"] for one in read_metrics(tmp_path / "runs" / "first_run")] == [0, 1, 2]


def test_the_wheel_alone_finds_its_configurations(installed, tmp_path):
  from_where = (
    "import maxbatch, maxbatch.config.find as f; print(maxbatch.__file__, f.config_path('base'))"
  )
  package, base = run(installed / "python", "-c", from_where, cwd=tmp_path).split()
  assert Path(package).is_relative_to(installed.parent)
  assert Path(base) == Path(package).parent / "configs" / "base.yml"
  out = run(installed / "maxbatch", "plan", "config=base", "model_name=gpt2-small", cwd=tmp_path)
  assert "global_batch_to_train" in out
  assert run(installed / "maxbatch", "--version", cwd=tmp_path).startswith("maxbatch 0.")
