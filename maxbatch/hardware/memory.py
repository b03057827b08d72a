"""The memory of this machine that its processes may use: what a container's limit leaves of it.

No jax here. Containers are control groups of the kernel, of version 2 (`memory.max`) or 1
(`memory.limit_in_bytes`); they are nested, and each bounds those within it.
"""

import os
import pathlib
import resource
import sys
from collections.abc import Iterator

_PROCESS = pathlib.Path("/proc/self")
_LIMITS = {"cgroup2": ("", "memory.max"), "cgroup": ("memory", "memory.limit_in_bytes")}
"""By kind of mount: the controller of its groups in /proc/self/cgroup, and the file of a limit."""


def machine_bytes(process: pathlib.Path = _PROCESS) -> int:
  """Returns the physical memory, or the least limit of the control groups that a process is in, whose
  folder of the kernel's is `process`."""
  physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
  return min([physical, *_limits(process)])


def host_peak_bytes() -> int:
  """Returns the most physical memory that this process has had so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else 1024 * peak


def _limits(process: pathlib.Path) -> Iterator[int]:
  """Yields the limits in bytes of the process's groups and of all that they lie in."""
  for mounted, inside, name in _groups(process):
    for folder in (mounted / inside, *(mounted / inside).parents):
      try:
        limit = (folder / name).read_text().strip()
      except OSError:
        limit = ""  # A version 2 hierarchy has no limit at its root.
      if limit.isdigit():  # Else "max".
        yield int(limit)
      if folder == mounted:
        break


def _groups(process: pathlib.Path) -> Iterator[tuple[pathlib.Path, pathlib.PurePath, str]]:
  """Yields, of each hierarchy with memory limits, where it is mounted, the group in it, the limit's
  file."""
  try:
    groups = (process / "cgroup").read_text().splitlines()
    mounts = (process / "mountinfo").read_text().splitlines()
  except OSError:
    return  # No Linux.
  for mount in mounts:
    # 30 23 0:26 /what/is/mounted /where options - kind source options-of-the-kind
    (_, _, _, root, where, *_), (kind, *_) = (part.split() for part in mount.split(" - ", 1))
    controller, limit = _LIMITS.get(kind, (None, ""))
    for group in groups:
      _, controllers, path = group.split(":", 2)
      if controller in controllers.split(","):
        inside = pathlib.PurePath(path)
        # In a container the mount may show its own group alone, under the path outside.
        inside = inside.relative_to(root) if inside.is_relative_to(root) else pathlib.PurePath()
        yield pathlib.Path(where), inside, limit
