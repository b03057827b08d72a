"""Two hosts that can no longer reach each other: two network namespaces of this machine."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from processes import small_run
from several_processes import started, wait
from test_faults import ALONE, after_save

from maxbatch.errors import EXIT_PROCESS_FAILED

ADDRESSES = ("10.213.77.1", "10.213.77.2")
NOBODY = "02:00:00:00:00:99"
"""The hardware address of a machine that is not there."""


def ip(*arguments: str) -> None:
  subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def hosts() -> Iterator[list[str]]:
  """The names of two hosts on one cable; a skipped test where namespaces are not permitted."""
  names = [f"maxbatch-{os.getpid()}-{letter}" for letter in "ab"]
  folders = [pathlib.Path("/etc/netns", name) for name in names]
  try:
    ip("netns", "add", names[0])
    ip("netns", "add", names[1])
    ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "cable", "netns", names[1])
    table = "".join(f"{address} {name}\n" for address, name in zip(ADDRESSES, names, strict=True))
    for name, address, folder in zip(names, ADDRESSES, folders, strict=True):
      ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
      for device in ("cable", "lo"):
        ip("-n", name, "link", "set", device, "up")
      folder.mkdir(parents=True)
      (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
  except (OSError, subprocess.CalledProcessError):
    pytest.skip("network namespaces are not permitted here")
  else:
    yield names
  finally:
    for name, folder in zip(names, folders, strict=True):
      subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
      shutil.rmtree(folder, ignore_errors=True)


def test_both_sides_of_a_partition_end_with_a_sentence_about_the_other(tmp_path):
  # The step of tests/test_faults.py.
  keys = "run_name=r num_simulated_devices=2 steps=100000 checkpoint_period=4 log_period=10000"
  keys += " ici_fsdp_parallelism=2"
  keys += " jax_distributed_heartbeat_timeout_seconds=15 num_processes=2"
  keys += f" coordinator_address={ADDRESSES[0]}:41234"
  arguments = [
    *small_run(tmp_path, tmp_path / "text.txt", tmp_path / "cache"),
    *keys.split(),
    *ALONE,
  ]
  with hosts() as names:
    processes = []
    for number, name in enumerate(names):
      inside = [
        "ip",
        "netns",
        "exec",
        name,
        "unshare",
        "--uts",
        "sh",
        "-c",
        'hostname "$0"; exec "$@"',
      ]
      command = [*inside, name, sys.executable, "-m", "maxbatch.train", *arguments]
      processes.append(started([*command, f"process_id={number}"], {}))
    after_save(processes, tmp_path, 4)
    # What each sends the other arrives at nobody, without an error.
    for name, other in zip(names, reversed(ADDRESSES), strict=True):
      ip("-n", name, "neighbor", "replace", other, "lladdr", NOBODY, "dev", "cable")
    ended = wait(processes)
  assert [process.exit_code for process in ended] == [EXIT_PROCESS_FAILED] * 2, ended
  for number, process in enumerate(ended):
    other = 1 - number
    expected = f"stopped: process {other} on {names[other]} has given no sign of life for 15 s "
    assert process.errors == f"{expected}(jax_distributed_heartbeat_timeout_seconds)\n"
