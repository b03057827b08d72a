"""The devices that a run finds, and that finding them says nothing."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import PATIENCE_SECONDS

from maxbatch.config.load import load_config
from maxbatch.hardware import devices

ROOT = Path(__file__).resolve().parent.parent
_TPU_VARIABLES = ("TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")


def found(simulated: int, **environment: str) -> subprocess.CompletedProcess[str]:
  """The devices of a new process, on which this one has had no influence."""
  kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
  program = (
    "from maxbatch.config.load import load_config\n"
    "from maxbatch.hardware.devices import find_devices\n"
    f"config = load_config(['config=base', 'num_simulated_devices={simulated}'])\n"
    "found = find_devices(config).devices\n"
    "print(len(found), found[0].platform)"
  )
  return subprocess.run(
    [sys.executable, "-c", program],
    capture_output=True,
    text=True,
    check=False,
    cwd=ROOT,
    env=kept | environment,
    timeout=PATIENCE_SECONDS,
  )


def test_simulated_devices_are_found_in_silence():
  done = found(8)
  assert (done.stdout, done.stderr) == ("8 cpu\n", "")


def test_without_an_accelerator_the_default_simulates_8_devices_in_silence():
  done = found(-1)
  assert (done.stdout, done.stderr) == ("8 cpu\n", "")


def test_the_default_takes_the_accelerator_that_is_there(monkeypatch):
  # jax prefers an accelerator unless it is told a platform: which one, is left to it.
  asked = []
  monkeypatch.setattr(devices, "platforms", lambda: "")
  monkeypatch.setattr(devices, "keep_libraries_quiet", lambda: None)
  monkeypatch.setattr(devices.jax.config, "update", lambda *change: asked.append(change))
  monkeypatch.setattr(devices.jax, "devices", lambda: [_Accelerator()] * 4)
  there = devices.find_devices(load_config(["config=base"]))
  asked.remove(("jax_enable_preemption_service", False))  # Of several processes, on a TPU pod.
  assert asked == [("jax_num_cpu_devices", 8)]
  assert there.layout.num_devices == 4
  assert devices.describe_devices(there.devices) == "4 × NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class _Accelerator:
  platform = "gpu"
  device_kind = "NVIDIA H200"


def test_platforms_of_the_environment_are_obeyed():
  assert found(-1, JAX_PLATFORMS="cpu").stdout == "8 cpu\n"
  for platform in ("cuda", "rocm"):
    done = found(-1, JAX_PLATFORMS=platform)
    assert f"UserError: JAX_PLATFORMS={platform}: jax cannot start these devices: " in done.stderr


def test_simulated_devices_and_platforms_without_the_cpu_contradict_each_other():
  done = found(2, JAX_PLATFORMS="cuda")
  assert (
    "UserError: JAX_PLATFORMS=cuda leaves out the CPU, and num_simulated_devices=2 are simulated on "
    "it; for example num_simulated_devices=-1" in done.stderr
  )


def test_a_number_of_devices_in_xla_flags_is_obeyed():
  done = found(-1, XLA_FLAGS="--xla_force_host_platform_device_count=4")
  assert (done.stdout, done.stderr) == ("4 cpu\n", "")


def test_the_tpu_compiler_does_not_speak_where_there_is_no_tpu():
  pytest.importorskip("libtpu")
  if (Path("/dev") / "accel0").exists() or (Path("/dev") / "vfio" / "0").exists():
    pytest.skip("there may be a TPU")
  done = found(0)
  assert done.stderr == ""
  assert done.stdout


def test_where_platforms_are_named_the_environment_stays(monkeypatch):
  # jax itself names them where it finds a TPU, whose hosts must not be told to be alone.
  for name in _TPU_VARIABLES:
    monkeypatch.delenv(name, raising=False)
  assert devices.platforms() == "cpu"
  devices.find_devices(load_config(["config=base", "num_simulated_devices=0"]))
  assert not [name for name in _TPU_VARIABLES if name in os.environ]


def test_what_the_environment_says_goes_before(monkeypatch):
  monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host7")
  for name in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
  devices.keep_libraries_quiet()
  assert os.environ["TPU_WORKER_HOSTNAMES"] == "host7"
  assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"


TWO_UNDER_WAY = """
from maxbatch.config.load import load_config
from maxbatch.hardware.devices import find_devices
find_devices(load_config(["config=base", "num_simulated_devices=4"]))
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P

ring = [(place, (place + 1) % 4) for place in range(4)]

def collect(x):
  for number in range(12):
    y = x
    for _ in range(3 * number % 7):
      y = jnp.tanh(y @ y)
    moved = jax.lax.psum(y, "all") if number % 3 else jax.lax.ppermute(y, "all", ring)
    x = x + 0.001 * moved
  return x

mesh = jax.make_mesh((4,), ("all",))
step = jax.jit(jax.shard_map(collect, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
chains = [jnp.ones((64, 64)), jnp.zeros((64, 64))]
for number in range(400):
  chains[number % 2] = step(chains[number % 2])
print(len(jax.block_until_ready(chains)))
"""


def test_simulated_devices_with_two_programs_under_way_all_get_a_thread():
  # With a thread for each device, and one more, this waits for ever: NPROC=5 shows it.
  kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
  command = [sys.executable, "-c", TWO_UNDER_WAY]
  done = subprocess.run(
    command, capture_output=True, text=True, check=False, cwd=ROOT, env=kept, timeout=120
  )
  assert (done.stdout, done.stderr) == ("2\n", "")
