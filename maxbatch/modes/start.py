"""The start of a run: its devices, and several processes that must have started alike.

A process with another key, another checkout or another library compiles another program, and all of
them would wait for each other in the first collective that only some of them reach; with other data
they would train on what nobody asked for. So what decides is compared before anything else is done.
"""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

import maxbatch
from maxbatch.compile.step_identity import compiler_environment, library_versions
from maxbatch.config.load import to_flat_dict
from maxbatch.config.schema import Config
from maxbatch.core.plan import BatchPlan
from maxbatch.data.dataset import Dataset
from maxbatch.errors import UserError
from maxbatch.hardware.agreement import check_alike, gather, shared_error
from maxbatch.hardware.connections import connect_processes
from maxbatch.hardware.devices import idle_accelerators, start_devices
from maxbatch.hardware.ending import ending_together
from maxbatch.run_folder.paths import RunFolder
from maxbatch.run_folder.process_log import process_log

_OF_EACH = ("coordinator_address", "process_id")
"""Keys in which processes may differ."""
_LIBRARIES = ("numpy", "grain", "orbax-checkpoint")
_OWN_MODULE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")
"""A key's value that names something of the user's (config/registry.py)."""


@contextlib.contextmanager
def started(config: Config, *, leaves_files: bool = True) -> Iterator[None]:
  """Joins all processes and starts them alike inside this context, where process 0 alone speaks.

  Args:
    config: as its keys say.
    leaves_files: whether each process has a log in the run's folder.

  Raises:
    UserError: as `start_devices`, or the processes have different keys, packages or sources.
  """
  with ending_together():
    devices = start_devices(config)
  number = jax.process_index()
  if number == 0 and (idle := idle_accelerators(config, devices)):
    print(f"note: {idle}", file=sys.stderr)
  if config.compile.compile_topology or jax.process_count() == 1:
    yield
    return
  log = RunFolder.of(config.run).process_log(number) if leaves_files else Path(os.devnull)
  with process_log(log, speaks=number == 0):
    with ending_together(alone=True):
      connect_processes(config.distributed.jax_distributed_initialization_timeout)
    check_alike(_keys(config) | _installation() | own_modules(config))
    try:
      yield
    except UserError as error:
      # Process 0 says it, or that it happened here (hardware/ending.py); here it is in the log.
      raise shared_error(str(error)) from None


def check_same_run(config: Config, plan: BatchPlan, dataset: Dataset) -> None:
  """Checks that all processes have resolved the run alike, and have the same data before them.

  A plan may rest on a file, data are read on every host, and the user's modules have imported others.

  Raises:
    UserError: they have not.
  """
  if jax.process_count() > 1:
    check_alike(
      _keys(config)
      | own_modules(config)
      | {f"plan, {key}": value for key, value in plan.as_dict().items()}
      | _data("training", dataset.fingerprint, dataset.train_files)
      | _data("validation", dataset.validation_fingerprint, dataset.validation_files)
    )


def _keys(config: Config) -> dict[str, object]:
  return {key: value for key, value in to_flat_dict(config).items() if key not in _OF_EACH}


def _installation() -> dict[str, object]:
  """Returns Python, packages, what the environment tells the compiler, and a hash of each of our
  files."""
  versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
  package = Path(maxbatch.__file__).parent
  sources = {
    f"maxbatch/{path.relative_to(package)}": _hash(path) for path in sorted(package.rglob("*.py"))
  }
  compiler = compiler_environment(jax.local_devices()[0])
  return {"python": platform.python_version()} | library_versions() | versions | compiler | sources


def own_modules(config: Config) -> dict[str, object]:
  """Hashes each file that a key names as module:attribute.

  And of those beside it that all processes have imported by now: what it needs, as a rule. All
  processes must call it, in the same order.
  """
  named = _named_files(config)
  folders, imported = {path.parent for path in named.values()}, dict[str, Path]()
  for name, module in list(sys.modules.items()):
    path = Path(getattr(module, "__file__", None) or "")
    if path.parent in folders and path.suffix:
      imported[name] = path
  # What is imported when it is first used, one process may have needed and another not yet.
  everywhere = set.intersection(*map(set, gather(sorted(imported))))
  files = named | {name: path for name, path in imported.items() if name in everywhere}
  return {
    f"{name.replace('.', '/')}{path.suffix}": _hash(path)
    for name, path in sorted(files.items())
    if path.is_file()
  }


def _named_files(config: Config) -> dict[str, Path]:
  """Returns the modules that keys name, and their files."""
  names = re.findall(_OWN_MODULE, "\n".join(map(str, to_flat_dict(config).values())))
  files: dict[str, Path] = {}
  for name in names:
    # Where it cannot be found the registry says so later, better.
    with contextlib.suppress(ImportError, ValueError):
      spec = importlib.util.find_spec(name)
      if spec is not None and spec.origin is not None:
        files[name] = Path(spec.origin)
  return files


def _hash(path: Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def _data(part: str, fingerprint: str, files: Mapping[str, int]) -> dict[str, object]:
  sizes: dict[str, object] = {f"{part} data, bytes of {name}": size for name, size in files.items()}
  return sizes | {f"{part} data, fingerprint": fingerprint}
