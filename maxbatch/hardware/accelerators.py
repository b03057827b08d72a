"""The accelerators of this machine, found without jax, and the extra of maxbatch that each needs.

scripts/environment.sh runs this file before anything is installed, so it imports the standard library
alone.
"""

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CUDA_DRIVERS = (("gpu", 580, "13"), ("gpu12", 525, "12"))
"""Extra, oldest driver, version of CUDA: the newest first."""
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
_PATIENCE_SECONDS = 20.0
"""nvidia-smi waits for a driver that hangs."""
_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
_TPUS = {
  "0x0027": "v3", "0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e", "0x0076": "7x",
}  # fmt: skip
"""PCI devices of Google's that are TPUs; jax recognizes them by the same numbers."""


@dataclasses.dataclass(frozen=True)
class Accelerators:
  """What a machine has of one kind."""

  name: str
  """How many of what: `8 × NVIDIA H200, driver 580.95`."""
  extra: str
  """Of maxbatch; empty: its driver is too old for any."""
  plugins: Sequence[str]
  """Modules, of which jax needs one."""

  def installed(self) -> bool:
    """Returns whether jax has a plugin for them."""
    return any(importlib.util.find_spec(name) for name in self.plugins)


def find_accelerators(pci: Path = _PCI) -> Accelerators | None:
  """Returns the NVIDIA GPUs that nvidia-smi lists, or else the TPU chips on the PCI bus."""
  return _nvidia() or _tpu(pci)


def _nvidia() -> Accelerators | None:
  program = shutil.which("nvidia-smi")
  if program is None:
    return None
  try:
    done = subprocess.run(
      [program, *_QUERY],
      capture_output=True,
      text=True,
      errors="replace",
      timeout=_PATIENCE_SECONDS,
      check=False,
    )
  except (OSError, subprocess.TimeoutExpired):
    return None
  gpus = re.findall(r"^(.+), ((\d+)\.[\d.]+)\s*$", done.stdout, re.MULTILINE)
  if done.returncode or not gpus:
    return None
  kind, driver, major = gpus[0]
  extra = next((extra for extra, oldest, _ in CUDA_DRIVERS if int(major) >= oldest), "")
  return Accelerators(f"{len(gpus)} × {kind}, driver {driver}", extra, _PLUGINS)


def _tpu(pci: Path) -> Accelerators | None:
  chips = [
    _TPUS[device]
    for vendor in sorted(pci.glob("*/vendor"))
    if _read(vendor) == _GOOGLE and (device := _read(vendor.parent / "device")) in _TPUS
  ]
  return Accelerators(f"{len(chips)} × TPU {chips[0]}", "tpu", ("libtpu",)) if chips else None


def _read(path: Path) -> str:
  try:
    return path.read_text().strip()
  except OSError:
    return ""


def advice(found: Accelerators) -> str:
  """Returns what to do so that jax uses accelerators that it does not."""
  if not found.extra:
    _, oldest, cuda = CUDA_DRIVERS[-1]
    return (
      f"CUDA {cuda}, the oldest that jax has, needs driver {oldest} or newer: update the driver"
    )
  if found.installed():
    return "jax has a plugin for it and did not start it; what it printed above says why"
  return f"{sys.executable} -m pip install 'maxbatch[{found.extra}]' brings what jax needs for it"


def main() -> None:
  """Prints the extra that this machine's accelerators need, and below it a sentence."""
  if result := find_accelerators():
    to_do = f"installing maxbatch[{result.extra}]" if result.extra else advice(result)
    print(f"{result.extra}\nThis machine has {result.name}: {to_do}.")


if __name__ == "__main__":
  main()
