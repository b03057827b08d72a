"""What starts runs elsewhere: a checkout with an environment, srun, and the pods of a job."""

import pathlib
import shutil
import subprocess
import sys

from processes import PATIENCE_SECONDS, REPOSITORY, environment
from several_processes import free_port

SRUN = """
import os, subprocess, sys
# srun [--option ...] COMMAND: as many tasks of it as the script asked SLURM for.
tasks = int(os.environ["SLURM_NTASKS"])
command = sys.argv[next(n for n, word in enumerate(sys.argv) if n and not word.startswith("--")):]
step = {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": str(tasks)}
places = [{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)} for n in range(tasks)]
started = [subprocess.Popen(command, env=os.environ | step | place) for place in places]
sys.exit(max([process.wait() for process in started]))
"""
"""Stands for SLURM's."""


def checkout(folder: pathlib.Path) -> pathlib.Path:
  """Returns a checkout whose scripts find this environment installed, and install nothing."""
  shutil.copytree(REPOSITORY / "scripts", folder / "scripts")
  for name in ("configs", "maxbatch", "pyproject.toml", "constraints.txt"):
    (folder / name).symlink_to(REPOSITORY / name)
  _program(folder / ".venv" / "bin" / "python", "")
  stamp = 'source scripts/environment.sh && fingerprint "" > .venv/maxbatch-installed'
  subprocess.run(["bash", "-c", stamp], cwd=folder, check=True)
  return folder


def _program(path: pathlib.Path, code: str) -> None:
  """Makes a program that is Python with these arguments, or runs `code` with them."""
  path.parent.mkdir(parents=True, exist_ok=True)
  words = f'"{sys.executable}" "$@"'
  if code:
    path.with_suffix(".py").write_text(code)
    words = f'"{sys.executable}" "{path.with_suffix(".py")}" "$@"'
  path.write_text(f"#!/bin/sh\nexec {words}\n")
  path.chmod(0o755)


def sbatch(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
  """Does what `sbatch scripts/train.sbatch ARGUMENTS` would, with two tasks on this machine."""
  _program(folder / "bin" / "srun", SRUN)
  variables = {
    "PATH": f"{folder / 'bin'}:{environment()['PATH']}",
    "SLURM_SUBMIT_DIR": str(folder),
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "2",
    "JAX_COORDINATOR_PORT": str(free_port()),
  }
  # SLURM runs a copy of the script, somewhere else.
  script = shutil.copy(folder / "scripts" / "train.sbatch", folder / "slurm_script")
  return subprocess.run(
    ["bash", script, *arguments],
    cwd="/",
    capture_output=True,
    text=True,
    timeout=PATIENCE_SECONDS,
    env=environment(**variables),
  )


def path_with_python(folder: pathlib.Path) -> str:
  """Returns a PATH on which `python` is this one, as in an image."""
  _program(folder / "bin" / "python", "")
  return f"{folder / 'bin'}:{environment()['PATH']}"
