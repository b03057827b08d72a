"""Real file systems that are small, full, or become read-only."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
  """A file system at `place`, as `mount` is told; a skipped test where that is not permitted."""
  place.mkdir(exist_ok=True)
  try:
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, check=False)
  except FileNotFoundError:
    pytest.skip("there is no mount")
  if done.returncode:
    pytest.skip("mounting a file system is not permitted here")
  try:
    yield place
  finally:
    # Lazily: a process that a failing test leaves behind may still have files open there.
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def small(place: Path, kibibytes: int) -> Iterator[Path]:
  """A file system of so many KiB."""
  with mounted(place, "-t", "tmpfs", "-o", f"size={kibibytes}k", "tmpfs") as disk:
    yield disk


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[Path]:
  """The folder, in which from now on no file can be opened for writing."""
  with mounted(folder, "--bind", "-o", "ro", str(folder)) as same:
    yield same


def fill(disk: Path) -> Path:
  """A file that takes all the room there is; it can be deleted."""
  filler = disk / "filler"
  with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
    while file.write(bytes(1024)):
      pass
  return filler
