"""Files that appear whole: after errors, signals and on a full disk the old content is there."""

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxbatch.errors import UserError
from maxbatch.run_folder.atomic import elsewhere, replacing, write_run_file, write_whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
  """A file system of 64 kB."""
  place = tmp_path / "disk"
  place.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
  try:
    done = subprocess.run(mount, capture_output=True, check=False)
  except FileNotFoundError:
    pytest.skip("there is no mount")
  if done.returncode:
    pytest.skip("mounting a file system is not permitted here")
  yield place
  subprocess.run(["umount", str(place)], check=True)


def test_a_file_is_written_and_replaced_and_nothing_else_is_left(tmp_path):
  file = tmp_path / "new folder" / "file.txt"
  write_whole(file, "first ×\n")
  assert file.read_bytes() == "first ×\n".encode()
  write_whole(file, b"second\xff")
  assert file.read_bytes() == b"second\xff"
  assert list(file.parent.iterdir()) == [file]


def test_it_is_not_there_before_it_is_whole(tmp_path):
  file = tmp_path / "file"
  with replacing(file) as writer:
    writer.write(b"a part")
    writer.flush()
    assert not file.exists()
  assert file.read_bytes() == b"a part"


def write_half_and_raise(file: Path, error: type[BaseException]) -> None:
  with replacing(file) as writer:
    writer.write(b"new")
    raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_what_was_there(tmp_path, error):
  file = tmp_path / "file"
  write_whole(file, "old")
  with pytest.raises(error):
    write_half_and_raise(file, error)
  assert file.read_text() == "old"
  assert list(tmp_path.iterdir()) == [file]


def test_a_process_that_is_killed_while_writing_leaves_what_was_there(tmp_path):
  file = tmp_path / "file"
  write_whole(file, "old")
  code = (
    "import os, pathlib, signal, sys\n"
    "from maxbatch.run_folder.atomic import replacing\n"
    "with replacing(pathlib.Path(sys.argv[1])) as writer:\n"
    "  writer.write(b'new')\n"
    "  writer.flush()\n"
    "  os.kill(os.getpid(), signal.SIGKILL)\n"
  )
  done = subprocess.run([sys.executable, "-c", code, str(file)], check=False)
  assert done.returncode == -signal.SIGKILL
  assert file.read_text() == "old"
  write_whole(file, "new")
  assert file.read_text() == "new"


def test_a_full_disk_leaves_what_was_there(small_disk):
  file = small_disk / "file"
  write_whole(file, "old")
  with pytest.raises(OSError, match="No space left") as caught:
    write_whole(file, bytes(100_000))
  assert caught.value.errno == errno.ENOSPC
  assert file.read_text() == "old"
  assert list(small_disk.iterdir()) == [file]
  write_whole(file, bytes(30_000))  # The space of the failed attempt is free again.
  with pytest.raises(UserError) as refused:
    write_run_file(file, bytes(100_000))
  assert str(refused.value) == (
    f"{file} cannot be written (No space left on device); make room there, or choose another "
    "folder, for example base_output_directory=runs"
  )
  assert file.read_bytes() == bytes(30_000)


def test_the_folder_that_is_offered_is_another_one_that_can_be_written(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path / "home"))
  monkeypatch.chdir(tmp_path)
  assert elsewhere(tmp_path / "other" / "run").endswith("=runs")
  assert elsewhere(tmp_path / "runs" / "run").endswith(f"={tmp_path}/home/runs")
  (tmp_path / "runs").touch()
  assert elsewhere(Path("other/run")).endswith(f"={tmp_path}/home/runs")
  monkeypatch.setattr("os.access", lambda *_: False)
  assert elsewhere(Path("other/run")) == ""


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_who_may_read_it_follows_from_the_umask(tmp_path, mask):
  before = os.umask(mask)
  try:
    write_whole(tmp_path / "file", "")
  finally:
    os.umask(before)
  assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
  file = tmp_path / ("é" * 127)
  write_whole(file, "content")
  assert file.read_text() == "content"


def test_readers_never_see_a_part(tmp_path):
  file, contents = tmp_path / "file", [bytes([n]) * 50_000 for n in range(4)]
  write_whole(file, contents[0])

  def write_often(content: bytes) -> None:
    for _ in range(20):
      write_whole(file, content)

  writers = [threading.Thread(target=write_often, args=(content,)) for content in contents]
  with contextlib.ExitStack() as stack:
    for writer in writers:
      writer.start()
      stack.callback(writer.join)
    while any(writer.is_alive() for writer in writers):
      assert file.read_bytes() in contents
  assert list(tmp_path.iterdir()) == [file]
