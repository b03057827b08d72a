"""One process at a time makes a file, whichever run or host it belongs to; the others find it."""

import contextlib
import errno
import fcntl
from collections.abc import Iterator
from pathlib import Path

_HELD = (errno.EAGAIN, errno.EACCES)


@contextlib.contextmanager
def claimed(path: Path, *, wait: bool) -> Iterator[bool]:
  """Whether this process alone has `path`, a file that is made for it and removed again.

  The system gives a claim back when its process ends, however it ends. Where files cannot be
  locked, everyone has what they claim: files that appear whole may be made twice.

  Args:
    wait: until another process gives it back; else False while one has it.

  Raises:
    OSError: the file cannot be made.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("a+b") as file:
    try:
      fcntl.lockf(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
      if error.errno in _HELD:
        yield False
        return
    try:
      yield True
    finally:
      path.unlink(missing_ok=True)
