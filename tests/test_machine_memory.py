"""What a container leaves of the machine's memory: a real group of the kernel, and its files."""

import os
import pathlib
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator

import pytest

from maxbatch.hardware.devices import machine_bytes

GIB = 2**30
PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def group() -> Iterator[pathlib.Path]:
  """A group of the kernel without a limit, in one of 2 GiB, in this process's own."""
  own = next((each for each in own_groups() if (each / "cgroup.procs").exists()), None)
  if own is None:
    pytest.skip("this process is in no group with a limit for memory")
  outer = own / f"maxbatch-test-{uuid.uuid4().hex}"
  inner = outer / "inner"
  try:
    inner.mkdir(parents=True)
    limit = next(outer.glob("memory.limit_in_bytes"), outer / "memory.max")
    limit.write_text(str(2 * GIB))
    yield inner
  except PermissionError as error:
    pytest.skip(f"no group can be made here: {error}")
  finally:
    for folder in (inner, outer):
      if folder.is_dir():
        folder.rmdir()


def own_groups() -> Iterator[pathlib.Path]:
  """Where this process's groups are on most machines, of both versions of the interface."""
  for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
    _, controllers, path = line.split(":", 2)
    if controllers in ("memory", ""):
      yield pathlib.Path(f"/sys/fs/cgroup/{controllers}{path}")


def test_auto_sees_the_limit_of_a_real_group(group):
  code = f"""
    import os, pathlib
    pathlib.Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    from maxbatch.compile.program import capacity_bytes
    print(capacity_bytes(jax.devices(), 0.0))
  """
  done = subprocess.run(
    [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True
  )
  assert int(done.stdout.splitlines()[-1]) == 2 * GIB // 4


def process(folder: pathlib.Path, groups: str, mounts: str, **limits: str) -> pathlib.Path:
  """A folder as the kernel's about a process, in groups mounted below `folder`."""
  (folder / "cgroup").write_text(textwrap.dedent(groups))
  (folder / "mountinfo").write_text(textwrap.dedent(mounts).format(folder=folder))
  for name, value in limits.items():
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(value + "\n")
  return folder


UNIFIED = """\
  22 27 0:21 / /proc rw,relatime - proc proc rw
  30 23 0:26 / {folder}/fs rw,nosuid shared:4 master:1 - cgroup2 cgroup2 rw,nsdelegate
"""
LEGACY = """\
  34 31 0:31 / {folder}/fs/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
  35 31 0:32 %s {folder}/fs/memory rw,relatime - cgroup cgroup rw,memory
  41 31 0:38 / {folder}/fs/unified rw,relatime - cgroup2 cgroup2 rw
"""


@pytest.mark.parametrize(
  ("limits", "expected"),
  [
    ({"fs/pods/one/memory.max": str(GIB)}, GIB),
    ({"fs/pods/one/memory.max": "max", "fs/pods/memory.max": str(GIB)}, GIB),
    ({"fs/pods/one/memory.max": str(2 * GIB), "fs/pods/memory.max": str(GIB)}, GIB),
    ({"fs/pods/one/memory.max": str(GIB), "fs/pods/memory.max": str(2 * GIB)}, GIB),
    ({"fs/pods/one/memory.max": "max"}, PHYSICAL),
    ({"fs/pods/one/memory.max": str(PHYSICAL + GIB)}, PHYSICAL),
    ({"fs/pods/two/memory.max": str(GIB)}, PHYSICAL),
    ({}, PHYSICAL),
  ],
)
def test_version_2_with_all_groups_above(tmp_path, limits, expected):
  groups = "0::/pods/one\n"
  assert machine_bytes(process(tmp_path, groups, UNIFIED, **limits)) == expected


@pytest.mark.parametrize(
  ("root", "path"),
  [("/", "/docker/a"), ("/docker/a", "/docker/a"), ("/docker/a", "/")],
  ids=["host", "container", "namespace"],
)
def test_version_1_as_a_host_and_a_container_see_it(tmp_path, root, path):
  groups = f"9:name=systemd:/\n4:memory:{path}\n1:cpu,cpuacct:/other\n0::/\n"
  inside = "fs/memory/docker/a" if root == "/" else "fs/memory"
  limits = {f"{inside}/memory.limit_in_bytes": str(GIB), "fs/unified/memory.max": "max"}
  limits["fs/cpu/other/memory.limit_in_bytes"] = "1"
  assert machine_bytes(process(tmp_path, groups, LEGACY % root, **limits)) == GIB


def test_no_limit_in_version_1_is_a_number_beyond_all_memory(tmp_path):
  limits = {"fs/memory/memory.limit_in_bytes": "9223372036854771712"}
  groups = "4:memory:/\n"
  assert machine_bytes(process(tmp_path, groups, LEGACY % "/", **limits)) == PHYSICAL


def test_without_groups_it_is_the_machine_s(tmp_path):
  assert machine_bytes(tmp_path) == PHYSICAL
