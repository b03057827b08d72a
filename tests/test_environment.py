"""Locales, signals while modules are imported, and variables that jax and XLA read."""

import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest
from processes import PATIENCE_SECONDS
from support import TINY

from maxbatch.config.load import load_config
from maxbatch.errors import UserError
from maxbatch.hardware.devices import check_environment, find_devices
from maxbatch.train import main

ROOT = pathlib.Path(__file__).parents[1]
POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LATIN = {"PYTHONIOENCODING": "latin-1"}


def run(command: str, *arguments: str | bytes, **more: str) -> subprocess.CompletedProcess[bytes]:
  return subprocess.run(
    [sys.executable, "-m", f"maxbatch.{command}", "config=base", *arguments],
    cwd=ROOT,
    capture_output=True,
    timeout=PATIENCE_SECONDS,
    env=os.environ | more,
  )


def keys(folder: pathlib.Path) -> list[str]:
  sizes = {
    **TINY,
    "steps": 1,
    "generate_length": 2,
    "eval_interval": -1,
    "per_device_batch_size": 1,
  }
  sizes |= {"enable_checkpointing": "false"}
  sizes |= {"dataset_type": "synthetic", "base_output_directory": folder}
  sizes |= {"jax_cache_dir": jax.config.values["jax_compilation_cache_dir"]}
  return [f"{key}={value}" for key, value in sizes.items()]


@pytest.mark.parametrize("locale", [POSIX, LATIN], ids=["posix", "latin-1"])
@pytest.mark.parametrize("command", ["plan", "pipeline"])
def test_a_locale_without_our_signs_prints_others(command, locale):
  stages = ["pipeline_schedule=1f1b", "ici_pipeline_parallelism=2"]
  done = run(command, *(stages if command == "pipeline" else []), **locale)
  assert (done.returncode, done.stderr) == (0, b"")
  assert b" 8 " in done.stdout


def test_training_checks_itself_in_a_posix_locale(tmp_path):
  done = run("train", *keys(tmp_path), "validate_only=true", **POSIX)
  assert (done.returncode, done.stderr) == (0, b"")


def test_a_prompt_is_taken_as_it_was_typed_in_a_posix_locale(tmp_path):
  prompt = "déjà".encode().decode("ascii", errors="surrogateescape")
  assert main(["config=base", *keys(tmp_path), f"prompt={prompt}"]) == 0
  written = (tmp_path / "first_run" / "text_before_training.txt").read_bytes()
  assert written.startswith("déjà".encode())


@pytest.mark.parametrize("main_mode", ["", "validate_only=true"])
def test_a_prompt_that_is_no_utf8_is_refused(tmp_path, capsys, main_mode):
  given = os.fsdecode(b"prompt=a\xe4b")
  assert main(["config=base", *keys(tmp_path), given, *([main_mode] if main_mode else [])]) == 2
  said = "prompt='a\\udce4b' is not text in UTF-8; for example prompt=ab"
  assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize("imported", ["maxbatch", "numpy", "jax"])
def test_an_interrupt_while_modules_are_imported_ends_in_a_word(imported):
  command = [sys.executable, "-X", "importtime", "-m", "maxbatch.train", "config=base"]
  lines = []
  with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
    assert process.stderr is not None
    for line in process.stderr:
      lines.append(line)
      if line.rpartition("|")[2].strip() == imported:
        process.send_signal(signal.SIGINT)
  assert process.returncode == 130
  assert [line for line in lines if not line.startswith("import time:")] == ["interrupted\n"]


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    ("--xla_no_such=1", "Unknown flag in XLA_FLAGS: --xla_no_such=1"),
    (
      "--xla_force_host_platform_device_count=abc",
      "Couldn't interpret value abc for flag xla_force_host_platform_device_count",
    ),
  ],
)
def test_flags_that_xla_would_end_the_process_over_are_refused_in_words(monkeypatch, flags, said):
  monkeypatch.setenv("XLA_FLAGS", flags)
  with pytest.raises(UserError) as error:
    check_environment()
  assert str(error.value) == f"XLA_FLAGS={flags}: {said}; correct that, or unset XLA_FLAGS"


def test_flags_that_xla_knows_pass(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
  check_environment()


def test_a_command_says_what_is_wrong_with_the_flags(tmp_path):
  done = run("train", *keys(tmp_path), "validate_only=true", XLA_FLAGS="--xla_no_such=1")
  assert done.returncode == 2
  assert done.stderr.startswith(b"error: XLA_FLAGS=--xla_no_such=1: Unknown flag")


def test_a_run_without_jit_is_refused():
  with jax.disable_jit(), pytest.raises(UserError, match="JAX_DISABLE_JIT=0"):
    check_environment()
  assert len(find_devices(load_config(["config=base"])).devices) == 8


def test_a_platform_that_is_not_here_is_refused(tmp_path):
  pytest.importorskip("libtpu")
  if any(pathlib.Path("/dev").glob("accel*")):
    pytest.skip("there may be a TPU here")
  done = run("train", *keys(tmp_path), "num_simulated_devices=0", JAX_PLATFORMS="tpu")
  assert done.returncode == 2
  assert b"Traceback" not in done.stderr
