"""The devices that a command is about: present, simulated on the CPU, or a TPU slice or GPUs by name.

The compilers for TPUs and GPUs run on any machine. They describe devices, and programs can be compiled
for these, but never run. Commands that look at no device count them (topologies.py).

The memory that processes may use is what a container's limit leaves of the machine's. Containers are control groups of the kernel, of version 2 (`memory.max`) or 1
(`memory.limit_in_bytes`); they are nested, and each bounds those within it.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.lib import cuda_versions
from jax.experimental import topologies

from maxbatch.batch.from_config import mesh_of, training_devices
from maxbatch.config.schema import Config
from maxbatch.core.topology import Topology
from maxbatch.errors import UserError
from maxbatch.hardware.accelerators import advice, find_accelerators
from maxbatch.hardware.processes import check_joined, join
from maxbatch.hardware.topologies import SIMULATED_DEVICES, slice_named

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


_NO_TPU = {
  # Else the TPU library asks a cloud's metadata server about the machine it is on, for minutes.
  "TPU_SKIP_MDS_QUERY": "1",
  # Else it prints that it does not find these.
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5litepod-4",
  # Compiling holds no TPU, so nobody needs to be kept out.
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_NO_GPU = {
  # Else the plugin asks for CUDA's libraries, and a traceback says that it finds none.
  "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
_DRIVER = pathlib.Path("/dev/nvidiactl")


_THREADS_EACH = 2
"""Of a simulated device, in XLA's pool: as many as programs with collectives that are under way.

Whoever takes part in a collective holds a thread until all have come, and where two programs that do
not wait for each other each hold some, as many as there are devices are too few for either to end.
The training loop has two under way at most: a step, or a batch of an evaluation, and the fingerprints
of a checkpoint that is read back. More threads cost time, as XLA splits every operation among them:
with 8 for each of 8 devices a step took a quarter longer on 2 cores.
"""

_XLA_COUNT = "xla_force_host_platform_device_count"
"""How jax's own documents simulate devices; who says it there need not say it again."""

_READ_FLAGS = "from jaxlib.xla_client import CompileOptions; CompileOptions()"
_FAULT = re.compile(r"(Unknown flags? in XLA_FLAGS|Couldn't interpret value).*")


class Device(Protocol):
  """What we ask of a jax device."""

  @property
  def platform(self) -> str:
    """cpu, gpu or tpu."""
    ...

  @property
  def device_kind(self) -> str:
    """The model of the device."""
    ...


@dataclasses.dataclass(frozen=True)
class Target:
  """The devices that a step runs on or is compiled for, and how the mesh axes divide them."""

  devices: Sequence[Device]
  layout: Topology
  rollout: Sequence[Device] = ()
  """Those that only sample, of reinforcement learning; none: those above do it in turn."""


def find_devices(config: Config) -> Target:
  """Finds the devices that the configuration names: of all processes, or of slices that are not
  here.

  Raises:
    UserError: jax has already started with another number of devices, there is no such slice or no
      compiler for it, the axes do not multiply to the devices, or rollout_devices leave none.
  """
  devices = start_devices(config)
  parts: dict[tuple[int, int], list[Device]] = {}
  for device in devices:
    # Platforms that know no slices have one; of a slice that is not here nobody says whose devices are whose.
    process = 0 if config.compile.compile_topology else getattr(device, "process_index", 0)
    parts.setdefault((getattr(device, "slice_index", 0), process), []).append(device)
  num_slices = len({number for number, _ in parts})
  if not config.rl.rollout_devices:
    return Target(devices, mesh_of(config, len(devices), num_slices))
  unit = "processes" if len(parts) > num_slices else "slices"
  training = training_devices(config.rl, len(devices), len(parts), unit)
  # The last of each process sample, in the order of the slices.
  each, owned = training // len(parts), [parts[part] for part in sorted(parts)]
  return Target(
    [device for own in owned for device in own[:each]],
    mesh_of(config, training, num_slices),
    [device for own in owned for device in own[each:]],
  )


def start_devices(config: Config) -> Sequence[Device]:
  """Returns the same, without a mesh; jax joins the other processes and starts its devices.

  Raises:
    UserError: as above, but for the axes.
  """
  check_environment()
  keys = config.compile
  if keys.compile_topology:
    place = keys.compile_topology, keys.compile_topology_num_slices
    slice_named(*place, keys.compile_topology_network_gbps)  # Refuses a network that nothing uses.
    return topology_devices(*place)
  simulated, processes = config.mesh.num_simulated_devices, join(config)
  _choose_platform(simulated, processes)
  devices = _started_devices()
  check_joined(processes, simulated)
  return devices


@dataclasses.dataclass(frozen=True)
class _Compiler:
  """A compiler for devices that are not here."""

  name: str
  packages: tuple[str, ...]
  """One of which must be installed."""
  extra: str
  machines: str


_COMPILERS = {
  "tpu": _Compiler("the TPU compiler", ("libtpu",), "tpu", "any x86-64 Linux machine"),
  "cuda": _Compiler(
    "XLA's compiler for NVIDIA GPUs",
    ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "gpu-compile",
    "any Linux machine, without a GPU or driver",
  ),
}


def topology_devices(name: str, num_slices: int = 1) -> Sequence[Device]:
  """Returns the devices of `num_slices` TPU slices, or the GPUs, of this name, for compiling only.

  Raises:
    UserError: there is no such slice, or its compiler is not installed.
  """
  slice_ = slice_named(name, num_slices)
  needed = _COMPILERS[slice_.compiler]
  if not any(importlib.util.find_spec(package) for package in needed.packages):
    raise UserError(
      f"compile_topology={name} needs {needed.name}, which is not installed; "
      f"pip install 'maxbatch[{needed.extra}]' installs it, on {needed.machines}"
    )
  keep_libraries_quiet()
  if not platforms():
    jax.config.update("jax_platforms", "cpu")
  devices = topologies.get_topology_desc(
    platform=slice_.compiler, **slice_.compiler_arguments(num_slices)
  ).devices
  if slice_.gpu:
    assume_cudnn()
  return devices


def describe_devices(devices: Sequence[Device]) -> str:
  """Returns how many of which kind: `8 × NVIDIA H200` or `8 × CPU, simulated`."""
  if devices[0].platform != "cpu":
    return f"{len(devices):,} × {devices[0].device_kind}"
  return f"{len(devices):,} × CPU, simulated" if len(devices) > 1 else "the CPU"


def idle_accelerators(config: Config, devices: Sequence[Device]) -> str:
  """Returns a sentence about accelerators of this machine that are not used, and what would use them.

  Empty where the devices are accelerators, where there are none, or where keys or variables ask for the
  CPU.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  asked = config.mesh.num_simulated_devices > 0 or _XLA_COUNT in flags or platforms()
  if asked or devices[0].platform != "cpu":
    return ""
  result = find_accelerators()
  if result is None:
    return ""
  return (
    f"{result.name}: idle. This is on {describe_devices(devices)}: {advice(result)}. "
    "JAX_PLATFORMS=cpu says that the CPU is meant."
  )


def _choose_platform(num_simulated_devices: int, num_processes: int) -> None:
  """Tells jax, before it starts, which devices to start; of simulated ones, this process's share.

  Raises:
    UserError: JAX_PLATFORMS leaves out the CPU, of which devices are to be simulated, or the
      processes cannot share them equally.
  """
  if num_simulated_devices > 0:
    if "cpu" not in (platforms() or "cpu").split(","):
      raise UserError(
        f"JAX_PLATFORMS={platforms()} leaves out the CPU, and num_simulated_devices="
        f"{num_simulated_devices} are simulated on it; for example num_simulated_devices=-1, the "
        "accelerators that are there"
      )
    own = devices_per_process(num_simulated_devices, num_processes)
    _simulate(num_simulated_devices, own)
    return
  if not platforms():
    # Where jax finds a TPU it has named it there. Elsewhere it tries the TPU library all the same,
    # if only the compiler in it is wanted, and its complaints would come before our first line.
    keep_libraries_quiet()
  if num_simulated_devices == -1 and _XLA_COUNT not in os.environ.get("XLA_FLAGS", ""):
    with contextlib.suppress(RuntimeError):  # jax has already started, with the devices it has.
      # Of the CPU; jax takes an accelerator before it.
      _set_num_cpu_devices(max(SIMULATED_DEVICES // num_processes, 1))


def devices_per_process(num_simulated_devices: int, num_processes: int) -> int:
  """Returns the simulated devices of each of several processes.

  Raises:
    UserError: the processes cannot share them equally.
  """
  if num_simulated_devices % num_processes:
    fitting = max(num_simulated_devices // num_processes, 1) * num_processes
    raise UserError(
      f"num_simulated_devices={num_simulated_devices}: {num_processes} processes share them "
      f"equally, so it must be a multiple of {num_processes}; for example "
      f"num_simulated_devices={fitting}"
    )
  return num_simulated_devices // num_processes


def _started_devices() -> Sequence[Device]:
  """Returns the devices of the platform that jax prefers.

  Raises:
    UserError: it starts none.
  """
  try:
    return jax.devices()
  except (RuntimeError, AssertionError) as error:
    # jax asserts that there is a backend where it knows a platform's name and has no plugin for it.
    reason = str(error).split("(set JAX_PLATFORMS")[0].strip() or "it has no plugin for them"
    raise UserError(
      f"JAX_PLATFORMS={platforms()}: jax cannot start these devices: {reason}; without "
      "JAX_PLATFORMS it takes those that are there"
    ) from error


def platforms() -> str:
  """Returns the value of jax_platforms; empty: jax looks for itself."""
  return jax.config.values["jax_platforms"] or ""


def keep_libraries_quiet() -> None:
  """Tells the libraries of TPUs and GPUs, where there are none, what they would otherwise look and wait
  for."""
  for key, value in (_NO_TPU | ({} if _DRIVER.exists() else _NO_GPU)).items():
    os.environ.setdefault(key, value)


def _simulate(count: int, own: int) -> None:
  """Simulates so many devices on the CPU, `own` of them in this process.

  Raises:
    UserError: jax has already started with another number.
  """
  try:
    jax.config.update("jax_platforms", "cpu")
    _set_num_cpu_devices(own)
  except RuntimeError as error:
    there = len(jax.devices())
    if there != count:
      raise UserError(
        f"num_simulated_devices={count}, but jax has already started with {there} devices; "
        f"set it first, or use num_simulated_devices={there}"
      ) from error


def _set_num_cpu_devices(count: int) -> None:
  os.environ.setdefault("NPROC", str(max(_THREADS_EACH * count, os.cpu_count() or 1)))
  jax.config.update("jax_num_cpu_devices", count)


def check_environment() -> None:
  """Checks the variables with which no step can be compiled.

  Raises:
    UserError: XLA_FLAGS has a flag or a value that XLA does not know, or jit is disabled.
  """
  if jax.config.values["jax_disable_jit"]:
    raise UserError(
      "JAX_DISABLE_JIT: a training step is compiled as a whole, which this forbids; unset it, or "
      "JAX_DISABLE_JIT=0"
    )
  _check_flags(os.environ.get("XLA_FLAGS", ""))


@functools.cache
def _check_flags(flags: str) -> None:
  """Lets another process read the flags: XLA ends the one that reads a flag it does not know."""
  if not flags.strip():
    return
  command = [sys.executable, "-c", _READ_FLAGS]
  done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
  if fault := _FAULT.search(done.stderr):
    raise UserError(f"XLA_FLAGS={flags}: {fault[0].rstrip('.')}; correct that, or unset XLA_FLAGS")


def assume_cudnn() -> None:
  """Lets jax trace for the version that its CUDA plugin was built with, unless cuDNN is here.

  While it traces cuDNN's attention, jax asks the library for its version, and fails where there is none.
  The program holds no code of the library. There is no public way: without this the wheels of cuDNN and cuBLAS, 1.4 GB, would have to be
  installed for a number.
  """
  try:
    fused_attention_stablehlo.check_cudnn_version()
  except RuntimeError:
    if cuda_versions is not None:
      fused_attention_stablehlo.check_cudnn_version = cuda_versions.cudnn_build_version
